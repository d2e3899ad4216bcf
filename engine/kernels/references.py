"""Reference implementations of the kernels in plain torch: one sequence at a time, on any device. For tests and as documentation."""

import torch
from torch import Tensor
from torch.nn import functional

from penstock.engine.kernels.launch import GPT_NEOX, RotaryForm


def paged_decode(
    query_BHD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables_PN: Tensor,
    table_rows_B: Tensor,
    context_lens_B: Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The arguments and the result of `attention.paged_decode`: prefill with one query per sequence."""
    query_start_loc = torch.arange(query_BHD.shape[0] + 1, device=query_BHD.device)
    return varlen_prefill(
        query_BHD,
        key_cache,
        value_cache,
        block_tables_PN,
        table_rows_B,
        query_start_loc,
        context_lens_B,
        scaling=scaling,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
    )


def plan_splits(
    context_lens: list[int], *, num_wanted: int, min_tiles: int, tile_keys: int, sliding_window: int | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """The items and the merges of `attention.plan_splits`, as rows of `SplitPlan.plan_R4`; a merge's last number means nothing."""
    first_tiles = [0 if sliding_window is None else max(context_len - sliding_window, 0) // tile_keys for context_len in context_lens]
    num_tiles = [-(-context_len // tile_keys) - first for context_len, first in zip(context_lens, first_tiles, strict=True)]
    tiles_per_split = max(min_tiles, -(-sum(num_tiles) // num_wanted))
    items, merges, num_partials = [], [], 0
    for sequence, tiles in enumerate(num_tiles):
        num_splits = max(1, -(-tiles // tiles_per_split))
        items += [[sequence, num_splits, num_partials, split] for split in range(num_splits)]
        if num_splits > 1:
            merges.append([sequence, num_splits, num_partials, 0])
            num_partials += num_splits
    return items, merges


def varlen_prefill(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables_PN: Tensor,
    table_rows_B: Tensor,
    query_start_loc: Tensor,
    context_lens_B: Tensor,
    *,
    key_stops_T: Tensor | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The arguments and the result of `attention.varlen_prefill`; computed in float32. Rows of no sequence are zero."""
    num_tokens, num_heads, _ = query_THD.shape
    out = query_THD.new_zeros(num_tokens, num_heads, value_cache.shape[-1])
    starts = query_start_loc.tolist()
    for sequence, context_len in enumerate(context_lens_B.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        if context_len == 0 or rows.start == rows.stop:
            continue
        blocks_N = block_tables_PN[table_rows_B[sequence], : -(-context_len // key_cache.shape[1])].long()
        key_CHD = key_cache[blocks_N].flatten(0, 1)[:context_len]
        value_CHD = value_cache[blocks_N].flatten(0, 1)[:context_len]
        stops_T = None if key_stops_T is None else key_stops_T[rows]
        out[rows] = _attend(query_THD[rows], key_CHD, value_CHD, stops_T, scaling, sliding_window, softcap, sinks).to(out.dtype)
    return out


def _attend(
    query_THD: Tensor,
    key_CHD: Tensor,
    value_CHD: Tensor,
    key_stops_T: Tensor | None,
    scaling: float,
    sliding_window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The last T tokens of one sequence over its C keys, float32."""
    num_queries, num_heads, _ = query_THD.shape
    context_len, num_kv_heads, _ = key_CHD.shape
    group_size = num_heads // num_kv_heads
    query_HTD = query_THD.float().transpose(0, 1)
    key_HCD = key_CHD.float().transpose(0, 1).repeat_interleave(group_size, dim=0)
    value_HCD = value_CHD.float().transpose(0, 1).repeat_interleave(group_size, dim=0)
    scores_HTC = query_HTD @ key_HCD.transpose(1, 2) * scaling
    if softcap is not None:
        scores_HTC = softcap * torch.tanh(scores_HTC / softcap)
    query_position_T1 = torch.arange(context_len - num_queries, context_len, device=query_THD.device)[:, None]
    key_position_C = torch.arange(context_len, device=query_THD.device)
    is_visible_TC = key_position_C <= query_position_T1
    if key_stops_T is not None:
        is_visible_TC |= key_position_C < key_stops_T[:, None]
    if sliding_window is not None:
        is_visible_TC &= key_position_C > query_position_T1 - sliding_window
    scores_HTC = scores_HTC.masked_fill(~is_visible_TC, float("-inf"))
    value_HCD = value_HCD.masked_fill(~is_visible_TC.any(0)[:, None], 0.0)  # blocks before all windows may hold anything
    # One more column holds the sink, or nothing: it is dropped after the softmax.
    sink_H = torch.full([num_heads], float("-inf"), device=query_THD.device) if sinks is None else sinks.float()
    sink_HT1 = sink_H[:, None, None].expand(-1, num_queries, 1)
    # A row without any key has NaN for its softmax, and attends to nothing.
    weights_HTC = torch.softmax(torch.cat([scores_HTC, sink_HT1], dim=-1), dim=-1)[..., :context_len].nan_to_num(0.0)
    return (weights_HTC @ value_HCD).transpose(0, 1)


def kv_write(key_THD: Tensor, value_THD: Tensor | None, key_cache: Tensor, value_cache: Tensor | None, slot_mapping_T: Tensor) -> None:
    """The arguments and the effect of `attention.kv_write`."""
    is_token_T = slot_mapping_T >= 0
    slots = slot_mapping_T[is_token_T]
    block_size = key_cache.shape[1]
    for cache, rows_THD in ((key_cache, key_THD), (value_cache, value_THD)):
        if cache is None or rows_THD is None:
            continue
        largest = torch.finfo(cache.dtype).max if cache.dtype.itemsize == 1 else torch.inf
        cache[slots // block_size, slots % block_size] = rows_THD[is_token_T].clamp(-largest, largest).to(cache.dtype)


def bitmask_apply(logits_BV: Tensor, bitmask_RW: Tensor, rows_R: Tensor) -> None:
    """The arguments and the effect of `sampling.bitmask_apply`."""
    vocab_size = logits_BV.shape[1]
    bits_RV = (bitmask_RW[:, :, None] >> torch.arange(32, device=bitmask_RW.device) & 1).flatten(1)[:, :vocab_size]
    is_allowed_RV = functional.pad(bits_RV, (0, vocab_size - bits_RV.shape[1])).bool()
    rows = rows_R.long()
    logits_BV[rows] = logits_BV[rows].masked_fill(~is_allowed_RV, float("-inf"))


def sample(
    logits_BV: Tensor,
    temperatures_B: Tensor,
    top_ps_B: Tensor,
    min_ps_B: Tensor,
    seeds_B: Tensor,
    *,
    top_ks_B: Tensor | None = None,
    max_top_k: int = 0,
) -> tuple[Tensor, Tensor]:
    """The arguments of `sampling.sample`, and what it would draw with other random numbers: `seeds_B` and `max_top_k` are not looked at."""
    probs_BV = sampling_distribution(logits_BV, temperatures_B, top_ps_B, min_ps_B, top_ks_B)
    is_possible_B = logits_BV.amax(-1).isfinite()
    return torch.multinomial(probs_BV.where(is_possible_B[:, None], 1.0), 1)[:, 0], is_possible_B


def sampling_distribution(
    logits_BV: Tensor, temperatures_B: Tensor, top_ps_B: Tensor, min_ps_B: Tensor, top_ks_B: Tensor | None = None
) -> Tensor:
    """The probabilities [B, V] that `sample` draws by, from a sorted vocabulary. The rows of NaN or of no token mean nothing."""
    logits_BV = logits_BV.float()
    is_greedy_B1 = (temperatures_B == 0)[:, None]
    scaled_BV = logits_BV / temperatures_B[:, None].where(~is_greedy_B1, 1.0)
    if top_ks_B is not None:
        ordered_BV = scaled_BV.sort(-1, descending=True).values
        kth_B1 = ordered_BV.gather(1, top_ks_B.clamp(max=logits_BV.shape[1])[:, None] - 1)
        scaled_BV = scaled_BV.masked_fill(scaled_BV < kth_B1, -torch.inf)
    probs_BV = scaled_BV.softmax(-1)
    ordered_BV, index_BV = probs_BV.sort(-1, descending=True)
    # What a token's likelier ones add up to: that of the first of those that tie with it.
    before_BV = (ordered_BV.cumsum(-1) - ordered_BV).masked_fill(ordered_BV == ordered_BV.roll(1, -1), -1.0)
    before_BV[:, 0] = 0.0
    is_in_BV = before_BV.cummax(-1).values < top_ps_B[:, None]
    is_kept_BV = torch.zeros_like(is_in_BV).scatter_(1, index_BV, is_in_BV)
    is_kept_BV &= probs_BV >= min_ps_B[:, None] * probs_BV.amax(-1, keepdim=True)
    probs_BV = probs_BV.where(is_kept_BV, 0.0)
    greedy_BV = functional.one_hot(logits_BV.argmax(-1), logits_BV.shape[1]).float()
    return (probs_BV / probs_BV.sum(-1, keepdim=True)).where(~is_greedy_B1, greedy_BV)


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, adds_one: bool = False) -> Tensor:
    """The arguments and the result of `layers.rms_norm`."""
    scale = (states.float().pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()
    if adds_one:
        return (states.float() * scale * (1.0 + weight.float())).to(states.dtype)
    return (states.float() * scale).to(states.dtype) * weight.to(states.dtype)


def add_rms_norm(
    residual: Tensor,
    states: Tensor,
    before: tuple[Tensor, float] | None,
    after: tuple[Tensor, float] | None,
    *,
    scale: float = 1.0,
    adds_one: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The arguments and the result of `layers.add_rms_norm`."""
    total = residual + scale * (states if before is None else rms_norm(states, *before, adds_one))
    return total, None if after is None else rms_norm(total, *after, adds_one)


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """The arguments and the result of `layers.gated`."""
    gate_float = gate.float()
    activated = functional.silu(gate_float) if activation == "silu" else functional.gelu(gate_float, approximate="tanh")
    return (activated * up.float()).to(gate.dtype)


def rotate(
    query_1HTD: Tensor, key_1HTD: Tensor, cosines_1TC: Tensor, sines_1TC: Tensor, form: RotaryForm = GPT_NEOX
) -> tuple[Tensor, Tensor]:
    """The arguments and the result of `layers.rotate`."""
    num_rotated = form.per_cosine * cosines_1TC.shape[-1]

    def halves(of_dims: Tensor, are_neighbours: bool) -> tuple[Tensor, Tensor]:
        first, second = (of_dims[..., 0::2], of_dims[..., 1::2]) if are_neighbours else of_dims.chunk(2, dim=-1)
        return first, second

    def angles(table_1TC: Tensor) -> tuple[Tensor, Tensor]:
        table = table_1TC[:, None].float()
        once = table[..., : num_rotated // 2]
        return (once, once) if form.cosines == "once" else halves(table, form.cosines == "pairs")

    def turn(states_1HTD: Tensor) -> Tensor:
        first, second = halves(states_1HTD[..., :num_rotated].float(), form.is_interleaved)
        (first_cosine, second_cosine), (first_sine, second_sine) = angles(cosines_1TC), angles(sines_1TC)
        turned = first * first_cosine - second * first_sine, second * second_cosine + first * second_sine
        joined = torch.stack(turned, dim=-1).flatten(-2) if form.is_interleaved else torch.cat(turned, dim=-1)
        return torch.cat([joined.to(states_1HTD.dtype), states_1HTD[..., num_rotated:]], dim=-1)

    return turn(query_1HTD), turn(key_1HTD)


def add_low_rank(output_TO: Tensor, x_TI: Tensor, slots_T: Tensor, down_SRI: Tensor, up_SOR: Tensor) -> None:
    """The arguments and the effect of `launch.add_low_rank`."""
    for slot, (down_RI, up_OR) in enumerate(zip(down_SRI, up_SOR, strict=True)):
        added_TO = ((x_TI @ down_RI.T) @ up_OR.T).to(output_TO.dtype)
        output_TO += torch.where((slots_T == slot)[:, None], added_TO, 0.0)


def gated_delta_update(
    states_SHKV: Tensor,
    slots_N: Tensor,
    query_NGK: Tensor,
    key_NGK: Tensor,
    value_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    *,
    is_normalized: bool,
) -> Tensor:
    """The arguments, the result and the effect of `recurrent.gated_delta_update`."""
    value_NHV, out_type = value_NHV.float(), value_NHV.dtype
    query_NHK, key_NHK = (states.float().repeat_interleave(value_NHV.shape[1] // states.shape[1], dim=1) for states in (query_NGK, key_NGK))
    if is_normalized:
        query_NHK, key_NHK = (states * (states.pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt() for states in (query_NHK, key_NHK))
    states_NHKV = states_SHKV[slots_N] * decay_NH.float().exp()[..., None, None]
    delta_NHV = (value_NHV - (states_NHKV * key_NHK[..., None]).sum(2)) * beta_NH.float()[..., None]
    states_NHKV += key_NHK[..., None] * delta_NHV[:, :, None]
    states_SHKV[slots_N] = states_NHKV
    out_NHV: Tensor = (states_NHKV * query_NHK[..., None] * key_NHK.shape[2] ** -0.5).sum(2)
    return out_NHV.to(out_type)


def state_space_update(
    states_SHDN: Tensor,
    slots_R: Tensor,
    x_RHD: Tensor,
    steps_RH: Tensor,
    decay_H: Tensor,
    inputs_RGN: Tensor,
    outputs_RGN: Tensor,
    *,
    skip_H: Tensor | None = None,
    step_bias_H: Tensor | None = None,
    gate_RHD: Tensor | None = None,
) -> Tensor:
    """The arguments, the result and the effect of `recurrent.state_space_update`."""
    x, heads_per_group = x_RHD.float(), x_RHD.shape[1] // inputs_RGN.shape[1]
    inputs_RHN, outputs_RHN = (each.float().repeat_interleave(heads_per_group, dim=1) for each in (inputs_RGN, outputs_RGN))
    steps_RH = functional.softplus(steps_RH.float() if step_bias_H is None else steps_RH.float() + step_bias_H.float())
    states_RHDN = states_SHDN[slots_R] * (steps_RH * decay_H.float()).exp()[..., None, None]
    states_RHDN += (steps_RH[..., None] * inputs_RHN)[:, :, None] * x[..., None]
    states_SHDN[slots_R] = states_RHDN
    out_RHD = (states_RHDN * outputs_RHN[:, :, None]).sum(-1)
    if skip_H is not None:
        out_RHD += x * skip_H.float()[:, None]
    if gate_RHD is not None:
        out_RHD *= functional.silu(gate_RHD.float())
    return out_RHD.to(x_RHD.dtype)
