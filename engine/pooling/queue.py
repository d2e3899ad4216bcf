"""The queue of texts, by priority and then arrival, and the batches made of them."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.errors import QueueFull
from penstock.engine.pooling.model import PoolingInput


@dataclass(slots=True, eq=False)
class WaitingInput:
    """A text and where its answer goes. Cancelling the future takes the text out."""

    input: PoolingInput
    future: "asyncio.Future[Tensor]"
    queued_at: float = 0.0

    @property
    def num_tokens(self) -> int:
        return len(self.input.tokens.token_ids)


@dataclass(slots=True)
class PoolingQueue:
    """`max_num_batched_tokens` is the budget of a batch, which a single text may exceed.

    `max_waiting`, in texts, and `max_waiting_tokens` bound the queue: none is added once either is reached. A text that has waited for
    `aging_seconds` goes before all that have not, whatever their priority; 0 switches that off.
    """

    max_num_batched_tokens: int
    max_waiting: int
    max_waiting_tokens: int | None = None
    aging_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _heap: list[tuple[bool, int, int, WaitingInput]] = field(default_factory=list)  # not overdue, priority, arrival
    _num_tokens: int = 0  # in the heap, those of cancelled inputs included
    _arrivals: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return sum(not entry[-1].future.done() for entry in self._heap)

    def add(self, waiting: WaitingInput, priority: int) -> None:
        """Lower priorities go first. Raises `QueueFull`."""
        self.check_admission()
        waiting.queued_at = self.clock()
        heapq.heappush(self._heap, (True, priority, next(self._arrivals), waiting))
        self._num_tokens += waiting.num_tokens

    def check_admission(self) -> None:
        """Raises `QueueFull` where a bound is reached."""
        if self._is_full:
            self._forget_cancelled()
        if self._is_full:
            raise QueueFull(f"{len(self._heap)} inputs with {self._num_tokens} tokens are waiting already; try again later")

    def take_batch(self) -> list[WaitingInput]:
        """The next texts in order, as many as the budget holds. Empty where nothing waits."""
        self._age()
        batch: list[WaitingInput] = []
        budget = self.max_num_batched_tokens
        while self._heap:
            waiting = self._heap[0][-1]
            if not waiting.future.done():
                if batch and waiting.num_tokens > budget:
                    break
                budget -= waiting.num_tokens
                batch.append(waiting)
            heapq.heappop(self._heap)
            self._num_tokens -= waiting.num_tokens
        return batch

    def take_all(self) -> list[WaitingInput]:
        waiting = [entry[-1] for entry in self._heap]
        self._heap.clear()
        self._num_tokens = 0
        return waiting

    @property
    def _is_full(self) -> bool:
        has_tokens = self.max_waiting_tokens is not None and self._num_tokens >= self.max_waiting_tokens
        return len(self._heap) >= self.max_waiting or has_tokens

    def _age(self) -> None:
        if not self.aging_seconds:
            return
        oldest = self.clock() - self.aging_seconds
        if any(is_fresh and waiting.queued_at <= oldest for is_fresh, _, _, waiting in self._heap):
            for place, (_, _, arrival, waiting) in enumerate(self._heap):
                if waiting.queued_at <= oldest:
                    self._heap[place] = (False, 0, arrival, waiting)
            heapq.heapify(self._heap)

    def _forget_cancelled(self) -> None:
        self._heap = [entry for entry in self._heap if not entry[-1].future.done()]
        heapq.heapify(self._heap)
        self._num_tokens = sum(entry[-1].num_tokens for entry in self._heap)
