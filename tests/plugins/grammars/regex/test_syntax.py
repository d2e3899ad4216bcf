import re

import pytest

from penstock.plugins.grammars.regex.syntax import MisplacedAnchor, RegexError, ecma_dialect, full_match, parse, python_dialect
from penstock.plugins.grammars.regex.tree import num_utf8_states, of, unicode_word


@pytest.mark.parametrize(
    "pattern", ["(", ")", "a)", "(a", "*a", "a**", "[a", "[b-a]", "a{3,2}", "\\", "\\y", "(?P<1>a)", "(?x", "\\x1", "[\\d-z]"]
)
def test_what_python_cannot_compile_is_refused_at_a_position(pattern: str) -> None:
    with pytest.raises(re.error):
        re.compile(pattern)
    with pytest.raises(RegexError) as caught:
        parse(pattern, python_dialect())
    assert 0 <= caught.value.position <= len(pattern)
    assert str(caught.value).endswith(f"at position {caught.value.position}")


@pytest.mark.parametrize(
    ("pattern", "name", "position"),
    [
        (r"(a)\1", "back-reference", 3),
        ("(?P<x>a)(?P=x)", "back-reference", 8),
        (r"a\b", "word boundary", 1),
        ("(?>a)", "atomic group", 0),
        ("a++", "possessive", 1),
        ("(?i)a", "flags", 0),
        (r"\p{L}", "Unicode property", 0),
        (r"a\x00", "NUL", 1),
    ],
)
def test_what_is_not_regular_is_refused_by_name(pattern: str, name: str, position: int) -> None:
    with pytest.raises(RegexError, match=re.escape(name)) as caught:
        parse(pattern, python_dialect())
    assert caught.value.position == position


@pytest.mark.parametrize(
    ("pattern", "plain"),
    [
        (r'[^"\x00-\x1f]', r'[^"\x01-\x1f]'),
        (r"[\x00-\x7f]", r"[\x01-\x7f]"),
        (r"[^\x00]", r"[\s\S]"),
        (r"[\ud800-\uffff]", r"[\ue000-\uffff]"),
        (r"[^\ud800-\udfff]", r"[\s\S]"),
        ("[^\0a]", "[^a]"),
    ],
)
def test_a_class_may_name_what_no_text_holds(pattern: str, plain: str) -> None:
    assert parse(pattern, python_dialect()) == parse(plain, python_dialect())


@pytest.mark.parametrize("pattern", ["a^", "$a", "(a$)b", "(^a)+", "a(b|$)c"])
def test_an_anchor_with_text_beyond_it_is_refused(pattern: str) -> None:
    with pytest.raises(MisplacedAnchor) as caught:
        full_match(parse(pattern, python_dialect()))
    assert pattern[caught.value.position] in "^$"


@pytest.mark.parametrize(("pattern", "plain"), [("^a$", "a"), (r"\Aa\Z", "a"), ("^(?:a|b)$", "a|b"), ("^a|b$", "a|b"), ("(^a)(b$)", "ab")])
def test_anchors_at_the_ends_mean_nothing(pattern: str, plain: str) -> None:
    assert re.fullmatch(pattern, "ab" if plain == "ab" else "a")
    full_match(parse(pattern, ecma_dialect()))


def test_the_states_inside_characters_are_counted_by_distinct_tails() -> None:
    assert num_utf8_states(of("az")) == 0
    assert num_utf8_states(of("é")) == 1
    assert num_utf8_states(of("字")) == 2
    assert num_utf8_states(of("😀")) == 3
    assert num_utf8_states(unicode_word()) > 100
