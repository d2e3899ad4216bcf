"""Reasoning as the checkpoint's own `response_template` describes it."""

from penstock.engine.contracts.parsing import Event, FormatInfo, Phase, Reasoning, ReasoningParser, SpecialText, Text, Turn
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
    template_of,
)

MAX_BETWEEN = 100
"""Characters between two fields that pass for part of their delimiters, where the template has no field for them."""


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
    """The engine writes a marker itself only where it is not a pattern."""
    return delimiter.literals[0] if delimiter.literals else ""


TEMPLATE_INFO = FormatInfo(
    models="any checkpoint with a `response_template` in its tokenizer config",
    markers=(),
    quirks="fields, delimiters and patterns are the checkpoint's own; without a template everything is content",
    aliases=("response-template", "hf"),
    declared_fields=REASONING_FIELDS,
)
