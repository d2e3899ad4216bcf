"""TensorRT-LLM's Executor API in Python: requests in, responses out, from any thread and any event loop."""

import asyncio
import copy
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from datetime import timedelta
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.engine.hooks import RegisteredLogitsProcessor
from penstock.engine.text.tokenizer import Tokenizer
from penstock.llm.executor.config import (
    BatchingType,
    CapacitySchedulerPolicy,
    ExecutorConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    ModelType,
    SchedulerConfig,
    check_model_type,
)
from penstock.llm.executor.jobs import Jobs, Mailbox
from penstock.llm.executor.requests import (
    AdditionalModelOutput,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    LogitsProcessorConfig,
    OutputConfig,
    Request,
    RequestType,
    SamplingConfig,
    TokenRangeRetentionConfig,
    check_type,
    wrong,
)
from penstock.llm.executor.responses import (
    AdditionalOutput,
    FinishReason,
    KvCacheMetrics,
    RequestPerfMetrics,
    Response,
    Result,
    TimingMetrics,
)
from penstock.llm.executor.stats import (
    InflightBatchingStats,
    IterationStats,
    KvCacheStats,
    RequestStage,
    RequestStats,
    RequestStatsPerIteration,
    StepRecorder,
)
from penstock.llm.model import LocalModel, LoopThread, threads_as_they_were
from penstock.serving.context import ServerContext

__all__ = [
    "AdditionalModelOutput",
    "AdditionalOutput",
    "BatchingType",
    "CapacitySchedulerPolicy",
    "Executor",
    "ExecutorConfig",
    "FinishReason",
    "GuideType",
    "GuidedDecodingParams",
    "InflightBatchingStats",
    "IterationStats",
    "KvCacheConfig",
    "KvCacheMetrics",
    "KvCacheRetentionConfig",
    "KvCacheStats",
    "LogitsPostProcessorConfig",
    "LogitsProcessorConfig",
    "ModelType",
    "OutputConfig",
    "Request",
    "RequestPerfMetrics",
    "RequestStage",
    "RequestStats",
    "RequestStatsPerIteration",
    "RequestType",
    "Response",
    "Result",
    "SamplingConfig",
    "SchedulerConfig",
    "TimingMetrics",
    "TokenRangeRetentionConfig",
]

MAX_ITERATIONS = 1000
T = TypeVar("T")
Timeout = float | timedelta | None
Ids = int | Iterable[int] | None


class Executor:
    """Serves requests of all kinds in one batch, beam widths mixed.

        with Executor() as executor:
            prompt = executor.tokenizer.encode("The capital of France is")
            executor.enqueue_request(Request(prompt, max_tokens=8))
            for response in executor.await_responses():
                print(executor.tokenizer.decode(response.result.output_token_ids[0]))

    `model` and the other keyword arguments are those of `LLM`; `model_type` and `executor_config` are the original's. `context` is a
    server's context in their place, whose engine has not been started. `logits_processors` are registered under their names, as a
    plug-in's are; requests name them. Statistics are kept of the last `iter_stats_max_iterations` and
    `request_stats_max_iterations` steps, by default those of the config, or 1000 without one; 0 keeps none.

    Every method may be called in any thread, by several at once, and each response is given out once. A request that cannot be served
    has a response that says why. `shutdown`, or leaving a `with` or `async with` block, ends it.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        model_type: ModelType | None = None,
        executor_config: ExecutorConfig | None = None,
        *,
        logits_processors: Mapping[str, RegisteredLogitsProcessor] | None = None,
        context: ServerContext | None = None,
        iter_stats_max_iterations: int | None = None,
        request_stats_max_iterations: int | None = None,
        **engine_arguments: Any,
    ) -> None:
        if context is not None and (model is not None or executor_config is not None or logits_processors or engine_arguments):
            raise TypeError("a context brings its own model, logits processors and engine")
        check_type(context, "context", ServerContext, "what penstock.assembly.assemble made")
        check_type(executor_config, "executor_config", ExecutorConfig, "an ExecutorConfig")
        check_model_type(model_type)
        config = executor_config or ExecutorConfig(request_stats_max_iterations=MAX_ITERATIONS)
        max_iterations = _bound("iter_stats_max_iterations", iter_stats_max_iterations, config.iter_stats_max_iterations)
        max_requests = _bound("request_stats_max_iterations", request_stats_max_iterations, config.request_stats_max_iterations)
        if context is None:
            post_processors = config.logits_post_processor_config or LogitsPostProcessorConfig()
            arguments = merged(config.engine_arguments(), engine_arguments)
            context = load_context(model, arguments, merged(post_processors.processors(), logits_processors))
        self._context = context
        core = context.engine.core
        core.observer = self._recorder = StepRecorder(core.scheduler, max_iterations=max_iterations, max_request_iterations=max_requests)
        self._mailbox = Mailbox()
        self._jobs = Jobs(self._context, self._mailbox, lambda: self._recorder.num_iterations)
        self._is_accepting = True
        self._loop = LoopThread("penstock-executor")
        self._loop.run(self._context.engine.start())

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's: `encode` makes input ids, `decode` reads output ids."""
        return self._context.tokenizer

    def enqueue_request(self, request: Request) -> int:
        """Begins to serve it, and gives the id that its responses have. Raises `EngineUnavailable` after `shutdown`."""
        return self.enqueue_requests([request])[0]

    def enqueue_requests(self, requests: Iterable[Request]) -> list[int]:
        """The same for several: all of them, or none where one is no `Request`."""
        requests = list(requests)
        for index, request in enumerate(requests):
            if not isinstance(request, Request):
                where = f" as requests[{index}]" if len(requests) > 1 else ""
                raise TypeError(f"expected a Request of penstock.llm.executor.executor{where}, got {request!r:.100}")
        requests = [own_copy(request) for request in requests]  # the caller may change its own, and use it again
        arrival_time = time.monotonic()
        with self._jobs.lock:  # a shutdown either sees them or refuses them
            if not self._is_accepting:
                raise EngineUnavailable("the executor has been shut down")
            ids = [self._mailbox.open() for _ in requests]
            self._loop.submit(self._jobs.begin(list(zip(ids, requests, strict=True)), arrival_time))
        return ids

    @overload
    def await_responses(self, ids: int | timedelta | None = None, timeout: Timeout = None) -> list[Response]: ...
    @overload
    def await_responses(self, ids: Iterable[int], timeout: Timeout = None) -> list[list[Response]]: ...
    def await_responses(self, ids: Ids | timedelta = None, timeout: Timeout = None) -> list[Response] | list[list[Response]]:
        """All responses that are ready, of one request or of any; waits until there are some. For several ids, a list for each of them.

        A timedelta alone is the timeout of waiting for any.

        Empty once `timeout`, in seconds or as a timedelta, has passed, and where nothing will ever come: after a request's final response,
        and after `shutdown`. Raises `InvalidRequest` for an id that no request has had.
        """
        if isinstance(ids, timedelta) and timeout is None:
            ids, timeout = None, ids
        deadline = _deadline(timeout)
        if isinstance(ids, timedelta):
            wrong("ids", "an id or several", ids)
        if ids is None or isinstance(ids, int):
            self._mailbox.check_known([] if ids is None else [ids])
            return self._mailbox.take(ids, _left(deadline))
        several = list(ids)
        self._mailbox.check_known(several)
        return [self._mailbox.take(request_id, _left(deadline)) for request_id in several]

    @overload
    async def responses(self, ids: int | None = None) -> list[Response]: ...
    @overload
    async def responses(self, ids: Iterable[int]) -> list[list[Response]]: ...
    async def responses(self, ids: Ids = None) -> list[Response] | list[list[Response]]:
        """What `await_responses` gives, in any event loop. A call that is cancelled, by `asyncio.timeout` for one, has taken nothing."""
        if ids is None or isinstance(ids, int):
            self._mailbox.check_known([] if ids is None else [ids])
            return await self._mailbox.take_async(ids)
        several = list(ids)
        self._mailbox.check_known(several)
        return list(await asyncio.gather(*map(self._mailbox.take_async, several)))

    async def stream(self, request: Request | int) -> AsyncGenerator[Response, None]:
        """The responses of a request, which may be enqueued already, one by one up to its final one. Leaving early cancels the request."""
        request_id = request if isinstance(request, int) else self.enqueue_request(request)
        is_over = False
        try:
            while responses := await self.responses(request_id):
                for response in responses:
                    is_over = response.is_final
                    yield response
        finally:
            if not is_over:
                self.cancel_request(request_id)

    def num_responses_ready(self, request_id: int | None = None) -> int:
        """How many responses can be taken without waiting."""
        self._mailbox.check_known([] if request_id is None else [request_id])
        return self._mailbox.num_ready(request_id)

    def cancel_request(self, request_id: int) -> None:
        """Ends the request with what there is: each unfinished sequence has a last response, CANCELLED. One that has ended stays."""
        self._mailbox.check_known([request_id])
        with self._jobs.lock:
            if not self._loop.is_closed:
                self._loop.submit(self._jobs.cancel(request_id))

    def latest_iteration_stats(self) -> list[IterationStats]:
        """The steps since the last call, oldest first, as far as they are kept."""
        return self._recorder.take_iterations()

    def latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """The same for the requests in each step."""
        return self._recorder.take_requests()

    get_num_responses_ready = num_responses_ready  # the original's names
    get_latest_iteration_stats = latest_iteration_stats
    get_latest_request_stats = latest_request_stats

    def can_enqueue_requests(self) -> bool:
        """False after `shutdown`, and where the engine has failed for good."""
        return self._is_accepting and self._context.engine.is_healthy

    def shutdown(self, timeout: Timeout = None) -> None:
        """Takes no more requests, waits until those there are have ended, at most `timeout`, cancels the others, and gives everything back.

        What is ready may still be taken. Callers that wait for responses which will not come are woken. May be called twice.
        """
        deadline = _deadline(timeout)
        with self._jobs.lock:
            self._is_accepting = False
        self._mailbox.close()
        if not self._mailbox.wait_until_none_is_open(_left(deadline)):
            self._loop.run(self._jobs.cancel_all())
            self._mailbox.wait_until_none_is_open(None)
        with self._jobs.lock:
            if not self._loop.is_closed:
                self._loop.run(self._context.engine.stop())
                self._loop.close()
                self._context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Waits for what runs, unless there was an error."""
        self.shutdown(None if kind is None else 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        await asyncio.to_thread(self.shutdown, None if kind is None else 0)


def merged(configured: Mapping[str, T], given: Any) -> Any:
    """What a config says with what was given beside it. Raises `TypeError` for a name that both have; what is no mapping stays."""
    if not isinstance(given, Mapping):
        return given or configured
    twice = configured.keys() & given.keys()
    if twice:
        raise TypeError(f"`{min(twice)}` is given twice, once by `executor_config`")
    return {**configured, **given}


def load_context(
    model: str | os.PathLike[str] | None, given: Mapping[str, Any], processors: Mapping[str, RegisteredLogitsProcessor] | None
) -> ServerContext:
    """A loaded model whose engine has not been started. Raises `InvalidRequest` for one that generates nothing."""
    local = LocalModel(model, given, processors)
    with threads_as_they_were():
        local.load()
    try:
        return local.generating
    except InvalidRequest:
        local.context.close()
        raise


def own_copy(request: Request) -> Request:
    """With configs of its own."""
    own = copy.copy(request)
    own.sampling_config, own.output_config = copy.copy(request.sampling_config), copy.copy(request.output_config)
    return own


def _bound(name: str, given: Any, configured: int) -> int:
    bound = configured if given is None else given
    if not isinstance(bound, Integral) or bound < 0:
        wrong(name, "0 or a positive integer", bound)
    return int(bound)


def _deadline(timeout: Timeout) -> float | None:
    """Raises `TypeError` for what is no time, and for what is not a number: it would never pass."""
    check_type(timeout, "timeout", (Real, timedelta), "a number of seconds or a timedelta")
    if timeout is None:
        return None
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if math.isnan(seconds):
        wrong("timeout", "a number of seconds or a timedelta", timeout)
    return None if seconds > threading.TIMEOUT_MAX else time.monotonic() + seconds


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
