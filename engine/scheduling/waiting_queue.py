"""The queue of waiting sequences: by priority, age and arrival, with bounds on sequences and tokens."""

import bisect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from penstock.engine.errors import QueueFull
from penstock.engine.request import BACKGROUND
from penstock.engine.sequence import Sequence

MAX_EMBED_BYTES = 2**31  # of the images and vectors that wait: a small file may be a large image
FIRST_IN_BACKGROUND = (True, BACKGROUND, -1, -1)


@dataclass(slots=True)
class WaitingLoad:
    """The waiting sequences, forks included, the tokens of their prompts, and the bytes of images and vectors in these."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_embed_bytes: int = 0


class WaitingQueue:
    """In order of priority, then arrival. Sequences with forks wait as one, and count as all that will run.

    `max_sequences`, `max_tokens`, of prompts, and `MAX_EMBED_BYTES` bound the queue: no request is added once one is reached, so an idle
    server refuses none. None is no bound. A sequence that has waited for `aging_seconds` goes before all that have not, whatever their
    priority, so that each is scheduled in the end; 0 switches that off. Preempted sequences come back whatever the bounds, with the age
    that they have. Background sequences do not age, and have bounds of their own, as large, so that they never have another refused.
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
        self._load, self._background_load = WaitingLoad(), WaitingLoad()

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    @property
    def num_foreground(self) -> int:
        """How many are not background sequences; in the order they are the first. Those with forks count as one."""
        return bisect.bisect_left(self._sequences, FIRST_IN_BACKGROUND, key=scheduling_order)

    def first(self, count: int) -> list[Sequence]:
        """Those that are to be scheduled first."""
        return self._sequences[:count]

    def check_admission(self, *, is_background: bool = False) -> None:
        """Raises `QueueFull` where a bound is reached."""
        load = self._background_load if is_background else self._load
        if load.num_sequences >= self._max_sequences:
            raise QueueFull(f"{load.num_sequences} sequences are waiting already; try again later")
        if self._max_tokens is not None and load.num_tokens >= self._max_tokens:
            raise QueueFull(f"prompts with {load.num_tokens} tokens are waiting already; try again later")
        if load.num_embed_bytes >= MAX_EMBED_BYTES:
            raise QueueFull(f"prompts with {load.num_embed_bytes} bytes of images and vectors are waiting already; try again later")

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence with its forks. Raises `QueueFull`."""
        self.check_admission(is_background=sequence.is_background)
        for member in sequence.self_and_forks:
            member.queued_at = self._clock()
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queues a sequence that was preempted."""
        bisect.insort(self._sequences, sequence, key=scheduling_order)
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
        aged = [
            sequence
            for sequence in self._sequences
            if not sequence.has_aged and sequence.queued_at <= oldest and not sequence.is_background
        ]
        if aged:
            for sequence in aged:
                sequence.has_aged = True
            self._sequences.sort(key=scheduling_order)

    def check_integrity(self) -> None:
        """Asserts that the order holds and that the counts are those of the sequences."""
        assert self._sequences == sorted(self._sequences, key=scheduling_order)
        foreground, background = self._sequences[: self.num_foreground], self._sequences[self.num_foreground :]
        for load, sequences in ((self._load, foreground), (self._background_load, background)):
            assert all(sequence.is_background == (sequences is background) for sequence in sequences)
            assert load.num_sequences == sum(sequence.max_num_running for sequence in sequences)
            assert load.num_tokens == sum(sequence.num_prompt_tokens for sequence in sequences)
            assert load.num_embed_bytes == sum(sequence.request.num_embed_bytes for sequence in sequences)

    def _count(self, sequence: Sequence, sign: int) -> None:
        load = self._background_load if sequence.is_background else self._load
        load.num_sequences += sign * sequence.max_num_running
        load.num_tokens += sign * sequence.num_prompt_tokens
        load.num_embed_bytes += sign * sequence.request.num_embed_bytes


def scheduling_order(sequence: Sequence) -> tuple[bool, int, int, int]:
    return sequence.order
