"""Incremental search for several patterns at once: stop strings in text, stop sequences and bad words in token ids, markers of formats."""

import re
from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Generic, Self, TypeVar

Symbol = TypeVar("Symbol", bound=Hashable)


class PatternState(Generic[Symbol]):
    """A state of the automaton of Aho and Corasick ("Efficient string matching", 1975); `PatternState(patterns)` is the initial one.

    Each symbol, a character or a token id, is read once, however many patterns there are. A state never changes for its users, so a
    reader that keeps a reference to its state can be copied and rolled back. States are made when a text first reaches them: thousands
    of long patterns cost little where the text has nothing of them.
    """

    __slots__ = ("_children", "_failure", "_first", "_initial", "_last_symbols", "_longer", "depth", "found", "num_held", "num_pending")

    def __init__(
        self,
        patterns: Sequence[Sequence[Symbol]],
        *,
        depth: int = 0,
        failure: "PatternState[Symbol] | None" = None,
        initial: "PatternState[Symbol] | None" = None,
    ) -> None:
        assert all(patterns), "a pattern is not empty"
        self._failure = failure  # the state of the longest proper suffix that is a beginning of a pattern
        self._initial: PatternState[Symbol] = initial or self
        self._longer = [pattern for pattern in patterns if len(pattern) > depth]
        self._children: dict[Symbol, PatternState[Symbol]] | None = None
        self._last_symbols: list[Symbol] = []  # those that complete a pattern from here
        self.depth = depth
        """The length of the longest beginning of a pattern that the symbols so far end with; it may be the whole pattern."""
        self.found: Sequence[Symbol] | None = None if failure is None else failure.found
        """The longest pattern that the symbols so far end with."""
        self.num_pending: int = depth if self._longer or failure is None else failure.num_pending
        """How many of the last symbols may become a match with those that follow."""
        if len(self._longer) < len(patterns):
            self.found = next(pattern for pattern in patterns if len(pattern) == depth)
        self.num_held: int = depth if self.found is None else len(self.found)
        """How many of the last symbols are the match that was found or, without a match, may become one."""
        if initial is None:
            firsts = {re.escape(pattern[0]) for pattern in patterns if isinstance(pattern[0], str) and len(pattern[0]) == 1}
            self._first = re.compile("|".join(firsts) or r"(?!)")  # a set of characters, as `re` compiles it

    def __deepcopy__(self, memo: object) -> Self:
        return self

    @property
    def has_patterns(self) -> bool:
        """Whether anything can be found at all."""
        return bool(self._initial._longer)

    @property
    def completing(self) -> list[Symbol]:
        """The symbols of which each would complete a pattern now."""
        if self._children is None:
            self._expand()
        symbols, state = self._last_symbols.copy(), self._failure
        while state is not None:
            symbols += state._last_symbols
            state = state._failure
        return symbols

    @property
    def completing_after(self) -> list[tuple[Symbol, Symbol]]:
        """Pairs of a symbol that may come next, and one that would complete a longer pattern after it."""
        state: PatternState[Symbol] | None = self
        pairs: dict[tuple[Symbol, Symbol], None] = {}
        alone = set(self._initial.completing)
        while state is not None:
            for symbol in state._expand() if state._children is None else state._children:
                pairs |= dict.fromkeys((symbol, last) for last in self.step(symbol).completing if last not in alone)
            state = state._failure
        return list(pairs)

    def step(self, symbol: Symbol) -> "PatternState[Symbol]":
        """The state after one more symbol."""
        state = self
        while True:
            children = state._children
            if children is None:
                children = state._expand()
            child = children.get(symbol)
            if child is not None:
                return child
            if state._failure is None:
                return state
            state = state._failure

    def read(self: "PatternState[str]", text: str, start: int, end: int) -> "tuple[PatternState[str], int]":
        """Reads characters from `start` to `end`, or to the end of the first match: the state there, and the position."""
        state, initial = self, self._initial
        while start < end:
            if state is initial:
                first = initial._first.search(text, start, end)
                if first is None:
                    return initial, end
                start = first.start()
            state = state.step(text[start])
            start += 1
            if state.found is not None:
                break
        return state, start

    def _expand(self) -> "dict[Symbol, PatternState[Symbol]]":
        # The children of a state need those of its failure state, which is less deep: made in this order, there is no recursion.
        # Threads that do so at the same time make equal states, and it makes no difference which of them stay.
        states = [self]
        while (failure := states[-1]._failure) is not None and failure._children is None:
            states.append(failure)
        while states:
            children = states.pop()._make_children()
        return children

    def _make_children(self) -> "dict[Symbol, PatternState[Symbol]]":
        groups: dict[Symbol, list[Sequence[Symbol]]] = {}
        for pattern in self._longer:
            groups.setdefault(pattern[self.depth], []).append(pattern)
        initial, depth = self._initial, self.depth + 1
        self._last_symbols = list({pattern[-1]: None for pattern in self._longer if len(pattern) == depth})
        self._children = {
            symbol: PatternState(
                group, depth=depth, failure=initial if self._failure is None else self._failure.step(symbol), initial=initial
            )
            for symbol, group in groups.items()
        }
        return self._children


@lru_cache(maxsize=16)  # the n sequences of a request share theirs
def compile_strings(strings: tuple[str, ...]) -> PatternState[str]:
    """The initial state over the characters of these strings."""
    return PatternState(strings)


@lru_cache(maxsize=16)
def compile_sequences(sequences: tuple[tuple[int, ...], ...]) -> PatternState[int]:
    """The initial state over these sequences of token ids."""
    return PatternState(sequences)
