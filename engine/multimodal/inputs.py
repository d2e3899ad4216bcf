"""What a prompt holds besides token ids: images, and vectors that take the place of token embeddings.

An image is decoded and bounded where the request comes in (`LoadedImage`). An `ImageProcessor`, in a worker, replaces the one image token
that stands for it in the prompt by as many as it takes, and turns it into pixels (`PromptImage`). The vision tower makes vectors of those,
in the model's thread, and a step puts them in place of the embeddings of the image tokens.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class LoadedImage:
    """A decoded image. Images with equal digests are equal."""

    digest: bytes
    image: "Image"

    @classmethod
    def of(cls, image: "Image") -> "LoadedImage":
        """The digest is that of the pixels, which a worker computes. Where the file is at hand, that of its bytes does as well."""
        digest = hashlib.blake2b(f"{image.mode} {image.size}".encode(), digest_size=DIGEST_BYTES)
        digest.update(image.tobytes())
        return cls(digest.digest(), image)

    def salted(self, salt: str) -> "LoadedImage":
        """The image as one that differs from those with other salts: how soon it is encoded says nothing about them."""
        if not salt:
            return self
        return replace(self, digest=hashlib.blake2b(salt.encode(), key=self.digest, digest_size=DIGEST_BYTES).digest())


@dataclass(frozen=True, slots=True, eq=False)
class PromptEmbeds:
    """Vectors [N, H] in place of the embeddings of the tokens at these N positions of a prompt, which ascend.

    The ids at these positions are placeholders. The prefix cache knows them by `digest`: equal digests, equal vectors.
    """

    positions: Sequence[int]
    digest: bytes
    vectors_NH: "Tensor"

    @property
    def num_bytes(self) -> int:
        return self.vectors_NH.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class PromptImage:
    """An image as `PromptEmbeds`, whose vectors the vision tower makes of `pixels`, the inputs that its image processor gives.

    Where rotary positions have three parts, its tokens fill a `grid` of so many times, rows and columns. `spans` are the runs [start, stop)
    of its positions within which attention goes in both directions; they are computed in one step each.
    """

    positions: Sequence[int]
    digest: bytes
    pixels: "dict[str, Tensor]"
    grid: tuple[int, int, int] | None = None
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.pixels.values())


def runs_of(positions: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The runs [start, stop) of consecutive numbers among these, which ascend."""
    starts = [place for place, position in enumerate(positions) if place == 0 or positions[place - 1] != position - 1]
    return tuple((positions[start], positions[stop - 1] + 1) for start, stop in pairwise([*starts, len(positions)]))


def moved(source: PromptEmbeds | PromptImage, num_tokens: int) -> PromptEmbeds | PromptImage:
    """The same behind so many more tokens."""
    positions = [position + num_tokens for position in source.positions]
    if isinstance(source, PromptEmbeds):
        return replace(source, positions=positions)
    return replace(source, positions=positions, spans=tuple((start + num_tokens, stop + num_tokens) for start, stop in source.spans))


def spans_within(embeds: Iterable[PromptEmbeds | PromptImage], first: int, last: int) -> Iterator[tuple[int, int]]:
    """The spans of images that overlap the positions [first, last) of a prompt."""
    for source in embeds:
        if isinstance(source, PromptImage):
            yield from ((start, stop) for start, stop in source.spans if start < last and first < stop)


@dataclass(frozen=True, slots=True)
class RopePositions:
    """The rotary positions of a prompt's tokens, in three parts: time, row and column.

    Qwen2-VL (arXiv:2409.12191): the three parts of a text token are all its position. Those of an image's tokens are places in its grid,
    counted from where it begins, and the text after it goes on behind the largest of them. So a token behind the prompt has its number plus
    `delta`.
    """

    parts: list[tuple[int, int, int]]
    delta: int

    @classmethod
    def of_prompt(cls, num_tokens: int, grids: Iterable[tuple[int, tuple[int, int, int]]]) -> "RopePositions":
        """Of so many tokens, with grids that begin at these of them."""
        parts: list[tuple[int, int, int]] = []
        delta = 0
        for start, (times, rows, columns) in grids:
            parts += _alike(len(parts) + delta, start + delta)
            first = start + delta
            parts += [
                (first + time, first + row, first + column) for time in range(times) for row in range(rows) for column in range(columns)
            ]
            delta += max(times, rows, columns) - times * rows * columns
        parts += _alike(len(parts) + delta, num_tokens + delta)
        return cls(parts, delta)

    def of(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Those of the tokens [first, last) of a sequence."""
        return self.parts[first:last] + _alike(max(first, len(self.parts)) + self.delta, last + self.delta)


def _alike(first: int, last: int) -> list[tuple[int, int, int]]:
    return [(position, position, position) for position in range(first, last)]


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows of a step that hold vectors of `source`, one after another from its vector number `first` on."""

    source: PromptEmbeds | PromptImage
    first: int
    rows: list[int]


def embedded_rows(embeds: Iterable[PromptEmbeds | PromptImage], first: int, last: int, first_row: int) -> list[EmbeddedRows]:
    """What the positions [first, last) of a prompt hold of its `embeds`, where position `first` is the step's row `first_row`."""
    found = []
    for source in embeds:
        start, stop = bisect_left(source.positions, first), bisect_left(source.positions, last)
        if start < stop:
            found.append(EmbeddedRows(source, start, [first_row + position - first for position in source.positions[start:stop]]))
    return found


def content_ids(token_ids: Sequence[int], embeds: Iterable[PromptEmbeds | PromptImage]) -> list[int]:
    """The ids by which the prefix cache knows a prompt: below 0, and derived from the digest, where something else takes their place."""
    ids = list(token_ids)
    for source in embeds:
        numbers = array("q", hashlib.shake_128(source.digest).digest(8 * len(source.positions)))
        for position, number in zip(source.positions, numbers, strict=True):
            ids[position] = number | -(2**63)
    return ids


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A prompt with all of its placeholders, and what takes their place: `token_ids` and `embeds` of the engine's request."""

    token_ids: list[int]
    embeds: tuple[PromptEmbeds | PromptImage, ...] = ()

    @property
    def text_ids(self) -> list[int]:
        """The tokens behind the last placeholder: the text of an answer continues theirs."""
        return self.token_ids[max((source.positions[-1] + 1 for source in self.embeds), default=0) :]


class ImageProcessor(ABC):
    """Makes prompts with images for one model. Is built with the model, and may be called in any thread but the event loop's.

    A prompt that is given to it holds the token `image_token_id`, whose text is `image_token`, once for each image. Chat templates write it
    for a content part `{"type": "image"}`.
    """

    image_token: str
    image_token_id: int

    @abstractmethod
    def prepare(self, token_ids: Sequence[int], images: Sequence[LoadedImage], param: str | None = None) -> ProcessedPrompt:
        """Raises `InvalidRequest`, with `param` as its path, where image tokens and images differ in number, or for an image of a size that
        the model does not take.
        """
