"""Gemma's notation as a grammar: members in the order of the schema, strings between delimiters, everything else as JSON writes it."""

import json
from collections.abc import Sequence as Tools
from dataclasses import dataclass
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.structure import Either, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.tool_format import CallableTool
from penstock.plugins.expression_calls.arguments_document import arguments_document
from penstock.plugins.expression_calls.keyword_list import keyword_list
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.plugins.grammars.json_schema.values import json_type

MAX_DEPTH = 16
MAX_VALUES = 300
"""Of one tool, with references followed: what refers to itself several times would grow without end."""

_NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$schema", "$id", "$defs", "definitions", "nullable"})
_KNOWN = {
    **dict.fromkeys(("string", "integer", "number", "boolean", "null"), frozenset({"type"})),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": frozenset({"type", "properties", "required", "additionalProperties"}),
}
_SPELLINGS = {"boolean": ("true", "false"), "null": ("null",)}
_NUMBERS = {"integer": r"-?(0|[1-9][0-9]{0,18})", "number": r"-?(0|[1-9][0-9]{0,15})(\.[0-9]{1,15})?"}
_ANY = ("string", "number", "boolean", "null")
_MARKS = frozenset(":,{}[]")


@dataclass(frozen=True, slots=True)
class NotationToolFormat:
    """`opening`, `call:NAME{…}`, `closing`, for each call anew."""

    opening: str
    closing: str
    delimiter: str

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. Raises `UnsupportedGrammar` for schemas that the notation cannot be held to."""
        call = Sequence((Either(tuple(map(self._call, tools))), Marker(self.closing)))
        return call if is_single else Sequence((call, Repeat(Sequence((Marker(self.opening), call)))))

    def _call(self, tool: CallableTool) -> Structure:
        writer = _ValueWriter(tool, self.delimiter)
        return Sequence((Literal(f"call:{tool.name}"), writer.object(writer.root, 0)))


class _ValueWriter:
    """Structures for the values of one tool's schema."""

    def __init__(self, tool: CallableTool, delimiter: str) -> None:
        self.root = arguments_document(tool)
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
        return Sequence((Literal("{"), keyword_list(members, ","), Literal("}")))

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
        unknown = sorted(schema.keys() - _KNOWN[kind] - _NOTES) if isinstance(schema.get("type", kind), str) else []
        if unknown and not self._tool.arguments.is_lenient:
            raise self._refusal(f"`{unknown[0]}`")

    def _refusal(self, what: str) -> UnsupportedGrammar:
        return UnsupportedGrammar(f"calls in this model's notation cannot be held to {what}", self._tool.arguments.param)
