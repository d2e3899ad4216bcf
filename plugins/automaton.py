"""Several markers looked for at once, each symbol of the text looked at once."""

import re
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

from penstock.engine.events import SpecialText


class MarkerAutomaton:
    """Aho-Corasick over a set of markers (Aho and Corasick, 1975): each symbol of the text is looked at once, whatever the markers.

    A symbol is one character of plain text or one whole `SpecialText`. A marker is split into symbols at the vocabulary's added tokens, so
    one that is an added token is a single symbol that no plain text matches. State 0 is the root; `depths[s]` symbols are held in state s.
    """

    def __init__(self, markers: Sequence[str], added_tokens: frozenset[str]) -> None:
        self._texts: list[dict[str, int]] = [{}]
        self._specials: list[dict[str, int]] = [{}]
        self._fails = [0]
        self.depths = [0]
        self.found: list[tuple[str, int] | None] = [None]  # the marker that ends in this state, and its length in symbols
        for marker in markers:
            self._add(marker, split_symbols(marker, added_tokens))
        self._link()
        firsts = "".join(map(re.escape, self._texts[0]))
        self.first = re.compile(f"[{firsts}]" if firsts else r"(?!)")

    def __deepcopy__(self, memo: object) -> "MarkerAutomaton":
        return self  # it never changes

    def _add(self, marker: str, symbols: list[str]) -> None:
        state = 0
        for symbol in symbols:
            children = self._children(state, symbol)
            if symbol not in children:
                children[symbol] = len(self.depths)
                self._texts.append({})
                self._specials.append({})
                self._fails.append(0)
                self.depths.append(self.depths[state] + 1)
                self.found.append(None)
            state = children[symbol]
        self.found[state] = (marker, len(symbols))

    def _link(self) -> None:
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            for children in (self._texts[state], self._specials[state]):
                for symbol, child in children.items():
                    if state:
                        self._fails[child] = self.step(self._fails[state], symbol)
                    self.found[child] = self.found[child] or self.found[self._fails[child]]
                    waiting.append(child)

    def _children(self, state: int, symbol: str) -> dict[str, int]:
        return (self._specials if isinstance(symbol, SpecialText) else self._texts)[state]

    def step(self, state: int, symbol: str) -> int:
        """The state after one more symbol."""
        table = self._specials if isinstance(symbol, SpecialText) else self._texts
        while symbol not in table[state]:
            if not state:
                return 0
            state = self._fails[state]
        return table[state][symbol]


def split_symbols(marker: str, added_tokens: frozenset[str]) -> list[str]:
    """The added tokens in a marker, each as `SpecialText`, and the single characters of what is left."""
    tokens = sorted((token for token in added_tokens if token and token in marker), key=len, reverse=True)
    if not tokens:
        return list(marker)
    symbols: list[str] = []
    for part in re.split(f"({'|'.join(map(re.escape, tokens))})", marker):
        symbols.extend([SpecialText(part)] if part in added_tokens else part)
    return symbols


@lru_cache(maxsize=256)
def compile_markers(markers: tuple[str, ...], added_tokens: frozenset[str]) -> MarkerAutomaton:
    """The automaton for these markers, made once for all answers."""
    assert all(markers), "a marker is not empty"
    return MarkerAutomaton(markers, added_tokens)
