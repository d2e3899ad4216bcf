"""Texts that wait for their turn, by priority and then arrival, and the batches that are made of them."""

import asyncio
import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from penstock.engine.errors import QueueFull
from penstock.engine.pooling.model import PoolingInput


@dataclass(slots=True, eq=False)
class WaitingInput:
    """A text and where its answer goes. Cancelling the future takes the text out."""

    input: PoolingInput
    future: "asyncio.Future[Tensor]"

    @property
    def num_tokens(self) -> int:
        return len(self.input.tokens.token_ids)


@dataclass(slots=True)
class PoolingQueue:
    """`max_num_batched_tokens` is the budget of a batch, which a single text may exceed. `max_waiting` bounds the queue, in texts."""

    max_num_batched_tokens: int
    max_waiting: int
    _heap: list[tuple[int, int, WaitingInput]] = field(default_factory=list)
    _arrivals: Iterator[int] = field(default_factory=itertools.count)

    def __len__(self) -> int:
        return sum(not waiting.future.done() for _, _, waiting in self._heap)

    def add(self, waiting: WaitingInput, priority: int) -> None:
        """Lower priorities go first. Raises `QueueFull`."""
        self.check_admission()
        heapq.heappush(self._heap, (priority, next(self._arrivals), waiting))

    def check_admission(self) -> None:
        """Raises `QueueFull` where as many inputs wait as may."""
        if len(self._heap) >= self.max_waiting:
            self._forget_cancelled()
        if len(self._heap) >= self.max_waiting:
            raise QueueFull(f"{self.max_waiting} inputs are waiting already; try again later")

    def take_batch(self) -> list[WaitingInput]:
        """The next texts in order, as many as the budget holds. Empty where nothing waits."""
        batch: list[WaitingInput] = []
        budget = self.max_num_batched_tokens
        while self._heap:
            waiting = self._heap[0][2]
            if not waiting.future.done():
                if batch and waiting.num_tokens > budget:
                    break
                budget -= waiting.num_tokens
                batch.append(waiting)
            heapq.heappop(self._heap)
        return batch

    def take_all(self) -> list[WaitingInput]:
        waiting = [entry[2] for entry in self._heap]
        self._heap.clear()
        return waiting

    def _forget_cancelled(self) -> None:
        self._heap = [entry for entry in self._heap if not entry[2].future.done()]
        heapq.heapify(self._heap)
