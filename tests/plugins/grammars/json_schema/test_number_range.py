import json
import operator
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.values import number
from penstock.plugins.grammars.outlines_core.backend import to_pattern

SIDES = {"minimum": operator.ge, "exclusiveMinimum": operator.gt, "maximum": operator.le, "exclusiveMaximum": operator.lt}
integers = st.one_of(st.integers(-30, 30), st.integers(-100_000, 100_000))
bounds = st.dictionaries(st.sampled_from(sorted(SIDES)), integers, min_size=1, max_size=3)


def pattern(schema: dict[str, Any], *, is_integer: bool) -> re.Pattern[str] | None:
    """What the bounds leave, for Python's `re`, which spells code points its own way; None where that is nothing."""
    try:
        written = to_pattern(number(schema, "guided_json", is_integer=is_integer))
    except UnsupportedGrammar as error:
        if error.message == "no number is within the bounds":
            return None
        raise
    return re.compile(re.sub(r"\\x\{([0-9a-f]+)\}", lambda match: f"\\U{int(match[1], 16):08x}", written))


def accepts(schema: dict[str, Any], text: str, *, is_integer: bool) -> bool:
    compiled = pattern(schema, is_integer=is_integer)
    return compiled is not None and compiled.fullmatch(text) is not None


def is_within(schema: dict[str, Any], value: float) -> bool:
    return all(SIDES[keyword](value, bound) for keyword, bound in schema.items())


@given(bounds, st.lists(integers, max_size=20), st.sampled_from([-1, 0, 1]))
def test_exactly_the_integers_within_the_bounds_are_accepted(schema: dict[str, int], values: list[int], step: int) -> None:
    compiled = pattern(schema, is_integer=True)
    for value in [*values, *(bound + step for bound in schema.values())]:
        assert bool(compiled and compiled.fullmatch(str(value))) == is_within(schema, value)


@given(bounds, st.lists(st.tuples(integers, st.sampled_from(["", ".0", ".5", ".001", ".250", ".00"])), max_size=20))
def test_exactly_the_numbers_within_the_bounds_are_accepted(schema: dict[str, int], values: list[tuple[int, str]]) -> None:
    compiled = pattern(schema, is_integer=False)
    for whole, fraction in [*values, *((bound, fraction) for bound in schema.values() for fraction in ("", ".0", ".5", ".01"))]:
        text = f"{whole}{fraction}"
        assert bool(compiled and compiled.fullmatch(text)) == is_within(schema, json.loads(text)), text


@pytest.mark.parametrize("text", ["-0.5", "-0.0", "0.99", "1", "1.0"])
def test_signs_of_fractions_below_one_count(text: str) -> None:
    assert accepts({"minimum": -1, "maximum": 1}, text, is_integer=False)
    assert accepts({"exclusiveMinimum": 0}, text, is_integer=False) == (float(text) > 0)
    assert accepts({"exclusiveMaximum": 0}, text, is_integer=False) == (float(text) < 0)


def test_fractional_bounds_of_integers_are_rounded_inwards() -> None:
    schema = {"minimum": 0.5, "exclusiveMaximum": 2.5}
    assert [accepts(schema, text, is_integer=True) for text in "0123"] == [False, True, True, False]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"minimum": 0.5}, ".minimum"),
        ({"exclusiveMaximum": True}, ".exclusiveMaximum"),
        ({"maximum": 10**30}, ".maximum"),
        ({"minimum": "1"}, ".minimum"),
    ],
)
def test_other_bounds_are_refused_with_their_path(schema: dict[str, Any], path: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        number(schema, "guided_json", is_integer=False)
    assert caught.value.param == f"guided_json{path}"
