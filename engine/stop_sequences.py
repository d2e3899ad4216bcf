"""Token sequences that end an answer."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence


class StopSequences:
    """Watches an output for several token sequences. A sequence that is complete before `min_tokens` tokens ends nothing.

    One that begins in the prompt is not found. Once `match` is set, nothing is to be appended.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], min_tokens: int = 0) -> None:
        self._sequences = {tuple(sequence) for sequence in sequences if sequence}
        self._beginnings = {sequence[:length] for sequence in self._sequences for length in range(1, len(sequence))}
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._tail: deque[int] = deque(maxlen=max(map(len, self._sequences), default=0))
        self.match: tuple[int, ...] | None = None
        """The sequence that the output ends with; the longest where it ends with several."""

    def append(self, token_id: int) -> None:
        assert self.match is None, "the output ended at a stop sequence"
        self._tail.append(token_id)
        self._num_tokens += 1
        if self._num_tokens >= self._min_tokens:
            self.match = next((ending for ending in self._endings() if ending in self._sequences), None)

    def copy(self) -> "StopSequences":
        """One that goes on by itself."""
        other = copy.copy(self)
        other._tail = self._tail.copy()
        return other

    @property
    def num_pending(self) -> int:
        """How many of the last tokens may yet be the beginning of a sequence."""
        return next((len(ending) for ending in self._endings() if ending in self._beginnings), 0)

    def _endings(self) -> Iterable[tuple[int, ...]]:
        """What the output ends with, the longest first."""
        tail = tuple(self._tail)
        return (tail[start:] for start in range(len(tail)))
