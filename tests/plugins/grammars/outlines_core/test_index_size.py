import random
import re
import time

import pytest
from hypothesis import given, settings
from outlines_core import Index  # type: ignore[import-untyped]
from outlines_core import Vocabulary as EngineVocabulary

from penstock.plugins.grammars.outlines_core import index_size
from penstock.plugins.grammars.outlines_core.backend import to_pattern
from penstock.plugins.grammars.outlines_core.index_size import IndexSize, IndexTooLarge, TokenOpenings, measure
from penstock.plugins.grammars.regex.syntax import full_match, parse, python_dialect
from penstock.plugins.grammars.regex.tree import Literal, Node, Sequence
from tests.plugins.grammars.grammar_walks import patterns

TOKENS = [bytes([byte]) for byte in range(1, 256)] + [b"ab", b"abc", b"aa", b"12", "é".encode(), "中文".encode()]
OPENINGS = TokenOpenings(TOKENS)


def tree(pattern: str) -> Node:
    return full_match(parse(pattern, python_dialect()))


def size(pattern: str) -> IndexSize:
    return measure(tree(pattern), OPENINGS)


@settings(max_examples=60)
@given(patterns)
def test_no_index_is_much_larger_than_was_said(pattern: str) -> None:
    vocabulary = EngineVocabulary(1000, {token: [i] for i, token in enumerate(TOKENS)} | {b"\0": [999]})
    index = Index(f"\\x00(?:{to_pattern(tree(pattern))})\\x00", vocabulary)
    num_transitions = sum(len(edges) for edges in index.get_transitions().values())
    said = size(pattern)
    # The NULs at both ends: two states, and a transition from every state in which the text may end. Inside a character, 64 bytes at most.
    assert len(index.get_transitions()) <= 1.5 * said.num_states + 8
    assert num_transitions <= 1.2 * said.num_transitions + 80 * said.num_states + 8


@pytest.mark.parametrize(
    "pattern",
    [r"(?:a|\d|(?:a|b|c))", r"(?:a|\d|(?:a|b|c)){1000}", "a{0,2000}", "(ab|cd){1000}", r"\w+@\w+\.\w+", "[" + "aé" * 1900 + "]{3}"],
)
def test_patterns_that_grow_with_their_length_only_are_measured(pattern: str) -> None:
    assert size(pattern).num_states < 200_000


@pytest.mark.parametrize(
    "pattern",
    [
        ".*a.{20}",
        "(a{1,100}){1,100}",
        "(((a?){90}){90}){90}",
        "(" + "|".join(rf"[\w{chr(0x2000 + 2 * i)}]" for i in range(580)) + ")*x{9}",
    ],
)
def test_what_grows_out_of_proportion_is_refused(pattern: str) -> None:
    with pytest.raises(IndexTooLarge):
        size(pattern)


def test_what_has_too_many_states_is_refused_before_they_are_all_found() -> None:
    num_states = size("[ab]*a[ab]{8}").num_states
    assert measure(tree("[ab]*a[ab]{8}"), OPENINGS, num_states) == size("[ab]*a[ab]{8}")
    with pytest.raises(IndexTooLarge, match="more than 500 states"):
        measure(tree("[ab]*a[ab]{8}"), OPENINGS, 500)


def test_the_interpreter_is_let_go_while_much_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    size("a{10}")
    assert not pauses
    with pytest.raises(IndexTooLarge):
        size(".*a.{20}")
    assert len(pauses) > index_size.MAX_WORK // index_size._WORK_BETWEEN_PAUSES // 4


def test_tokens_are_counted_by_their_first_two_bytes() -> None:
    rng = random.Random(0)
    tokens = [bytes(rng.choices(b"abc", k=rng.randint(1, 3))) for _ in range(300)]
    openings = TokenOpenings(tokens)
    for first, second in (("a", "b"), ("ab", "c"), ("abc", "")):
        fits = re.compile(f"[{first}]([{second}]|$)".replace("[]|", "") + ".*")
        expected = sum(fits.fullmatch(token.decode()) is not None for token in tokens)
        assert openings.count(frozenset(first.encode()), frozenset(second.encode())) == expected


def test_a_tree_whose_parts_stand_in_several_places_is_measured_as_it_would_be_written() -> None:
    node: Node = Literal("a")
    for _ in range(60):
        node = Sequence((node, node))
    with pytest.raises(IndexTooLarge, match="30000 characters"):
        measure(node, TokenOpenings([]))
