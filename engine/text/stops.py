"""Stop strings in an answer's text, and stop sequences in its tokens."""

import copy
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.engine.contracts.parsing import Parser, SpecialText, Text


@dataclass(slots=True)
class _Node:
    """A prefix of some stop strings. `fallback`: its longest proper suffix that is one; `match`: the longest stop string it ends with."""

    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    match: str | None = None


class StopStrings(Parser):
    """A parser that ends the text at the first stop string to be complete, and gives nothing out after it.

    Of several that end at the same character the longest wins; `match` is the winner. So nothing depends on how the text was cut, and no
    token is waited for once a stop string is there. Held back is only what may yet become one. Hidden special tokens are no text while
    `skip_special_tokens` is on: they pass by in their place, and a stop string may lie across them. Any other added token is text.
    Linear in the text (Aho and Corasick, 1975).
    """

    def __init__(self, stop: Sequence[str], include_in_output: bool = False, *, skip_special_tokens: bool = True) -> None:
        self.match: str | None = None
        self.is_armed = True
        """While it is off, a stop string that becomes complete is text like any other."""
        self._include_in_output = include_in_output
        self._skip_special_tokens = skip_special_tokens
        self._node = self._root = _automaton(tuple(stop))
        self._held: deque[str] = deque()
        self._num_held = 0  # characters in `_held`, hidden pieces not counted

    def feed(self, text: str) -> list[Text]:
        if self.match is not None:
            return []
        if self._is_hidden(text):
            self._held.append(text)
            return self._release(0)
        for position, character in enumerate(text, start=1):
            self._node = _step(self._node, character)
            if self._node.match is not None and self.is_armed:
                self._hold(text[:position] if position < len(text) else text)
                return self._end(self._node.match)
        self._hold(text)
        return self._release(self._num_held - self._node.depth)

    def copy(self) -> "StopStrings":
        """An independent copy."""
        other = copy.copy(self)
        other._held = self._held.copy()
        return other

    def finish(self) -> list[Text]:
        if self.match is not None:
            return []
        self._node = self._root
        return self._release(self._num_held)

    def _end(self, match: str) -> list[Text]:
        self.match = match
        released = self._release(self._num_held - (0 if self._include_in_output else len(match)), is_last=True)
        self._held.clear()
        return released

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)

    def _release(self, num_characters: int, *, is_last: bool = False) -> list[Text]:
        """Gives out the first of the characters held, with the hidden pieces there. Only the last cut may go through an added token."""
        released: list[Text] = []
        while self._held:
            piece = self._held[0]
            if self._is_hidden(piece):
                released.append(Text(self._held.popleft()))
            elif len(piece) <= num_characters:
                released.append(Text(self._held.popleft()))
                num_characters -= len(piece)
                self._num_held -= len(piece)
            else:
                break
        if num_characters and (is_last or not isinstance(self._held[0], SpecialText)):
            piece = self._held.popleft()
            released.append(Text(piece[:num_characters]))
            self._held.appendleft(piece[num_characters:])
            self._num_held -= num_characters
        return released

    def _is_hidden(self, piece: str) -> bool:
        return self._skip_special_tokens and isinstance(piece, SpecialText) and piece.is_hidden


@lru_cache(maxsize=16)  # the n sequences of a request share theirs
def _automaton(patterns: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for pattern in patterns:
        node = root
        for character in pattern:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.match = pattern
    level = deque([root])
    while level:  # breadth first: a fallback is shorter than its node, so it is complete before
        node = level.popleft()
        for character, child in node.children.items():
            child.fallback = root if node is root else _step(node.fallback or root, character)
            child.match = child.match or child.fallback.match
            level.append(child)
    return root


def _step(node: _Node, character: str) -> _Node:
    while character not in node.children and node.fallback is not None:
        node = node.fallback
    return node.children.get(character, node)


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
        """An independent copy."""
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
        """How long the beginning is that a text ends with, once the token follows one that ended with `length`."""
        return self._extended(self.proper(length), token_id)

    def proper(self, length: int) -> int:
        """The same, or where all of the sequence is there, the longest beginning that is not all of it."""
        return self._shorter[-1] if length == len(self.sequence) else length

    def _extended(self, length: int, token_id: int) -> int:
        while length and self.sequence[length] != token_id:
            length = self._shorter[length - 1]
        return length + (self.sequence[length] == token_id)
