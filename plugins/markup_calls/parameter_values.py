"""What a grammar allows as the value of a parameter in markup: such text as the parser reads as a value of the parameter's schema."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.engine.structure import Either, Literal, Marker, Sequence, Structure, TextUntil, Value
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS
from penstock.plugins.schema_types import Types, types_of
from penstock.plugins.schema_values import TextValue

_DEFINITIONS = ("$defs", "definitions")
_PLAIN = frozenset({"type", "nullable", "anyOf", "oneOf"}) | ANNOTATIONS
_WORDS: dict[str, tuple[bool | None, ...]] = {"boolean": (True, False), "null": (None,)}
_SCALARS = frozenset({"string", "null", "boolean", "integer", "number"})


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
        """A string may stand here, so that text stands for it."""
        types = self.types
        return types is None or "string" in types


def value_structure(
    parameter: ParameterSchema, new_value: Callable[[], TextValue], *, end: str, inner_ends: tuple[str, ...] = (), around: str = ""
) -> Structure:
    """The value, up to and including the marker `end`; `inner_ends` end it too, and `around` stands on either side of it.

    `new_value` gives what the parser reads it with.

    Strings are text. Where other values could stand in the same place, they are told apart by how they read, so that this has to be a plain
    string or number, `true`, `false` or `null`. Raises `UnsupportedGrammar`, with the property's path, for what cannot be enforced.
    """
    values = _given_values(parameter)
    if not parameter.is_text and values is None:
        return Sequence((Literal(around), Value(_json_spec(parameter)), Literal(around), Marker(end)))
    if values is not None:
        texts = [text for text in _readable(values, new_value, around) if not any(marker in text for marker in (end, *inner_ends))]
        if not texts:
            raise UnsupportedGrammar("none of these values can be written in this model's tool calls", f"{parameter.path}.enum")
        return Sequence((Literal(around), Either(tuple(map(Literal, texts))), Literal(around), Marker(end)))
    if not parameter.spec.is_lenient:
        _check_plain(parameter)
    return Sequence((Literal(around), TextUntil(end, inner_ends)))


def _json_spec(parameter: ParameterSchema) -> GrammarSpec:
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
                    f"`{keyword}` is not supported where a string may stand in this model's tool calls", f"{path}.{keyword}"
                )
            if keyword in ("anyOf", "oneOf") and isinstance(schema[keyword], list):
                pending += [(branch, f"{path}.{keyword}[{place}]") for place, branch in enumerate(schema[keyword])]
