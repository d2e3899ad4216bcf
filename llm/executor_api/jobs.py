"""The requests of an executor on the engine's loop."""

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing

from penstock.api.context import ServerContext
from penstock.engine.deltas import FinishReason
from penstock.engine.errors import PenstockError
from penstock.llm.executor_api.fold import ResponseFold
from penstock.llm.executor_api.mailbox import Mailbox
from penstock.llm.executor_api.preparing import fold_settings, prepare
from penstock.llm.executor_api.request import Request
from penstock.llm.executor_api.response import Response

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
                self._mailbox.put(Response(request_id, _told(error), request.client_id))
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
        message = None if error is None else _told(error)
        if not fold.is_over:
            self._put(fold.end(FinishReason.ABORT) if message is None else [fold.error(message)])

    def _put(self, responses: Iterable[Response]) -> None:
        for response in responses:
            self._mailbox.put(response)


def _told(error: BaseException) -> str:
    """What a response says of it. What is no refusal is logged."""
    if isinstance(error, PenstockError):
        return str(error)
    logger.error("A request could not be served", exc_info=error)
    return f"{type(error).__name__}: {error}"
