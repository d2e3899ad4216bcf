"""Formats whose calls are named parameters in markup, `<function=f><parameter=x>1</parameter></function>`, and the values they hold."""

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tools
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, Turn
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.calls.markup_reader import Heads, ParameterMarkup, ParameterReader, Tag, read_attribute_tag, read_bare_tag
from penstock.plugins.calls.schema_values import TextValue, ToolSchemas, Types, types_of
from penstock.plugins.calls.section_stream import SectionStream
from penstock.plugins.calls.stream import CallFormat, Surroundings, tags_of
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS
from penstock.plugins.markers import StepBuffer

_DEFINITIONS = ("$defs", "definitions")
_PLAIN = frozenset({"type", "nullable", "anyOf", "oneOf"}) | ANNOTATIONS
_WORDS: dict[str, tuple[bool | None, ...]] = {"boolean": (True, False), "null": (None,)}
_SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})
_UNDERSTOOD = (
    frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "id"}) | ANNOTATIONS
)


@dataclass(frozen=True, slots=True)
class ParameterSchema:
    """One property of a tool's arguments. `spec` is the constraint that `root`, the schema of all of them, came in."""

    name: str
    schema: Any
    root: Any
    spec: GrammarSpec

    @property
    def path(self) -> str:
        return f"{self.spec.param}.properties.{self.name}"

    @property
    def types(self) -> Types | None:
        return types_of(self.schema, self.root)

    @property
    def is_text(self) -> bool:
        """The value may be a string, which is written as plain text."""
        types = self.types
        return types is None or "string" in types


@dataclass(frozen=True, kw_only=True)
class MarkupFormat(CallFormat):
    """`block` encloses all calls, with `separator` between them; each of them is a `call`, and each parameter in that a `parameter`.

    These templates are as in the model's own, white space included. Slots are `{calls}`; `{name}` and `{parameters}`; `{name}`,
    `{value}` and perhaps `{is_string}`, for `true` or `false`, or `{json_type}`, for the name of the value's type. Required parameters are
    all written and in the schema's order, others may be left out, and none is added. Line breaks around `{value}` are not part of it.

    The parser's markers are derived from these (`markup`). Others are given: `call_start` and
    `parameter_start` are the markers with which a call and a parameter begin, if their names are not in tags that begin with `<`;
    the rest is described in `ParameterMarkup`. With `may_lack_value_end`, the next parameter or the end of the call ends a value too.
    """

    call: str
    parameter: str
    block: str = "{calls}"
    separator: str = ""
    call_start: str = ""
    call_end: str = ""
    parameter_start: str = ""
    lead: str = ""
    tag_end: str = ">"
    read_tag: Callable[[str], Tag | None] | None = None
    type_start: str = ""
    type_end: str = ""
    skipped: tuple[str, ...] = ()
    literal: str = ""
    literal_end: str = ""
    may_lack_section: bool = False
    may_lack_value_end: bool = False
    is_offered_only: bool = False
    reads_untyped_json: bool = False
    wrappers: tuple[str, ...] = ()

    def __call__(self, turn: Turn) -> SectionStream:
        return SectionStream(turn, self.markup, self._new_reader, self.tool_format)

    def _new_reader(self, buffer: StepBuffer, schemas: ToolSchemas, around: Surroundings) -> ParameterReader:
        return ParameterReader(buffer, self.markup, schemas, around)

    # What is read

    @cached_property
    def markup(self) -> ParameterMarkup:
        """The markers of the templates."""
        before, _, after = self.block.partition("{calls}")
        start, _, rest = self.call.partition("{name}")
        name_end, _, end = rest.partition("{parameters}")
        is_in_tag = start.endswith(("=", '="'))
        call = self.call_start or (start[start.rindex("<") :].rstrip('"') if is_in_tag else start.strip())
        call_end = self.call_end or end.strip().partition("\n")[0]
        parameter, _, rest = self.parameter.partition("{name}")
        between, _, value_end = rest.partition("{value}")
        read_tag = self.read_tag or (read_attribute_tag if start.endswith('"') else read_bare_tag)
        end_markers = (self.parameter_start or parameter.rstrip('"'), call_end)
        heads = {} if is_in_tag else self._line_heads(name_end, between)
        return ParameterMarkup(
            section=before.strip() or start[: start.index(call)].strip(),
            section_end=after.strip() or end[end.index(call_end) + len(call_end) :].strip(),
            call=call,
            call_end=call_end,
            parameter=end_markers[0],
            value_end=value_end.strip(),
            read_tag=read_tag,
            tag_end=self.tag_end,
            lead=self.lead,
            type_start=self.type_start,
            type_end=self.type_end,
            skipped=self.skipped,
            implied_ends=end_markers if self.may_lack_value_end else (),
            literal=self.literal,
            literal_end=self.literal_end,
            may_lack_section=self.may_lack_section,
            is_offered_only=self.is_offered_only,
            trims_newline=bool(self._around),
            reads_untyped_json=self.reads_untyped_json,
            wrappers=self.wrappers,
            **heads,
        )

    @staticmethod
    def _line_heads(after_name: str, between: str) -> dict[str, Any]:
        name_end, value = tags_of(between)
        return {"heads": Heads.LINES, "name_ends": tuple(after_name.split()), "name_end": name_end, "value": value}

    @property
    def _around(self) -> str:
        """The white space on either side of a value."""
        before, _, after = self.parameter.partition("{value}")
        return before[len(before.rstrip()) :] if after[:1].isspace() else ""

    # What is written

    def written_markers(self) -> tuple[str, ...]:
        return self.markup.markers

    def written_example(self) -> str:
        value = f"{self.literal}Oslo{self.literal_end}"
        parameter = self.parameter.replace("{name}", "city").replace("{value}", value)
        parameter = parameter.replace("{is_string}", "true").replace("{json_type}", "string")
        return self.block.replace("{calls}", self.call.replace("{name}", "weather").replace("{parameters}", parameter))

    @property
    def opening(self) -> str:
        return self.markup.section or self.markup.call

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        before, _, after = self.block.partition("{calls}")
        start, _, rest = self.call.partition("{name}")
        name_end, _, end = rest.partition("{parameters}")
        call = Either(tuple(self._call(tool, name_end, end) for tool in tools))
        more = () if is_single else (Repeat(Sequence((Marker(self.separator + start), call))),)
        return Sequence((*_marker((before + start).removeprefix(self.opening)), call, *more, *_marker(after)))

    def _call(self, tool: CallableTool, name_end: str, end: str) -> Structure:
        self._check_name(tool.name, "a tool", tool.arguments.param)
        return Sequence((Marker(tool.name + name_end), *self._parameters(tool), Marker(end)))

    def _parameters(self, tool: CallableTool) -> list[Structure]:
        root = json.loads(tool.arguments.text)
        path = tool.arguments.param
        if not isinstance(root, Mapping):
            raise UnsupportedGrammar("the arguments' schema must be an object", path)
        check_keywords(root, tool.arguments)
        return members(root, path, lambda name, schema: self._parameter(ParameterSchema(name, schema, root, tool.arguments)))

    def _parameter(self, parameter: ParameterSchema) -> Structure:
        self._check_name(parameter.name, "a property", parameter.path)
        start, _, end = self.parameter.partition("{value}")
        around, markup = self._around, self.markup
        is_typed = "{is_string}" in start or "{json_type}" in start
        head = start.removesuffix(around).replace("{is_string}", "true" if parameter.is_text else "false")
        head = head.replace("{json_type}", _json_type(parameter)).replace("{name}", parameter.name)
        after = end.removeprefix(around + markup.value_end)
        new_value = partial(markup.new_value, parameter.types, Tag(parameter.name, parameter.is_text if is_typed else None))
        if markup.literal and parameter.is_text:
            text = value_structure(parameter, new_value, end=markup.literal_end, around=around)
            value: Structure = Sequence((Marker(markup.literal), text, Marker(markup.value_end)))
        else:
            value = value_structure(parameter, new_value, end=markup.value_end, inner_ends=markup.implied_ends, around=around)
        return Sequence((Marker(head), value, *_marker(after)))

    def _check_name(self, name: str, what: str, path: str) -> None:
        if not self.markup.can_write(name):
            raise UnsupportedGrammar(f"{what} of this name, {json.dumps(name)}, cannot be written in this model's tool calls", path)


def _json_type(parameter: ParameterSchema) -> str:
    """As the format calls it; where there are several, one that is not written as a string is."""
    types = parameter.types or frozenset()
    if parameter.is_text:
        return "string"
    return "object" if len(types) != 1 else "number" if types <= {"integer", "number"} else next(iter(types))


def _marker(text: str) -> tuple[Marker, ...]:
    return (Marker(text),) if text else ()


def check_keywords(arguments: Mapping[str, Any], spec: GrammarSpec) -> None:
    """Raises `UnsupportedGrammar` for what a strict schema of arguments says beside its members."""
    for keyword in () if spec.is_lenient else arguments:
        if keyword not in _UNDERSTOOD and not keyword.startswith("x-"):
            message = f"`{keyword}` is not supported for arguments in this model's tool calls"
            raise UnsupportedGrammar(message, f"{spec.param}.{keyword}")


def members(schema: Mapping[str, Any], path: str, write: Callable[[str, Any], Structure]) -> list[Structure]:
    """What `write` makes of each property, in the schema's order. Raises `UnsupportedGrammar` where one is required and not described."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise UnsupportedGrammar("`properties` must be an object and `required` an array", path)
    for name in required:
        if name not in properties:
            raise UnsupportedGrammar(f"`required` names {json.dumps(name)}, which `properties` does not describe", f"{path}.required")
    written = ((name, write(name, described)) for name, described in properties.items())
    return [member if name in required else Repeat(member, 0, 1) for name, member in written]


def value_structure(
    parameter: ParameterSchema, new_value: Callable[[], TextValue], *, end: str, inner_ends: tuple[str, ...] = (), around: str = ""
) -> Structure:
    """The value, up to and including the marker `end`; `inner_ends` end it too, and `around` is written on either side of it.

    `new_value` gives what the parser reads it with.

    Strings are text. Where other values are allowed in the same place, they are told apart by how they read, so that this has to be a plain
    string or number, `true`, `false` or `null`. Raises `UnsupportedGrammar`, with the property's path, for what cannot be enforced.
    """
    values = _given_values(parameter)
    if not parameter.is_text and values is None:
        return Sequence((Literal(around), Value(json_spec(parameter)), Literal(around), Marker(end)))
    if values is not None:
        texts = [text for text in _readable(values, new_value, around) if not any(marker in text for marker in (end, *inner_ends))]
        if not texts:
            raise UnsupportedGrammar("none of these values can be written in this model's tool calls", f"{parameter.path}.enum")
        return Sequence((Literal(around), Either(tuple(map(Literal, texts))), Literal(around), Marker(end)))
    if not parameter.spec.is_lenient:
        _check_plain(parameter)
    return Sequence((Literal(around), TextUntil(end, inner_ends)))


def json_spec(parameter: ParameterSchema) -> GrammarSpec:
    """The constraint of a value that is written as JSON."""
    spec = parameter.spec
    text = json.dumps(parameter.schema)
    if '"$ref"' in text:
        definitions = {keyword: parameter.root[keyword] for keyword in _DEFINITIONS if keyword in parameter.root}
        text = json.dumps(parameter.schema | definitions)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, text, parameter.path, spec.whitespace_pattern, spec.is_lenient)


def _given_values(parameter: ParameterSchema) -> list[Any] | None:
    """Those that are few enough to be spelled out; None for any others."""
    schema = parameter.schema
    if not isinstance(schema, Mapping):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return values if parameter.is_text or not any(isinstance(value, dict | list) for value in values) else None
    if parameter.types and parameter.types <= _WORDS.keys() and schema.keys() <= _PLAIN:
        return [value for kind in sorted(parameter.types) for value in _WORDS[kind]]
    return None


def _readable(values: list[Any], new_value: Callable[[], TextValue], around: str) -> list[str]:
    """The spellings of those values that are read as what they are."""
    readable: list[str] = []
    for value in values:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        reader = new_value()
        if json.loads(reader.feed(f"{around}{text}{around}") + reader.finish()) == value:
            readable.append(text)
    return readable


def _check_plain(parameter: ParameterSchema) -> None:
    """Raises `UnsupportedGrammar` where not all text would be read as a valid value."""
    types = parameter.types or frozenset()
    if not types <= _SCALARS:
        message = "a value that may be a string, an array or an object cannot be told apart in this model's tool calls"
        raise UnsupportedGrammar(message, parameter.path)
    pending = [(parameter.schema, parameter.path)]
    while pending:
        schema, path = pending.pop()
        if not isinstance(schema, Mapping):
            continue
        for keyword in schema:
            if keyword not in _PLAIN and not keyword.startswith("x-"):
                raise UnsupportedGrammar(
                    f"`{keyword}` is not supported where a string is allowed in this model's tool calls", f"{path}.{keyword}"
                )
            if keyword in ("anyOf", "oneOf") and isinstance(schema[keyword], list):
                pending += [(branch, f"{path}.{keyword}[{place}]") for place, branch in enumerate(schema[keyword])]
