# mypy: disable-error-code="import-untyped,import-not-found"
"""The interpreter accepts more than the compiler does: here every kernel is compiled for real chips, which takes no GPU."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from penstock.engine.kernels import bitmask_apply_kernel, kv_write_kernel, paged_decode_kernel, varlen_prefill_kernel
from penstock.engine.kernels.bitmask_apply import bitmask_apply
from penstock.engine.kernels.kv_write import kv_write
from penstock.engine.kernels.paged_decode import paged_decode
from penstock.engine.kernels.varlen_prefill import varlen_prefill

MakeCase = Callable[..., Any]

KERNELS = [
    (paged_decode_kernel, "paged_decode_kernel"),
    (paged_decode_kernel, "merge_splits_kernel"),
    (varlen_prefill_kernel, "varlen_prefill_kernel"),
    (kv_write_kernel, "kv_write_kernel"),
    (bitmask_apply_kernel, "bitmask_apply_kernel"),
]
SHARED_MEMORY = {80: 163, 89: 99, 90: 227}  # KiB that one program may have, by compute capability
TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64"}


class Compiled:
    """Stands in for a kernel: a launch compiles it for the arguments it got, as a launch on that chip would, and notes the result."""

    def __init__(self, kernel: Any, capability: int) -> None:
        self.kernel = kernel
        self.capability = capability
        self.results: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.launch

    def launch(self, *arguments: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
        signature, constexprs, attributes = {}, {}, {}
        for index, (parameter, value) in enumerate(zip(self.kernel.params, [*arguments, *constants.values()], strict=True)):
            if isinstance(value, torch.Tensor):
                signature[parameter.name] = TYPES[value.dtype]
                is_aligned = not parameter.do_not_specialize_on_alignment
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constexprs[(index,)] = value
                is_aligned = False
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                is_aligned = isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            if is_aligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constexprs, attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages}
        self.results.append(triton.compile(source, target=GPUTarget("cuda", self.capability, 32), options=options))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int) -> Iterator[dict[str, Compiled]]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # as it is without; Triton 3.9 warns where nobody says so
    stand_ins = {}
    for module, name in KERNELS:
        stand_ins[name] = Compiled(getattr(module, name), capability)
        monkeypatch.setattr(module, name, stand_ins[name])
    yield stand_ins
    results = [result for stand_in in stand_ins.values() for result in stand_in.results]
    assert results
    assert all(result.metadata.shared <= SHARED_MEMORY[capability] * 1024 for result in results)


@pytest.mark.parametrize(
    ("capability", "num_splits", "options"),
    [
        (90, 4, {"group_size": 4, "key_size": 128, "value_size": 128}),
        (89, 4, {"group_size": 4, "key_size": 128, "value_size": 128}),
        (90, 1, {"group_size": 8, "has_sinks": True, "sliding_window": 128}),
        (89, 4, {"group_size": 2, "key_size": 256, "value_size": 256, "softcap": 50.0, "sliding_window": 4096}),
        (90, 1, {"group_size": 1, "key_size": 192, "value_size": 128}),
        (80, 4, {"group_size": 3, "dtype": torch.float32}),
    ],
    ids=["llama-sm90", "llama-sm89", "gpt-oss-sm90", "gemma-sm89", "deepseek-sm90", "smollm-sm80"],
)
def test_attention_compiles_and_fits(kernels: dict[str, Compiled], make_case: MakeCase, num_splits: int, options: dict[str, Any]) -> None:
    make_case = partial(make_case, **{"dtype": torch.bfloat16} | options)
    paged_decode(**make_case(context_lens=(9,), query_lens=(1,)).decode_arguments(), num_splits=num_splits)
    varlen_prefill(**make_case(context_lens=(300,), query_lens=(300,)).prefill_arguments(), max_query_len=300)
    num_compiled = {name: len(kernel.results) for name, kernel in kernels.items() if kernel.results}
    assert num_compiled == {"paged_decode_kernel": 1, "varlen_prefill_kernel": 1} | ({"merge_splits_kernel": 1} if num_splits > 1 else {})


@pytest.mark.parametrize("capability", [80, 90])
def test_the_other_kernels_compile(kernels: dict[str, Compiled]) -> None:
    rows, cache = torch.zeros(3, 8, 128, dtype=torch.bfloat16), torch.zeros(4, 16, 8, 128, dtype=torch.bfloat16)
    kv_write(rows, rows, cache, cache, torch.zeros(3, dtype=torch.int64))
    bitmask_apply(torch.zeros(3, 1000), torch.zeros(3, 32, dtype=torch.int32), torch.zeros(3, dtype=torch.int64))
    assert {name: len(kernel.results) for name, kernel in kernels.items() if kernel.results} == {
        "kv_write_kernel": 1,
        "bitmask_apply_kernel": 1,
    }
