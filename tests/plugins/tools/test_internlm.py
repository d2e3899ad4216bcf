import pytest

from penstock.engine.events import Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import read
from tests.helpers.tool_parsers import tool_parser

internlm = tool_parser("internlm")

AUTO = Turn(tool_choice="auto")


@pytest.mark.parametrize("marker", ["<|action_start|><|plugin|>", "<|action_start|> <|plugin|>\n", "<|plugin|>"])
@pytest.mark.parametrize("key", ["parameters", "arguments"])
def test_both_spellings_of_the_opening_and_of_the_key_are_read(marker: str, key: str) -> None:
    text = f'{marker}{{"name": "f", "{key}": {{"x": 1}}}}<|action_end|>'
    assert read(internlm(AUTO), [f"hi {text}"]) == [Text("hi "), ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]


@pytest.mark.parametrize(
    "text",
    [
        "<|action_start|><|interpreter|>\nprint(1)<|action_end|>",
        "<|action_start|> <|plugin|>get_weather('par",
        '<|action_start|>{"name": "f"}',
        "<|action_start|><|plugin|>",
    ],
)
def test_what_is_no_call_is_content(text: str) -> None:
    assert read(internlm(AUTO), [text]) == [Text(text)]
