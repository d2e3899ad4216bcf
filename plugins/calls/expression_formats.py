"""Formats whose calls are expressions: Python's, `f(x=1)`, and Gemma's notation, `call:f{x:1}`."""

import json
from collections.abc import Sequence as Tools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, ToolFormat, Turn
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.calls.markup_format import ParameterSchema, json_spec
from penstock.plugins.calls.notation import NotationReader
from penstock.plugins.calls.python_call import KEY, NAME
from penstock.plugins.calls.python_stream import PythonEnvelope, PythonStream
from penstock.plugins.calls.schema_values import STRING, ToolSchemas, Types
from penstock.plugins.calls.section_stream import Envelope, SectionStream
from penstock.plugins.calls.stream import CallFormat, Surroundings
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.plugins.grammars.json_schema.values import json_type
from penstock.plugins.markers import StepBuffer

_MAX_PROPERTIES = 200
_PYTHON_KEYWORDS = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$id", "$defs", "definitions"}
)

MAX_DEPTH = 16
MAX_VALUES = 300
"""Of one tool, with references followed: what refers to itself several times would grow without end."""

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$defs", "definitions", "nullable"})
_NOTATION_KEYWORDS = {
    **dict.fromkeys(("string", "integer", "number", "boolean", "null"), frozenset({"type"})),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
}
_SPELLINGS = {"boolean": ("true", "false"), "null": ("null",)}
_NUMBERS = {"integer": r"-?(0|[1-9][0-9]{0,18})", "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?"}
_ANY = ("string", "number", "boolean", "null")
_MARKS = frozenset(":,{}[]")


@dataclass(frozen=True, kw_only=True)
class PythonFormat(CallFormat):
    """`block` encloses the calls, with `separator` between them: keywords in the order of the schema, and JSON for the values, which
    the parser accepts as literals too.

    The parser's markers are derived from it: the markers around `{calls}`, and whether these are a list in brackets. With `is_bare`, such
    a list may begin the answer without a marker; without markers in `block` it always does, which no grammar can enforce. With
    `may_lack_brackets`, the list between markers may lack its own.
    """

    block: str
    separator: str = ", "
    is_bare: bool = False
    may_lack_brackets: bool = False

    def __call__(self, turn: Turn) -> PythonStream:
        return PythonStream(turn, self._envelope, self.tool_format)

    @cached_property
    def _envelope(self) -> PythonEnvelope:
        start, _, end = self.block.partition("{calls}")
        return PythonEnvelope(
            start=start.removesuffix("["),
            end=end.removeprefix("]"),
            is_bare=self.is_bare,
            has_list=start.endswith("["),
            may_lack_brackets=self.may_lack_brackets,
        )

    def written_markers(self) -> tuple[str, ...]:
        return (self._envelope.start, self._envelope.end)

    def written_example(self) -> str:
        return self.block.replace("{calls}", "weather(city='Oslo')")

    @property
    def tool_format(self) -> ToolFormat | None:
        return self if self._envelope.start else None

    @property
    def opening(self) -> str:
        return self._envelope.start

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """The text after `opening`. Raises `UnsupportedGrammar` for a strict tool whose arguments are not a plain list of properties."""
        call = Either(tuple(map(_python_call, tools)))
        more = () if is_single else (Repeat(Sequence((Literal(self.separator), call))),)
        before, after = ("[", "]") if self._envelope.has_list else ("", "")
        return Sequence((Literal(before), call, *more, Literal(after), Marker(self._envelope.end)))


@dataclass(frozen=True, kw_only=True)
class NotationFormat(CallFormat):
    """`start`, `call:NAME{…}`, `end`, for each call anew: members in the order of the schema, strings between delimiters, everything else
    as JSON writes it.

    Strings between delimiters have `types_of_strings` if the tool's schema does not define their type.
    """

    start: str
    end: str
    delimiter: str
    types_of_strings: Types = STRING

    def __call__(self, turn: Turn) -> SectionStream:
        return SectionStream(turn, Envelope(call=self.start), self._new_reader, self.tool_format)

    def _new_reader(self, buffer: StepBuffer, schemas: ToolSchemas, around: Surroundings) -> NotationReader:
        return NotationReader(
            buffer, schemas, around, start=self.start, end=self.end, delimiter=self.delimiter, types_of_strings=self.types_of_strings
        )

    def written_markers(self) -> tuple[str, ...]:
        return (self.start, self.end, self.delimiter)

    def written_example(self) -> str:
        return f"{self.start}call:weather{{city:{self.delimiter}Oslo{self.delimiter}}}{self.end}"

    @property
    def opening(self) -> str:
        return self.start

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """The text after `opening`. Raises `UnsupportedGrammar` for schemas that the notation cannot express."""
        call = Sequence((Either(tuple(map(self._call, tools))), Marker(self.end)))
        return call if is_single else Sequence((call, Repeat(Sequence((Marker(self.start), call)))))

    def _call(self, tool: CallableTool) -> Structure:
        writer = _ValueWriter(tool, self.delimiter)
        return Sequence((Literal(f"call:{tool.name}"), writer.object(writer.root, 0)))


def _python_call(tool: CallableTool) -> Structure:
    schema = _arguments_document(tool)
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if len(properties) > _MAX_PROPERTIES:
        raise UnsupportedGrammar(f"`{tool.name}` has more than {_MAX_PROPERTIES} parameters", tool.arguments.param)
    if not all(map(KEY.fullmatch, properties)) or not NAME.fullmatch(tool.name):
        raise UnsupportedGrammar(f"`{tool.name}` or one of its parameters has a name that Python has no notation for", tool.arguments.param)
    unknown = [keyword for keyword in schema if keyword not in _PYTHON_KEYWORDS] + [name for name in required if name not in properties]
    if unknown and not tool.arguments.is_lenient:
        raise UnsupportedGrammar(f"calls in Python's notation cannot be held to {unknown[0]!r}", tool.arguments.param)
    arguments = [(_argument(ParameterSchema(name, properties[name], schema, tool.arguments)), name in required) for name in properties]
    return Sequence((Literal(f"{tool.name}("), _keyword_list(arguments, ", "), Literal(")")))


def _argument(parameter: ParameterSchema) -> Structure:
    return Sequence((Literal(f"{parameter.name}="), Value(json_spec(parameter))))


class _ValueWriter:
    """Structures for the values of one tool's schema."""

    def __init__(self, tool: CallableTool, delimiter: str) -> None:
        self.root = _arguments_document(tool)
        self._num_values = 0
        self._tool = tool
        self._delimiter = delimiter

    def value(self, schema: Any, depth: int) -> Structure:
        self._num_values += 1
        if depth > MAX_DEPTH or self._num_values > MAX_VALUES:
            raise self._refusal("schemas that contain themselves, or as much as this one")
        if not isinstance(schema, dict):
            schema = {}
        if "$ref" in schema:
            return self.value(resolve(self.root, schema["$ref"], self._tool.arguments.param)[1], depth + 1)
        if "enum" in schema or "const" in schema:
            constants = schema.get("enum", [schema.get("const")])
            if not constants:
                raise self._refusal("an empty `enum`")
            return Either(tuple(map(self._constant, constants)))
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return Either(tuple(self.value(branch, depth + 1) for branch in schema[keyword]))
        types = schema.get("type", "object" if "properties" in schema else _ANY)
        kinds = [types] if isinstance(types, str) else list(types)
        if schema.get("nullable") is True and "null" not in kinds:
            kinds.append("null")
        return Either(tuple(self._of_type(kind, schema, depth) for kind in kinds))

    def _of_type(self, kind: str, schema: dict[str, Any], depth: int) -> Structure:
        if kind == "string":
            self._check(kind, schema)
            return Sequence((Marker(self._delimiter), TextUntil(self._delimiter)))
        if kind == "array":
            return self._array(schema, depth)
        if kind == "object":
            return self.object(schema, depth)
        self._check(kind, schema)
        if kind in _SPELLINGS:
            return Either(tuple(map(Literal, _SPELLINGS[kind])))
        # Not a schema: next to free text, a grammar can only tell regular parts apart.
        pattern = _NUMBERS["integer" if kind == "integer" else "number"]
        return Value(GrammarSpec(GrammarKind.REGEX, pattern, self._tool.arguments.param))

    def _array(self, schema: dict[str, Any], depth: int) -> Structure:
        self._check("array", schema)
        item = self.value(schema.get("items"), depth + 1)
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        more = Repeat(Sequence((Literal(","), item)), max(low - 1, 0), None if high is None else max(high - 1, 0))
        items: Structure = Sequence((item, more)) if high != 0 else Literal("")
        return Sequence((Literal("["), items if low else Either((items, Literal(""))), Literal("]")))

    def object(self, schema: dict[str, Any], depth: int) -> Structure:
        """Members that the schema does not describe are never written."""
        self._check("object", schema)
        properties, required = schema.get("properties", {}), schema.get("required", [])
        unwritable = [name for name in properties if not name.strip() or name != name.strip() or _MARKS & set(name)]
        if unwritable or any(name not in properties for name in required):
            raise self._refusal("members of such a name" if unwritable else "members that are required and not described")
        members = [(Sequence((Literal(f"{name}:"), self.value(properties[name], depth + 1))), name in required) for name in properties]
        return Sequence((Literal("{"), _keyword_list(members, ","), Literal("}")))

    def _constant(self, value: Any) -> Structure:
        if isinstance(value, str):
            if self._delimiter in value:
                raise self._refusal("strings with a delimiter inside")
            return Sequence((Marker(self._delimiter), Literal(value), Marker(self._delimiter)))
        if json_type(value) in ("array", "object"):
            raise self._refusal("arrays and objects as constants")
        return Literal(json.dumps(value))

    def _check(self, kind: str, schema: dict[str, Any]) -> None:
        """Keywords that the notation cannot hold to are left out where the tool is not strict."""
        unknown = sorted(schema.keys() - _NOTATION_KEYWORDS[kind] - _NOTES) if isinstance(schema.get("type", kind), str) else []
        if unknown and not self._tool.arguments.is_lenient:
            raise self._refusal(f"`{unknown[0]}`")

    def _refusal(self, what: str) -> UnsupportedGrammar:
        return UnsupportedGrammar(f"calls in this model's notation cannot be held to {what}", self._tool.arguments.param)


def _arguments_document(tool: CallableTool) -> dict[str, Any]:
    """The schema as JSON. Raises `UnsupportedGrammar` where it is none: keywords have the types then that they should have."""
    import jsonschema  # type: ignore[import-untyped]

    document: dict[str, Any] = json.loads(tool.arguments.text)
    try:
        jsonschema.Draft202012Validator.check_schema(document)
    except (jsonschema.SchemaError, RecursionError) as error:
        message = error.message if isinstance(error, jsonschema.SchemaError) else "it is nested too deep"
        raise UnsupportedGrammar(f"the schema of `{tool.name}` is wrong: {message}", tool.arguments.param) from error
    return document


def _keyword_list(members: Tools[tuple[Structure, bool]], comma: str) -> Structure:
    """The members, each with whether it is required. A choice of which is the first one; those that follow it each bring their comma."""
    firsts: list[Structure] = []
    for place, (member, is_required) in enumerate(members):
        firsts.append(Sequence((member, *(_following(*rest, comma) for rest in members[place + 1 :]))))
        if is_required:
            return Either(tuple(firsts))
    return Either((*firsts, Literal("")))


def _following(member: Structure, is_required: bool, comma: str) -> Structure:
    following = Sequence((Literal(comma), member))
    return following if is_required else Repeat(following, 0, 1)
