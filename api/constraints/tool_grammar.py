"""What a request's tools and its constraint allow together, as one `GrammarSpec` in the model's own wire format."""

from typing import Any

from penstock.api.constraints.json_reading import AS_WRITTEN, JsonReading, schema_spec
from penstock.api.tools import Tool, ToolUse
from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.structure import Either, FreeText, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.tool_format import CallableTool, ToolFormat

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def answer_grammar(
    use: ToolUse,
    constraint: GrammarSpec | None,
    tool_format: ToolFormat | None,
    parser_name: str | None,
    reading: JsonReading = AS_WRITTEN,
) -> GrammarSpec | None:
    """What the answer is held to once its reasoning is over; None where it is free. `reading` is of the schemas of arguments.

    - Without tools: the constraint alone.
    - Where a call is forced: calls, and nothing else.
    - Beside a constraint: either what it allows, or calls.
    - Where a tool is strict, where one call is the most, or where only some tools may be called: text and calls, which are held to their
      tools from the moment the model opens one.

    Raises `InvalidRequest` where the tool parser `parser_name` does not say how calls are written, and for a constraint on content beside
    a forced call.
    """
    if not use.shown:
        return constraint
    promise = what_is_promised(use, constraint)
    if promise is None:
        return None
    if tool_format is None:
        what, param = promise
        parser = "the tool parser" if parser_name is None else f"the tool parser `{parser_name}`"
        raise InvalidRequest(f"{what} cannot be guaranteed here: {parser} has no `tool_format`, which says how calls are written", param)
    opening = tool_format.opening
    calls = tool_format.calls([callable_tool(tool, reading) for tool in use.callable], is_single=use.is_single)
    only_calls = Sequence((Marker(opening), calls))
    if use.is_forced:
        if constraint is not None and not is_about_content(constraint):
            message = f"`{constraint.param}` constrains the content, of which a forced tool call leaves none: use `tool_choice` `auto`"
            raise InvalidRequest(message, constraint.param)
        return grammar_of(only_calls)
    if constraint is not None:
        return grammar_of(Either((Value(constraint), only_calls)))
    return grammar_of(text_and_calls(opening, calls, is_single=use.is_single))


def what_is_promised(use: ToolUse, constraint: GrammarSpec | None) -> tuple[str, str] | None:
    """Why the answer cannot be left to the model, and the field that says so; None where it can."""
    if use.is_forced:
        return "a tool call", "tool_choice"
    if use.is_restricted:
        return "`allowed_tools`", "tool_choice"
    for tool in use.callable:
        if tool.is_strict:
            return "a tool with `strict`", f"{tool.path}.function.strict"
    if use.is_single:
        return ("`max_tool_calls: 1`", "max_tool_calls") if use.max_calls == 1 else ("`parallel_tool_calls: false`", "parallel_tool_calls")
    if constraint is not None:
        return f"`{constraint.param}` beside tools", constraint.param
    return None


def is_about_content(constraint: GrammarSpec) -> bool:
    """`response_format` is the shape of whatever content there is, so an answer without any keeps it; a structure is the whole answer's."""
    return constraint.param.startswith("response_format") and constraint.kind is not GrammarKind.STRUCTURE


def text_and_calls(opening: str, calls: Structure, *, is_single: bool) -> Structure:
    text = FreeText(without=(opening,))
    if is_single:
        return Either((text, Sequence((TextUntil(opening), calls))))
    return Sequence((Repeat(Sequence((TextUntil(opening), calls))), text))


def grammar_of(structure: Structure) -> GrammarSpec:
    return GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=structure)


def callable_tool(tool: Tool, reading: JsonReading = AS_WRITTEN) -> CallableTool:
    """Equal definitions give equal texts, which is what compiled grammars are kept by; the properties keep the client's order."""
    param = f"{tool.path}.function.parameters"
    return CallableTool(tool.name, schema_spec(arguments_schema(tool.parameters), param, reading, is_lenient=not tool.is_strict))


def arguments_schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """A function without `parameters` takes none, as in OpenAI's reference. Whatever else a schema allows, arguments are an object."""
    if parameters is None:
        return NO_PARAMETERS
    if "type" in parameters:
        return {key: "object" if key == "type" else value for key, value in parameters.items()}
    return {"type": "object"} | parameters
