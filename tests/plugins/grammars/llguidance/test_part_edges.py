import re
from collections.abc import Sequence

import pytest
from hypothesis import given

from penstock.plugins.grammars.llguidance.edges import (
    ADDED_TOKEN,
    EMPTY,
    Edges,
    Indistinct,
    either,
    free_text,
    json_value,
    lexeme_either,
    lexeme_repeat,
    lexeme_sequence,
    literal,
    of_grammar,
    of_regex,
    repeat,
    sequence,
    text_until,
)
from penstock.plugins.grammars.regex.syntax import full_match, parse, python_dialect
from penstock.plugins.grammars.regex.tree import ANY, Either, Literal, of
from tests.plugins.grammars.grammar_walks import patterns, subjects

NUMBER = json_value(None, is_number=True)
OBJECT = json_value(None, is_number=False)
ANY_GRAMMAR = of_grammar(ANY)


def regex(pattern: str) -> Edges:
    return of_regex(full_match(parse(pattern, python_dialect())))


def holds(chars: tuple[tuple[int, int], ...], character: str) -> bool:
    return any(low <= ord(character) <= high for low, high in chars)


@given(patterns, subjects)
def test_what_a_regex_begins_and_goes_on_with_is_among_its_edges(pattern: str, text: str) -> None:
    edges = regex(pattern)
    matches = [end for end in range(len(text) + 1) if re.fullmatch(pattern, text[:end])]
    if matches and matches[-1]:
        assert holds(edges.first, text[0])
    assert edges.is_nullable or 0 not in matches
    for end in matches:
        if matches[-1] > end:
            assert holds(edges.more, text[end])


@pytest.mark.parametrize(("pattern", "more"), [("abc", ""), ("[0-9]{2}x", ""), ("x[0-9]*", "0123456789"), ("(?:ab)+", "a"), ("a?b", "")])
def test_what_a_regex_may_go_on_with(pattern: str, more: str) -> None:
    assert regex(pattern).more == of(more)


def test_what_a_choice_may_go_on_with() -> None:
    choice = of_regex(Either(tuple(map(Literal, ("a", "ab", "ad", "abc", "b", "")))))
    assert choice.more == of("abcd")
    assert choice.first == of("ab")
    assert choice.is_nullable


@pytest.mark.parametrize(
    "parts",
    [
        (regex("[0-9]+"), NUMBER),
        (NUMBER, literal(".5")),
        (NUMBER, EMPTY, literal("5")),
        (free_text(()), OBJECT),
        (ANY_GRAMMAR, literal("a")),
        (repeat(OBJECT, 0, None), json_value("", is_number=False)),
        (repeat(literal("ab"), 0, None), free_text(("x",)), ADDED_TOKEN),
    ],
)
def test_a_sequence_whose_parts_run_into_each_other_is_refused(parts: Sequence[Edges]) -> None:
    with pytest.raises(Indistinct):
        sequence(parts)


@pytest.mark.parametrize(
    "parts",
    [
        (NUMBER, literal("</a>")),
        (OBJECT, literal("}"), OBJECT),
        (free_text(()), ADDED_TOKEN, NUMBER),
        (NUMBER, ADDED_TOKEN, NUMBER),
        (ANY_GRAMMAR, ADDED_TOKEN),
        (repeat(sequence((text_until("<a>", ()), OBJECT)), 0, None), free_text(("<a>",))),
        (repeat(sequence((literal("\n"), ADDED_TOKEN, OBJECT)), 0, None), free_text(())),
    ],
)
def test_a_sequence_whose_parts_end_by_themselves_passes(parts: Sequence[Edges]) -> None:
    sequence(parts)


def test_two_values_are_alternatives_only_where_they_share_their_lexemes_or_begin_otherwise() -> None:
    either((OBJECT, json_value(None, is_number=True), regex("a+")))
    for other in (json_value("", is_number=False), regex("[{]"), ANY_GRAMMAR, free_text(())):
        with pytest.raises(Indistinct):
            either((OBJECT, other))


def test_free_text_is_an_alternative_where_a_marker_ends_it() -> None:
    call = sequence((text_until("<a>", ("<b>",)), OBJECT))
    other = sequence((text_until("<b>", ("<a>",)), OBJECT))
    either((call, other, free_text(("<a>", "<b>"))))
    with pytest.raises(Indistinct):
        either((call, free_text(("<b>",))))
    with pytest.raises(Indistinct):
        either((call, sequence((text_until("<b>", ()), OBJECT))))


def test_within_one_lexeme_anything_goes_and_what_it_may_go_on_with_is_known() -> None:
    assert lexeme_sequence((free_text(()), literal("a"))).more == ANY
    assert lexeme_sequence((text_until("<a>", ()), literal("b"))).more == ()
    assert lexeme_either((literal("a"), literal("b"))).more == ()
    assert lexeme_either((literal("a"), literal("ab"))).more == ANY
    assert lexeme_repeat(literal("ab"), 0, None).more == of("a")
    assert lexeme_repeat(literal("ab"), 0, 0) == repeat(literal("ab"), 0, 0) == EMPTY
    assert lexeme_repeat(literal("ab"), 0, 1).is_nullable
    assert not lexeme_repeat(literal("ab"), 2, 3).is_nullable
