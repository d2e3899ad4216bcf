"""Functionary 3.2: a line `>>>NAME` before the arguments of each call, and `>>>all` before text."""

from penstock.engine.events import Event, Text
from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import ToolParser
from penstock.engine.text.answer import split_at_calls
from penstock.engine.turn import Turn
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead, JsonStream
from penstock.plugins.calls.schema_values import ToolSchemas
from penstock.plugins.markers import MarkerBuffer, read_steps

RECIPIENT, ALL = ">>>", "all\n"


class FunctionaryMessages(ToolParser):
    """Functionary 3.2: messages, each with a line that names its recipient. The prompt has opened the first one.

    A line that names neither an offered tool nor `all` is text.
    """

    tool_format = None  # of a form that calls at the very start of an answer, which no format can say

    def __init__(self, turn: Turn) -> None:
        offered = ToolSchemas(turn.tools)
        envelope = CallEnvelope(openings=(RECIPIENT,))
        head = CallHead({"name": {"\n": None}}, lambda fields: (fields["name"], None) if fields["name"] in offered else None)
        self._is_off = turn.tool_choice == "none"
        self._calls = JsonStream(turn, envelope, head=head)
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._names = tuple(f"{name}\n" for name in offered.names)
        self._is_at_start = True
        self._is_recipient_implied = False  # the prompt has written it, so that it is no text where no call comes of it

    @property
    def is_in_call(self) -> bool:
        """Whether the next text belongs to a call's arguments."""
        return self._calls.is_in_call

    def feed(self, text: str) -> list[Event]:
        """Reads the next piece of text, however it is cut."""
        return [event for part in split_at_calls(text) for event in read_steps(self._buffer, part, self._step)]

    def finish(self) -> list[Event]:
        """Emits the text that both hold back."""
        rest = [event for piece in self._buffer.finish() for event in self._through(piece)]
        return [*rest, *self._without_implied(self._calls.finish())]

    def _step(self, events: list[Event]) -> bool:
        if self._is_at_start:
            return self._read_first_line(events)
        pieces, marker = self._buffer.take_until(*(() if self.is_in_call else (RECIPIENT + ALL,)))
        for piece in pieces:
            events += self._through(piece)
        return marker is not None

    def _read_first_line(self, events: list[Event]) -> bool:
        start = self._buffer.take_start(ALL, *(() if self._is_off else self._names))
        if start is None:
            return False
        space, marker = start
        self._is_at_start = False
        for piece in space if marker != ALL else ():
            events += self._through(piece)
        if marker is not None and marker != ALL:
            self._is_recipient_implied = True
            events += self._through(RECIPIENT + marker)
        return True

    def _through(self, text: str) -> list[Event]:
        return self._without_implied(self._calls.feed(text))

    def _without_implied(self, events: list[Event]) -> list[Event]:
        if not events or not self._is_recipient_implied:
            return events
        self._is_recipient_implied = False
        first = events[0]
        return [Text(first.text.removeprefix(RECIPIENT)), *events[1:]] if isinstance(first, Text) else events


@hookimpl
def register_tool_parsers(register: Register) -> None:
    info = FormatInfo(
        models="Functionary 3.2",
        markers=(RECIPIENT, RECIPIENT + ALL),
        quirks="The prompt ends with `>>>`, so that an answer begins with the name of a tool or with `all`, which is taken out. "
        "So a call may be the very beginning, which no grammar here can say: `required` and strict tools are refused.",
        aliases=("functionary", "functionary-v3.2"),
        signs=(">>>${recipient}", "recipient==all"),
        prompt_tail=RECIPIENT,
        example='weather\n{"city": "Oslo"}',
    )
    register("functionary_v32", FunctionaryMessages, info)
