"""An executor's requests on the engine's event loop, and their responses between threads."""

import asyncio
import concurrent.futures
import functools
import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from penstock.engine.deltas import FinishReason
from penstock.engine.errors import InvalidRequest, PenstockError
from penstock.llm.executor.preparing import fold_settings, prepare
from penstock.llm.executor.requests import Request
from penstock.llm.executor.responses import Response, ResponseFold
from penstock.serving.context import ServerContext

Waiter = concurrent.futures.Future[list[Response]]
ANY = 0  # requests count from 1


class Mailbox:
    """Each response is returned once: to a caller that waits for its request, else to one that waits for any, else to the next that asks.

    A request is open until its final response has come, and known for ever. A call never waits for a response that cannot come: of a
    request that is not open, or of any once the mailbox is closed and no request is open.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_empty = threading.Condition(self._lock)
        self._num_opened = 0
        self._open: set[int] = set()
        self._ready: dict[int, deque[Response]] = {}
        self._waiters: defaultdict[int, deque[Waiter]] = defaultdict(deque)
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
            self._give(response.request_id, [response])
            if response.is_final:
                self._open.discard(response.request_id)
                self._dismiss(response.request_id)
            if not self._open:
                self._is_empty.notify_all()
                if self._is_closed:
                    self._dismiss(ANY)

    def num_ready(self, request_id: int | None = None) -> int:
        with self._lock:
            chosen = self._ready.values() if request_id is None else [self._ready.get(request_id, ())]
            return sum(map(len, chosen))

    def take(self, request_id: int | None, timeout: float | None) -> list[Response]:
        """All that is ready, of one request or of any; waits for the first, at most `timeout` seconds. Empty where none came or will."""
        waiter = self._ask(request_id)
        try:
            return waiter.result(timeout)
        except TimeoutError:
            return self._leave(request_id, waiter)
        except BaseException:
            self._give_back(self._leave(request_id, waiter))
            raise

    async def take_async(self, request_id: int | None) -> list[Response]:
        """The same for a coroutine, without end. Where it is cancelled, what it had been given is given to others."""
        waiter = self._ask(request_id)
        try:
            return await asyncio.shield(asyncio.wrap_future(waiter))
        except BaseException:
            self._give_back(self._leave(request_id, waiter))
            raise

    def close(self) -> None:
        """There will be no more requests."""
        with self._lock:
            self._is_closed = True
            if not self._open:
                self._dismiss(ANY)

    def wait_until_none_is_open(self, timeout: float | None) -> bool:
        """Whether every request has had its final response within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self._open:
                if not self._is_empty.wait(None if deadline is None else max(0.0, deadline - time.monotonic())) and self._open:
                    return False
            return True

    def _ask(self, request_id: int | None) -> Waiter:
        """One that is done already where there is something, or never will be."""
        waiter: Waiter = concurrent.futures.Future()
        with self._lock:
            ready = self._take_ready(request_id)
            may_come = not self._is_closed or self._open if request_id is None else request_id in self._open
            if ready or not may_come:
                waiter.set_result(ready)
            else:
                self._waiters[request_id or ANY].append(waiter)
        return waiter

    def _take_ready(self, request_id: int | None) -> list[Response]:
        if request_id is not None:
            return list(self._ready.pop(request_id, ()))
        ready = [response for responses in self._ready.values() for response in responses]
        self._ready.clear()
        return ready

    def _leave(self, request_id: int | None, waiter: Waiter) -> list[Response]:
        """Stops waiting, and takes what may have come at the last moment."""
        with self._lock:
            if waiter.done():
                return waiter.result()
            self._waiters[request_id or ANY].remove(waiter)
            self._forget_empty(request_id or ANY)
            return []

    def _give_back(self, responses: list[Response]) -> None:
        """As if they had not been taken: before what came after them."""
        by_request: dict[int, list[Response]] = {}
        for response in responses:
            by_request.setdefault(response.request_id, []).append(response)
        with self._lock:
            for request_id, returned in by_request.items():
                later = self._ready.pop(request_id, ())
                self._give(request_id, [*returned, *later])

    def _give(self, request_id: int, responses: list[Response]) -> None:
        for key in (request_id, ANY):
            if self._waiters.get(key):
                self._waiters[key].popleft().set_result(responses)
                self._forget_empty(key)
                return
        self._ready.setdefault(request_id, deque()).extend(responses)

    def _dismiss(self, key: int) -> None:
        for waiter in self._waiters.pop(key, ()):
            waiter.set_result([])

    def _forget_empty(self, key: int) -> None:
        if not self._waiters[key]:
            del self._waiters[key]


logger = logging.getLogger(__name__)

MAX_COMPILING = 8


class Jobs:
    """Serves each request in a task of its own. Its final response comes whatever happens to the task.

    Coroutines run on the engine's loop. Other threads hold `lock` while they hand one over, so that none comes after the loop's end.
    """

    def __init__(self, context: ServerContext, mailbox: Mailbox, num_steps: Callable[[], int]) -> None:
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
            self._put(fold.end(FinishReason.TIMED_OUT))
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
            self._put(fold.end(FinishReason.ABORT) if message is None else [fold.error(message)])

    def _put(self, responses: Iterable[Response]) -> None:
        for response in responses:
            self._mailbox.put(response)


def _described(error: BaseException) -> str:
    """What a response says of it. What is no refusal is logged."""
    if isinstance(error, PenstockError):
        return str(error)
    logger.error("A request could not be served", exc_info=error)
    return f"{type(error).__name__}: {error}"
