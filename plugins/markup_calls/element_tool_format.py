"""The envelope of tool calls whose arguments are elements, nested where objects and arrays are."""

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Tools
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.structure import Either, Marker, Repeat, Sequence, Structure
from penstock.engine.tool_format import CallableTool
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS
from penstock.plugins.markup_calls.element_value import ITEM
from penstock.plugins.markup_calls.parameter_values import ParameterSchema, value_structure
from penstock.plugins.schema_types import followed
from penstock.plugins.schema_values import TextValue

_NAME = re.compile(r"[^\s<>/\"'][^<>\n\"']*(?<!\s)")
_OBJECT = frozenset({"type", "properties", "required", "additionalProperties"}) | ANNOTATIONS
_ARRAY = frozenset({"type", "items", "minItems", "maxItems"}) | ANNOTATIONS
_ARGUMENTS = _OBJECT | {"$defs", "definitions", "$schema", "$id", "id"}
_MAX_DEPTH = 6


@dataclass(frozen=True, slots=True)
class ElementToolFormat:
    """`mark` before each tag, all calls in an element `section`. Values that nest in another way than by plain properties and items are
    written as JSON, which is read as well. Required properties are all there and in the schema's order, others may be left out.
    """

    mark: str
    section: str

    @property
    def opening(self) -> str:
        return f"{self.mark}<{self.section}>"

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. There is at least one tool. Raises `UnsupportedGrammar` for arguments that cannot be written so."""
        call = Sequence((Marker(f'\n{self.mark}<invoke name="'), Either(tuple(map(self._call, tools)))))
        more = () if is_single else (Repeat(call),)
        return Sequence((call, *more, Marker(f"\n{self.mark}</{self.section}>")))

    def _call(self, tool: CallableTool) -> Structure:
        _check_name(tool.name, tool.arguments.param)
        root = json.loads(tool.arguments.text)
        path = tool.arguments.param
        for keyword in () if tool.arguments.is_lenient or not isinstance(root, Mapping) else root:
            if keyword not in _ARGUMENTS and not keyword.startswith("x-"):
                raise UnsupportedGrammar(f"`{keyword}` is not supported for arguments in this model's tool calls", f"{path}.{keyword}")
        arguments = ParameterSchema("", root, root, replace(tool.arguments, param=path))
        return Sequence((Marker(f'{tool.name}">'), *self._members(arguments, path, 0), Marker(f"{self.mark}</invoke>")))

    def _members(self, parent: ParameterSchema, path: str, depth: int) -> list[Structure]:
        schema = parent.schema if isinstance(parent.schema, Mapping) else {}
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UnsupportedGrammar("`properties` must be an object and `required` an array", path)
        for name in required:
            if name not in properties:
                raise UnsupportedGrammar(f"`required` names {json.dumps(name)}, which `properties` does not describe", f"{path}.required")
        members: list[Structure] = []
        for name, described in properties.items():
            _check_name(name, f"{path}.properties.{name}")
            member = ParameterSchema(name, described, parent.root, replace(parent.spec, param=path))
            element = self._element(name, member, depth)
            members.append(element if name in required else Repeat(element, 0, 1))
        return members

    def _element(self, name: str, value: ParameterSchema, depth: int) -> Structure:
        """A tag, what is in it, and the tag that ends it."""
        schema: Any = followed(value.schema, value.root)
        start, end = Marker(f"{self.mark}<{name}>"), Marker(f"{self.mark}</{name}>")
        if depth < _MAX_DEPTH and isinstance(schema, Mapping) and _nests(schema, "object", _OBJECT) and schema.get("properties"):
            members = self._members(replace(value, schema=schema), value.path, depth + 1)
            return Sequence((start, *members, end))
        if (
            depth < _MAX_DEPTH
            and isinstance(schema, Mapping)
            and _nests(schema, "array", _ARRAY)
            and isinstance(schema.get("items"), Mapping)
        ):
            item = self._element(ITEM, replace(value, name=f"{value.name}.items", schema=schema["items"]), depth + 1)
            return Sequence((start, Repeat(item, schema.get("minItems", 0), schema.get("maxItems")), end))
        return Sequence((start, value_structure(value, partial(TextValue, value.types), end=self.mark), Marker(f"</{name}>")))


def _nests(schema: Mapping[str, Any], kind: str, keywords: frozenset[str]) -> bool:
    return schema.get("type") == kind and all(keyword in keywords or keyword.startswith("x-") for keyword in schema)


def _check_name(name: str, path: str) -> None:
    if not _NAME.fullmatch(name) or name.split()[0] in ("invoke", "tool_call"):
        raise UnsupportedGrammar(f"the name {json.dumps(name)} cannot be written in this model's tool calls", path)
