"""The automaton, held against a search that compares every ending with every pattern."""

import copy
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.streaming import PatternState

TOKEN = st.integers(0, 2)
some_patterns = st.lists(st.lists(TOKEN, min_size=1, max_size=5), max_size=5)
some_symbols = st.lists(TOKEN, max_size=16)
some_strings = st.lists(st.text("abc", min_size=1, max_size=5), max_size=5)


def states(patterns: list[list[int]], symbols: list[int]) -> list[PatternState[int]]:
    """The state after none of the symbols, after the first, and so on."""
    path = [PatternState(patterns)]
    for symbol in symbols:
        path.append(path[-1].step(symbol))
    return path


def ends_with(symbols: list[int], suffix: list[int]) -> bool:
    return symbols[len(symbols) - len(suffix) :] == suffix


@given(some_patterns, some_symbols)
def test_a_state_has_the_longest_pattern_that_ends_there(patterns: list[list[int]], symbols: list[int]) -> None:
    for end, state in enumerate(states(patterns, symbols)):
        found = [pattern for pattern in patterns if ends_with(symbols[:end], pattern)]
        assert state.found == max(found, key=len, default=None)


@given(some_patterns, some_symbols)
def test_a_state_has_the_longest_beginning_that_ends_there_whole_and_cut(patterns: list[list[int]], symbols: list[int]) -> None:
    for end, state in enumerate(states(patterns, symbols)):
        beginnings = [
            (length, len(word)) for word in patterns for length in range(len(word) + 1) if ends_with(symbols[:end], word[:length])
        ]
        assert state.depth == max((length for length, _ in beginnings), default=0)
        assert state.num_pending == max((length for length, whole in beginnings if length < whole), default=0)
        assert state.num_held == (state.num_pending if state.found is None else len(state.found))


@given(some_patterns, some_symbols)
def test_a_symbol_completes_a_pattern_exactly_where_the_symbols_would_end_with_it(patterns: list[list[int]], symbols: list[int]) -> None:
    completing = states(patterns, symbols)[-1].completing
    for symbol in range(3):
        assert (symbol in completing) == any(ends_with([*symbols, symbol], pattern) for pattern in patterns)


@given(some_patterns, some_symbols)
def test_after_a_symbol_that_is_unknown_each_pair_that_would_complete_a_longer_pattern_is_known(
    patterns: list[list[int]], symbols: list[int]
) -> None:
    pairs = states(patterns, symbols)[-1].completing_after
    assert len(pairs) == len(set(pairs))
    for pending, last in itertools.product(range(3), range(3)):
        longer = [pattern for pattern in patterns if len(pattern) > 1 and [last] not in patterns]
        assert ((pending, last) in pairs) == any(ends_with([*symbols, pending, last], pattern) for pattern in longer)


@given(some_patterns, some_symbols, some_symbols)
def test_a_state_is_all_that_is_needed_to_go_back(patterns: list[list[int]], symbols: list[int], others: list[int]) -> None:
    for end, state in enumerate(states(patterns, symbols)):
        fresh = states(patterns, symbols[:end] + others)[-1]
        for symbol in others:
            state = state.step(symbol)
        assert (state.found, state.depth, sorted(state.completing)) == (fresh.found, fresh.depth, sorted(fresh.completing))


def matches(state: PatternState[str], pieces: list[str]) -> list[tuple[int, str]]:
    """All positions at which a match ends, and the longest one there."""
    found, num_read = [], 0
    for piece in pieces:
        position = 0
        while position < len(piece):
            state, position = state.read(piece, position, len(piece))
            if state.found is not None:
                found.append((num_read + position, "".join(state.found)))
        num_read += len(piece)
    return found


@given(some_strings, st.lists(st.text("abcd", max_size=8), max_size=6))
def test_reading_stops_at_each_match_however_the_text_is_cut(strings: list[str], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = ((end, [string for string in strings if text[:end].endswith(string)]) for end in range(len(text) + 1))
    expected = [(end, max(found, key=len)) for end, found in ends if found]
    state = PatternState(strings)
    assert matches(state, pieces) == matches(state, [text]) == matches(state, list(text)) == expected


def test_reading_keeps_to_its_part_of_the_text() -> None:
    initial = PatternState(["ab"])
    assert initial.read("xxabab", 3, 5) == (initial.step("a"), 5)
    assert initial.read("xxabab", 3, 4) == (initial, 4)


def test_without_patterns_nothing_is_found() -> None:
    initial = PatternState[str]([])
    assert initial.read("abc", 0, 3) == (initial, 3)
    assert initial.completing == []


def test_an_empty_pattern_is_refused() -> None:
    with pytest.raises(AssertionError):
        PatternState([""])


def test_copies_of_a_reader_share_the_automaton() -> None:
    state = PatternState(["ab"]).step("a")
    assert copy.deepcopy([state])[0] is state


def test_a_long_chain_of_suffixes_is_no_recursion() -> None:
    depth = 3000
    patterns = ["x" + "a" * depth + "b", "a" * depth + "c", *("a" * length + "d" for length in range(1, 4))]
    state = PatternState(patterns)
    for character in "x" + "a" * depth:
        state = state.step(character)
    assert sorted(state.completing) == ["b", "c", "d", "d", "d"]


class CountedCharacter(str):
    """Counts how often the automaton looks for a character."""

    num_lookups = 0

    def __hash__(self) -> int:
        CountedCharacter.num_lookups += 1
        return super().__hash__()


@pytest.mark.parametrize("patterns", [["a" * 400 + "b", "a" * 300 + "b"], ["a" * length + "b" for length in range(1, 64)]])
def test_the_work_is_linear_in_the_text(patterns: list[str]) -> None:
    state, text = PatternState(patterns), [*"a" * 3000, *"b" * 3000]
    for character in text:
        state.step(character)  # makes the states
    CountedCharacter.num_lookups = 0
    for character in text:
        state = state.step(CountedCharacter(character))
    assert len(text) <= CountedCharacter.num_lookups <= 2 * len(text)
