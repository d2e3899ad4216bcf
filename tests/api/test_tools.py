import json
from typing import Any

import pytest

from penstock.api.chat_protocol import ChatCompletionRequest
from penstock.api.decoding import decode
from penstock.api.tools import offered_tools
from penstock.engine.errors import InvalidRequest

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "return": {"type": "string"}}, "x": 1}


def offered(has_parser: bool = True, **fields: Any) -> list[dict[str, Any]]:
    body, _ = decode(json.dumps({"messages": []} | fields).encode(), ChatCompletionRequest)
    return offered_tools(body, has_parser=has_parser)


def test_tools_go_to_the_template_as_they_were_written() -> None:
    assert offered(tools=[TOOL]) == offered(tools=[TOOL], tool_choice="auto") == [TOOL]


def test_tools_stay_out_of_the_prompt_where_none_may_be_called() -> None:
    assert offered(tools=[TOOL], tool_choice="none") == []
    assert offered(tools=[TOOL], tool_choice="none", has_parser=False) == []
    assert offered() == offered(tool_choice="none") == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": []}, "must not be an empty array"),
        ({"tool_choice": "auto"}, "`tools` must be set"),
        ({"tools": [TOOL], "tool_choice": "any"}, "Invalid value for `tool_choice`"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "Invalid value for `tool_choice`"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "does not match any"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "not supported yet"),
        ({"tools": [TOOL], "tool_choice": "required"}, "`required` is not supported yet"),
        ({"tools": [{"function": {"name": "f", "strict": True}}]}, "`strict` tools are not supported yet"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "must be `function`"),
        ({"tools": [TOOL, {"function": {"name": 1}}]}, r"`\$\.tools\[1\]\.function\.name`"),
        ({"tools": [{"function": {"name": ""}}]}, "must not be empty"),
        ({"tools": [TOOL], "has_parser": False}, "--plugin hermes"),
    ],
)
def test_what_cannot_be_offered_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        offered(**fields)
