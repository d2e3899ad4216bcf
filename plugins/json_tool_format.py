"""The envelope of tool calls that are written as JSON objects, `{"name": …, "arguments": …}`: one class for all of them."""

import json
from collections.abc import Sequence as Tools
from dataclasses import dataclass

from penstock.engine.structure import Either, Literal, Repeat, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool


@dataclass(frozen=True, slots=True)
class JsonToolFormat:
    """`opening`, the calls with `separator` between them, `closing`; each call is `before`, the object, `after`.

    Each of these is a part, or several: a `Marker` where the parser looks for an added token, a `Literal` where it is plain text. The first
    `before` follows `opening`, which is not part of it; so where every call has an opening of its own, it belongs to `separator`.
    `name_key` and `arguments_key` are the object's. `{"name": "f", "arguments": ` is written as `json.dumps` does it, for which models are
    trained; white space inside the arguments is as their own constraint allows it.
    """

    opening: str
    before: tuple[Structure, ...] = ()
    after: tuple[Structure, ...] = ()
    separator: tuple[Structure, ...] = ()
    closing: tuple[Structure, ...] = ()
    name_key: str = "name"
    arguments_key: str = "arguments"

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. There is at least one tool."""
        call = Sequence((*self.before, Either(tuple(self._object(tool) for tool in tools)), *self.after))
        more = () if is_single else (Repeat(Sequence((*self.separator, call))),)
        return Sequence((call, *more, *self.closing))

    def _object(self, tool: CallableTool) -> Structure:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = f"{{{json.dumps(self.name_key)}: {name}, {json.dumps(self.arguments_key)}: "
        return Sequence((Literal(head), Value(tool.arguments), Literal("}")))
