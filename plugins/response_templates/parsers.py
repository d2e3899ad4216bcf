"""The parsers `response_template`: reasoning and tool calls in the form that the checkpoint's own template describes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import (
    Event,
    FormatInfo,
    Phase,
    Reasoning,
    ReasoningParser,
    SpecialText,
    Text,
    ToolCallArguments,
    ToolCallStart,
    ToolParser,
    Turn,
)
from penstock.plugins.calls.json_call import is_name
from penstock.plugins.calls.schema_values import SchemaNode, ToolSchemas, to_json
from penstock.plugins.calls.stream import new_call_id
from penstock.plugins.markers import EdgeSpace, join_pieces
from penstock.plugins.response_templates.template import (
    CALLS_FIELD,
    REASONING_FIELDS,
    Closed,
    Delimiter,
    Field,
    Opened,
    Part,
    Stretch,
    TemplateReader,
    after_anchor,
    parse_content,
    template_of,
    transformed,
)

Call = tuple[str, str]
"""A name, and arguments as JSON."""
MAX_BETWEEN = 100  # characters between two fields that pass for part of their delimiters, where the template has no field for them


class TemplateReasoning(ReasoningParser):
    """Fields that hold reasoning are reasoning, what opens and closes fields is taken out, and calls stay whole for the tool parser.

    Where the answer starts is what the prompt's tail, read by the template, leads to.
    """

    def __init__(self, turn: Turn) -> None:
        template = template_of(turn)
        reasoning = template.field(*REASONING_FIELDS)
        self.start_marker = _literal(reasoning.opening) if reasoning is not None else ""
        self.end_marker = _literal(reasoning.closing) if reasoning is not None else ""
        self._has_implicit = template.implicit is not None
        self._reader = TemplateReader(template, turn.added_tokens)
        self._space = EdgeSpace()
        self._between: list[str] | None = None  # text after a field, while another one may follow
        self._num_blocks = 0
        self._joins = ""
        self._reader.feed(after_anchor(template, turn.prompt_tail, turn.added_tokens))

    @property
    def phase(self) -> Phase:
        current = self._reader.current
        if current is not None and current.is_reasoning:
            return Phase.REASONING
        return Phase.CONTENT if self._reader.has_begun else Phase.UNDECIDED

    def feed(self, text: str) -> list[Event]:
        return self._events(self._reader.feed([text] if isinstance(text, SpecialText) else text))

    def finish(self) -> list[Event]:
        events = self._events(self._reader.finish())
        rest = self._between or []
        return events if all(piece.isspace() for piece in rest) else [*events, *map(Text, join_pieces(rest))]

    @staticmethod
    def _kind(field: Field | None) -> type[Text] | type[Reasoning]:
        return Reasoning if field is not None and field.is_reasoning else Text

    def _events(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Stretch):
                self._stretch(part, events)
                continue
            self._space.end(drops_trailing=True)
            self._between = [] if isinstance(part, Closed) and not self._has_implicit else None
            if part.field.name == CALLS_FIELD:
                events += map(Text, part.pieces)
            elif isinstance(part, Opened) and part.field.is_reasoning:
                self._joins = part.field.join if self._num_blocks else ""
                self._num_blocks += 1
        return events

    def _stretch(self, part: Stretch, events: list[Event]) -> None:
        field = part.field
        if field is None and self._between is not None:
            self._between += part.pieces
            if sum(map(len, self._between)) <= MAX_BETWEEN:
                return
            pieces, self._between = self._between, None
        else:
            pieces = part.pieces
        if field is not None and field.trims_space and field.name != CALLS_FIELD:
            pieces = self._space.take(pieces, drops_leading=True)
        kind = self._kind(field)
        if pieces and self._joins and kind is Reasoning:
            events.append(kind(self._joins))
            self._joins = ""
        events += [kind(piece) for piece in pieces]


def _literal(delimiter: Delimiter) -> str:
    # The engine writes a marker itself only where it is not a pattern.
    return delimiter.literals[0] if delimiter.literals else ""


class TemplateCalls(ToolParser):
    """A call is emitted whole when its field ends, since its meaning is not known before. A field that is no call is `Text`, unchanged."""

    tool_format = None

    def __init__(self, turn: Turn, new_id: Callable[[], str] = new_call_id) -> None:
        template = template_of(turn)
        field = None if turn.tool_choice == "none" else template.field(CALLS_FIELD)
        fields = (field,) if field is not None and field.opening else ()
        self._reader = TemplateReader(replace(template, fields=fields, implicit=None), turn.added_tokens)
        self._schemas = ToolSchemas(turn.tools)
        self._new_id = new_id
        self._num_calls = 0
        self._pieces: list[str] | None = None  # of the field that is open, with what opened it
        self._body: list[str] = []
        self._groups: dict[str, str] = {}
        self._space: list[str] | None = None  # after a call: part of the format where another one follows

    def feed(self, text: str) -> list[Event]:
        return self._events(self._reader.feed([text] if isinstance(text, SpecialText) else text))

    def finish(self) -> list[Event]:
        """A field that is not closed is a call all the same, if what was written is one."""
        events = self._events(self._reader.finish())
        if self._pieces is not None:
            self._end([], events)
        return events

    def _events(self, parts: list[Part]) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            if isinstance(part, Opened):
                self._pieces = [*(self._space or ()), *part.pieces]
                self._body = []
                self._groups = part.groups
                self._space = None
            elif isinstance(part, Closed):
                self._end(part.pieces, events)
            elif self._pieces is not None:
                self._pieces += part.pieces
                self._body += part.pieces
            else:
                self._text(part.pieces, events)
        return events

    def _text(self, pieces: list[str], events: list[Event]) -> None:
        if self._space is not None and all(piece.isspace() for piece in pieces):
            self._space += pieces
            return
        events += map(Text, join_pieces([*(self._space or ()), *pieces]))
        self._space = None

    def _end(self, closing: list[str], events: list[Event]) -> None:
        assert self._pieces is not None
        calls = self._calls("".join(self._body))
        if not calls:
            events += map(Text, join_pieces([*self._pieces, *closing]))
        for name, arguments in calls:
            events += [ToolCallStart(self._num_calls, name, self._new_id()), ToolCallArguments(self._num_calls, arguments)]
            self._num_calls += 1
        self._pieces = None
        self._space = [] if calls else None

    def _calls(self, body: str) -> list[Call]:
        """None where the template cannot make calls of it, all of it."""
        field = self._reader.template.field(CALLS_FIELD)
        assert field is not None
        try:
            value = parse_content(body, field.content, field.arguments)
            value = transformed(value, field.transform, self._groups, each=field.transforms_each)
            calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        except (ValueError, RecursionError):
            return []
        return [call for call in calls if call is not None] if None not in calls else []

    def _call(self, value: Any) -> Call | None:
        function = value.get("function", value) if isinstance(value, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(name, str) or not is_name(name):
            return None
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, dict):
            return None
        schema = self._schemas.of(name)
        return name, json.dumps(
            {key: _coerced(item, schema.member(key)) for key, item in arguments.items()}, ensure_ascii=False, allow_nan=False
        )


def _coerced(value: Any, schema: SchemaNode) -> Any:
    types = schema.types
    return json.loads(to_json(value, types)) if isinstance(value, str) and types is not None else value


REASONING_INFO = FormatInfo(
    models="any checkpoint with a `response_template` in its tokenizer config",
    markers=(),
    quirks="fields, delimiters and patterns are the checkpoint's own; without a template everything is content",
    aliases=("response-template", "hf"),
    declared_fields=REASONING_FIELDS,
)

CALLS_INFO = FormatInfo(
    models="any checkpoint with a `response_template` in its tokenizer config",
    markers=(),
    quirks="calls come out whole; strings are coerced by the tool's schema; patterns must be regular, so that no answer can make one hang",
    aliases=("response-template", "hf"),
    declared_fields=(CALLS_FIELD,),
)


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("response_template", TemplateReasoning, REASONING_INFO)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("response_template", TemplateCalls, CALLS_INFO)
