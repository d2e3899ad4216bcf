"""Checks `tools` and `tool_choice`."""

from typing import Any

import msgspec

from penstock.api.chat_protocol import ChatCompletionRequest
from penstock.engine.errors import InvalidRequest


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct):
    function: FunctionDefinition
    type: str = "function"


def offered_tools(body: ChatCompletionRequest, *, has_parser: bool) -> list[dict[str, Any]]:
    """The tools that the model is told of, as the client wrote them: none where there are none, or where `tool_choice` is `none`.

    Raises `InvalidRequest` for what is malformed or cannot be guaranteed here.
    """
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise InvalidRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return []
    if not body.tools:
        raise InvalidRequest("`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools")
    names = [check_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools)]
    check_choice(body.tool_choice, names)
    if body.tool_choice == "none":
        return []
    if not has_parser:
        raise InvalidRequest("this server was started without a tool parser: start it with one, such as --plugin hermes", "tools")
    return body.tools


def check_tool(tool: dict[str, Any], path: str) -> str:
    """The tool's name. Keys that are not OpenAI's are left alone: some templates read them."""
    try:
        definition = msgspec.convert(tool, ToolDefinition)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error).replace("`$", f"`$.{path}"), path) from None
    if definition.type != "function":
        raise InvalidRequest(f"`{path}.type` must be `function`, got {definition.type[:100]!r}", f"{path}.type")
    if not definition.function.name:
        raise InvalidRequest(f"`{path}.function.name` must not be empty", f"{path}.function.name")
    if definition.function.strict:
        raise InvalidRequest("`strict` tools are not supported yet", f"{path}.function.strict")
    return definition.function.name


def check_choice(choice: str | dict[str, Any] | None, names: list[str]) -> None:
    if choice in (None, "auto", "none"):
        return
    if choice == "required":
        raise InvalidRequest("`tool_choice` `required` is not supported yet: use `auto`", "tool_choice")
    function = choice.get("function") if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise InvalidRequest(f"Invalid value for `tool_choice`: {str(choice)[:100]!r}", "tool_choice")
    if name not in names:
        raise InvalidRequest("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    raise InvalidRequest("a named tool in `tool_choice` is not supported yet: use `auto`", "tool_choice")
