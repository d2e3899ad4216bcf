from penstock.engine.events import Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import read
from tests.helpers.tool_parsers import tool_parser

cohere = tool_parser("cohere")

BLOCK = """<|START_ACTION|>
[
    {"tool_call_id": "0", "tool_name": "f", "parameters": {"name": "x", "tool_name": "y"}},
    {"tool_name": "g", "parameters": {}}
]
<|END_ACTION|>"""


def test_one_call_may_lack_the_brackets() -> None:
    call = '{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}'
    events = read(cohere(Turn(tool_choice="auto")), [f"So: <|START_ACTION|>\n{call}\n<|END_ACTION|>"])
    assert events == [Text("So: "), ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}')]


def test_ids_are_the_models_own_where_it_writes_them() -> None:
    start, arguments, other, nothing = cohere(Turn(tool_choice="auto")).feed(BLOCK)
    assert start == ToolCallStart(0, "f", "0")
    assert arguments == ToolCallArguments(0, '{"name": "x", "tool_name": "y"}')
    assert isinstance(other, ToolCallStart)
    assert (other.index, other.name, other.id[:5]) == (1, "g", "call_")
    assert nothing == ToolCallArguments(1, "{}")
