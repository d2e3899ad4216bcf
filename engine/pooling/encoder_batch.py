"""Many texts as one flat row of tokens: what an encoder computes at once, with no padding in it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """The tokens of one text, or of a pair of texts where `token_type_ids` tells them apart. There is at least one."""

    token_ids: list[int]
    token_type_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class LengthGroup:
    """`count` texts of `length` tokens each, one after another from token `start` of the flat row on."""

    start: int
    count: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.count * self.length

    def rows(self, flat_TX: Tensor) -> Tensor:
        """Its part of a tensor over all tokens, as [count, length, ...]: a view."""
        return flat_TX[self.start : self.stop].view(self.count, self.length, *flat_TX.shape[1:])


@dataclass(frozen=True, slots=True)
class EncoderBatch:
    """Texts laid end to end, shortest first. `order` says which of the inputs each of them is; `positions_1T` begin at 0 in each text."""

    input_ids_1T: Tensor
    positions_1T: Tensor
    token_type_ids_1T: Tensor
    groups: tuple[LengthGroup, ...]
    order: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.input_ids_1T.shape[1]

    @property
    def lengths(self) -> list[int]:
        return [group.length for group in self.groups for _ in range(group.count)]

    def split(self, flat_TX: Tensor) -> list[Tensor]:
        """A tensor over all tokens as one of [length, ...] for each text, in the order of the inputs: views."""
        parts: list[Tensor] = [flat_TX] * len(self.order)
        for index, part in zip(self.order, torch.split(flat_TX, self.lengths), strict=True):
            parts[index] = part
        return parts


def build_encoder_batch(inputs: Sequence[EncoderInput], device: torch.device) -> EncoderBatch:
    """Texts of equal length come to lie side by side, so that attention computes them together."""
    order = sorted(range(len(inputs)), key=lambda index: len(inputs[index].token_ids))
    lengths = [len(inputs[index].token_ids) for index in order]
    types = (inputs[index].token_type_ids or [0] * len(inputs[index].token_ids) for index in order)
    return EncoderBatch(
        _row(itertools.chain.from_iterable(inputs[index].token_ids for index in order), device),
        _row(itertools.chain.from_iterable(range(length) for length in lengths), device),
        _row(itertools.chain.from_iterable(types), device),
        length_groups(lengths),
        tuple(order),
    )


def length_groups(lengths: Sequence[int]) -> tuple[LengthGroup, ...]:
    """Runs of equal lengths in a row of texts."""
    groups, start = [], 0
    for length, run in itertools.groupby(lengths):
        group = LengthGroup(start, sum(1 for _ in run), length)
        groups.append(group)
        start = group.stop
    return tuple(groups)


def _row(values: "itertools.chain[int]", device: torch.device) -> Tensor:
    return torch.tensor(list(values), dtype=torch.long).to(device)[None]
