import itertools
import re

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.serving.constraints.schemas import whitespace_regex

PATTERNS = ["", r"\s*", "[ \n\t]*", " ?", r"\n?\ *", r"^\s{0,2}$", "( |\t){1,2}|\r", r"\r?\n[ ]{0,2}", r"[^\S\n]+"]
TEXTS = ["".join(text) for length in range(4) for text in itertools.product(" \t\n\r", repeat=length)]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_it_meant_less_what_is_no_white_space_of_json(pattern: str) -> None:
    written = re.compile(whitespace_regex(pattern, "p"))
    assert [text for text in TEXTS if written.fullmatch(text)] == [text for text in TEXTS if re.fullmatch(pattern, text)]
    assert not any(written.fullmatch(text) for text in ("\xa0", "\x0b", "\u205f", "a"))


@pytest.mark.parametrize("pattern", ["a", "#?", r"\S", r"\w*", r"\d", "[^x]", r"[\s\xa0]", "\u2003", " $ ", "[", "(?= )", " " * 1001])
def test_other_patterns_are_refused_by_the_name_of_their_field(pattern: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        whitespace_regex(pattern, "structured_outputs.whitespace_pattern")
    assert caught.value.param == "structured_outputs.whitespace_pattern"
    assert "structured_outputs.whitespace_pattern" in str(caught.value)


def test_deep_patterns_are_answered() -> None:
    assert re.fullmatch(whitespace_regex("(" * 40 + " " + ")?" * 40, "p"), " ")
