"""Token sequences that end an answer."""

import copy
from collections.abc import Iterable, Sequence


class StopSequences:
    """Watches an output for several token sequences. A sequence that is complete before `min_tokens` tokens ends nothing.

    One that begins in the prompt is not found. Once `match` is set, nothing is to be appended.
    A token costs the same however long the sequences are (Knuth, Morris and Pratt, 1977), but for their number.
    """

    def __init__(self, sequences: Iterable[Sequence[int]], min_tokens: int = 0) -> None:
        self._patterns = [_Pattern(sequence) for sequence in {tuple(sequence) for sequence in sequences if sequence}]
        self._lengths = [0] * len(self._patterns)  # of each, how many tokens the output ends with
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.match: tuple[int, ...] | None = None
        """The sequence that the output ends with; the longest where it ends with several."""

    def append(self, token_id: int) -> None:
        assert self.match is None, "the output ended at a stop sequence"
        self._num_tokens += 1
        self._lengths = [pattern.advance(length, token_id) for pattern, length in self._progress()]
        if self._num_tokens >= self._min_tokens:
            complete = (pattern.sequence for pattern, length in self._progress() if length == len(pattern.sequence))
            self.match = max(complete, key=len, default=None)

    def copy(self) -> "StopSequences":
        """One that goes on by itself."""
        return copy.copy(self)

    @property
    def num_pending(self) -> int:
        """How many of the last tokens may yet be the beginning of a sequence."""
        return max((pattern.proper(length) for pattern, length in self._progress()), default=0)

    def _progress(self) -> Iterable[tuple["_Pattern", int]]:
        return zip(self._patterns, self._lengths, strict=True)


class _Pattern:
    """A sequence and, for each of its beginnings, how long the next shorter one is that the beginning ends with."""

    def __init__(self, sequence: tuple[int, ...]) -> None:
        self.sequence = sequence
        self._shorter = [0]
        for token_id in sequence[1:]:
            self._shorter.append(self._extended(self._shorter[-1], token_id))

    def advance(self, length: int, token_id: int) -> int:
        """How long the beginning is that a text ends with, once the token stands behind one that ended with `length`."""
        return self._extended(self.proper(length), token_id)

    def proper(self, length: int) -> int:
        """The same, or where all of the sequence is there, the longest beginning that is not all of it."""
        return self._shorter[-1] if length == len(self.sequence) else length

    def _extended(self, length: int, token_id: int) -> int:
        while length and self.sequence[length] != token_id:
            length = self._shorter[length - 1]
        return length + (self.sequence[length] == token_id)
