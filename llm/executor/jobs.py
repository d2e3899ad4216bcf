"""TensorRT-LLM's Executor API in Python: requests in, responses out, from any thread and any event loop."""

import asyncio
import copy
import functools
import logging
import math
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager, suppress
from datetime import timedelta
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from penstock.engine.contracts.hooks import RegisteredLogitsProcessor
from penstock.engine.deltas import FinishReason as EngineFinishReason
from penstock.engine.errors import EngineUnavailable, InvalidRequest, PenstockError
from penstock.engine.text.tokenizer import Tokenizer
from penstock.llm.executor.config import ExecutorConfig, LogitsPostProcessorConfig, ModelType, check_model_type
from penstock.llm.executor.preparing import fold_settings, prepare
from penstock.llm.executor.requests import Request, check_type, wrong
from penstock.llm.executor.responses import Response, ResponseFold
from penstock.llm.executor.stats import IterationStats, RequestStatsPerIteration, StepRecorder
from penstock.llm.model import LocalModel, LoopThread, threads_as_they_were
from penstock.serving.context import LocalContext

ANY = 0  # requests count from 1


class Mailbox:
    """Each response is returned once: to a call that waits for its request, else to one that waits for any, else to the next that asks.

    A request is open until its final response has come, and known for ever. A call never waits for a response that cannot come: of a
    request that is not open, or of any once the mailbox is closed and no request is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_empty = threading.Condition(self._lock)
        self._num_opened = 0
        self._open: set[int] = set()
        self._ready: dict[int, list[Response]] = {}
        self._waiting: dict[int, list[Callable[[], object]]] = {}  # by request, or for `ANY`: what wakes a call that waits
        self._is_closed = False

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open(self) -> int:
        """A new request. Its id is the next number."""
        with self._lock:
            self._num_opened += 1
            self._open.add(self._num_opened)
            return self._num_opened

    def check_known(self, ids: Iterable[int]) -> None:
        """Raises `InvalidRequest` for an id that no request has had."""
        for request_id in ids:
            if isinstance(request_id, bool) or not isinstance(request_id, int):
                raise TypeError(f"a request id is an integer, got {request_id!r:.100}")
            if not 1 <= request_id <= self._num_opened:
                raise InvalidRequest(f"there has been no request {request_id}", "ids")

    def put(self, response: Response) -> None:
        """Hands over a response. After a final one no call waits for the request any more."""
        with self._lock:
            self._ready.setdefault(response.request_id, []).append(response)
            if response.is_final:
                self._open.discard(response.request_id)
            if not self._open:
                self._is_empty.notify_all()
            self._wake(response.request_id)
            self._wake(ANY)

    def num_ready(self, request_id: int | None = None) -> int:
        with self._lock:
            chosen = self._ready.values() if request_id is None else [self._ready.get(request_id, ())]
            return sum(map(len, chosen))

    def take(self, request_id: int | None, timeout: float | None) -> list[Response]:
        """All that is ready, of one request or of any; waits for the first, at most `timeout` seconds. Empty where none came or will."""
        deadline, woken = _deadline(timeout), threading.Event()
        with self._waiting_for(request_id, woken.set):
            while (taken := self._taken(request_id)) is None:
                if not woken.wait(_left(deadline)):
                    return self._taken(request_id) or []
                woken.clear()
            return taken

    async def take_async(self, request_id: int | None) -> list[Response]:
        """The same for a coroutine, without end. Where it is cancelled, it has taken nothing."""
        woken = asyncio.Event()
        with self._waiting_for(request_id, functools.partial(asyncio.get_running_loop().call_soon_threadsafe, woken.set)):
            while (taken := self._taken(request_id)) is None:
                await woken.wait()
                woken.clear()
            return taken

    def close(self) -> None:
        """There will be no more requests."""
        with self._lock:
            self._is_closed = True
            self._wake(ANY)

    def wait_until_none_is_open(self, timeout: float | None) -> bool:
        """Whether every request has had its final response within `timeout` seconds."""
        with self._is_empty:
            return self._is_empty.wait_for(lambda: not self._open, timeout)

    def _taken(self, request_id: int | None) -> list[Response] | None:
        """All that is ready; None where nothing is, and something may come."""
        with self._lock:
            if request_id is None:
                chosen = [key for key in self._ready if key not in self._waiting]
                may_come = not self._is_closed or bool(self._open)
            else:
                chosen = [request_id] if request_id in self._ready else []
                may_come = request_id in self._open
            taken = [response for key in chosen for response in self._ready.pop(key)]
            return taken if taken or not may_come else None

    @contextmanager
    def _waiting_for(self, request_id: int | None, wake: Callable[[], object]) -> Iterator[None]:
        key = request_id or ANY
        with self._lock:
            self._waiting.setdefault(key, []).append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._waiting[key].remove(wake)
                if not self._waiting[key]:
                    del self._waiting[key]
                if key in self._ready:  # what came for this call, which has left without it
                    self._wake(ANY)

    def _wake(self, key: int) -> None:
        for wake in self._waiting.get(key, ()):
            with suppress(RuntimeError):  # the call's event loop has been closed
                wake()


logger = logging.getLogger(__name__)

MAX_COMPILING = 8


class Jobs:
    """Serves each request in a task of its own. Its final response comes whatever happens to the task.

    Coroutines run on the engine's loop. Other threads hold `lock` while they hand one over, so that none comes after the loop's end.
    """

    def __init__(self, context: LocalContext, mailbox: Mailbox, num_steps: Callable[[], int]) -> None:
        self.lock = threading.RLock()
        self._context = context
        self._mailbox = mailbox
        self._num_steps = num_steps
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._turns = asyncio.Semaphore(MAX_COMPILING)

    async def begin(self, requests: Sequence[tuple[int, Request]], arrival_time: float) -> None:
        for request_id, request in requests:
            try:
                fold = ResponseFold(request_id, request, fold_settings(self._context, request, arrival_time, self._num_steps))
            except Exception as error:
                # A request may be changed after its types were checked; the others of its batch are still served.
                self._mailbox.put(Response(request_id, _described(error), request.client_id))
                continue
            task = asyncio.create_task(self._serve(request_id, request, fold), name=f"request {request_id}")
            self._tasks[request_id] = task
            task.add_done_callback(functools.partial(self._end, request_id, fold))

    async def cancel(self, request_id: int) -> None:
        """Ends it, unless it has ended."""
        task = self._tasks.get(request_id)
        if task is not None:
            task.cancel()

    async def cancel_all(self) -> None:
        for task in self._tasks.values():
            task.cancel()

    async def _serve(self, request_id: int, request: Request, fold: ResponseFold) -> None:
        limit = asyncio.timeout(request.allotted_seconds)  # from here on for what comes before the engine, which has the deadline itself
        try:
            async with limit:
                prepared = await prepare(self._context, request, request_id, fold.arrival_time, self._turns)
        except TimeoutError:
            if not limit.expired():
                raise
            self._put(fold.end(EngineFinishReason.TIMED_OUT))
            return
        fold.queued_time = time.monotonic()
        async with aclosing(self._context.engine.generate(prepared)) as deltas:
            async for delta in deltas:
                self._put(fold.feed(delta))
                if fold.is_over:  # an error in one sequence ends the others
                    return

    def _end(self, request_id: int, fold: ResponseFold, task: "asyncio.Task[None]") -> None:
        """Has the last word where the task had not: it was cancelled, perhaps before it began, or refused, or there is a defect."""
        del self._tasks[request_id]
        error = None if task.cancelled() else task.exception()
        message = None if error is None else _described(error)
        if not fold.is_over:
            self._put(fold.end(EngineFinishReason.ABORT) if message is None else [fold.error(message)])

    def _put(self, responses: Iterable[Response]) -> None:
        for response in responses:
            self._mailbox.put(response)


def _described(error: BaseException) -> str:
    """What a response says of it. What is no refusal is logged."""
    if isinstance(error, PenstockError):
        return str(error)
    logger.error("A request could not be served", exc_info=error)
    return f"{type(error).__name__}: {error}"


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
        context: LocalContext | None = None,
        iter_stats_max_iterations: int | None = None,
        request_stats_max_iterations: int | None = None,
        **engine_arguments: Any,
    ) -> None:
        if context is not None and (model is not None or executor_config is not None or logits_processors or engine_arguments):
            raise TypeError("a context brings its own model, logits processors and engine")
        check_type(context, "context", LocalContext, "what penstock.assembly.assemble made")
        check_type(executor_config, "executor_config", ExecutorConfig, "an ExecutorConfig")
        check_model_type(model_type)
        config = executor_config or ExecutorConfig(request_stats_max_iterations=MAX_ITERATIONS)
        max_iterations = _bound("iter_stats_max_iterations", iter_stats_max_iterations, config.iter_stats_max_iterations)
        max_requests = _bound("request_stats_max_iterations", request_stats_max_iterations, config.request_stats_max_iterations)
        if context is None:
            post_processors = config.logits_post_processor_config or LogitsPostProcessorConfig()
            arguments = merged(config.engine_arguments(engine_arguments), engine_arguments)
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
                raise TypeError(f"expected a Request of penstock.llm.executor{where}, got {request!r:.100}")
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
) -> LocalContext:
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
