"""Token sequences that may not appear in the output."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence


class BadWords:
    """Which tokens would complete a forbidden sequence now.

    A sequence is forbidden in the output alone: one that begins in the prompt is not caught. The caller tokenizes each word with and
    without a leading space, and gives both.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last_ids: dict[tuple[int, ...], list[int]] = {}  # by what comes before them
        for sequence in sequences:
            if sequence:
                self._last_ids.setdefault(tuple(sequence[:-1]), []).append(sequence[-1])
        self._lengths = sorted({len(beginning) for beginning in self._last_ids})
        self._tail: deque[int] = deque(maxlen=max(self._lengths, default=0))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self._last_ids)

    def append(self, token_id: int) -> None:
        self._tail.append(token_id)

    def copy(self) -> "BadWords":
        """One that goes on by itself."""
        other = copy.copy(self)
        other._tail = self._tail.copy()
        return other

    def completing_ids(self) -> list[int]:
        tail = tuple(self._tail)
        beginnings = (tail[len(tail) - length :] for length in self._lengths if length <= len(tail))
        return [token_id for beginning in beginnings for token_id in self._last_ids.get(beginning, ())]
