"""Text around markers, without llguidance: Python's `re` reads the same expressions."""

import itertools
import re

import pytest

from penstock.plugins.grammars.llguidance.structure import text_regex


def pattern(expression: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"\\x\{([0-9a-f]{2})\}", r"\\x\1", expression), re.DOTALL)


@pytest.mark.parametrize(
    ("marker", "bans"),
    [
        ("ab", ()),
        ("aa", ()),
        ("aab", ("ba",)),
        ("aba", ("bb",)),
        ("abab", ("aa", "bba")),
        ("aabaa", ()),
        ("a", ("aa",)),
        (None, ("a",)),
        (None, ("aba", "bb")),
        (None, ("aabaa",)),
    ],
)
def test_an_expression_matches_text_up_to_the_first_marker_and_no_other(marker: str | None, bans: tuple[str, ...]) -> None:
    expression = text_regex(bans, marker)
    assert expression is not None
    for length in range(8):
        for text in map("".join, itertools.product("abc", repeat=length)):
            ends_well = marker is None or (marker in text and text.index(marker) == len(text) - len(marker))
            is_allowed = ends_well and not any(ban in text for ban in bans)
            assert (pattern(expression).fullmatch(text) is not None) == is_allowed, text


def test_markers_that_nothing_can_match_have_no_expression() -> None:
    assert text_regex(["b"], "ab") is None
    assert text_regex([""]) is None


def test_markers_that_are_too_long_have_no_expression() -> None:
    assert text_regex(["ab" * 300]) is None


def test_the_length_grows_with_the_markers() -> None:
    expression = text_regex(["<parameter=", "</function>"], "</parameter>")
    assert expression is not None
    assert len(expression) < 3000
