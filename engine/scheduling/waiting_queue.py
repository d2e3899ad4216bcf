"""The queue of waiting sequences: by priority, age and arrival, with bounds on sequences and tokens."""

import bisect
import time
from collections.abc import Callable, Iterator

from penstock.engine.errors import QueueFull
from penstock.engine.sequence import Sequence


class WaitingQueue:
    """In order of priority, then arrival. Sequences with forks wait as one, and count as all that will run.

    `max_sequences` and `max_tokens`, of prompts, bound the queue: no request is added once either is reached, so an idle server refuses
    none. None is no bound. A sequence that has waited for `aging_seconds` goes before all that have not, whatever their priority, so that
    each is scheduled in the end; 0 switches that off. Preempted sequences come back whatever the bounds, with the age that they have.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_tokens: int | None = None,
        aging_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sequences: list[Sequence] = []
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._aging_seconds = aging_seconds
        self._clock = clock
        self.num_sequences = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    def first(self, count: int) -> list[Sequence]:
        """Those that are to be scheduled first."""
        return self._sequences[:count]

    def check_admission(self) -> None:
        """Raises `QueueFull` where a bound is reached."""
        if self.num_sequences >= self._max_sequences:
            raise QueueFull(f"{self.num_sequences} sequences are waiting already; try again later")
        if self._max_tokens is not None and self.num_tokens >= self._max_tokens:
            raise QueueFull(f"prompts with {self.num_tokens} tokens are waiting already; try again later")

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence with its forks. Raises `QueueFull`."""
        self.check_admission()
        for member in sequence.family:
            member.queued_at = self._clock()
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queues a sequence that was preempted."""
        bisect.insort(self._sequences, sequence, key=in_order)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._count(sequence, -1)

    def seconds_waited(self, sequence: Sequence) -> float:
        """Since it was first queued."""
        return self._clock() - sequence.queued_at

    def age(self) -> None:
        """Moves those that have waited for long to the front, in order of arrival. To be called before the order counts."""
        if not self._aging_seconds:
            return
        oldest = self._clock() - self._aging_seconds
        aged = [sequence for sequence in self._sequences if not sequence.has_aged and sequence.queued_at <= oldest]
        if aged:
            for sequence in aged:
                sequence.has_aged = True
            self._sequences.sort(key=in_order)

    def check_integrity(self) -> None:
        """Asserts that the order holds and that the counts are those of the sequences."""
        assert self._sequences == sorted(self._sequences, key=in_order)
        assert self.num_sequences == sum(sequence.num_places for sequence in self._sequences)
        assert self.num_tokens == sum(sequence.num_prompt_tokens for sequence in self._sequences)

    def _count(self, sequence: Sequence, sign: int) -> None:
        self.num_sequences += sign * sequence.num_places
        self.num_tokens += sign * sequence.num_prompt_tokens


def in_order(sequence: Sequence) -> tuple[bool, int, int, int]:
    return sequence.order
