"""What every call of the library stands on: a model in this process, for callers that are not asynchronous."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import torch

from penstock.engine.hooks import RegisteredLogitsProcessor
from penstock.llm.local_model import LocalModel
from penstock.llm.loop_thread import LoopThread
from penstock.llm.metric_values import Metric, metric_values
from penstock.llm.preparing import refuse_adapter


class OfflineModel:
    """Loads a model, and runs its engine in a thread of its own until `close`.

    `_model` is the model, all of whose coroutines run in `_loop`. Any thread may call, also one in which another loop is running.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        logits_processors: Mapping[str, RegisteredLogitsProcessor] | None = None,
        **engine_arguments: Any,
    ) -> None:
        self._model = LocalModel(model, engine_arguments, logits_processors)
        with threads_as_they_were():
            self._model.load()
        self._loop = LoopThread()
        self._loop.run(self._model.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends what runs and gives the model's memory back. May be called twice."""
        if not self._loop.is_closed:
            self._loop.run(self._model.close())
            self._loop.close()

    def get_tokenizer(self, lora_request: None = None) -> Any:
        """The model's tokenizer as transformers loads it."""
        refuse_adapter(lora_request)
        return self._model.hf_tokenizer

    def get_metrics(self) -> list[Metric]:
        """What the server shows at `/metrics`: counters, gauges and histograms by name."""
        return metric_values(self._model.metrics.registry)

    def reset_prefix_cache(self) -> bool:
        """Forgets what earlier prompts left in the KV cache."""
        self._loop.run(self._model.reset_prefix_cache())
        return True

    def sleep(self, level: int = 1) -> None:
        """Frees the KV cache, at level 2 the weights too, once what runs has ended. Until `wake_up`, `EngineUnavailable` is raised."""
        self._loop.run(self._model.rest.sleep(level))

    def wake_up(self) -> None:
        """Serves again, with an empty KV cache and new counters. Raises `ConfigurationError` where there is no room any more."""
        self._loop.run(self._model.rest.wake_up())

    @property
    def is_sleeping(self) -> bool:
        return self._model.is_sleeping


@contextmanager
def threads_as_they_were() -> Iterator[None]:
    """Loading leaves torch one thread in whichever thread it is done: a server's has nothing else to compute, a caller's may have."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
