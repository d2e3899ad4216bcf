"""The forward pass of an encoder over many texts in one flat row: batch, attention, and the check against the model's own code."""

import functools
import inspect
import itertools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from penstock.engine.errors import ConfigurationError

logger = logging.getLogger(__name__)

FLAT_ATTENTION = "penstock_flat"
MAX_PADDING = 0.1  # of the tokens that are computed together
PROBE_LENGTHS = (7, 4, 7)
MAX_PROBED_WINDOW = 600  # longer ones would take seconds to try
# Rounding is orders of magnitude less, wrong positions or attention across texts orders of magnitude more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


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


def batch_message(batch: EncoderBatch) -> Tensor:
    """All that another rank needs to compute the batch, int64: the number of texts, their lengths, and the tokens with their types."""
    parts = (torch.tensor([len(batch.order), *batch.lengths]), batch.input_ids_1T[0].cpu(), batch.token_type_ids_1T[0].cpu())
    return torch.cat(parts)


def batch_of(message: Tensor, device: torch.device) -> EncoderBatch:
    """What `batch_message` says, of texts in the order in which they lie there."""
    count, *lengths = message[: 1 + int(message[0])].tolist()
    token_ids, token_type_ids = message[1 + count :].view(2, -1)
    positions = itertools.chain.from_iterable(range(length) for length in lengths)
    rows = (token_ids.to(device)[None], _row(positions, device), token_type_ids.to(device)[None])
    return EncoderBatch(*rows, length_groups(lengths), tuple(range(count)))


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


def flat_attention(
    module: nn.Module,
    query_1HTD: Tensor,
    key_1HTD: Tensor,
    value_1HTD: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    length_groups: tuple[LengthGroup, ...] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What `attn_implementation="penstock_flat"` calls: [1, H, T, D] in, [1, T, H, D] out.

    Raises `NotImplementedError` for what only some architectures have and this does not compute.
    """
    if length_groups is None or kwargs.get("position_bias") is not None or kwargs.get("s_aux") is not None:
        raise NotImplementedError("position biases and attention sinks")
    if is_causal is None:
        is_causal = bool(getattr(module, "is_causal", True))
    flat = [states_1HTD[0].transpose(0, 1) for states_1HTD in (query_1HTD, key_1HTD, value_1HTD)]
    outs = []
    for group in length_groups:
        query, key, value = (group.rows(flat_THD).transpose(1, 2) for flat_THD in flat)
        if key.shape[1] != query.shape[1]:
            key, value = (states.repeat_interleave(query.shape[1] // states.shape[1], dim=1) for states in (key, value))
        mask = None
        if sliding_window is not None and group.length > sliding_window:
            mask = _window_mask(group.length, sliding_window, is_causal, query.device)
        if softcap is not None:
            mask = _window_mask(group.length, sliding_window or group.length, is_causal, query.device)
            out = _capped_attention(query, key, value, mask, scaling, softcap)
        else:
            out = scaled_dot_product_attention(query, key, value, mask, is_causal=is_causal and mask is None, scale=scaling)
        outs.append(out.transpose(1, 2).flatten(0, 1))
    return (outs[0] if len(outs) == 1 else torch.cat(outs))[None], None


@functools.lru_cache(maxsize=8)
def _window_mask(length: int, window: int, is_causal: bool, device: torch.device) -> Tensor:
    """True where a token may look, [length, length]: at the last `window` tokens, its own included, or at those less than `window` away."""
    places = torch.arange(length, device=device)
    distance = places[:, None] - places
    return (distance >= 0) & (distance < window) if is_causal else distance.abs() < window


def _capped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float) -> Tensor:
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    return scores.masked_fill(~mask, -torch.inf).softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def register_flat_attention() -> None:
    """Makes `penstock_flat` known to transformers. No mask function goes with it, so no model builds a dense mask."""
    AttentionInterface.register(FLAT_ATTENTION, flat_attention)


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
    """For classes that take no flat row: texts of about the same length are padded to one, and computed by the class's own code."""

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


def choose_forward(model: PreTrainedModel) -> Forward:
    """Flat where the model's class can be run so, else padded. Raises `ConfigurationError` where it cannot be run at all."""
    plain = "sdpa" if model._supports_sdpa else "eager"
    model.set_attn_implementation(plain)
    inputs = probe_inputs(model)
    try:
        expected = [own_states(model, text) for text in inputs]
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError) as error:
        raise ConfigurationError(f"{type(model).__name__} cannot be served: it takes no plain text ({error})") from error
    if model._supports_attention_backend:
        register_flat_attention()
        model.set_attn_implementation(FLAT_ATTENTION)
        flat = FlatForward.of(model)
        if _agrees(flat, model, inputs, expected):
            return flat
        model.set_attn_implementation(plain)
    logger.info("%s is computed with padding: it takes no flat batches", type(model).__name__)
    return PaddedForward.of(model)


def probe_inputs(model: PreTrainedModel) -> list[EncoderInput]:
    """Texts of a few tokens each, none of which pads, and one longer than the windows of a model that looks both ways.

    Classes may count those differently.
    """
    config = model.config.get_text_config()
    usable = [token_id for token_id in range(min(config.vocab_size, 1000)) if token_id != config.pad_token_id]
    lengths = [*PROBE_LENGTHS, *_longer_than_windows(model)]
    picks = iter(range(sum(lengths)))
    return [EncoderInput([usable[7919 * next(picks) % len(usable)] for _ in range(length)]) for length in lengths]


def _longer_than_windows(model: PreTrainedModel) -> list[int]:
    windows = [getattr(module, "sliding_window", None) for module in model.modules() if getattr(module, "is_causal", True) is False]
    widest = max((window for window in windows if isinstance(window, int)), default=0)
    return [widest + 4] if 0 < widest <= MAX_PROBED_WINDOW else []


def own_states(model: PreTrainedModel, text: EncoderInput) -> Tensor:
    """Token vectors [L, D] as the class computes them for one text."""
    with torch.inference_mode():
        states: Tensor = model(input_ids=torch.tensor([text.token_ids], device=model.device)).last_hidden_state[0]
    return states


def _agrees(forward: Forward, model: PreTrainedModel, inputs: Sequence[EncoderInput], expected: Sequence[Tensor]) -> bool:
    batch = build_encoder_batch(inputs, model.device)
    try:
        with torch.inference_mode():
            found = batch.split(forward(batch))
    except (TypeError, ValueError, RuntimeError, AttributeError, IndexError, NotImplementedError) as error:
        logger.debug("%s takes no flat batches: %s", type(model).__name__, error)
        return False
    return all(is_close(ours, own) for ours, own in zip(found, expected, strict=True))


def is_close(ours: Tensor, own: Tensor) -> bool:
    """Whether the two differ by rounding only."""
    scale = float(own.float().abs().max())
    return bool((ours.float() - own.float()).abs().max() <= TOLERANCE[own.dtype] * max(scale, 1e-6))
