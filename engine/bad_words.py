"""Token sequences that may not appear in the output."""

from collections import deque
from collections.abc import Iterable, Sequence


class BadWords:
    """Which tokens would complete a forbidden sequence now.

    A sequence is forbidden in the output alone: one that begins in the prompt is not caught. The caller tokenizes each word with and
    without a leading space, and gives both.
    """

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._sequences = [tuple(sequence) for sequence in sequences if sequence]
        self._tail: deque[int] = deque(maxlen=max((len(sequence) for sequence in self._sequences), default=1) - 1)

    def append(self, token_id: int) -> None:
        self._tail.append(token_id)

    def completing_ids(self) -> list[int]:
        tail = tuple(self._tail)
        return [sequence[-1] for sequence in self._sequences if tail[len(tail) - len(sequence) + 1 :] == sequence[:-1]]
