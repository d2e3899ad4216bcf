from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.events import SpecialText, Text
from penstock.engine.turn import Turn
from penstock.testing import read
from tests.helpers.tool_parsers import tool_parser
from tests.plugins.tools.parameter_samples import AUTO, calls, content

qwen3_coder = tool_parser("qwen3_coder")
seed_oss = tool_parser("seed_oss")


def body(*parameters: str) -> str:
    return "\n".join(["<tool_call>", "<function=weather>", *parameters, "</function>", "</tool_call>"])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ((), {}),
        (("<parameter=city>\nNew\n\nYork\n</parameter>",), {"city": "New\n\nYork"}),
        (("<parameter=city>\n\n  Oslo\n\n</parameter>",), {"city": "\n  Oslo\n"}),
        (("<parameter=city>Oslo</parameter>",), {"city": "Oslo"}),
        (("<parameter=city>\n</parameter>",), {"city": ""}),
        (('<parameter=city>\nsay "a\\b" & <b>&lt;早安</b>\n</parameter>',), {"city": 'say "a\\b" & <b>&lt;早安</b>'}),
        (("<parameter=days>\n3\n</parameter>", "<parameter=exact>\nTrue\n</parameter>"), {"days": 3, "exact": True}),
        (("<parameter=note>\nnull\n</parameter>",), {"note": None}),
        (("<parameter=note>\nnullable\n</parameter>",), {"note": "nullable"}),
        (('<parameter=place>\n{"lat": 1.5,\n "lon": null}\n</parameter>',), {"place": {"lat": 1.5, "lon": None}}),
        (("<parameter=place>\n{'lat': 1}\n</parameter>",), {"place": {"lat": 1}}),
        (('<parameter=tags>\n["</parameter>", "<parameter=x>"]\n</parameter>',), {"tags": ["</parameter>", "<parameter=x>"]}),
        (("<parameter=zip>\n0150\n</parameter>",), {"zip": "0150"}),
        (("<parameter=city>\nOslo\n<parameter=days>\n3\n</parameter>",), {"city": "Oslo", "days": 3}),
        (("<parameter=city>\nOslo",), {"city": "Oslo"}),
        (("<parameter=city>\nOslo\n</parameter>", "<parameter=city>\nRome\n</parameter>"), {"city": "Oslo"}),
        (('<parameter="city">\nOslo\n</parameter>',), {"city": "Oslo"}),
    ],
)
def test_values_are_read_by_the_schema(parameters: tuple[str, ...], expected: dict[str, Any]) -> None:
    assert calls(qwen3_coder, body(*parameters)) == [("weather", expected)]
    assert content(qwen3_coder, body(*parameters)) == ""


@pytest.mark.parametrize("value", ["Oslo", "New\n\nYork", "\nOslo\n", "\n", ""])
def test_seed_oss_writes_no_line_breaks_around_values(value: str) -> None:
    text = f"<seed:tool_call>\n<function=weather>\n<parameter=city>{value}</parameter>\n</function>\n</seed:tool_call>"
    assert calls(seed_oss, text) == [("weather", {"city": value})]
    assert content(seed_oss, text) == ""


def test_arguments_of_an_unknown_tool_are_strings() -> None:
    text = "<tool_call><function=other><parameter=x>1</parameter></function></tool_call>"
    assert calls(qwen3_coder, text) == [("other", {"x": "1"})]


def test_a_missing_opener_is_forgiven_at_the_beginning_of_a_line() -> None:
    bare = body("<parameter=city>\nOslo\n</parameter>").removeprefix("<tool_call>\n")
    assert calls(qwen3_coder, bare) == [("weather", {"city": "Oslo"})]
    text = f"I'll check.\n\n{bare}"
    assert calls(qwen3_coder, text) == [("weather", {"city": "Oslo"})]
    assert content(qwen3_coder, text) == "I'll check.\n\n"
    pieces = ["Look:\n", bare.removesuffix("</tool_call>"), SpecialText("</tool_call>")]
    turn = replace(AUTO, added_tokens=frozenset({"<tool_call>", "</tool_call>"}))
    assert [event for event in read(qwen3_coder(turn), pieces) if isinstance(event, Text)] == [Text("Look:\n")]


@pytest.mark.parametrize("before", ["Write `", "<function=other>\n", "- "])
def test_a_missing_opener_is_not_forgiven_in_the_middle_of_text_or_for_other_tools(before: str) -> None:
    name = "other" if before.startswith("<") else "weather"
    text = f"{before}<function={name}></function>" if name == "weather" else f"{before}</function>"
    assert content(qwen3_coder, text) == text


def test_a_missing_opener_is_not_forgiven_where_a_tool_is_strict() -> None:
    strict = Turn(tool_choice="auto", tools=[{"type": "function", "function": {"name": "weather", "strict": True}}])
    bare = "<function=weather></function>"
    assert content(qwen3_coder, bare, strict) == bare


def test_a_quotation_of_the_whole_markup_calls_nothing() -> None:
    turn = replace(AUTO, added_tokens=frozenset({"<tool_call>", "</tool_call>"}))
    text = body("<parameter=city>\nOslo\n</parameter>")
    assert read(qwen3_coder(turn), [text]) == [Text(text)]


def test_a_tag_that_is_not_closed_makes_no_call_and_the_next_one_is_read() -> None:
    broken = "<tool_call>\n<function=weather\n</function>\n</tool_call>\n"
    text = broken + body("<parameter=city>\nOslo\n</parameter>")
    assert calls(qwen3_coder, text) == [("weather", {"city": "Oslo"})]
    assert content(qwen3_coder, text) == broken


def test_what_follows_parameters_without_an_end_is_content() -> None:
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\nThat is all."
    assert calls(qwen3_coder, text) == [("weather", {"city": "Oslo"})]
    assert content(qwen3_coder, text) == "\nThat is all."


def test_several_calls_may_stand_in_one_section() -> None:
    text = "<tool_call><function=weather></function>\n<function=weather></function></tool_call>"
    assert calls(qwen3_coder, text) == [("weather", {}), ("weather", {})]
