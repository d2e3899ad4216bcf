"""Python calls as a grammar: keywords in the order of the schema, and JSON for the values, which the parser takes for literals too."""

import json
from collections.abc import Sequence as Tools
from dataclasses import dataclass, replace
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.structure import Either, Literal, Repeat, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool
from penstock.plugins.expression_calls.arguments_document import arguments_document
from penstock.plugins.expression_calls.keyword_list import keyword_list
from penstock.plugins.expression_calls.python_call import KEY, NAME

MAX_PROPERTIES = 200
DEFINITIONS = ("$defs", "definitions")
KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "title", "description", "$schema", "$id", *DEFINITIONS})


@dataclass(frozen=True, slots=True)
class PythonToolFormat:
    """`opening`, the calls with `separator` between them, `closing`."""

    opening: str
    before: tuple[Structure, ...] = ()
    separator: tuple[Structure, ...] = (Literal(", "),)
    closing: tuple[Structure, ...] = (Literal("]"),)

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. Raises `UnsupportedGrammar` for a strict tool whose arguments are not a plain list of properties."""
        call = Either(tuple(map(_call, tools)))
        more = () if is_single else (Repeat(Sequence((*self.separator, call))),)
        return Sequence((*self.before, call, *more, *self.closing))


def _call(tool: CallableTool) -> Structure:
    schema = arguments_document(tool)
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if len(properties) > MAX_PROPERTIES:
        raise UnsupportedGrammar(f"`{tool.name}` has more than {MAX_PROPERTIES} parameters", tool.arguments.param)
    if not all(map(KEY.fullmatch, properties)) or not NAME.fullmatch(tool.name):
        raise UnsupportedGrammar(f"`{tool.name}` or one of its parameters has a name that Python has no notation for", tool.arguments.param)
    unknown = [keyword for keyword in schema if keyword not in KNOWN] + [name for name in required if name not in properties]
    if unknown and not tool.arguments.is_lenient:
        raise UnsupportedGrammar(f"calls in Python's notation cannot be held to {unknown[0]!r}", tool.arguments.param)
    definitions = {keyword: schema[keyword] for keyword in DEFINITIONS if keyword in schema}
    arguments = [(_argument(tool, name, properties[name], definitions), name in required) for name in properties]
    return Sequence((Literal(f"{tool.name}("), keyword_list(arguments, ", "), Literal(")")))


def _argument(tool: CallableTool, name: str, schema: Any, definitions: dict[str, Any]) -> Structure:
    text = json.dumps(schema | definitions if isinstance(schema, dict) else schema)
    spec = replace(tool.arguments, text=text, param=f"{tool.arguments.param}.properties.{name}")
    return Sequence((Literal(f"{name}="), Value(spec)))
