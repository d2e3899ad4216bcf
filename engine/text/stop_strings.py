"""Stop strings: cuts the text where the first of them is complete."""

import copy
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.engine.events import SpecialText, Text
from penstock.engine.parsing import Parser


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
        """One that goes on by itself."""
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
