import json

import pytest

from penstock.engine.events import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import read
from tests.helpers.tool_parsers import tool_parser

BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
deepseek_v3 = tool_parser("deepseek_v3")
deepseek_v31 = tool_parser("deepseek_v31")

AUTO = Turn(tool_choice="auto")
F: list[Event] = [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]


@pytest.mark.parametrize(
    "body",
    [
        'f\n```json\n{"x": 1}\n```',
        'f\n```json{"x": 1}```',
        ' f \n\n```json\n\n{"x": 1}\n\n```\n',
        'f\n{"x": 1}\n',
        'f\n```json\n{"x": 1}',
    ],
)
def test_the_fence_is_part_of_the_format_and_may_be_missing(body: str) -> None:
    call = f"{CALL_BEGIN}function{SEPARATOR}{body}"
    for text in (f"{BEGIN}{call}{CALL_END}{END}", f"{BEGIN}\n{call}{CALL_END}\n{END}", f"{call}{CALL_END}", f"{BEGIN}{call}"):
        assert read(deepseek_v3(AUTO), [f"Hm.{text}"]) == [Text("Hm."), *F]


def test_arguments_over_several_lines_are_given_out_as_they_were_written() -> None:
    arguments = json.dumps({"city": "Tokyo", "days": [1, 2]}, indent=2)
    text = f"{BEGIN}{CALL_BEGIN}function{SEPARATOR}f\n```json\n{arguments}\n```{CALL_END}{END}"
    assert read(deepseek_v3(AUTO), [text])[1] == ToolCallArguments(0, arguments)


@pytest.mark.parametrize("factory", [deepseek_v3, deepseek_v31])
def test_a_section_without_a_call_is_content(factory: type) -> None:
    for text in (f"{BEGIN}function{SEPARATOR}f\n```json\n{{}}\n```{END}", f"{BEGIN}{END}", f"{BEGIN}{CALL_BEGIN}{CALL_END}{END}"):
        assert read(factory(AUTO), [text]) == [Text(text)]


def test_a_call_that_is_not_closed_does_not_break_the_next() -> None:
    broken = f'{CALL_BEGIN}function{SEPARATOR}f\n```json\n{{"x": 1\n```{CALL_END}'
    whole = f"{CALL_BEGIN}function{SEPARATOR}g\n```json\n{{}}\n```{CALL_END}"
    events = read(deepseek_v3(AUTO), [f"{BEGIN}{broken}\n{whole}{END}"])
    assert events == [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, '{"x": 1\n}'),
        ToolCallStart(1, "g", ""),
        ToolCallArguments(1, "{}"),
    ]


def test_text_after_the_section_is_content() -> None:
    call = f'{CALL_BEGIN}f{SEPARATOR}{{"x": 1}}{CALL_END}'
    assert read(deepseek_v31(AUTO), [f"{BEGIN}{call}{END} It is."]) == [*F, Text(" It is.")]
