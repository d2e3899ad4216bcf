import json
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.serving.endpoints.bodies import decode
from penstock.serving.requests import ChatCompletionRequest
from penstock.serving.tools import MAX_TOOLS, NO_TOOLS, ToolUse, tool_use

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "return": {"type": "string"}}, "x": 1}
OTHER = {"type": "function", "function": {"name": "files.read", "strict": True}}


def use_of(has_parser: bool = True, **fields: Any) -> ToolUse:
    body, _ = decode(json.dumps({"messages": []} | fields).encode(), ChatCompletionRequest)
    return tool_use(body, has_parser=has_parser)


def named(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def allowed(*names: str, mode: str = "auto") -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def callable_names(use: ToolUse) -> list[str]:
    return [tool.name for tool in use.callable]


def test_tools_go_to_the_template_as_they_were_written() -> None:
    for choice in (None, "auto", "required", named("f"), allowed("f"), allowed("f", mode="required")):
        assert use_of(tools=[TOOL, OTHER], tool_choice=choice).shown == [TOOL, OTHER]


def test_tools_stay_out_of_the_prompt_where_none_may_be_called() -> None:
    assert use_of(tools=[TOOL], tool_choice="none") == NO_TOOLS
    assert use_of(tools=[TOOL], tool_choice="none", has_parser=False) == NO_TOOLS
    assert use_of() == use_of(tool_choice="none") == NO_TOOLS


def test_what_may_be_called_is_what_was_chosen() -> None:
    tools = [TOOL, OTHER]
    auto = use_of(tools=tools)
    assert (callable_names(auto), auto.choice, auto.is_forced, auto.is_single) == (["f", "files.read"], "auto", False, False)
    assert [tool.is_strict for tool in auto.callable] == [False, True]
    assert auto == use_of(tools=tools, tool_choice="auto", parallel_tool_calls=True)
    required = use_of(tools=tools, tool_choice="required")
    assert (callable_names(required), required.choice, required.is_forced) == (["f", "files.read"], "required", True)
    one = use_of(tools=tools, tool_choice=named("files.read"))
    assert (callable_names(one), one.choice, one.is_forced, one.is_single) == (["files.read"], "files.read", True, True)
    assert not required.is_single
    assert use_of(tools=tools, tool_choice="required", parallel_tool_calls=False).is_single


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_allowed_tools_restrict_what_may_be_called(mode: str) -> None:
    use = use_of(tools=[TOOL, OTHER], tool_choice=allowed("files.read", mode=mode))
    assert (callable_names(use), use.choice, use.is_forced, use.is_restricted) == (["files.read"], mode, mode == "required", True)


@pytest.mark.parametrize("name", ["none", "auto", "required"])
def test_a_function_may_have_the_name_of_a_mode(name: str) -> None:
    use = use_of(tools=[named(name)], tool_choice=named(name))
    assert (callable_names(use), use.choice, use.is_forced) == ([name], "required", True)


@pytest.mark.parametrize("name", ["mcp.server/tool:v1", "wetter-für-köln", "天气", "two words", "x" * 256, '"\\'])
def test_names_may_be_freer_than_openais(name: str) -> None:
    assert callable_names(use_of(tools=[named(name)])) == [name]


@pytest.mark.parametrize(
    "parameters", [None, {}, {"properties": {}}, {"type": ["object", "null"]}, {"$ref": "#/$defs/A", "$defs": {"A": {}}}]
)
def test_schemas_of_objects_need_not_say_so(parameters: Any) -> None:
    assert use_of(tools=[named("f", parameters)]).callable[0].parameters == parameters


@pytest.mark.parametrize(
    ("fields", "words", "param"),
    [
        ({"tools": []}, "must not be an empty array", "tools"),
        ({"tools": [named(f"f{index}") for index in range(MAX_TOOLS + 1)]}, "256 tools at most, got 257", "tools"),
        ({"tools": [TOOL, OTHER, TOOL]}, "two functions of one name, 'f'", "tools[2].function.name"),
        ({"tool_choice": "auto"}, "`tools` must be set", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "any"}, "Invalid value for `tool_choice`: 'any'", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {}}, r"missing required field `function` - at `\$\.tool_choice`|required field", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "Invalid value for `tool_choice`", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "Invalid value for `tool_choice`", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": named("g")}, "does not match any", "tool_choice"),
        ({"tools": [TOOL], "tool_choice": allowed("f", "g")}, "does not match any", "tool_choice.allowed_tools.tools[1]"),
        ({"tools": [TOOL], "tool_choice": allowed()}, "must name at least one", "tool_choice.allowed_tools.tools"),
        ({"tools": [TOOL], "tool_choice": allowed("f", mode="none")}, r"`\$\.tool_choice\.allowed_tools\.mode`", "tool_choice"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "must be `function`", "tools[0].type"),
        ({"tools": [TOOL, {"function": {"name": 1}}]}, r"`\$\.tools\[1\]\.function\.name`", "tools[1].function.name"),
        ({"tools": [named("")]}, "1 to 256 characters, got 0", "tools[0].function.name"),
        ({"tools": [named("x" * 257)]}, "1 to 256 characters, got 257", "tools[0].function.name"),
        ({"tools": [named("a\nb")]}, "printable", "tools[0].function.name"),
        ({"tools": [named("f", {"type": "string"})]}, "schema of an object, got type 'string'", "tools[0].function.parameters.type"),
        ({"tools": [named("f", {"type": ["null", "array"]})]}, "schema of an object", "tools[0].function.parameters.type"),
        ({"tools": [named("f", ["object"])]}, r"`\$\.tools\[0\]\.function\.parameters`", "tools[0].function.parameters"),
        ({"tools": [{"type": "function"}]}, "missing required field `function`", "tools[0].function"),
        ({"tools": [TOOL], "has_parser": False}, "without a tool parser", "tools"),
    ],
)
def test_what_cannot_be_offered_is_refused(fields: dict[str, Any], words: str, param: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as caught:
        use_of(**fields)
    assert caught.value.param == param
