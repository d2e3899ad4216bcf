"""Tools: which the prompt describes and how, what the model may or must call, and the grammar that holds it to that."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import msgspec

from penstock.engine.contracts import structure as parts
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, ToolFormat
from penstock.engine.contracts.structure import Either, FreeText, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import InvalidRequest
from penstock.engine.system.process import examined
from penstock.engine.text.answer import NO_LIMITS, CallLimits
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.constraints.schemas import AS_WRITTEN, JsonReading, schema_spec
from penstock.serving.requests import ChatCompletionRequest, convert_at

T = TypeVar("T")

MAX_TOOLS = 256
MAX_NAME_LENGTH = 256


class FunctionDefinition(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct):
    function: FunctionDefinition
    type: str = "function"


class FunctionName(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    function: FunctionName
    type: Literal["function"] = "function"


class AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class AllowedToolChoice(msgspec.Struct):
    allowed_tools: AllowedTools
    type: Literal["allowed_tools"] = "allowed_tools"


@dataclass(frozen=True, slots=True)
class Tool:
    """A function as the client described it. `path` is that of its definition; without `parameters` it takes none."""

    name: str
    parameters: dict[str, Any] | None
    is_strict: bool
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """`shown` are the tools that the prompt tells of, as the client wrote them; `callable` those of them that may be called.

    Where `is_forced` the answer is a call; where `is_single` there is one at most. `is_restricted` says that `allowed_tools` chose some.
    `choice` is the word for parsers: as `Turn.tool_choice`. `max_calls` is the request's own bound.
    """

    shown: list[dict[str, Any]]
    callable: tuple[Tool, ...]
    choice: str
    is_forced: bool = False
    is_single: bool = False
    is_restricted: bool = False
    max_calls: int | None = None

    def limits(self, default: int, opening: str | None) -> CallLimits:
        """What ends the answer. `opening` is how a grammar opens calls, None without a grammar.

        A model that is forced to call, and would not stop by itself, repeats a call: there the first repetition ends the answer, elsewhere
        `default` equal calls in a row. Without a bound of the request's own, a forced answer has `default` calls at most.
        """
        if not self.shown:
            return NO_LIMITS
        max_calls = 1 if self.is_single else self.max_calls or (default if self.is_forced else None)
        return CallLimits(max_calls=max_calls, max_alike=1 if self.is_forced else default, opening="" if self.is_forced else opening)


NO_TOOLS = ToolUse(shown=[], callable=(), choice="none")


def tool_use(body: ChatCompletionRequest, *, has_parser: bool) -> ToolUse:
    """What the request asks for: `NO_TOOLS` where it has none, or where `tool_choice` is `none`.

    Raises `InvalidRequest` for what is malformed, and for tools on a server that could not read their calls.
    """
    if body.tools is None:
        if body.tool_choice not in (None, "none"):
            raise InvalidRequest("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return NO_TOOLS
    if not body.tools:
        raise InvalidRequest("`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools")
    if len(body.tools) > MAX_TOOLS:
        raise InvalidRequest(f"`tools` may hold {MAX_TOOLS} tools at most, got {len(body.tools)}", "tools")
    tools: dict[str, Tool] = {}
    for index, definition in enumerate(body.tools):
        tool = read_tool(definition, f"tools[{index}]")
        if tool.name in tools:
            raise InvalidRequest(f"`tools` holds two functions of one name, {tool.name!r}", f"{tool.path}.function.name")
        tools[tool.name] = tool
    use = read_choice(body, tools)
    if use.shown and not has_parser:
        raise InvalidRequest("this server was started without a tool parser: leave out --tool-parser none and --plugin none", "tools")
    return use


def read_tool(definition: dict[str, Any], path: str) -> Tool:
    """Keys that are not OpenAI's are left alone: some templates read them."""
    tool = convert_at(definition, ToolDefinition, path)
    if tool.type != "function":
        raise InvalidRequest(f"`{path}.type` must be `function`, got {tool.type[:100]!r}", f"{path}.type")
    function = tool.function
    check_name(function.name, f"{path}.function.name")
    if function.parameters is not None:
        check_parameters(function.parameters, f"{path}.function.parameters")
    return Tool(function.name, function.parameters, bool(function.strict), path)


def check_name(name: str, path: str) -> None:
    """OpenAI's rule is `[a-zA-Z0-9_-]{1,64}`; tools from elsewhere, MCP servers above all, have dots and slashes in theirs."""
    if not name or len(name) > MAX_NAME_LENGTH:
        raise InvalidRequest(f"`{path}` must have 1 to {MAX_NAME_LENGTH} characters, got {len(name)}", path)
    if not name.isprintable():
        raise InvalidRequest(f"`{path}` must be made of printable characters, got {name!r}", path)


def check_parameters(schema: dict[str, Any], path: str) -> None:
    """Arguments are an object. A schema that does not say its type is one of objects, as far as a call goes."""
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise InvalidRequest(f"`{path}` must be the schema of an object, got type {str(kind)[:100]!r}", f"{path}.type")


def read_choice(body: ChatCompletionRequest, tools: dict[str, Tool]) -> ToolUse:
    """`none`, `auto`, `required`, one function, or `allowed_tools`, which choose among the tools without changing the prompt."""
    choice = body.tool_choice
    if choice == "none":
        return NO_TOOLS
    shown, every, max_calls = body.tools or [], tuple(tools.values()), body.max_tool_calls
    is_single = body.parallel_tool_calls is False or max_calls == 1
    if choice is None or choice == "auto":
        return ToolUse(shown=shown, callable=every, choice="auto", is_single=is_single, max_calls=max_calls)
    if choice == "required":
        return ToolUse(shown=shown, callable=every, choice="required", is_forced=True, is_single=is_single, max_calls=max_calls)
    if isinstance(choice, str):
        raise InvalidRequest(f"Invalid value for `tool_choice`: {choice[:100]!r}", "tool_choice")
    if choice.get("type") == "allowed_tools":
        allowed = convert_choice(choice, AllowedToolChoice).allowed_tools
        if not allowed.tools:
            raise InvalidRequest("`tool_choice.allowed_tools.tools` must name at least one tool", "tool_choice.allowed_tools.tools")
        paths = {named.function.name: f"tool_choice.allowed_tools.tools[{index}]" for index, named in enumerate(allowed.tools)}
        called = tuple(chosen_tool(name, tools, path) for name, path in paths.items())
        return ToolUse(
            shown=shown,
            callable=called,
            choice=allowed.mode,
            is_forced=allowed.mode == "required",
            is_single=is_single,
            is_restricted=True,
            max_calls=max_calls,
        )
    tool = chosen_tool(convert_choice(choice, NamedTool).function.name, tools, "tool_choice")
    # A function may have the name of a mode: parsers get the nearest mode.
    word = "required" if tool.name in ("auto", "none") else tool.name
    return ToolUse(shown=shown, callable=(tool,), choice=word, is_forced=True, is_single=True)


def convert_choice(choice: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(choice, examined(kind))
    except msgspec.ValidationError as error:
        message = str(error).replace("`$", "`$.tool_choice")
        raise InvalidRequest(f"Invalid value for `tool_choice`: {message}", "tool_choice") from None


def chosen_tool(name: str, tools: dict[str, Tool], path: str) -> Tool:
    if name not in tools:
        raise InvalidRequest("The tool specified in `tool_choice` does not match any of the specified `tools`", path)
    return tools[name]


NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


def answer_grammar(
    use: ToolUse,
    constraint: GrammarSpec | None,
    tool_format: ToolFormat | None,
    parser_name: str | None,
    reading: JsonReading = AS_WRITTEN,
) -> GrammarSpec | None:
    """The constraint of the answer after its reasoning; None if there is no constraint. `reading` applies to the schemas of arguments.

    - Without tools: the constraint alone.
    - Where a call is forced: calls, and nothing else.
    - Beside a constraint: either what it allows, or calls. Only beam search takes both under one grammar; else see `call_grammar`.
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
    tool_format = known_format(tool_format, parser_name, promise)
    opening = tool_format.opening
    callable_tools = [callable_tool(tool, reading) for tool in use.callable]
    calls = tool_format.calls(callable_tools, is_single=use.is_single)
    only_calls = Sequence((Marker(opening), calls))
    if use.is_forced:
        if constraint is not None and not is_about_content(constraint):
            message = f"`{constraint.param}` constrains the content, of which a forced tool call leaves none: use `tool_choice` `auto`"
            raise InvalidRequest(message, constraint.param)
        return structure_spec(only_calls)
    if constraint is not None:
        is_strict = any(tool.is_strict for tool in use.callable)
        values = None if is_strict else calls_as_values(tool_format, callable_tools, constraint, is_single=use.is_single)
        return structure_spec(Either((Value(constraint), values or only_calls)))
    return structure_spec(text_and_calls(opening, calls, is_single=use.is_single))


def call_grammar(
    use: ToolUse, constraint: GrammarSpec, tool_format: ToolFormat | None, parser_name: str | None, reading: JsonReading = AS_WRITTEN
) -> GrammarSpec:
    """The calls that an answer may be in place of what the constraint allows. Raises `InvalidRequest` as `answer_grammar` does."""
    promise = what_is_promised(use, constraint)
    assert promise is not None
    tool_format = known_format(tool_format, parser_name, promise)
    calls = tool_format.calls([callable_tool(tool, reading) for tool in use.callable], is_single=use.is_single)
    return structure_spec(Sequence((Marker(tool_format.opening), calls)))


def deciding_opening(use: ToolUse, constraint: GrammarSpec, tool_format: ToolFormat | None) -> str | None:
    """The marker that makes an answer a call however it goes on, as it does without the constraint.

    So it is where calls are held to their tools from there on, unless JSON content may begin like a call.
    """
    if tool_format is None or not (use.is_restricted or any(tool.is_strict for tool in use.callable)):
        return None
    is_json = constraint.kind in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
    return None if is_json and tool_format.opening.startswith(("{", "[")) else tool_format.opening


def known_format(tool_format: ToolFormat | None, parser_name: str | None, promise: tuple[str, str]) -> ToolFormat:
    if tool_format is None:
        what, param = promise
        parser = "the tool parser" if parser_name is None else f"the tool parser `{parser_name}`"
        raise InvalidRequest(f"{what} cannot be guaranteed here: {parser} has no `tool_format`, which says how calls are written", param)
    return tool_format


def calls_as_values(tool_format: ToolFormat, tools: List[CallableTool], constraint: GrammarSpec, *, is_single: bool) -> Structure | None:
    """Calls of a format that writes bare JSON objects, as JSON values: only so can a grammar tell them from content that is JSON too.

    They may be spelled with other white space than the format's own, which its parser reads, but not where a tool is strict. None for
    other formats and constraints, and for arguments with references, which are those of the whole schema.
    """
    if constraint.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT) or any('"$ref"' in tool.arguments.text for tool in tools):
        return None
    values: list[Structure] = []
    for tool in tools:
        try:
            call = json.loads(written_call(tool_format, tool.name, "{}") or "")
        except ValueError:
            return None
        if not isinstance(call, dict):
            return None
        properties = {key: json.loads(tool.arguments.text) if value == {} else {"const": value} for key, value in call.items()}
        text = json.dumps({"type": "object", "properties": properties, "required": list(call), "additionalProperties": False})
        values.append(Value(replace(tool.arguments, text=text, whitespace_pattern=constraint.whitespace_pattern, as_written=None)))
    one = Either(tuple(values))
    several = tool_format.calls([CallableTool("f", ANY_ARGUMENTS)], is_single=False)
    repeated = [part.part for part in several.parts if isinstance(part, Repeat)] if isinstance(several, Sequence) else []
    pieces = _pieces(repeated[0], "{}") if repeated and not is_single else None
    if pieces is None:
        return one
    separator = "".join(pieces).partition("{")[0]
    return Sequence((one, Repeat(Sequence((parts.Literal(separator), one)))))


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


def structure_spec(structure: Structure) -> GrammarSpec:
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


class ToolArguments(dict[str, Any]):
    """A call's arguments for templates of both kinds: those that take a mapping, and those that take its JSON text."""

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


INSTRUCTIONS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{tools}\n</tools>\n\n"
    "For each function call, answer in this form:\n{form}"
)
ANY_ARGUMENTS = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object"}', "arguments", is_lenient=True)


@dataclass(frozen=True, slots=True)
class ToolPrompt:
    """How the server describes tools to the model, and how calls and results of earlier turns are written for it.

    `tool_format` is the tool parser's; `example` shows a call in a format that is not JSON. Where `is_default`, the model's files show no
    format that a parser reads: the server describes this one, and not the template another.
    """

    tool_format: ToolFormat | None = HERMES.tool_format
    example: str = ""
    is_default: bool = False

    @property
    def form(self) -> str:
        """How a call is written; empty where that is not known, so that the prompt cannot say it."""
        written = None if self.tool_format is None else written_call(self.tool_format, "<function-name>", "<args-json-object>")
        return written or self.example

    def replaces(self, source: str) -> bool:
        """Whether the server is to tell of tools even where the template does: it describes another format."""
        return self.is_default and self.tool_format is not None and self.tool_format.opening not in source

    def instructions(self, tools: List[Mapping[str, Any]]) -> str:
        """The text that describes the tools to the model."""
        described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return INSTRUCTIONS.format(tools=described, form=self.form)

    def with_calls(self, messages: List[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with calls as content."""
        return [self._with_calls(message) if "tool_calls" in message else message for message in messages]

    def _with_calls(self, message: dict[str, Any]) -> dict[str, Any]:
        functions = [call.get("function", call) for call in message["tool_calls"] if isinstance(call, Mapping)]
        named = [function for function in functions if isinstance(function, Mapping) and isinstance(function.get("name"), str)]
        written = [message["content"], *(self._call(function["name"], function.get("arguments")) for function in named)]
        others = {name: value for name, value in message.items() if name != "tool_calls"}
        return {**others, "content": "\n".join(filter(None, written))}

    def _call(self, name: str, arguments: Any) -> str:
        text = str(arguments) if isinstance(arguments, str | ToolArguments) else json.dumps(arguments or {}, ensure_ascii=False)
        written = None if self.tool_format is None else written_call(self.tool_format, name, text)
        return written or written_call(HERMES, name, text) or ""


def with_results(messages: List[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the results of calls as messages of the user.

    Many templates refuse two of these in a row: neighbouring results are one message, and the user's own that follows is joined to it.
    """
    written: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        content = f"<tool_response>\n{message['content']}\n</tool_response>" if is_result else message["content"]
        if follows_result and (is_result or message["role"] == "user"):
            written[-1]["content"] += ("\n" if is_result else "\n\n") + content
        else:
            written.append({"role": "user", "content": content} if is_result else message)
        follows_result = is_result
    return written


def with_instructions(messages: List[dict[str, Any]], text: str, *, has_system: bool) -> list[dict[str, Any]]:
    """The conversation with `text` in its system message; without that role, at the beginning of the first message of the user."""
    roles = [message["role"] for message in messages]
    if not has_system and "user" in roles:
        place = roles.index("user")
        return [*messages[:place], {**messages[place], "content": f"{text}\n\n{messages[place]['content']}"}, *messages[place + 1 :]]
    if has_system and roles[0] in ("system", "developer"):
        content = messages[0]["content"]
        return [{**messages[0], "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    return [{"role": "system" if has_system else "user", "content": text}, *messages]


def written_call(tool_format: ToolFormat, name: str, arguments: str) -> str | None:
    """One call as the format writes it; None where its arguments are no JSON document."""
    pieces = _pieces(tool_format.calls([CallableTool(name, ANY_ARGUMENTS)], is_single=True), arguments)
    return None if pieces is None or pieces.count(arguments) != 1 else tool_format.opening + "".join(pieces)


def _pieces(part: Structure, arguments: str) -> list[str] | None:
    """The texts of what leaves no choice but the arguments."""
    match part:
        case parts.Literal(text) | Marker(text):
            return [text]
        case Value(spec):
            return [arguments] if spec is ANY_ARGUMENTS else None
        case Either((only,)):
            return _pieces(only, arguments)
        case Sequence(inner):
            pieces = [_pieces(one, arguments) for one in inner]
            return None if None in pieces else [text for texts in pieces for text in texts or ()]
        case Repeat(minimum=0) | FreeText():
            return []
        case Either() | Repeat() | TextUntil():
            return None
