"""Look-around that is regular: the trees without it match what Python's `re` and ECMAScript's semantics say, and nothing else."""

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plugins.grammars.regex.automaton import OversizedAutomaton, intersection
from penstock.plugins.grammars.regex.lark import to_pattern
from penstock.plugins.grammars.regex.syntax import MisplacedAnchor, ecma_dialect, full_match, parse, python_dialect, search
from penstock.plugins.grammars.regex.tree import Either, Node

TEXTS = ["".join(text) for length in range(6) for text in itertools.product("ab\n", repeat=length)]
CODE_POINTS = re.compile(r"\\x\{([0-9a-f]+)\}")


def compiled(node: Node) -> re.Pattern[str]:
    return re.compile(CODE_POINTS.sub(lambda found: f"\\U{int(found[1], 16):08x}", to_pattern(node)))


@pytest.mark.parametrize(
    "pattern",
    [
        *("(?!ab).*", "(?!a$)[ab]*\n?", r"(?!a\Z)[ab]*\n?", "a*(?!b)[ab]*", "(?=a)(?!aa)[ab]*", "[ab]*(?<!b)", "(?!a)[ab]+(?<!aa)"),
        *("(?!.*bb)[ab]*", "(?!a|b$)[ab]{1,4}", "^(?!ab)[ab]*$", "(?=.*a)(?=.*b)[ab\n]*", "(?!a)(?!b)\n*", "b|(?!a)[ab]+", "ab(?!c)"),
        *("(?!(?!a)b)[ab]+", "(?:a|b)(?=b)b{1,2}(?<=bb)", "a(?!b|\n)[ab\n]?"),
    ],
)
def test_look_around_in_a_whole_match_means_what_it_means_in_re(pattern: str) -> None:
    found = compiled(full_match(parse(pattern, python_dialect())))
    assert [text for text in TEXTS if found.fullmatch(text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]


@pytest.mark.parametrize("pattern", ["(?!ab)a", "^(?!a)", r"^(?!ab\Z)[ab]*", "a(?=b)", r"^(?!.*aa)[ab]*\Z", r"(?<!a)\Z", r"b(?=a\Z)|^a\Z"])
def test_look_around_in_a_search_means_what_it_means_in_re(pattern: str) -> None:
    found = compiled(search(parse(pattern, ecma_dialect())))
    assert [text for text in TEXTS if found.fullmatch(text)] == [text for text in TEXTS if re.search(pattern, text)]


@pytest.mark.parametrize(
    ("pattern", "reason", "position"),
    [
        ("ab(?=c)", "that no text satisfies", 2),
        ("(?<=a)b", "anywhere but at the end", 0),
        ("(?:(?!b)a)+", "within groups and repeats", 3),
        ("a(?!^b)[ab]", "^ is refused", 4),
        ("(?!a{400})a*", "too large", 0),
    ],
)
def test_other_look_around_is_refused_with_its_position(pattern: str, reason: str, position: int) -> None:
    with pytest.raises(MisplacedAnchor, match=re.escape(reason)) as caught:
        full_match(parse(pattern, python_dialect()))
    assert caught.value.position == position


PATTERNS = st.recursive(
    st.sampled_from(["a", "b", "\n", "[ab]", "[^a]", "."]),
    lambda parts: st.one_of(
        st.tuples(parts, parts).map("".join),
        st.tuples(parts, parts).map(lambda both: f"(?:{both[0]}|{both[1]})"),
        st.tuples(parts, st.sampled_from(["*", "?", "+", "{2}", "{1,3}", "{2,}"])).map(lambda both: f"(?:{both[0]}){both[1]}"),
    ),
    max_leaves=5,
)


@given(PATTERNS, PATTERNS)
def test_an_intersection_with_a_complement_is_what_one_matches_and_the_other_does_not(pattern: str, other: str) -> None:
    left, right = (full_match(parse(text, python_dialect())) for text in (pattern, other))
    try:
        node = intersection([(left, True), (right, False)])
    except OversizedAutomaton:
        return
    wanted = [text for text in TEXTS if re.fullmatch(pattern, text) and not re.fullmatch(other, text)]
    if node == Either(()):
        assert not wanted
    else:
        found = compiled(node)
        assert [text for text in TEXTS if found.fullmatch(text)] == wanted
