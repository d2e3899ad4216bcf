"""The forward pass of an encoder: token vectors of many texts at once."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.pooling.encoder import EncoderBatch, LengthGroup

MAX_PADDING = 0.1  # of the tokens that are computed together


class Forward(Protocol):
    """Token vectors [T, D] of a batch's flat row."""

    def __call__(self, batch: EncoderBatch) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class FlatForward:
    """Runs the row as it is: nothing is computed that no text has. The model's attention is `penstock_flat`.

    `position_offset` is the number of the first position: RoBERTa and its kin count from the padding token's id on.
    """

    model: PreTrainedModel
    position_offset: int
    takes_token_types: bool
    takes_use_cache: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> "FlatForward":
        takes_use_cache = "use_cache" in inspect.signature(model.forward).parameters
        return cls(model, position_offset(model), takes_token_types(model), takes_use_cache)

    def __call__(self, batch: EncoderBatch) -> Tensor:
        options: dict[str, Any] = {"token_type_ids": batch.token_type_ids_1T} if self.takes_token_types else {}
        if self.takes_use_cache:
            options["use_cache"] = False
        output = self.model(
            input_ids=batch.input_ids_1T,
            position_ids=batch.positions_1T + self.position_offset if self.position_offset else batch.positions_1T,
            length_groups=batch.groups,
            **options,
        )
        states: Tensor = output.last_hidden_state[0]
        return states


@dataclass(frozen=True, slots=True)
class PaddedForward:
    """For classes that take no flat row: texts of about the same length are padded to one, and computed by the class's own means."""

    model: PreTrainedModel
    pad_token_id: int
    takes_token_types: bool

    @classmethod
    def of(cls, model: PreTrainedModel) -> "PaddedForward":
        return cls(model, model.config.pad_token_id or 0, takes_token_types(model))

    def __call__(self, batch: EncoderBatch) -> Tensor:
        return torch.cat([self._states(batch, bucket) for bucket in buckets(batch.groups)])

    def _states(self, batch: EncoderBatch, bucket: Sequence[LengthGroup]) -> Tensor:
        lengths = [group.length for group in bucket for _ in range(group.count)]
        lengths_B1 = torch.tensor(lengths, device=batch.input_ids_1T.device)[:, None]
        is_token_BL = torch.arange(lengths[-1], device=lengths_B1.device) < lengths_B1
        part = slice(bucket[0].start, bucket[-1].stop)
        options: dict[str, Any] = {"input_ids": _padded(batch.input_ids_1T[0, part], is_token_BL, self.pad_token_id)}
        if self.takes_token_types:
            options["token_type_ids"] = _padded(batch.token_type_ids_1T[0, part], is_token_BL, 0)
        states_BLD: Tensor = self.model(attention_mask=is_token_BL.long(), **options).last_hidden_state
        return states_BLD[is_token_BL]


def buckets(groups: Sequence[LengthGroup]) -> list[list[LengthGroup]]:
    """Neighbouring groups, lengths ascending, of which padding would be no more than its share."""
    found: list[list[LengthGroup]] = []
    for group in groups:
        if found:
            together = [*found[-1], group]
            num_tokens = sum(member.count * member.length for member in together)
            num_computed = group.length * sum(member.count for member in together)
            if num_tokens >= (1 - MAX_PADDING) * num_computed:
                found[-1].append(group)
                continue
        found.append([group])
    return found


def takes_token_types(model: PreTrainedModel) -> bool:
    """RoBERTa and its kin have the parameter, and a single type."""
    has_several = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
    return has_several and "token_type_ids" in inspect.signature(model.forward).parameters


def position_offset(model: PreTrainedModel) -> int:
    """Classes that count positions from the padding token's id on say so where they keep their table of position embeddings."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            return module.padding_idx + 1
    return 0


def _padded(flat_T: Tensor, is_token_BL: Tensor, filler: int) -> Tensor:
    padded_BL = torch.full(is_token_BL.shape, filler, dtype=flat_T.dtype, device=flat_T.device)
    padded_BL[is_token_BL] = flat_T
    return padded_BL
