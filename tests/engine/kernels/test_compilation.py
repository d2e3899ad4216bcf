# mypy: disable-error-code="import-untyped,import-not-found"
"""The interpreter accepts more than the compiler does: here every kernel is compiled for real chips, which takes no GPU."""

import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from penstock.engine.kernels import attention_triton, layers_triton, quantized_triton, recurrent_triton, sampling_triton
from penstock.engine.kernels.launch import (
    GPT_NEOX,
    RotaryForm,
    add_low_rank,
    add_rms_norm,
    bitmask_apply,
    gated,
    kv_write,
    paged_decode,
    rms_norm,
    rotate,
    sample,
    varlen_prefill,
)
from penstock.engine.kernels.quantized import float8_linear, grouped_float8_linear, grouped_linear, quantized_linear
from penstock.engine.kernels.recurrent import gated_delta_update, state_space_update
from penstock.engine.kernels.tuning import prefill_tuning
from penstock.engine.system.cache import cache_directory
from penstock.engine.weights.packed import TYPES, pack
from tests.engine.kernels.attention.split_case import decode_in_splits
from tests.engine.weights.sample_weights import ALL_TYPES, random_weight

MakeCase = Callable[..., Any]

KERNELS = [
    (attention_triton, "paged_decode_kernel"),
    (attention_triton, "plan_splits_kernel"),
    (attention_triton, "merge_splits_kernel"),
    (attention_triton, "varlen_prefill_kernel"),
    (attention_triton, "kv_write_kernel"),
    (sampling_triton, "bitmask_apply_kernel"),
    (sampling_triton, "sample_kernel"),
    (layers_triton, "rms_norm_kernel"),
    (layers_triton, "add_rms_norm_kernel"),
    (layers_triton, "gated_kernel"),
    (layers_triton, "rotate_kernel"),
    (layers_triton, "shrink_kernel"),
    (layers_triton, "expand_kernel"),
    (quantized_triton, "quantized_linear_kernel"),
    (quantized_triton, "dequantize_kernel"),
    (quantized_triton, "float8_linear_kernel"),
    (quantized_triton, "dequantize_float8_kernel"),
    (recurrent_triton, "gated_delta_kernel"),
    (recurrent_triton, "state_space_kernel"),
]
SHARED_MEMORY = {80: 163, 89: 99, 90: 227, 100: 227}  # KiB that one program may have, by compute capability
REGISTERS, SHARED_MEMORY_OF_ALL = (
    65_536,
    {80: 164, 89: 100, 90: 228, 100: 228},
)  # of a multiprocessor; a program takes 1 KiB more than its own
SPILLED_IN_FLOAT32 = 160  # bytes a thread
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


elsewhere = pytest.mark.other_processors  # what is compiled for one chip already, for each of the others


class Chip:
    """What Triton asks of a driver before it compiles. Numbered apart from the devices of this machine, whose kernels Triton keeps."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 1000 + self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Stands in for a kernel: a launch compiles it for its arguments, as a launch on the chip would, and notes the result."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.results: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            self.results.append(self.kernel.run(*arguments, grid=grid, warmup=True, **options))

        return launch


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int) -> Iterator[dict[str, Compiled]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache_directory() / "triton"))  # where what is compiled once is found by the next run
    stand_ins = {name: Compiled(getattr(module, name)) for module, name in KERNELS}
    for module, name in KERNELS:
        monkeypatch.setattr(module, name, stand_ins[name])
    monkeypatch.setattr(driver, "_active", Chip(capability))
    yield stand_ins
    results = [result for stand_in in stand_ins.values() for result in stand_in.results]
    assert results
    for result in {id(result): result for result in results}.values():
        assert result.metadata.shared <= SHARED_MEMORY[capability] * 1024
        # Products in float32 run outside the tensor cores, and take more registers than there are.
        bound = SPILLED_IN_FLOAT32 if result.src.signature.get("query") == "*fp32" else 0
        assert max(resources(result, tmp_path, "STACK|LOCAL")) <= bound, (
            f"{result.metadata.name} keeps in memory what its registers do not hold"
        )


def resources(result: Any, scratch: Path, kinds: str) -> list[int]:
    """What each thread of a compiled kernel takes of some kinds."""
    binary = scratch / "kernel.cubin"
    binary.write_bytes(result.asm["cubin"])
    usage = subprocess.run([CUOBJDUMP, "-res-usage", binary], capture_output=True, text=True, check=True).stdout
    return [int(size) for size in re.findall(rf"(?:{kinds}):(\d+)", usage)]


def num_compiled(kernels: dict[str, Compiled]) -> dict[str, int]:
    return {name: len({id(result) for result in kernel.results}) for name, kernel in kernels.items() if kernel.results}


@pytest.mark.parametrize(
    ("capability", "num_splits", "options"),
    [
        (90, 4, {"group_size": 4, "key_size": 128, "value_size": 128}),
        pytest.param(89, 4, {"group_size": 4, "key_size": 128, "value_size": 128}, marks=elsewhere),
        (90, 1, {"group_size": 8, "has_sinks": True, "sliding_window": 128}),
        (89, 4, {"group_size": 2, "key_size": 256, "value_size": 256, "softcap": 50.0, "sliding_window": 4096}),
        (90, 1, {"group_size": 1, "key_size": 192, "value_size": 128}),
        (80, 4, {"group_size": 3, "dtype": torch.float32}),
        (90, 4, {"group_size": 4, "key_size": 128, "value_size": 128, "cache_dtype": torch.float8_e4m3fn}),
        (89, 1, {"group_size": 2, "key_size": 256, "value_size": 256, "cache_dtype": torch.float8_e4m3fn}),
        pytest.param(100, 4, {"group_size": 4, "key_size": 128, "value_size": 128}, marks=elsewhere),
        pytest.param(80, 1, {"group_size": 4, "key_size": 128, "value_size": 128}, marks=elsewhere),
        pytest.param(100, 1, {"group_size": 8, "has_sinks": True, "sliding_window": 128}, marks=elsewhere),
    ],
    ids=[
        "llama-sm90",
        "llama-sm89",
        "gpt-oss-sm90",
        "gemma-sm89",
        "deepseek-sm90",
        "smollm-sm80",
        "8bit-sm90",
        "8bit-sm89",
        "llama-sm100",
        "llama-sm80",
        "gpt-oss-sm100",
    ],
)
def test_attention_compiles_and_fits(
    kernels: dict[str, Compiled], make_case: MakeCase, tmp_path: Path, capability: int, num_splits: int, options: dict[str, Any]
) -> None:
    make_case = partial(make_case, **{"dtype": torch.bfloat16} | options)
    decode = make_case(context_lens=(9,), query_lens=(1,)).decode_arguments()
    if num_splits > 1:
        decode_in_splits(num_splits, max_context_len=1000, **decode)
    else:
        paged_decode(**decode)
    prefill = make_case(context_lens=(300,), query_lens=(300,)).prefill_arguments()
    _, num_heads, key_size = prefill["query_THD"].shape
    value_cache = prefill["value_cache"]
    group_size, itemsize = num_heads // value_cache.shape[2], prefill["query_THD"].element_size()
    tuning = prefill_tuning(group_size, key_size, value_cache.shape[3], itemsize, 300, capability // 10)
    varlen_prefill(**prefill, max_query_len=300, tuning=tuning)
    if max(key_size, value_cache.shape[3]) <= 128 and itemsize == 2:
        result = kernels["varlen_prefill_kernel"].results[0]
        num_threads = 32 * tuning.num_warps
        assert REGISTERS // (max(resources(result, tmp_path, "REG")) * num_threads) >= 2, "a multiprocessor has registers for one program"
        assert SHARED_MEMORY_OF_ALL[capability] * 1024 // (result.metadata.shared + 1024) >= 2
    assert num_compiled(kernels) == {"paged_decode_kernel": 1, "varlen_prefill_kernel": 1} | (
        {"plan_splits_kernel": 1, "merge_splits_kernel": 1} if num_splits > 1 else {}
    )


@pytest.mark.parametrize("capability", [80, *(pytest.param(capability, marks=elsewhere) for capability in (89, 90, 100))])
def test_the_other_kernels_compile(kernels: dict[str, Compiled]) -> None:
    rows, cache = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    kv_write(rows, rows, cache, cache, torch.zeros(3, dtype=torch.int64))
    bitmask_apply(torch.zeros(3, 1000), torch.zeros(3, 32, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    states, weight = torch.zeros(1, 3, 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    rms_norm(states, weight, 1e-6)
    add_rms_norm(states, states, (weight, 1e-6), (weight, 1e-6), adds_one=True)
    for num_tokens in (1, 3):
        gate, up = torch.zeros(1, num_tokens, 2 * 14_336, dtype=torch.bfloat16).chunk(2, dim=-1)
        gated(gate, up, "gelu_tanh")
    query, key = torch.zeros(2, 1, 8, 3, 128, dtype=torch.bfloat16).unbind()
    for num_cosines, form in ((128, GPT_NEOX), (96, RotaryForm(is_interleaved=True, cosines="pairs"))):
        cosines, sines = torch.zeros(2, 1, 3, num_cosines, dtype=torch.bfloat16).unbind()
        rotate(query, key, cosines, sines, form)
    for num_rows in (3, 100):
        states, down, up = (torch.zeros(*shape, dtype=torch.bfloat16) for shape in ((num_rows, 4096), (8, 16, 4096), (8, 4096, 16)))
        add_low_rank(states, states, torch.zeros(num_rows, dtype=torch.int64), down, up)
    temperatures, top_ps, min_ps = torch.ones(3, 3).unbind()
    sample(torch.zeros(3, 100_000), temperatures, top_ps, min_ps, torch.zeros(3, dtype=torch.int64))
    assert num_compiled(kernels) == {
        "kv_write_kernel": 1,
        "bitmask_apply_kernel": 1,
        "sample_kernel": 1,
        "rms_norm_kernel": 1,
        "add_rms_norm_kernel": 1,
        "gated_kernel": 1,
        "rotate_kernel": 2,
        "shrink_kernel": 2,
        "expand_kernel": 2,
    }


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        (90, "UINT4"),
        *(pytest.param(90, name, marks=pytest.mark.thorough) for name in ALL_TYPES if name != "UINT4"),
        *(pytest.param(capability, "Q5_K", marks=elsewhere) for capability in (80, 89, 100)),
    ],
)
def test_products_by_quantized_weights_compile(kernels: dict[str, Compiled], name: str) -> None:
    blocks, forms = [pack(random_weight(name, 64, 4096)).blocks], [TYPES[name]]
    for num_rows in (1, 64, 100):
        quantized_linear(torch.zeros(num_rows, 4096, dtype=torch.bfloat16), blocks, forms, [64], None)
    x_SI, starts = torch.zeros(30, 4096, dtype=torch.bfloat16), torch.zeros(129, dtype=torch.int64)
    grouped_linear(x_SI, starts, [blocks[0].expand(128, *blocks[0].shape).contiguous()], forms, [64], torch.zeros(128, 64))
    assert num_compiled(kernels) == {"quantized_linear_kernel": 3, "dequantize_kernel": 1}


@pytest.mark.parametrize("capability", [90, *(pytest.param(capability, marks=elsewhere) for capability in (80, 89, 100))])
def test_products_by_weights_of_8_bit_floats_compile(kernels: dict[str, Compiled]) -> None:
    codes, scales = torch.zeros(8, 2, 2048, 32, 2, dtype=torch.uint8), torch.zeros(8, 2, 32, 32)
    for num_rows in (1, 64, 100):
        float8_linear(torch.zeros(num_rows, 4096, dtype=torch.bfloat16), codes[0], scales[0], None, 128, 64)
    x_SI, starts = torch.zeros(30, 4096, dtype=torch.bfloat16), torch.zeros(9, dtype=torch.int64)
    grouped_float8_linear(x_SI, starts, codes, scales, None, 128, 64)
    assert num_compiled(kernels) == {"float8_linear_kernel": 3, "dequantize_float8_kernel": 1}


@pytest.mark.parametrize("capability", [90, *(pytest.param(capability, marks=elsewhere) for capability in (80, 89, 100))])
def test_updates_of_recurrent_states_compile(kernels: dict[str, Compiled]) -> None:
    slots, rows = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 32, 128, dtype=torch.bfloat16)
    decay, beta = torch.zeros(3, 32), torch.zeros(3, 32, dtype=torch.bfloat16)
    gated_delta_update(torch.zeros(1, 32, 128, 128), slots, rows[:, :16], rows[:, :16], rows, decay, beta, is_normalized=True)
    heads, groups = torch.zeros(32), torch.zeros(3, 1, 128, dtype=torch.bfloat16)
    update = partial(state_space_update, torch.zeros(1, 32, 64, 128), slots, rows[..., :64], beta, heads, groups, groups)
    update(skip_H=heads, step_bias_H=heads)
    assert num_compiled(kernels) == {"gated_delta_kernel": 1, "state_space_kernel": 1}


@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        (90, torch.bfloat16),
        *(pytest.param(capability, torch.bfloat16, marks=elsewhere) for capability in (80, 89, 100)),
        *(pytest.param(capability, torch.float8_e4m3fn, marks=elsewhere) for capability in (89, 90)),
    ],
)
def test_attention_over_latents_compiles_and_fits(
    kernels: dict[str, Compiled], make_case: MakeCase, capability: int, dtype: torch.dtype
) -> None:
    latents = partial(make_case, num_kv_heads=1, group_size=16, key_size=576, value_size=512, dtype=torch.bfloat16, cache_dtype=dtype)
    decode = latents(context_lens=(9,), query_lens=(1,)).decode_arguments()
    decode["value_cache"] = decode["key_cache"][..., :512]
    paged_decode(**decode, shares_keys=True)
    prefill = latents(context_lens=(300,), query_lens=(300,)).prefill_arguments()
    prefill["value_cache"] = prefill["key_cache"][..., :512]
    tuning = prefill_tuning(16, 576, 512, 2, 300, capability // 10)
    varlen_prefill(**prefill, max_query_len=300, tuning=tuning, shares_keys=True)
    kv_write(torch.zeros(3, 1, 576, dtype=torch.bfloat16), None, decode["key_cache"], None, torch.zeros(3, dtype=torch.int64))
    assert num_compiled(kernels) == {"paged_decode_kernel": 1, "varlen_prefill_kernel": 1, "kv_write_kernel": 1}


@pytest.mark.parametrize("capability", [89, 90])
def test_writing_to_a_cache_of_8_bits_compiles(kernels: dict[str, Compiled]) -> None:
    rows, cache = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 16, 8, 128, dtype=torch.float8_e4m3fn)
    kv_write(rows, rows, cache, cache, torch.zeros(3, dtype=torch.int64))
    assert num_compiled(kernels) == {"kv_write_kernel": 1}


@pytest.mark.parametrize("capability", [80])
def test_batches_of_other_sizes_need_no_other_kernels(kernels: dict[str, Compiled], make_case: MakeCase) -> None:
    for context_lens in [(1,), (17, 3), (256, 40, 3)]:
        decode = make_case(context_lens=context_lens, query_lens=(1,) * len(context_lens), dtype=torch.bfloat16).decode_arguments()
        packed = torch.cat([torch.zeros(1, dtype=torch.int64), decode["context_lens_B"], decode["table_rows_B"]])
        decode["context_lens_B"] = packed[1 : 1 + len(context_lens)]  # views that begin anywhere, as in AttentionMetadata
        decode["table_rows_B"] = packed[1 + len(context_lens) :]
        decode_in_splits(num_wanted=40 * len(context_lens), max_context_len=3000 * len(context_lens), **decode)
        query_lens = tuple(max(100, length) for length in context_lens)
        prefill = make_case(context_lens=query_lens, query_lens=query_lens, dtype=torch.bfloat16).prefill_arguments()
        varlen_prefill(**prefill, max_query_len=max(query_lens), first_sequence=len(context_lens) - 1)
    names = ("plan_splits_kernel", "paged_decode_kernel", "merge_splits_kernel", "varlen_prefill_kernel")
    assert num_compiled(kernels) == dict.fromkeys(names, 1)


@pytest.mark.parametrize("capability", [80])
def test_batches_of_any_size_are_sampled_by_one_kernel(kernels: dict[str, Compiled]) -> None:
    for num_rows in (1, 2, 3, 4, 5, 8):
        temperatures, top_ps, min_ps = torch.ones(3, num_rows).unbind()  # views of one tensor, as `choose_on_device` makes them
        top_ks, seeds = torch.ones(2, num_rows, dtype=torch.int64).unbind()
        sample(torch.zeros(num_rows, 4096), temperatures, top_ps, min_ps, seeds, top_ks_B=top_ks, max_top_k=1)
    assert num_compiled(kernels) == {"sample_kernel": 1}
