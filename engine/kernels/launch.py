"""Launches the Triton kernels: shapes and grids. Triton itself is imported with the first launch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.engine.kernels.tuning import AttentionTuning, decode_tuning, next_power_of_two, padded, padded_parts, prefill_tuning

COMPILER_OPTIONS = {"enable_fp_fusion": True}  # the default of old; Triton 3.9 warns where it is left open
ELEMENTS_PER_WARP = 256  # 16 bytes for each of 32 lanes, at 2 bytes an element


def kv_write(key_THD: Tensor, value_THD: Tensor | None, key_cache: Tensor, value_cache: Tensor | None, slot_mapping_T: Tensor) -> None:
    """Writes keys [T, KV heads, Dk] and values [T, KV heads, Dv], if any, to the caches, converted to their type, in one launch.

    Caches of 8 bits (float8_e4m3fn, on chips of capability 8.9 and later) have no scales: what exceeds their range is cut off at its end.

    Slot s (int64) is token s % block_size of block s // block_size; tokens with a negative slot are padding and are skipped. No two tokens
    may share a slot. Head dimensions are contiguous everywhere. Never waits for the device.
    """
    from penstock.engine.kernels.attention_triton import kv_write_kernel

    assert key_THD.stride(-1) == key_cache.stride(-1) == slot_mapping_T.stride(0) == 1
    num_tokens, num_kv_heads, key_size = key_THD.shape
    if num_tokens == 0:
        return
    value_size = 1
    value_strides: tuple[int, ...] = (0,) * 5
    if value_THD is not None and value_cache is not None:
        assert value_THD.stride(-1) == value_cache.stride(-1) == 1
        value_size, value_strides = value_THD.shape[-1], (*value_THD.stride()[:2], *value_cache.stride()[:3])
    key_elements = next_power_of_two(num_kv_heads * key_size)
    value_elements = next_power_of_two(num_kv_heads * value_size)
    kv_write_kernel[(num_tokens,)](
        key_THD,
        value_THD,
        key_cache,
        value_cache,
        slot_mapping_T,
        *key_THD.stride()[:2],
        *value_strides[:2],
        *key_cache.stride()[:3],
        *value_strides[2:],
        NUM_KV_HEADS=num_kv_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK_SIZE=key_cache.shape[1],
        KEY_ELEMENTS=key_elements,
        VALUE_ELEMENTS=value_elements,
        LARGEST=torch.finfo(key_cache.dtype).max if key_cache.dtype.itemsize == 1 else None,
        num_warps=max(1, min(8, max(key_elements, value_elements) // ELEMENTS_PER_WARP)),
        **COMPILER_OPTIONS,
    )


def _attention_strides(out: Tensor, query: Tensor, key_cache: Tensor, value_cache: Tensor, block_tables_PN: Tensor) -> tuple[int, ...]:
    """Those that both attention kernels take, in their order."""
    return (*out.stride()[:2], *query.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3], block_tables_PN.stride(0))


def _attention_constants(
    tuning: AttentionTuning, group_size: int, key_size: int, value_size: int, block_size: int, shares_keys: bool
) -> dict[str, Any]:
    """What both attention kernels are compiled for, and how."""
    key_padded, rest_padded = padded_parts(key_size)
    assert not shares_keys or value_size <= key_padded
    return {
        "GROUP_SIZE": group_size,
        "KEY_SIZE": key_size,
        "VALUE_SIZE": value_size,
        "KEY_PADDED": key_padded,
        "REST_PADDED": rest_padded,
        "VALUE_PADDED": key_padded if shares_keys else padded(value_size),
        "SHARES_KEYS": shares_keys,
        "BLOCK_SIZE": block_size,
        "TILE_ROWS": tuning.tile_rows,
        "TILE_KEYS": tuning.tile_keys,
        "num_warps": tuning.num_warps,
        "num_stages": tuning.num_stages,
        **COMPILER_OPTIONS,
    }


@dataclass(frozen=True, slots=True)
class SplitPlan:
    """Which keys each program of a decode attends to, decided on the device: the host knows bounds alone.

    Rows of `plan_R4` (int32): the numbers of items and of merges; from row 1 on, an item for each split: its sequence, the number of splits
    of that, the place of the first one's partial result, and the split's own number; from row `1 + max_items` on, a merge for each
    sequence of several splits: the sequence, the number of its splits, and the place of the first one's partial result.
    """

    plan_R4: Tensor
    max_items: int
    max_merges: int
    max_partials: int


TILE_SEQUENCES = 256


def plan_splits(
    context_lens_B: Tensor, *, num_wanted: int, min_tiles: int, tile_keys: int, max_context_len: int, sliding_window: int | None = None
) -> SplitPlan | None:
    """Splits the keys of a batch evenly: into at most B + `num_wanted` parts, none of them with more than a `num_wanted`th of all keys.

    A sequence has as many splits as that takes, each of at least `min_tiles` tiles of `tile_keys` keys. None where no sequence of up to
    `max_context_len` keys would have more than one split. All layers of a step that see the same keys can share a plan. Never waits for the
    device, and takes as many programs and as much memory whatever the lengths are, so that a CUDA graph can hold it.
    """
    num_sequences = context_lens_B.shape[0]
    max_tiles = -(-max_context_len // tile_keys)
    if sliding_window is not None:
        max_tiles = min(max_tiles, -(-sliding_window // tile_keys) + 1)
    if num_sequences == 0 or max_tiles <= min_tiles:
        return None
    from penstock.engine.kernels.attention_triton import plan_splits_kernel

    # With s_i = ceil(t_i / c) splits of sequence i, where c >= sum(t) / wanted: sum(s) <= wanted + B, and fewer than `wanted` have s_i > 1.
    max_items = min(num_sequences + num_wanted, num_sequences * -(-max_tiles // min_tiles))
    max_merges = min(num_sequences, num_wanted)
    plan_R4 = torch.empty(1 + max_items + max_merges, 4, dtype=torch.int32, device=context_lens_B.device)
    plan_splits_kernel[(1,)](
        plan_R4,
        context_lens_B,
        num_sequences,
        num_wanted,
        min_tiles,
        max_items,
        sliding_window,
        TILE_KEYS=tile_keys,
        TILE_SEQUENCES=TILE_SEQUENCES,
        num_warps=4,
        **COMPILER_OPTIONS,
    )
    return SplitPlan(plan_R4, max_items, max_merges, max_partials=min(max_items, 2 * num_wanted))


TILE_SPLITS = 16


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
    shares_keys: bool = False,
    splits: SplitPlan | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of each sequence's last token over all its keys, in parts that run side by side where `splits` has several; [B, H, Dv].

    The caches are [num_blocks, block_size, KV heads, Dk or Dv] with contiguous heads, of the query's type or float8_e4m3fn. Row
    `table_rows_B[i]` of the tables names the blocks of sequence i in order; entries past its context are never read. `context_lens_B`
    counts the new token, whose key and value are in the cache already; a sequence of length 0 gets zeros. Tables, rows and lengths are
    int32 or int64. `sinks` [H] join the softmax as keys without values. With `shares_keys`, values are the first dimensions of keys, and
    their cache is a view of the other. `splits` is a plan for these lengths, tiles and window. Never waits for the device.
    Source: Flash-Decoding (Dao et al. 2023) over vLLM's block tables (Kwon et al. 2023), all query heads of a KV head in one tile;
    splits by length as in FlashInfer (Ye et al. 2025).
    """
    from penstock.engine.kernels.attention_triton import merge_splits_kernel, paged_decode_kernel

    num_sequences, num_heads, key_size = query_BHD.shape
    _, block_size, num_kv_heads, value_size = value_cache.shape
    assert num_heads % num_kv_heads == 0
    assert query_BHD.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_tables_PN.stride(-1) == 1
    if out is None:
        out = query_BHD.new_empty(num_sequences, num_heads, value_size)
    if num_sequences == 0:
        return out
    group_size = num_heads // num_kv_heads
    tuning = decode_tuning(group_size, key_size, value_size, query_BHD.element_size())
    partial_output = partial_log_sum = out
    if splits is not None:
        partial_output = out.new_empty(splits.max_partials, num_heads, value_size, dtype=torch.float32)
        partial_log_sum = out.new_empty(splits.max_partials, num_heads, dtype=torch.float32)
    paged_decode_kernel[(num_kv_heads, num_sequences if splits is None else splits.max_items)](
        out,
        partial_output,
        partial_log_sum,
        None if splits is None else splits.plan_R4,
        query_BHD,
        key_cache,
        value_cache,
        block_tables_PN,
        table_rows_B,
        context_lens_B,
        sinks,
        scaling,
        sliding_window,
        softcap,
        *_attention_strides(out, query_BHD, key_cache, value_cache, block_tables_PN),
        IS_SPLIT=splits is not None,
        **_attention_constants(tuning, group_size, key_size, value_size, block_size, shares_keys),
    )
    if splits is not None:
        merge_splits_kernel[(num_heads, splits.max_merges)](
            out,
            partial_output,
            partial_log_sum,
            splits.plan_R4,
            splits.max_items,
            *out.stride()[:2],
            VALUE_SIZE=value_size,
            VALUE_PADDED=padded(value_size),
            TILE_SPLITS=TILE_SPLITS,
            num_warps=4,
            **COMPILER_OPTIONS,
        )
    return out


def varlen_prefill(
    query_THD: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables_PN: Tensor,
    table_rows_B: Tensor,
    query_start_loc: Tensor,
    context_lens_B: Tensor,
    *,
    max_query_len: int,
    key_stops_T: Tensor | None = None,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    shares_keys: bool = False,
    first_sequence: int = 0,
    out: Tensor | None = None,
    tuning: AttentionTuning | None = None,
) -> Tensor:
    """Causal attention of a flat batch, but for tokens that see the keys before `key_stops_T`, too; returns [T, H, Dv].

    Rows query_start_loc[i]:query_start_loc[i + 1] (int32 or int64 [B + 1]) are the last tokens of sequence i, whose keys and values up to
    context_lens_B[i] are in the cache already: chunks of a prompt and prefix-cache hits need nothing of their own. No sequence may have
    more than `max_query_len` rows. Only the sequences from `first_sequence` on are computed; the other rows of the result are left as
    they are in `out`, and undefined without one. `tuning` is `prefill_tuning`'s if not given. The rest is as in `paged_decode`. Never
    waits for the device.
    Source: FlashAttention-2 (Dao 2023), all query heads of a KV head in one tile.
    """
    from penstock.engine.kernels.attention_triton import varlen_prefill_kernel

    num_tokens, num_heads, key_size = query_THD.shape
    _, block_size, num_kv_heads, value_size = value_cache.shape
    assert num_heads % num_kv_heads == 0
    assert query_THD.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == block_tables_PN.stride(-1) == 1
    if out is None:
        out = query_THD.new_empty(num_tokens, num_heads, value_size)
    num_sequences = context_lens_B.shape[0] - first_sequence
    if num_tokens == 0 or num_sequences <= 0:
        return out
    group_size = num_heads // num_kv_heads
    if tuning is None:
        sizes = (group_size, key_size, value_size, query_THD.element_size(), max_query_len)
        tuning = prefill_tuning(*sizes, capability=torch.cuda.get_device_capability(query_THD.device)[0] if query_THD.is_cuda else 9)
    num_tiles = -(-max_query_len // (tuning.tile_rows // group_size))
    varlen_prefill_kernel[(num_tiles, num_kv_heads, num_sequences)](
        out,
        query_THD,
        key_cache,
        value_cache,
        block_tables_PN,
        table_rows_B,
        query_start_loc,
        context_lens_B,
        key_stops_T,
        sinks,
        first_sequence,
        scaling,
        sliding_window,
        softcap,
        *_attention_strides(out, query_THD, key_cache, value_cache, block_tables_PN),
        **_attention_constants(tuning, group_size, key_size, value_size, block_size, shares_keys),
    )
    return out


NORM_ELEMENTS_PER_WARP = 512


def _norm_warps(size: int) -> int:
    return max(1, min(16, next_power_of_two(size) // NORM_ELEMENTS_PER_WARP))


def rms_norm(states: Tensor, weight: Tensor, epsilon: float, adds_one: bool = False) -> Tensor:
    """Each row of [..., N] over the root of its mean square, times the weights [N]; contiguous, in the type of `states`.

    With `adds_one`, times one more than the weights, and rounded once, as Gemma's. Rows may lie apart, as the heads of a fused projection
    do. Never waits for the device.
    Source: Zhang and Sennrich 2019.
    """
    from penstock.engine.kernels.layers_triton import rms_norm_kernel

    size = states.shape[-1]
    assert weight.shape == (size,)
    out = torch.empty(states.shape, dtype=states.dtype, device=states.device)
    if out.numel():
        rows = states.reshape(-1, states.shape[-2] if states.dim() > 1 else 1, size)  # a view, but for shapes that no model has
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        rms_norm_kernel[(rows.shape[0] * rows.shape[1],)](
            out,
            rows,
            weight,
            epsilon,
            rows.shape[1],
            rows.stride(0),
            rows.stride(1),
            SIZE=size,
            PADDED=next_power_of_two(size),
            ADDS_ONE=adds_one,
            num_warps=_norm_warps(size),
            **COMPILER_OPTIONS,
        )
    return out


def add_rms_norm(
    residual: Tensor,
    states: Tensor,
    before: tuple[Tensor, float] | None,
    after: tuple[Tensor, float] | None,
    *,
    scale: float = 1.0,
    adds_one: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`residual` plus `scale` times `states`, [..., N]: normalized before it is added, the sum after that, where a norm is given.

    Norms are weights [N] and epsilons, as those of `rms_norm`. Returns the sum and what is normalized of it. Never waits for the device.
    """
    from penstock.engine.kernels.layers_triton import add_rms_norm_kernel

    size = states.shape[-1]
    assert residual.shape == states.shape
    assert residual.dtype == states.dtype
    residual, states = residual.contiguous(), states.contiguous()
    total = torch.empty_like(residual)
    normed = None if after is None else torch.empty_like(residual)
    num_rows = states.numel() // size
    if num_rows:
        add_rms_norm_kernel[(num_rows,)](
            total,
            normed,
            residual,
            states,
            float(scale),
            *(before or (None, 0.0)),
            *(after or (None, 0.0)),
            SIZE=size,
            PADDED=next_power_of_two(size),
            ADDS_ONE=adds_one,
            num_warps=_norm_warps(size),
            **COMPILER_OPTIONS,
        )
    return total, normed


ACTIVATIONS = ("silu", "gelu_tanh")
GATED_TILE = 1024


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """`up` [..., N] times one of `ACTIVATIONS` of `gate`; contiguous. Rows may lie apart, as halves of a fused projection do.

    Rounds once, at the end. Never waits for the device.
    """
    from penstock.engine.kernels.layers_triton import gated_kernel

    assert activation in ACTIVATIONS
    size = gate.shape[-1]
    assert gate.shape == up.shape
    assert gate.stride(-1) == up.stride(-1) == 1
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate, up = gate.reshape(-1, size), up.reshape(-1, size)  # views, for all that a model has
        gated_kernel[(len(gate), -(-size // GATED_TILE))](
            out,
            gate,
            up,
            size,
            gate.stride(0),
            up.stride(0),
            ACTIVATION=activation,
            TILE=GATED_TILE,
            num_warps=4,
            **COMPILER_OPTIONS,
        )
    return out


TILE_HEADS = 8


@dataclass(frozen=True, slots=True)
class RotaryForm:
    """Which two of R rotated dimensions turn together, d and d + R / 2 or neighbours, and where the cosines of both are.

    `cosines`: as the dimensions are in "halves", as they are in "pairs", or the same for both ("once"). `per_cosine` is how many
    dimensions are rotated for each cosine that there is.
    """

    is_interleaved: bool = False
    cosines: str = "halves"
    per_cosine: int = 1


GPT_NEOX = RotaryForm()


def rotate(
    query_1HTD: Tensor, key_1HTD: Tensor, cosines_1TC: Tensor, sines_1TC: Tensor, form: RotaryForm = GPT_NEOX
) -> tuple[Tensor, Tensor]:
    """Turns pairs among the first C * `form.per_cosine` dimensions of each head; the others stay. Results have the shapes of query and key.

    One token's heads are together. Rounds once, at the end. Never waits for the device.
    Source: RoFormer (Su et al. 2021).
    """
    from penstock.engine.kernels.layers_triton import rotate_kernel

    _, num_heads, num_tokens, size = query_1HTD.shape
    num_kv_heads = key_1HTD.shape[1]
    num_rotated = form.per_cosine * cosines_1TC.shape[-1]
    assert len(query_1HTD) == len(key_1HTD) == 1
    assert query_1HTD.stride(-1) == key_1HTD.stride(-1) == cosines_1TC.stride(-1) == sines_1TC.stride(-1) == 1
    assert cosines_1TC.shape == sines_1TC.shape == (1, num_tokens, cosines_1TC.shape[-1])
    assert num_rotated % 2 == 0
    assert num_rotated <= size
    out_query_1THD = torch.empty(1, num_tokens, num_heads, size, dtype=query_1HTD.dtype, device=query_1HTD.device)
    out_key_1THD = torch.empty(1, num_tokens, num_kv_heads, size, dtype=key_1HTD.dtype, device=key_1HTD.device)
    if num_tokens:
        rotate_kernel[(num_tokens, -(-num_heads // TILE_HEADS) + -(-num_kv_heads // TILE_HEADS))](
            out_query_1THD,
            out_key_1THD,
            query_1HTD,
            key_1HTD,
            cosines_1TC,
            sines_1TC,
            query_1HTD.stride(2),
            query_1HTD.stride(1),
            key_1HTD.stride(2),
            key_1HTD.stride(1),
            cosines_1TC.stride(1),
            sines_1TC.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            SIZE=size,
            NUM_ROTATED=num_rotated,
            HALF_PADDED=next_power_of_two(num_rotated // 2),
            REST_PADDED=next_power_of_two(size - num_rotated),
            TILE_HEADS=TILE_HEADS,
            IS_INTERLEAVED=form.is_interleaved,
            COSINES=form.cosines,
            num_warps=4,
            **COMPILER_OPTIONS,
        )
    return out_query_1THD.transpose(1, 2), out_key_1THD.transpose(1, 2)


TILE_WORDS = 128  # times 32 tokens: a program writes at most 16 KiB


ADAPTER_ROWS, ADAPTER_INPUTS, ADAPTER_OUTPUTS = 16, 64, 64  # of a program
FEW_ROWS, SPLITS_OF_FEW = 64, 8  # up to so many rows, several programs share the inputs of a tile


def add_low_rank(output_TO: Tensor, x_TI: Tensor, slots_T: Tensor, down_SRI: Tensor, up_SOR: Tensor) -> None:
    """Adds x down^T up^T to each row of the output, with the matrices of the row's slot; rows with a negative slot stay as they are.

    Ranks are a power of two of 16 or more, padded with zeros. The numbers in `slots_T` decide what is computed, and no shape depends on
    them, so that graphs hold it. Columns are contiguous, and so are the matrices. Never waits for the device.
    Source: Chen et al., Punica (arXiv:2310.18547).
    """
    from penstock.engine.kernels.layers_triton import expand_kernel, shrink_kernel

    (num_rows, num_inputs), (num_slots, rank, _) = x_TI.shape, down_SRI.shape
    num_outputs = output_TO.shape[1]
    assert down_SRI.shape == (num_slots, rank, num_inputs)
    assert up_SOR.shape == (num_slots, num_outputs, rank)
    assert output_TO.stride(1) == x_TI.stride(1) == 1
    assert down_SRI.is_contiguous()
    assert up_SOR.is_contiguous()
    if not num_rows:
        return
    num_tiles, num_splits = -(-num_rows // ADAPTER_ROWS), SPLITS_OF_FEW if num_rows <= FEW_ROWS else 1
    reduced = torch.empty(num_splits, num_rows, rank, dtype=torch.float32, device=x_TI.device)
    shared = {"RANK": rank, "SPLITS": num_splits, "BLOCK_T": ADAPTER_ROWS, **COMPILER_OPTIONS}
    shrink_kernel[(num_tiles, num_slots, num_splits)](
        reduced, x_TI, slots_T, down_SRI, num_rows, x_TI.stride(0), SIZE=num_inputs, BLOCK_I=ADAPTER_INPUTS, **shared
    )
    expand_kernel[(num_tiles, num_slots, -(-num_outputs // ADAPTER_OUTPUTS))](
        output_TO, reduced, slots_T, up_SOR, num_rows, output_TO.stride(0), SIZE=num_outputs, BLOCK_O=ADAPTER_OUTPUTS, **shared
    )


def bitmask_apply(logits_BV: Tensor, bitmask_RW: Tensor, rows_R: Tensor) -> None:
    """Sets to -inf, in place, what row i of the bitmask forbids in row rows_R[i] of the logits.

    The bitmask is int32 [R, ceil(V / 32)]: bit t % 32 of word t // 32 is set where token t may come next; tokens beyond its last word are
    forbidden. `rows_R` (int32 or int64, no row twice) and the bitmask are on the device of the logits. Never waits for the device.
    """
    from penstock.engine.kernels.sampling_triton import bitmask_apply_kernel

    assert logits_BV.stride(-1) == bitmask_RW.stride(-1) == 1
    vocab_size = logits_BV.shape[1]
    num_rows, num_words = bitmask_RW.shape
    assert rows_R.shape == (num_rows,)
    if num_rows == 0:
        return
    num_tiles = -(-vocab_size // (32 * TILE_WORDS))
    bitmask_apply_kernel[(num_rows, num_tiles)](
        logits_BV,
        bitmask_RW,
        rows_R,
        vocab_size,
        num_words,
        logits_BV.stride(0),
        bitmask_RW.stride(0),
        TILE_WORDS=TILE_WORDS,
        num_warps=4,
        **COMPILER_OPTIONS,
    )


WIDEST_LOGITS_TILE = 8192  # logits


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
    """A token for each row, int64 [B], and whether the row had any to give, bool [B]: without that its token means nothing.

    At temperature 0 it is the first of the most probable tokens. Else it is drawn: `top_ks_B` (int64; at least the vocabulary's size takes
    nothing away) keeps the k most probable and all that tie with the last of them, `top_ps_B` of these the nucleus, with ties as well, and
    `min_ps_B` what is at least that share as probable as the most probable one. No k is above `max_top_k` but for those that take nothing
    away. Parameters are float32, on the device of the logits. The same `seeds_B` (int64) give the same tokens.
    Draws by rejection as `choice.draw` does: exact, one draw for most rows. Never waits for the device.
    """
    from penstock.engine.kernels.sampling_triton import sample_kernel

    assert logits_BV.stride(-1) == 1
    num_rows, vocab_size = logits_BV.shape
    token_ids_B = torch.empty(num_rows, dtype=torch.int64, device=logits_BV.device)
    is_possible_B = torch.empty(num_rows, dtype=torch.int8, device=logits_BV.device)
    if num_rows:
        sample_kernel[(num_rows,)](
            token_ids_B,
            is_possible_B,
            logits_BV,
            temperatures_B,
            top_ps_B,
            min_ps_B,
            _floors(logits_BV, top_ks_B, max_top_k),
            seeds_B,
            vocab_size,
            logits_BV.stride(0),
            TILE=min(WIDEST_LOGITS_TILE, next_power_of_two(vocab_size)),
            num_warps=16,
            **COMPILER_OPTIONS,
        )
    return token_ids_B, is_possible_B.bool()


def _floors(logits_BV: Tensor, top_ks_B: Tensor | None, max_top_k: int) -> Tensor:
    """The k-th greatest logit of each row, float32 [B]; -inf where every token may come."""
    everything_B = torch.full((len(logits_BV),), -torch.inf, device=logits_BV.device)
    if top_ks_B is None or max_top_k == 0:
        return everything_B
    greatest_BK = logits_BV.topk(max_top_k).values.float()
    kth_B = greatest_BK.gather(1, top_ks_B.clamp(max=max_top_k)[:, None] - 1)[:, 0]
    return torch.where(top_ks_B < logits_BV.shape[1], kth_B, everything_B)
