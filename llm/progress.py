"""The progress bar of a batch: prompts done, and tokens in and out per second."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from penstock.engine.pooling.engine import PoolingOutput
from penstock.llm.request_output import RequestOutput


class Bar(Protocol):
    """What is asked of tqdm, or of whatever stands in for it."""

    def update(self, n: int = ...) -> object: ...

    def close(self) -> object: ...


UseTqdm = bool | Callable[..., Any]
"""True for tqdm's own bar, False for none, or what makes one: it is called as tqdm is."""


class Progress:
    """A bar over `total` prompts, None where that is not known, or nothing. To be used as a context manager."""

    def __init__(self, use_tqdm: UseTqdm, total: int | None) -> None:
        self._bar: Any = None
        self._started = time.perf_counter()
        self._num_input = self._num_output = 0
        if use_tqdm:
            self._bar = _maker(use_tqdm)(total=total, desc="Processed prompts", dynamic_ncols=True, postfix=_speeds(0.0, 0.0))

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def add(self, output: RequestOutput) -> None:
        self.count(len(output.prompt_token_ids), sum(len(answer.token_ids) for answer in output.outputs))

    def count_pooled(self, output: PoolingOutput) -> None:
        self.count(len(output.prompt_token_ids), 0)

    def count(self, num_input: int, num_output: int) -> None:
        """One more prompt is done: its tokens, and those of its answers."""
        if self._bar is None:
            return
        self._num_input += num_input
        self._num_output += num_output
        seconds = max(time.perf_counter() - self._started, 1e-9)
        if hasattr(self._bar, "postfix"):
            self._bar.postfix = _speeds(self._num_input / seconds, self._num_output / seconds)
        self._bar.update(1)


def _maker(use_tqdm: UseTqdm) -> Callable[..., Any]:
    if callable(use_tqdm):
        return use_tqdm
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    made: Callable[..., Any] = tqdm
    return made


def _speeds(input_rate: float, output_rate: float) -> str:
    return f"est. speed input: {input_rate:.2f} toks/s, output: {output_rate:.2f} toks/s"
