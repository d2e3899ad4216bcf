import pytest

from penstock.engine.events import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import check_parser, read
from tests.helpers.tool_parsers import tool_parser

xlam = tool_parser("xlam")

AUTO = Turn(tool_choice="auto")
ARRAY = '[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]'
CALLS: list[Event] = [
    ToolCallStart(0, "f", ""),
    ToolCallArguments(0, '{"x": 1}'),
    ToolCallStart(1, "g", ""),
    ToolCallArguments(1, "{}"),
]


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        ("", ARRAY, ""),
        ("<think>Why.</think>", ARRAY, ""),
        ("I'll help.\n", f"```json\n{ARRAY}\n```", ""),
        ("I'll help.\n", f"```\n{ARRAY}\n```", "\nDone."),
        ("I'll help.", f"[TOOL_CALLS]{ARRAY}", ""),
        ("I'll help.", f"<tool_call>{ARRAY}</tool_call>", " Done."),
        ("", ARRAY.replace("[{", "[\n  {"), " [1]"),
    ],
)
def test_an_array_of_calls_may_stand_anywhere(before: str, text: str, after: str) -> None:
    expected = [*([Text(before)] if before else []), *CALLS, *([Text(after)] if after else [])]
    assert read(xlam(AUTO), [before + text + after]) == expected


@pytest.mark.parametrize(
    "text", ["[1, 2]", '[{"city": "Oslo"}]', '[{"name": "f"}]', '```json\n{"name": "f"}\n```', "```python\nx = [{}]\n```", "[TOOL_CALLS]"]
)
def test_any_other_array_is_content(text: str) -> None:
    assert read(xlam(AUTO), [text]) == [Text(text)]


def test_any_cut_and_any_stop_give_the_same_answer() -> None:
    samples = [f"Hm\n```json\n{ARRAY}\n``` ok", '[ {"city": "Oslo"}, {"name": "f", "arguments": {}}]']
    check_parser(xlam, samples, markers=["[TOOL_CALLS]", "<tool_call>", "</tool_call>"], max_examples=25)
