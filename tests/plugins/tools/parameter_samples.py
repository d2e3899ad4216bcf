"""Tools and helpers for the tests of formats whose arguments are parameters in markup."""

import json
from typing import Any

from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import Text, ToolCallArguments, ToolCallStart, Turn
from penstock.testing import read

PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"type": "object", "properties": {"lat": {"type": "number"}}},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOLS = ({"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},)
AUTO = Turn(tool_choice="auto", tools=TOOLS)
MIXED: dict[str, Any] = {
    "mixed": {
        "type": "object",
        "properties": {
            "first": {"type": "string"},
            "count": {"type": "integer"},
            "second": {"type": ["string", "null"]},
            "unit": {"enum": ["°C", "", "a b"]},
            "third": {"type": "string"},
            "level": {"enum": ["1", 2, None, "2"]},
            "list": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["unit"],
        "additionalProperties": False,
    },
    "text": {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "string"}},
        "required": ["b"],
        "additionalProperties": False,
    },
}


def calls(factory: ToolParserFactory, text: str, turn: Turn = AUTO) -> list[tuple[str, Any]]:
    """Names and arguments of the calls that a text is read as."""
    found: list[tuple[str, str]] = []
    for event in read(factory(turn), [text]):
        if isinstance(event, ToolCallStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            name, arguments = found[event.index]
            found[event.index] = (name, arguments + event.fragment)
    return [(name, json.loads(arguments)) for name, arguments in found]


def content(factory: ToolParserFactory, text: str, turn: Turn = AUTO) -> str:
    return "".join(event.text for event in read(factory(turn), [text]) if isinstance(event, Text))
