"""Formats whose calls are JSON: an object with a name and arguments, or the arguments after a name between markers."""

import json
import re
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Tools
from dataclasses import dataclass, replace
from functools import cached_property, partial

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, Turn
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, Value
from penstock.plugins.calls.json_call import USUAL_KEYS, CallKeys, JsonCall
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead, JsonStream
from penstock.plugins.calls.schema_values import ToolSchemas
from penstock.plugins.calls.stream import SLOT, CallFormat, new_call_id, tags_of

_BETWEEN = "between"  # a field of a head that says nothing


@dataclass(frozen=True, kw_only=True)
class JsonFormat(CallFormat):
    """`block` encloses all calls, with `separator` between them; each of them is a `call`. All three are written as in the model's own
    template, white space included.

    Slots are `{calls}` in `block`, and in `call` either `{object}`, the whole object with these `keys`, or its parts: `{arguments}`, before
    them `{name}`, or `{quoted_name}` as JSON, and perhaps `{id}`, which `id_pattern` describes. The object is written as by `json.dumps`,
    for which models are trained; white space inside the arguments is as their own constraint allows it.

    The parser's markers are derived from these: the last marker before a call opens it, earlier ones are sections, markers after it close
    it, and markers between its name and its arguments end the fields of its head. An `envelope` and a `head` are given if more is read
    than is written. Markers that are not spelled as tags are given, as `plain_markers` if docs/parsers.md does not name them.

    With `may_be_array`, or a bracket in `block`, one call or an array may follow an opening. `trigger` is the text at which a
    grammar takes over, by default the first marker. With `is_offered_only`, calls of other tools are content; with
    `may_repeat_name`, an offered tool's name may precede the opening too.
    """

    call: str = "{object}"
    block: str = "{calls}"
    separator: str = ""
    keys: CallKeys = USUAL_KEYS
    plain_markers: tuple[str, ...] = ()
    id_pattern: str = "0|[1-9][0-9]{0,3}"
    trigger: str = ""
    envelope: CallEnvelope | None = None
    head: CallHead | None = None
    may_be_array: bool = False
    is_offered_only: bool = False
    may_repeat_name: bool = False
    new_id: Callable[[], str] = new_call_id

    def __call__(self, turn: Turn) -> JsonStream:
        offered = ToolSchemas(turn.tools) if self.is_offered_only else None
        envelope = self._read_envelope
        if self.may_repeat_name:
            named = (f"{name}{opening}" for name in ToolSchemas(turn.tools).names for opening in envelope.openings)
            envelope = replace(envelope, openings=(*envelope.openings, *named))
        return JsonStream(
            turn, envelope, self.tool_format, call=partial(JsonCall, self.keys, offered), head=self._read_head, new_id=self.new_id
        )

    # What is read

    @cached_property
    def _marks(self) -> tuple[str, ...]:
        return (*self.all_markers, *self.plain_markers)

    def __post_init__(self) -> None:
        slots = {*SLOT.findall(self.call)}
        if slots not in ({"object"}, *({"arguments", name, *more} for name in ("name", "quoted_name") for more in ((), ("id",)))):
            raise ValueError(f"the call of the declared format {self.name!r} has to hold {{object}}, or {{name}} and {{arguments}}")

    @cached_property
    def _template(self) -> list[str]:
        """One call in its block, split into slots, markers and the text between them."""
        return self._split(self.block.replace("{calls}", self.call))

    def _split(self, text: str) -> list[str]:
        marks = "|".join(map(re.escape, sorted(self._marks, key=len, reverse=True)))
        return [piece for piece in re.split(rf"(\{{\w+\}}|{marks})", text) if piece]

    @cached_property
    def _first_text(self) -> int:
        """Where in the template the markers that begin a call end."""
        return next(place for place, piece in enumerate(self._template) if piece not in self._marks and not piece.isspace())

    @cached_property
    def _read_envelope(self) -> CallEnvelope:
        if self.envelope is not None:
            return self.envelope
        starts = [piece for piece in self._template[: self._first_text] if piece in self._marks]
        if not starts:
            raise ValueError(f"the declared format {self.name!r} has no marker before its calls: spell one as a tag, or give `markers`")
        *sections, opening = starts
        last_slot = max(place for place, piece in enumerate(self._template) if SLOT.fullmatch(piece))
        closings = tuple(piece for piece in self._template[last_slot:] if piece in self._marks)
        is_array = self.block.partition("{calls}")[0].rstrip().endswith("[")
        following = () if is_array or opening in self.call else ("{",)
        return CallEnvelope(
            sections=tuple(sections),
            openings=(opening,),
            closings=closings,
            following=following,
            may_be_array=is_array or self.may_be_array,
        )

    @cached_property
    def _read_head(self) -> CallHead | None:
        if self.head is not None or "{name}" not in self.call:
            return self.head
        ends: list[tuple[str, str]] = []  # each field and the marker that ends it
        field = _BETWEEN
        for piece in self._template[self._first_text : self._template.index("{arguments}")]:
            if piece in self._marks:
                ends.append((field, piece))
                field = _BETWEEN
            elif slot := SLOT.fullmatch(piece):
                field = slot[1]
        nexts = [*(following for following, _ in ends[1:]), None]
        return CallHead({field: {marker: following} for (field, marker), following in zip(ends, nexts, strict=True)})

    # What is written

    def written_markers(self) -> tuple[str, ...]:
        return tags_of(self.block.replace("{calls}", self.call))

    def written_example(self) -> str:
        written = {"id": "0", "name": "weather", "escaped_name": "weather", "arguments": '{"city": "Oslo"}'}
        return SLOT.sub(lambda slot: written[slot[1]], self.block.replace("{calls}", self._spelled_call))

    @cached_property
    def opening(self) -> str:
        return self.trigger or self._template[0]

    @property
    def _spelled_call(self) -> str:
        """The call with its object spelled out, and its name between quotes that belong to the template."""
        keys = self.keys
        members = f"{json.dumps(keys.name)}: {{quoted_name}}, {json.dumps(keys.arguments[0])}" if keys.name else "{quoted_name}"
        return self.call.replace("{object}", f"{{{members}: {{arguments}}}}").replace("{quoted_name}", '"{escaped_name}"')

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        before, _, after = self.block.partition("{calls}")
        first = self._call(tools, before, taken=self.opening)
        more = () if is_single else (Repeat(self._call(tools, self.separator)),)
        return Sequence((first, *more, *self._parts(after)))

    def _call(self, tools: Tools[CallableTool], before: str, taken: str = "") -> Structure:
        """`before` and one call, without what is `taken` of its beginning."""
        call = self._spelled_call
        start = re.search(r"\{(escaped_)?name\}", call)
        assert start is not None
        lead = before + call[: start.start()]
        assert lead.startswith(taken[: len(lead)])
        end = call.index("{arguments}") + len("{arguments}")
        arms = (Sequence(self._parts(call[start.start() : end], tool, taken[len(lead) :])) for tool in tools)
        return Sequence((*self._parts(lead[len(taken) :]), Either(tuple(arms)), *self._parts(call[end:])))

    def _parts(self, text: str, tool: CallableTool | None = None, taken: str = "") -> tuple[Structure, ...]:
        """A part of the templates with its slots filled in, neighbouring text joined, and without what is `taken` of its beginning."""
        parts: list[Structure] = []
        for part in self._written(text, tool):
            last = parts[-1] if parts else None
            if isinstance(part, Literal) and isinstance(last, Literal):
                parts[-1] = Literal(last.text + part.text)
            else:
                parts.append(part)
        if taken:
            first = parts[0]
            assert isinstance(first, Literal)
            parts[0] = Literal(first.text.removeprefix(taken))
        return tuple(parts)

    def _written(self, text: str, tool: CallableTool | None) -> Iterator[Structure]:
        for piece in self._split(text):
            if piece in self._marks:
                yield Marker(piece)
            elif piece == "{id}":
                yield Value(GrammarSpec(GrammarKind.REGEX, self.id_pattern, "tools"))
            elif tool is None or not SLOT.fullmatch(piece):
                yield Literal(piece)
            elif piece == "{arguments}":
                yield Value(tool.arguments)
            else:
                yield Literal(tool.name if piece == "{name}" else json.dumps(tool.name, ensure_ascii=False)[1:-1])
