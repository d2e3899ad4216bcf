# mypy: disable-error-code="import-untyped"
"""The tasks of the study of structured answers, how answers are read and judged, and its figures."""

from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks.quality_figures import ALL, Record, auroc, page, summary, wilson
from benchmarks.quality_tasks import (
    GENERATED,
    NONE,
    Item,
    bfcl_schema,
    call_in,
    call_item,
    items,
    json_in,
    last_integer,
    last_of,
    lines_of,
    matcher,
)
from benchmarks.structured_quality import answer_type, judge

NOWHERE = Path("/nonexistent")


def record(
    arm: str, *, is_right: bool, is_valid: bool = True, pressure: float | None = None, seconds: float = 1.0, key: str = "0"
) -> Record:
    return Record(
        "m", "t", key, arm, tokens=10, seconds=seconds, processor_seconds=seconds, pressure=pressure, is_valid=is_valid, is_right=is_right
    )


@pytest.mark.parametrize("task", GENERATED)
def test_items_depend_on_the_seed_alone_and_have_valid_schemas(task: str) -> None:
    made, again, other = (items(task, 25, seed, NOWHERE) for seed in (1, 1, 2))
    assert [item.question for item in made] == [item.question for item in again] != [item.question for item in other]
    assert len({item.key for item in made}) == 25
    for item in made:
        jsonschema.Draft202012Validator.check_schema(item.schema)


def test_arithmetic_is_computed_right() -> None:
    """Read out of the question again, by its form."""
    for item in items("arithmetic", 60, 0, NOWHERE):
        numbers = [last_integer(word) for word in item.question.split() if word.strip(".,?").isdigit()]
        a, b, *rest = numbers
        value = a * b - rest[0] if "left" in item.question or "free" in item.question else a * b + rest[0]
        assert item.is_right({"answer": value})
        assert not item.is_right({"answer": value + 1})


def test_a_calendar_call_may_name_its_guests_in_any_order() -> None:
    item = next(item for item in items("calendar", 50, 0, NOWHERE) if item.question.count(",") > 3 and "Put" in item.question)
    title = item.question.split("'")[1]
    day, time, minutes = item.question.split(": ")[1].split(", ")[:3]
    guests = item.question.rstrip(".").split("with ")[1].replace(" and ", ", ").split(", ")
    arguments = {"title": title.upper(), "date": day, "time": time, "minutes": int(minutes.split()[0]), "attendees": guests[::-1]}
    assert item.is_right({"name": "create_event", "arguments": arguments})
    assert not item.is_right({"name": "create_event", "arguments": {**arguments, "minutes": 1}})
    assert not item.is_right({"name": "create_event", "arguments": {**arguments, "attendees": [*guests, "Zoe"]}})
    assert not item.is_right({"name": "list_events", "arguments": {"date": day}})


def test_answers_in_text_are_read() -> None:
    assert last_integer("3 boxes of 4 are 12.\nAnswer: 1,012 (about 7 more)") == 1012
    assert last_integer("**Answer**: 3 * 4 + 2 = 14 pencils in 3 boxes") == 14
    assert last_integer("3 and 4 make 7.") == 7
    assert last_integer("First 5, so **Answer:** 12") == 12
    assert last_of("It is about a refund.\nCategory: Delivery", ["refund", "delivery"]) == "delivery"
    fields = {"city": {"type": "string"}, "price": {"type": "integer"}}
    assert lines_of("- **City**: Oslo.\n- price: 40 euros", fields) == {"city": "Oslo", "price": 40}
    for read in (last_integer, lambda text: last_of(text, ["a"]), lambda text: lines_of(text, fields), json_in):
        with pytest.raises(ValueError, match="no "):
            read("nothing here")
    assert json_in('Sure: ```json\n{"a": [1]}\n``` {"b": 2}') == {"a": [1]}


def test_calls_in_text_are_read_as_python_reads_them() -> None:
    known = {"math.gcd": ["a", "b"], "f": ["a"], NONE: []}
    gcd = {"name": "math.gcd", "arguments": {"a": 3, "b": [1, ")", True]}}
    assert call_in('I call `math.gcd(a=3, b=[1, ")", True])` now.', known) == gcd
    assert call_in('math.gcd(3, b=(1, ")", true))', known) == gcd
    assert call_in("None of them.", known) == {"name": NONE, "arguments": {}}
    for text in ("f(3, 4)", "g(a=1)", "f(a=b)", "f is known"):
        with pytest.raises(ValueError, match=r"no call|malformed"):
            call_in(text, {"f": ["a"]})


def test_calls_are_judged_by_the_rule_of_bfcl() -> None:
    is_right = matcher({"book": {"city": ["New York", "NYC"], "days": [3], "note": ["", "none"], "size": [{"w": [1.0]}]}})
    call: dict[str, Any] = {"name": "book", "arguments": {"city": "new-york", "days": 3, "size": {"w": 1}}}
    assert is_right(call)
    assert not is_right({**call, "name": "look"})
    for change in ({"days": 4}, {"days": True}, {"note": "x"}, {"size": {"w": 1, "h": 1}}, {"more": 1}, {"city": "York"}):
        assert not is_right({"name": "book", "arguments": {**call["arguments"], **change}})
    assert not is_right({"name": "book", "arguments": {"days": 3, "size": {"w": 1}}})
    assert matcher({})({"name": NONE, "arguments": {}})


def test_schemas_of_bfcl_become_json_schemas() -> None:
    described = {
        "type": "dict",
        "properties": {"a": {"type": "float", "default": 1}, "b": {"type": "tuple", "items": {"type": "any"}}},
        "required": ["a"],
    }
    assert bfcl_schema(described) == {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "array", "items": {}}},
        "required": ["a"],
        "additionalProperties": False,
    }


def item() -> Item:
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
    return call_item("t", "0", [function], "Call f with 1.", lambda call: bool(call["arguments"]["a"] == 1))


@pytest.mark.parametrize(
    ("text", "is_valid", "is_right"),
    [
        ('{"name": "f", "arguments": {"a": 1}}', True, True),
        ('{"name": "f", "arguments": {"a": 2}}', True, False),
        ('{"name": "f", "arguments": {"b": 1}}', False, False),
        ('{"name": "f"', False, False),
    ],
)
def test_an_answer_is_right_only_where_its_schema_accepts_it(text: str, is_valid: bool, is_right: bool) -> None:
    made = Record("m", "t", "0", "direct", text=text)
    judge(item(), made)
    assert (made.is_valid, made.is_right) == (is_valid, is_right)


def test_instructor_is_given_the_schema_and_its_validation() -> None:
    made = answer_type(item().schema)
    assert made.model_json_schema() == item().schema
    made.model_validate({"name": "f", "arguments": {"a": 1}})
    with pytest.raises(ValueError, match="'a' is a required property"):
        made.model_validate({"name": "f", "arguments": {}})


def test_wilsons_interval() -> None:
    """Of Newcombe (1998), table I: 81 of 263, and 0 of 20."""
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_auroc_counts_pairs() -> None:
    assert auroc([(1.0, True), (2.0, True), (2.0, False), (3.0, False)]) == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    assert auroc([(1.0, True)]) is None


def test_figures_compare_each_arm_with_the_free_answers_to_the_same_items() -> None:
    free = [record("free", is_right=place < 10, seconds=2.0, key=str(place)) for place in range(20)]
    draft = [record("draft", is_right=place < 15, seconds=2.2, pressure=20.0 - place, key=str(place)) for place in range(20)]
    of_free, of_draft, *of_all = summary([*free, *draft])["figures"]
    assert of_all == [{**row, "task": ALL} for row in (of_free, of_draft)]
    assert of_free["right"] == 0.5
    assert of_free["minus_free"] is None
    assert of_draft["minus_free"] == 0.25
    assert 0.0 < of_draft["minus_free_interval"][0] < 0.25 < of_draft["minus_free_interval"][1]
    assert of_draft["times_free"] == of_draft["processor_times_free"] == pytest.approx(1.1)
    assert of_draft["auroc"] == 0.0  # the wrong ones have the least pressure
    assert of_draft["wrong_but_valid"] == 0.25


def test_a_page_is_written_between_its_markers(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    (tmp_path / "plots").mkdir()
    path.write_text("before\n<!-- tables -->\nold\n<!-- /tables -->\nafter\n")
    page(path, summary([record("free", is_right=True), record("tools", is_right=False)]), tmp_path / "plots")
    text = path.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("<!-- /tables -->\nafter\n")
    assert "| t | `free` | 1 | 100 | 100 (21 to 100) |" in text
    assert "| m | t | 1 | 0 |" in text
    assert "(plots/structured-quality-m.svg)" in text
    assert (tmp_path / "plots" / "structured-quality-m.svg").read_text().startswith("<svg")
