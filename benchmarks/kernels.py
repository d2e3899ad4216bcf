# mypy: disable-error-code="import-untyped,import-not-found"
"""Times each CUDA kernel against its plain-torch reference, for the shapes of Llama-3.1-8B in bfloat16, and prefill against alternatives.

    python benchmarks/kernels.py [--repeat-ms 100]

Each line is one shape: the median time of the kernel and of the reference, and the rate that the kernel reaches, counting only what any
implementation must move (GB/s) or multiply (TFLOP/s). The L2 cache is emptied before every launch. Attention is compared with its
reference first.
"""

import argparse
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from penstock.engine.attention.cuda import heads_per_tile, num_multiprocessors
from penstock.engine.kernels import references
from penstock.engine.kernels.launch import (
    add_rms_norm,
    bitmask_apply,
    gated,
    kv_write,
    paged_decode,
    plan_splits,
    rms_norm,
    rotate,
    sample,
    varlen_prefill,
)
from penstock.engine.kernels.quantized import float8_linear, quantized_linear
from penstock.engine.kernels.recurrent import gated_delta_update, state_space_update
from penstock.engine.kernels.tuning import AttentionTuning, decode_tuning, split_sizes
from penstock.engine.weights.float8 import pack_float8
from penstock.engine.weights.packed import SUPER_BLOCK, TYPES, PackedWeight, QuantizedWeight, WeightType, pack

NUM_HEADS = 32
NUM_KV_HEADS = 8
HEAD_SIZE = 128
BLOCK_SIZE = 16
VOCAB_SIZE = 128_256
DTYPE = torch.bfloat16
ITEMSIZE = 2

# Runs of sequences: how many, and the keys of each.
DECODES = [
    *([run] for run in [(1, 1024), (1, 16_384), (1, 131_072), (8, 4096), (17, 2048), (32, 2048), (64, 2048), (256, 1024)]),
    [(31, 1024), (1, 100_000)],
    [(255, 1024), (1, 100_000)],
]
PREFILLS = [(1, 512, 0), (1, 4096, 0), (8, 512, 0), (1, 512, 15_872), (64, 7, 1000)]  # sequences, new tokens and earlier keys of each
# The tile that prefill had before, one program to a multiprocessor, for comparison with what `prefill_tuning` gives.
WIDE_TILE = AttentionTuning(tile_rows=128, tile_keys=64, num_warps=8, num_stages=5)
WIDE_PREFILLS = [(1, 4096, 0), (8, 512, 0), (1, 512, 15_872)]
TORCH_PREFILLS = [(1, 4096), (8, 512)]  # prompts without earlier keys, which `varlen_attn` reads as they come out of the projections
WRITES = [1, 256, 8192]  # tokens
BITMASKS = [1, 32, 256]  # rows
SAMPLES = [1, 32, 256]  # rows
NORMS = [1, 256, 8192]  # rows
ROTATIONS = [1, 256, 8192]  # tokens
QUANTIZED_TYPES = ("INT4", "UINT4", "Q4_K", "Q6_K", "MXFP4")
QUANTIZED_ROWS = [1, 16, 64, 512]
LATENT_HEADS, LATENT_SIZE, LATENT_VALUE_SIZE = 128, 576, 512  # of DeepSeek V3
LATENT_DECODES = [(1, 16_384), (64, 2048)]  # sequences, and the keys of each
STATES = [1, 64]  # rows
HIDDEN_SIZE = 4096
INTERMEDIATE_SIZE = 14_336


@dataclass(frozen=True, slots=True)
class Measurement:
    """One shape of one kernel: what to run, and how much `unit` work (GB or TFLOP) a run is."""

    name: str
    kernel: Callable[[], Any]
    reference: Callable[[], Any]
    work: float
    unit: str


def make_cache(context_lens: list[int], device: torch.device, dtype: torch.dtype = DTYPE) -> tuple[Tensor, Tensor, Tensor]:
    """Random keys and values, and a table that scatters each sequence's blocks all over them."""
    lens_B = torch.tensor(context_lens, device=device)
    num_blocks_B = -(-lens_B // BLOCK_SIZE)
    num_blocks = int(num_blocks_B.sum())
    places_BN = torch.arange(int(num_blocks_B.max()), device=device) + (num_blocks_B.cumsum(0) - num_blocks_B)[:, None]
    table_BN = torch.randperm(num_blocks, device=device)[places_BN.clamp(max=num_blocks - 1)]  # past a sequence's own it is not read
    key_cache, value_cache = (torch.randn(num_blocks, BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE, device=device, dtype=DTYPE) for _ in range(2))
    return key_cache.to(dtype), value_cache.to(dtype), table_BN


def decode_measurement(runs: list[tuple[int, int]], device: torch.device, dtype: torch.dtype = DTYPE) -> Measurement:
    context_lens = [context_len for num_sequences, context_len in runs for _ in range(num_sequences)]
    num_sequences = len(context_lens)
    key_cache, value_cache, table_BN = make_cache(context_lens, device, dtype)
    query_BHD = torch.randn(num_sequences, NUM_HEADS, HEAD_SIZE, device=device, dtype=DTYPE)
    context_lens_B = torch.tensor(context_lens, device=device)
    group_size = NUM_HEADS // NUM_KV_HEADS
    tile_keys = decode_tuning(group_size, HEAD_SIZE, HEAD_SIZE, ITEMSIZE).tile_keys
    num_wanted, min_tiles = split_sizes(NUM_KV_HEADS, group_size, tile_keys, num_multiprocessors(device))
    bounds = {"num_wanted": num_wanted, "min_tiles": min_tiles, "tile_keys": tile_keys, "max_context_len": max(context_lens)}
    arguments = (query_BHD, key_cache, value_cache, table_BN, torch.arange(num_sequences, device=device), context_lens_B)

    def kernel() -> Tensor:
        return paged_decode(*arguments, scaling=HEAD_SIZE**-0.5, splits=plan_splits(context_lens_B, **bounds))

    num_bytes = 2 * sum(context_lens) * NUM_KV_HEADS * HEAD_SIZE * dtype.itemsize
    name = "paged_decode    " + " and ".join(f"{count:4} x {context_len:6} keys" for count, context_len in runs)
    name += ", 8 bits" * (dtype.itemsize == 1)
    return Measurement(name, kernel, lambda: references.paged_decode(*arguments, scaling=HEAD_SIZE**-0.5), num_bytes / 1e9, "GB/s")


def prefill_inputs(num_sequences: int, query_len: int, prefix_len: int, device: torch.device) -> tuple[Tensor, ...]:
    context_len = prefix_len + query_len
    key_cache, value_cache, table_BN = make_cache([context_len] * num_sequences, device)
    query_THD = torch.randn(num_sequences * query_len, NUM_HEADS, HEAD_SIZE, device=device, dtype=DTYPE)
    query_start_loc = torch.arange(num_sequences + 1, device=device) * query_len
    context_lens_B = torch.full((num_sequences,), context_len, device=device)
    rows_B = torch.arange(num_sequences, device=device)
    return query_THD, key_cache, value_cache, table_BN, rows_B, query_start_loc, context_lens_B


def prefill_kernel(inputs: tuple[Tensor, ...], query_len: int, tuning: AttentionTuning | None = None) -> Callable[[], Tensor]:
    return lambda: varlen_prefill(*inputs, max_query_len=query_len, scaling=HEAD_SIZE**-0.5, tuning=tuning)


def tera_operations(num_sequences: int, query_len: int, prefix_len: int) -> float:
    num_pairs = num_sequences * (query_len * prefix_len + query_len * (query_len + 1) // 2)
    return 4 * num_pairs * NUM_HEADS * HEAD_SIZE / 1e12


def prefill_measurement(num_sequences: int, query_len: int, prefix_len: int, device: torch.device) -> Measurement:
    inputs = prefill_inputs(num_sequences, query_len, prefix_len, device)
    return Measurement(
        f"varlen_prefill  {num_sequences:4} x {query_len:6} tokens after {prefix_len}",
        prefill_kernel(inputs, query_len),
        lambda: references.varlen_prefill(*inputs, scaling=HEAD_SIZE**-0.5),
        tera_operations(num_sequences, query_len, prefix_len),
        "TFLOP/s",
    )


def wide_prefill_measurement(num_sequences: int, query_len: int, prefix_len: int, device: torch.device) -> Measurement:
    """The kernel in `WIDE_TILE`; its reference is the same kernel in the tile of `prefill_tuning`."""
    inputs = prefill_inputs(num_sequences, query_len, prefix_len, device)
    return Measurement(
        f"wide tile       {num_sequences:4} x {query_len:6} tokens after {prefix_len}, against ours",
        prefill_kernel(inputs, query_len, WIDE_TILE),
        prefill_kernel(inputs, query_len),
        tera_operations(num_sequences, query_len, prefix_len),
        "TFLOP/s",
    )


def torch_prefill_measurement(num_sequences: int, query_len: int, device: torch.device) -> Measurement:
    """torch's flash attention over keys and values that are not in a cache; its reference is the kernel, which reads them from blocks."""
    inputs = prefill_inputs(num_sequences, query_len, 0, device)
    query_THD, key_cache, value_cache, table_BN, _, query_start_loc, _ = inputs
    key_THD, value_THD = (torch.cat([cache[row].flatten(0, 1)[:query_len] for row in table_BN]) for cache in (key_cache, value_cache))
    starts = query_start_loc.int()
    causal: dict[str, Any] = {"scale": HEAD_SIZE**-0.5, "window_size": (-1, 0), "enable_gqa": True}
    return Measurement(
        f"varlen_attn     {num_sequences:4} x {query_len:6} tokens, against ours",
        lambda: varlen_attn(query_THD, key_THD, value_THD, starts, starts, query_len, query_len, **causal),
        prefill_kernel(inputs, query_len),
        tera_operations(num_sequences, query_len, 0),
        "TFLOP/s",
    )


def write_measurement(num_tokens: int, device: torch.device) -> Measurement:
    key_cache, value_cache, _ = make_cache([num_tokens], device)
    key_THD, value_THD = (torch.randn(num_tokens, NUM_KV_HEADS, HEAD_SIZE, device=device, dtype=DTYPE) for _ in range(2))
    slot_mapping_T = torch.randperm(key_cache.shape[0] * BLOCK_SIZE, device=device)[:num_tokens]
    arguments = (key_THD, value_THD, key_cache, value_cache, slot_mapping_T)
    num_bytes = 2 * (key_THD.numel() + value_THD.numel()) * ITEMSIZE  # read and written
    return Measurement(
        f"kv_write        {num_tokens:4} tokens",
        lambda: kv_write(*arguments),
        lambda: references.kv_write(*arguments),
        num_bytes / 1e9,
        "GB/s",
    )


def bitmask_measurement(num_rows: int, device: torch.device) -> Measurement:
    logits_BV = torch.randn(num_rows, VOCAB_SIZE, device=device)
    bitmask_RW = torch.zeros(num_rows, -(-VOCAB_SIZE // 32), dtype=torch.int32, device=device)
    bitmask_RW[:, ::100] = 1  # as a grammar does: few tokens may come next
    arguments = (logits_BV, bitmask_RW, torch.arange(num_rows, device=device))
    num_bytes = logits_BV.numel() * 4 + bitmask_RW.numel() * 4
    return Measurement(
        f"bitmask_apply   {num_rows:4} x {VOCAB_SIZE} logits",
        lambda: bitmask_apply(*arguments),
        lambda: references.bitmask_apply(*arguments),
        num_bytes / 1e9,
        "GB/s",
    )


def sample_measurement(num_rows: int, device: torch.device) -> Measurement:
    logits_BV = torch.randn(num_rows, VOCAB_SIZE, device=device) * 3
    temperatures_B, top_ps_B, min_ps_B = torch.tensor([[0.8], [0.95], [0.0]], device=device).expand(3, num_rows).contiguous()
    arguments = (logits_BV, temperatures_B, top_ps_B, min_ps_B, torch.arange(num_rows, device=device))

    def kernel() -> None:
        sample(*arguments)

    def reference() -> None:
        references.sample(*arguments)

    return Measurement(f"sample          {num_rows:4} x {VOCAB_SIZE} logits, top-p", kernel, reference, logits_BV.numel() * 4 / 1e9, "GB/s")


def norm_measurement(num_rows: int, device: torch.device) -> Measurement:
    states = torch.randn(1, num_rows, HIDDEN_SIZE, device=device, dtype=DTYPE)
    arguments = (states, torch.rand(HIDDEN_SIZE, device=device, dtype=DTYPE), 1e-6)
    return Measurement(
        f"rms_norm        {num_rows:4} x {HIDDEN_SIZE}",
        lambda: rms_norm(*arguments),
        lambda: references.rms_norm(*arguments),
        2 * states.numel() * ITEMSIZE / 1e9,
        "GB/s",
    )


def residual_measurement(num_rows: int, device: torch.device) -> Measurement:
    residual, states = torch.randn(2, 1, num_rows, HIDDEN_SIZE, device=device, dtype=DTYPE).unbind()
    norm = (torch.rand(HIDDEN_SIZE, device=device, dtype=DTYPE), 1e-6)
    return Measurement(
        f"add_rms_norm    {num_rows:4} x {HIDDEN_SIZE}",
        lambda: add_rms_norm(residual, states, None, norm)[1],
        lambda: references.add_rms_norm(residual, states, None, norm)[1],
        4 * states.numel() * ITEMSIZE / 1e9,
        "GB/s",
    )


def gate_measurement(num_rows: int, device: torch.device) -> Measurement:
    gate, up = torch.randn(1, num_rows, 2 * INTERMEDIATE_SIZE, device=device, dtype=DTYPE).chunk(2, dim=-1)
    return Measurement(
        f"gated           {num_rows:4} x {INTERMEDIATE_SIZE}",
        lambda: gated(gate, up, "silu"),
        lambda: references.gated(gate, up, "silu"),
        3 * gate.numel() * ITEMSIZE / 1e9,
        "GB/s",
    )


def rotation_measurement(num_tokens: int, device: torch.device) -> Measurement:
    heads = torch.randn(1, num_tokens, NUM_HEADS + NUM_KV_HEADS, HEAD_SIZE, device=device, dtype=DTYPE).transpose(1, 2)
    cosines, sines = torch.randn(2, 1, num_tokens, HEAD_SIZE, device=device, dtype=DTYPE).unbind()
    arguments = (heads[:, :NUM_HEADS], heads[:, NUM_HEADS:], cosines, sines)
    return Measurement(
        f"rotate          {num_tokens:4} tokens",
        lambda: rotate(*arguments),
        lambda: references.rotate(*arguments),
        2 * heads.numel() * ITEMSIZE / 1e9,
        "GB/s",
    )


def random_weight(type_: WeightType, num_outputs: int, num_inputs: int, device: torch.device) -> PackedWeight:
    shape = (num_outputs, num_inputs // type_.group)
    codes_OI = torch.randint(0, 2**type_.bits, (num_outputs, num_inputs), dtype=torch.uint8, device=device)
    if type_.scale_bits == 16:
        scales_OG = torch.rand(shape, device=device).half() / 100
    else:
        scales_OG = torch.randint(118, 122, shape, device=device) if type_.has_exponents else torch.randint(1, 32, shape, device=device)
    minimums_OG = factors_OKF = None
    if type_.has_minimums:
        minimums_OG = torch.randint(0, 16, shape, device=device) if type_.has_zero_points else scales_OG
        minimums_OG = minimums_OG.to(torch.int8 if type_.has_zero_points else type_.scale_dtype)
    if type_.has_factors:
        factors_OKF = torch.rand(num_outputs, num_inputs // SUPER_BLOCK, 1 + type_.has_minimums, device=device).half() / 1000
    return pack(QuantizedWeight(type_, codes_OI, scales_OG.to(type_.scale_dtype), minimums_OG, factors_OKF))


def quantized_measurement(name: str, num_rows: int, device: torch.device) -> Measurement:
    """The reference is torch's product by the dequantized weight."""
    weight = random_weight(TYPES[name], INTERMEDIATE_SIZE, HIDDEN_SIZE, device)
    x_TI, dense_OI = torch.randn(num_rows, HIDDEN_SIZE, device=device, dtype=DTYPE) / 20, weight.dequantized().to(DTYPE)
    return Measurement(
        f"quantized       {num_rows:4} x {HIDDEN_SIZE} by {name}, against bfloat16",
        lambda: quantized_linear(x_TI, [weight.blocks], [weight.weight_type], [INTERMEDIATE_SIZE], None),
        lambda: torch.nn.functional.linear(x_TI, dense_OI),
        weight.blocks.nbytes / 1e9,
        "GB/s",
    )


def float8_measurement(num_rows: int, device: torch.device) -> Measurement:
    codes_OI = torch.randn(INTERMEDIATE_SIZE, HIDDEN_SIZE, device=device).to(torch.float8_e4m3fn)
    weight = pack_float8(codes_OI, torch.rand(INTERMEDIATE_SIZE, HIDDEN_SIZE // 128, device=device), 128)
    x_TI, dense_OI = torch.randn(num_rows, HIDDEN_SIZE, device=device, dtype=DTYPE) / 100, weight.dequantized().to(DTYPE)
    return Measurement(
        f"quantized       {num_rows:4} x {HIDDEN_SIZE} by FP8, against bfloat16",
        lambda: float8_linear(x_TI, weight.codes, weight.scales, None, 128, INTERMEDIATE_SIZE),
        lambda: torch.nn.functional.linear(x_TI, dense_OI),
        (weight.codes.nbytes + weight.scales.nbytes) / 1e9,
        "GB/s",
    )


def latent_measurement(num_sequences: int, context_len: int, device: torch.device) -> Measurement:
    num_heads_of_tile = heads_per_tile(LATENT_HEADS)
    table_BN = torch.arange(num_sequences * -(-context_len // BLOCK_SIZE), device=device).view(num_sequences, -1).int()
    cache = torch.randn(table_BN.numel(), BLOCK_SIZE, 1, LATENT_SIZE, device=device, dtype=DTYPE)
    key_cache = cache.expand(-1, -1, LATENT_HEADS // num_heads_of_tile, -1)
    query_BHD = torch.randn(num_sequences, LATENT_HEADS, LATENT_SIZE, device=device, dtype=DTYPE)
    lens_B = torch.full((num_sequences,), context_len, device=device)
    arguments = (query_BHD, key_cache, key_cache[..., :LATENT_VALUE_SIZE], table_BN, torch.arange(num_sequences, device=device), lens_B)
    tile_keys = decode_tuning(num_heads_of_tile, LATENT_SIZE, LATENT_VALUE_SIZE, ITEMSIZE).tile_keys
    num_wanted, min_tiles = split_sizes(key_cache.shape[2], num_heads_of_tile, tile_keys, num_multiprocessors(device))
    bounds = {"num_wanted": num_wanted, "min_tiles": min_tiles, "tile_keys": tile_keys, "max_context_len": context_len}
    scaling = 192**-0.5
    return Measurement(
        f"latent decode   {num_sequences:4} x {context_len:6} keys",
        lambda: paged_decode(*arguments, scaling=scaling, shares_keys=True, splits=plan_splits(lens_B, **bounds)),
        lambda: references.paged_decode(*arguments, scaling=scaling),
        num_sequences * context_len * LATENT_SIZE * ITEMSIZE / 1e9,
        "GB/s",
    )


def state_measurements(num_rows: int, device: torch.device) -> Iterator[Measurement]:
    """Of Qwen3-Next's gated delta rule, and of Granite 4's Mamba 2. States decay at once, so that each run gives the same."""
    draw = functools.partial(torch.randn, device=device, dtype=DTYPE)
    slots = torch.arange(num_rows, device=device)
    states = torch.zeros(num_rows, 32, 128, 128, device=device)
    keys, values = torch.nn.functional.normalize(draw(2, num_rows, 16, 128), dim=-1).unbind(), draw(num_rows, 32, 128)
    delta = (states, slots, *keys, values, torch.full((num_rows, 32), -100.0, device=device), draw(num_rows, 32).sigmoid())
    yield Measurement(
        f"gated_delta     {num_rows:4} rows",
        lambda: gated_delta_update(*delta, is_normalized=True),
        lambda: references.gated_delta_update(*delta, is_normalized=True),
        2 * states.nbytes / 1e9,
        "GB/s",
    )
    own_states, decay_H = torch.zeros(num_rows, 48, 64, 128, device=device), torch.full((48,), -1000.0, device=device)
    groups = draw(2, num_rows, 1, 128).unbind()
    space = (own_states, slots, draw(num_rows, 48, 64) / 10, draw(num_rows, 48).abs(), decay_H, groups[0] / 10, groups[1] / 10)
    yield Measurement(
        f"state_space     {num_rows:4} rows",
        lambda: state_space_update(*space),
        lambda: references.state_space_update(*space),
        2 * own_states.nbytes / 1e9,
        "GB/s",
    )


def measurements(device: torch.device) -> Iterator[Measurement]:
    """One at a time: the caches of one go before those of the next come."""
    for shape in DECODES:
        yield decode_measurement(shape, device)
    if torch.cuda.get_device_capability(device) >= (8, 9):
        yield decode_measurement([(64, 2048)], device, torch.float8_e4m3fn)
    for run in PREFILLS:
        yield prefill_measurement(*run, device)
    for run in WIDE_PREFILLS:
        yield wide_prefill_measurement(*run, device)
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # which torch 2.11 does not have
        for prompts in TORCH_PREFILLS:
            yield torch_prefill_measurement(*prompts, device)
    for num_tokens in WRITES:
        yield write_measurement(num_tokens, device)
    for num_rows in BITMASKS:
        yield bitmask_measurement(num_rows, device)
    for num_rows in NORMS:
        yield norm_measurement(num_rows, device)
        yield residual_measurement(num_rows, device)
        yield gate_measurement(num_rows, device)
    for num_tokens in ROTATIONS:
        yield rotation_measurement(num_tokens, device)
    for num_rows in SAMPLES:
        yield sample_measurement(num_rows, device)
    for num_rows in QUANTIZED_ROWS:
        for name in QUANTIZED_TYPES:
            yield quantized_measurement(name, num_rows, device)
        yield float8_measurement(num_rows, device)
    for decodes in LATENT_DECODES:
        yield latent_measurement(*decodes, device)
    for num_rows in STATES:
        yield from state_measurements(num_rows, device)


def check(measurement: Measurement) -> None:
    """Raises AssertionError where kernel and reference return what differs by more than bfloat16 rounds."""
    result, expected = measurement.kernel(), measurement.reference()
    if result is not None:
        torch.testing.assert_close(result, expected, atol=2e-2, rtol=2e-2, msg=lambda text: f"{measurement.name}: {text}")


def measure(measurement: Measurement, repeat_ms: int) -> tuple[float, float]:
    """Median seconds of the kernel and of the reference."""
    import triton.testing  # only where there is a GPU to time

    kernel_ms, reference_ms = (
        triton.testing.do_bench(run, rep=repeat_ms, return_mode="median") for run in (measurement.kernel, measurement.reference)
    )
    return kernel_ms / 1e3, reference_ms / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat-ms", type=int, default=100, help="how long to repeat each measurement, in milliseconds")
    repeat_ms = parser.parse_args().repeat_ms
    if not torch.cuda.is_available():
        sys.exit("These kernels run on CUDA, and no CUDA GPU is available here. tests/engine/kernels checks their results without one.")
    import triton  # only where there is a GPU

    device = torch.device("cuda")
    print(f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"{'':58} {'kernel':>10} {'reference':>11} {'ratio':>7}   rate")
    for measurement in measurements(device):
        check(measurement)
        kernel_s, reference_s = measure(measurement, repeat_ms)
        rate = measurement.work / kernel_s
        times = f"{kernel_s * 1e3:7.3f} ms {reference_s * 1e3:8.3f} ms {reference_s / kernel_s:6.1f}x"
        print(f"{measurement.name:58} {times}   {rate:.1f} {measurement.unit}", flush=True)


if __name__ == "__main__":
    main()
