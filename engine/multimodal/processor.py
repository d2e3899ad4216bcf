"""From a prompt with image tokens to one with all the placeholders that its images take."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import ImageProcessor, LoadedImage, ProcessedPrompt


def expand(
    token_ids: Sequence[int], image_token_id: int, expansions: Sequence[Sequence[int]], param: str | None
) -> tuple[list[int], list[int]]:
    """Replaces each image token by the tokens of its image; returns the prompt and where each image begins in it.

    Raises `InvalidRequest` where image tokens and images differ in number.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id == image_token_id]
    if len(places) != len(expansions):
        raise InvalidRequest(f"the prompt has {len(places)} image tokens for {len(expansions)} images", param)
    expanded: list[int] = []
    starts = []
    previous = 0
    for place, expansion in zip(places, expansions, strict=True):
        expanded += token_ids[previous:place]
        starts.append(len(expanded))
        expanded += expansion
        previous = place + 1
    return [*expanded, *token_ids[previous:]], starts


@dataclass(frozen=True)
class BlindImageProcessor(ImageProcessor):
    """Gives each image so many placeholders, which the model reads as any token: it sees nothing of the image."""

    image_token: str
    image_token_id: int
    num_tokens: int

    def prepare(self, token_ids: Sequence[int], images: Sequence[LoadedImage], param: str | None = None) -> ProcessedPrompt:
        expanded, _ = expand(token_ids, self.image_token_id, [[self.image_token_id] * self.num_tokens] * len(images), param)
        return ProcessedPrompt(expanded, ())
