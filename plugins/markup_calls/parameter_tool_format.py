"""The envelope of tool calls that are written as named parameters in markup: one class for all of them."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Tools
from dataclasses import dataclass
from functools import partial

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.structure import Either, Marker, Repeat, Sequence, Structure
from penstock.engine.tool_format import CallableTool
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS
from penstock.plugins.markup_calls.parameter_markup import ParameterMarkup, Tag
from penstock.plugins.markup_calls.parameter_values import ParameterSchema, value_structure

_NAME = "NAME"
_TYPE = "IS_STRING"
_JSON_TYPE = "JSON_TYPE"
_UNDERSTOOD = (
    frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id", "id"}) | ANNOTATIONS
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterToolFormat:
    """`opening`, the calls with `separator` between them, `closing`; each call is `call`, its parameters, `call_end`.

    These are texts with the markers in them, as the model's own template writes them; NAME stands for the name of the tool or of the
    parameter, IS_STRING for `true` or `false`, JSON_TYPE for the name of the value's type. A parameter is `parameter`, its value with
    `around` on either side, the markup's `value_end`, and `after`. Required parameters are all there and in the schema's order, others
    may be left out, and none is added.
    """

    markup: ParameterMarkup
    opening: str
    call: str
    parameter: str
    call_end: str
    around: str = ""
    after: str = ""
    separator: str = ""
    closing: str = ""

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. There is at least one tool. Raises `UnsupportedGrammar` for arguments that cannot be written so."""
        call = Either(tuple(self._call(tool) for tool in tools))
        more = () if is_single else (Repeat(Sequence((Marker(self.separator), call))),)
        return Sequence((call, *more, *([Marker(self.closing)] if self.closing else [])))

    def _call(self, tool: CallableTool) -> Structure:
        self._check_name(tool.name, "a tool", tool.arguments.param)
        parts = [Marker(self.call.replace(_NAME, tool.name)), *self._parameters(tool), Marker(self.call_end)]
        return Sequence(tuple(parts))

    def _parameters(self, tool: CallableTool) -> list[Structure]:
        root = json.loads(tool.arguments.text)
        path = tool.arguments.param
        if not isinstance(root, Mapping):
            raise UnsupportedGrammar("the arguments' schema must be an object", path)
        for keyword in () if tool.arguments.is_lenient else root:
            if keyword not in _UNDERSTOOD and not keyword.startswith("x-"):
                raise UnsupportedGrammar(f"`{keyword}` is not supported for arguments in this model's tool calls", f"{path}.{keyword}")
        properties = root.get("properties", {})
        required = root.get("required", [])
        if not isinstance(properties, Mapping) or not isinstance(required, list):
            raise UnsupportedGrammar("`properties` must be an object and `required` an array", path)
        for name in required:
            if name not in properties:
                raise UnsupportedGrammar(f"`required` names {json.dumps(name)}, which `properties` does not describe", f"{path}.required")
        parts: list[Structure] = []
        for name, schema in properties.items():
            part = self._parameter(ParameterSchema(name, schema, root, tool.arguments))
            parts.append(part if name in required else Repeat(part, 0, 1))
        return parts

    def _parameter(self, parameter: ParameterSchema) -> Structure:
        self._check_name(parameter.name, "a property", parameter.path)
        head = self.parameter.replace(_TYPE, "true" if parameter.is_text else "false").replace(_JSON_TYPE, _json_type(parameter))
        head = head.replace(_NAME, parameter.name)
        markup = self.markup
        tag = Tag(parameter.name, parameter.is_text if _TYPE in self.parameter or _JSON_TYPE in self.parameter else None)
        new_value = partial(markup.new_value, parameter.types, tag)
        if markup.literal and parameter.is_text:
            text = value_structure(parameter, new_value, end=markup.literal_end, around=self.around)
            value: Structure = Sequence((Marker(markup.literal), text, Marker(markup.value_end)))
        else:
            value = value_structure(parameter, new_value, end=markup.value_end, inner_ends=markup.implied_ends, around=self.around)
        return Sequence((Marker(head), value, *([Marker(self.after)] if self.after else [])))

    def _check_name(self, name: str, what: str, path: str) -> None:
        if not self.markup.can_write(name):
            raise UnsupportedGrammar(f"{what} of this name, {json.dumps(name)}, cannot be written in this model's tool calls", path)


def _json_type(parameter: ParameterSchema) -> str:
    """As the format calls it; where there are several, one that is not written as a string is."""
    types = parameter.types or frozenset()
    if parameter.is_text:
        return "string"
    return "object" if len(types) != 1 else "number" if types <= {"integer", "number"} else next(iter(types))
