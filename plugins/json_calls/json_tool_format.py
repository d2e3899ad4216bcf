"""The envelope of tool calls that are written in JSON, most as objects, `{"name": …, "arguments": …}`: one class for all of them."""

import json
from collections.abc import Callable
from collections.abc import Sequence as Tools
from dataclasses import dataclass

from penstock.engine.structure import Either, Literal, Repeat, Sequence, Structure, Value
from penstock.engine.tool_format import CallableTool


@dataclass(frozen=True, slots=True)
class JsonToolFormat:
    """`opening`, `leading`, the calls with `separator` between them, `closing`; each call is `before`, the object, `after`.

    Each of these is a part, or several: a `Marker` where the parser looks for an added token, a `Literal` where it is plain text. The first
    `before` follows `opening`, which is not part of it; so where every call has an opening of its own, it belongs to `separator`.
    `name_key` and `arguments_key` are the object's; without `name_key`, its one key is the name. `{"name": "f", "arguments": ` is written
    as `json.dumps` does it, for which models are trained; white space inside the arguments is as their own constraint allows it.

    Where calls are no such objects, `call` writes one. `opened` is how much of each object stands before it already: at the end of
    `opening` and of `separator`.
    """

    opening: str
    before: tuple[Structure, ...] = ()
    after: tuple[Structure, ...] = ()
    separator: tuple[Structure, ...] = ()
    closing: tuple[Structure, ...] = ()
    name_key: str | None = "name"
    arguments_key: str = "arguments"
    leading: tuple[Structure, ...] = ()
    call: Callable[[CallableTool], Structure] | None = None
    opened: str = ""

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        """What follows `opening`. There is at least one tool."""
        more = () if is_single else (Repeat(Sequence((*self.separator, self._one_of(tools)))),)
        return Sequence((*self.leading, self._one_of(tools), *more, *self.closing))

    def _one_of(self, tools: Tools[CallableTool]) -> Structure:
        return Sequence((*self.before, Either(tuple(map(self.call or self._object, tools))), *self.after))

    def _object(self, tool: CallableTool) -> Structure:
        name = json.dumps(tool.name, ensure_ascii=False)
        head = f"{{{json.dumps(self.name_key)}: {name}, {json.dumps(self.arguments_key)}: " if self.name_key else f"{{{name}: "
        assert head.startswith(self.opened)
        return Sequence((Literal(head[len(self.opened) :]), Value(tool.arguments), Literal("}")))
