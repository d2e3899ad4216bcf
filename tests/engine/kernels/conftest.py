"""Running a kernel on every device there is: Triton's interpreter everywhere, and a CUDA GPU where there is one."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.interpreter import receive, send

# Triton exists for Linux alone; elsewhere there is nothing to run.
collect_ignore_glob = [] if find_spec("triton") else ["*test_*.py"]  # in the folders below as well

ROOT = Path(__file__).parents[3]
DEVICES = ["interpreter", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@dataclass(frozen=True, slots=True)
class Launched:
    """The outcome of a launch, on the CPU: the result, and the arguments as it left them."""

    result: Any
    arguments: dict[str, Any]


Launch = Callable[..., Launched]


class Interpreter:
    """Launches functions in a process that imported Triton as an interpreter."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("interpreter.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )

    def launch(self, function: Callable[..., Any], **arguments: Any) -> Launched:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        send((function.__module__, function.__name__, arguments), self._process.stdin)
        result, arguments_after, error = receive(self._process.stdout)
        assert error is None, error
        return Launched(result, arguments_after)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def launch_on_cuda(function: Callable[..., Any], **arguments: Any) -> Launched:
    """Launches a function in this process on copies of the arguments."""
    on_cuda = {name: _moved(argument, "cuda") for name, argument in arguments.items()}
    result = function(**on_cuda)
    return Launched(_moved(result, "cpu"), {name: _moved(argument, "cpu") for name, argument in on_cuda.items()})


def _moved(argument: Any, device: str) -> Any:
    if isinstance(argument, Tensor):
        return argument.to(device)
    if isinstance(argument, list):
        return [_moved(each, device) for each in argument]
    if dataclasses.is_dataclass(argument) and not isinstance(argument, type):
        fields = {field.name: _moved(getattr(argument, field.name), device) for field in dataclasses.fields(argument)}
        return dataclasses.replace(argument, **fields)
    return argument


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    process = Interpreter()
    yield process
    process.close()


@pytest.fixture(params=DEVICES)
def launch(request: pytest.FixtureRequest) -> Launch:
    """launch(function, **arguments) on the device of the test's parameter."""
    if request.param == "cuda":
        return launch_on_cuda
    interpreter: Interpreter = request.getfixturevalue("interpreter")
    return interpreter.launch


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A small batch in a paged cache whose unwritten slots, unnamed blocks and blocks outside of windows are NaN: reading them shows."""

    context_lens: tuple[int, ...]
    query_lens: tuple[int, ...]
    num_kv_heads: int = 2
    group_size: int = 2
    key_size: int = 64
    value_size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    has_sinks: bool = False
    sliding_window: int | None = None
    softcap: float | None = None
    index_dtype: torch.dtype = torch.int64

    def arguments(self) -> dict[str, Any]:
        """What decode and prefill both take."""
        generator = torch.Generator().manual_seed(hash((self.context_lens, self.query_lens, self.key_size)) % 2**31)
        num_blocks_of = [-(-length // self.block_size) for length in self.context_lens]
        num_blocks = sum(num_blocks_of) + 2
        free_blocks = torch.randperm(num_blocks, generator=generator).tolist()
        # Entries past a sequence's blocks are out of any cache's range.
        block_tables_PN = torch.full((len(self.context_lens) + 1, max(1, *num_blocks_of, 0) + 1), 2**30, dtype=torch.int32)
        table_rows = list(range(len(self.context_lens), 0, -1))
        key_cache = torch.full((num_blocks, self.block_size, self.num_kv_heads, self.key_size), float("nan"))
        value_cache = torch.full((num_blocks, self.block_size, self.num_kv_heads, self.value_size), float("nan"))
        for row, context_len in enumerate(self.context_lens):
            window = self.sliding_window or context_len
            oldest = max(0, context_len - self.query_lens[row] - window + 1) // self.block_size * self.block_size
            block_tables_PN[table_rows[row], : oldest // self.block_size] = free_blocks[0]
            for first in range(oldest, context_len, self.block_size):
                block = free_blocks.pop()
                block_tables_PN[table_rows[row], first // self.block_size] = block
                num_tokens = min(self.block_size, context_len - first)
                key_cache[block, :num_tokens] = torch.randn(num_tokens, *key_cache.shape[2:], generator=generator)
                value_cache[block, :num_tokens] = torch.randn(num_tokens, *value_cache.shape[2:], generator=generator)
        num_heads = self.num_kv_heads * self.group_size
        query_THD = torch.randn(sum(self.query_lens), num_heads, self.key_size, generator=generator)
        return {
            "query": query_THD.to(self.dtype),
            "key_cache": key_cache.to(self.cache_dtype or self.dtype),
            "value_cache": value_cache.to(self.cache_dtype or self.dtype),
            "block_tables_PN": block_tables_PN,
            "table_rows_B": torch.tensor(table_rows, dtype=self.index_dtype),
            "context_lens_B": torch.tensor(self.context_lens, dtype=self.index_dtype),
            "scaling": self.key_size**-0.5 * 1.5,
            "sliding_window": self.sliding_window,
            "softcap": self.softcap,
            "sinks": torch.randn(num_heads, generator=generator) if self.has_sinks else None,
        }

    def decode_arguments(self) -> dict[str, Any]:
        arguments = self.arguments()
        return {"query_BHD": arguments.pop("query"), **arguments}

    def prefill_arguments(self) -> dict[str, Any]:
        arguments = self.arguments()
        query_start_loc = torch.tensor([0, *torch.tensor(self.query_lens).cumsum(0).tolist()], dtype=self.index_dtype)
        return {"query_THD": arguments.pop("query"), "query_start_loc": query_start_loc, **arguments}

    def tolerance(self) -> float:
        """The bound on the absolute error: that of one rounding of the weights and one of the result, which are of order 1."""
        return 2e-5 if self.dtype == torch.float32 else 8 * torch.finfo(self.dtype).eps


@pytest.fixture
def make_case() -> type[Case]:
    return Case
