"""Attention of each text to itself, over many texts in one flat row: what transformers' encoders call in every layer."""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from penstock.engine.pooling.encoder_batch import LengthGroup

FLAT_ATTENTION = "penstock_flat"


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
