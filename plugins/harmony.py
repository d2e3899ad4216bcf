"""gpt-oss's format: messages with a header that names their channel and recipient, `<|start|>assistant<|channel|>final<|message|>`.

Tool calls are messages to `functions.NAME`, each with a JSON object.
"""

from collections.abc import Callable, Iterable

from penstock.engine.contracts.hooks import Register, hookimpl
from penstock.engine.contracts.parsing import (
    CallableTool,
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
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, Value
from penstock.plugins.calls.stream import new_call_id
from penstock.plugins.json.repair import JsonRepair
from penstock.plugins.markers import StepBuffer, Waiting, is_cut_marker, join_pieces, split_symbols, text_into

ROLE = "<|start|>assistant"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = "to=functions."
CHANNELS = frozenset({"analysis", "commentary", "final"})

MAX_LENGTH = 600
"""Characters: a tool's name has 256 at most. What is longer is no header, however it goes on."""


class Header:
    """Collects the pieces of an open header and parses them.

    `first` is the marker that it begins with and `pieces` what has been read of it. `channel` and `recipient` are
    None if missing; a recipient here is never a function.
    """

    def __init__(self, first: str, pieces: list[str]) -> None:
        self._opening = pieces
        self._rest: list[str] = []
        self._is_opened_by_role = first == ROLE
        self.channel: str | None = None
        self.recipient: str | None = None
        self.is_valid = True
        self._is_plain = True
        self._after = first
        self._segment: list[str] = []
        self._length = 0

    @property
    def pieces(self) -> list[str]:
        return [*self._opening, *self._rest]

    @property
    def pieces_after_role(self) -> list[str]:
        """Its pieces without the role, which carries no information."""
        return self._rest if self._is_opened_by_role else self.pieces

    @property
    def is_too_long(self) -> bool:
        return self._length > MAX_LENGTH

    def add(self, pieces: list[str]) -> None:
        """Text between two markers, as it comes."""
        self._rest += pieces
        self._segment += pieces
        self._length += sum(map(len, pieces))

    def mark(self, marker: str) -> None:
        """A marker that belongs to the header: what came before it is complete."""
        self.close()
        self._rest.append(marker)
        self._after = marker

    def close(self) -> None:
        """What has come since the last marker is complete."""
        segment = "".join(self._segment)
        words = segment.split()
        self._segment.clear()
        if self._after == CHANNEL:
            self.channel = words.pop(0).lower() if words else None
            self.is_valid = self.is_valid and self.channel in CHANNELS
        is_plain = not words and not segment[-1:].isspace() and self._after in (ROLE, CHANNEL)
        self._is_plain = self._is_plain and is_plain
        for word in words:
            if word.startswith("to="):
                self.recipient = word[len("to=") :]
            elif self._after == ROLE or "<" in word:
                self.is_valid = False

    def text_if_cut(self) -> list[Event]:
        """A header that stops before its message: nothing is lost with one that says no more than the channel."""
        self.close()
        if self.is_valid and self._is_plain:
            return []
        return [Text(piece) for piece in self.pieces]

    @property
    def kind(self) -> type[Text] | type[Reasoning]:
        """The kind of its message. Messages to built-in tools are not shown."""
        if self.channel in (None, "final"):
            return Text
        is_for_user = self.recipient in (None, "user")
        return Text if self.channel == "commentary" and is_for_user else Reasoning


_BOUNDARIES = frozenset({*ENDS, "<|start|>", CHANNEL})


class HarmonyCall:
    """What is known of a call. `head` are the pieces of its header so far, which are text where it is none after all."""

    def __init__(self, head: Iterable[str] = ()) -> None:
        self.head = list(head)
        self.arguments = JsonRepair()
        self._words: list[str] = []
        self._is_named = False
        self._length = 0

    @property
    def name(self) -> str:
        """The first word, or an empty string."""
        text = "".join(self._words)
        return "" if not text or text[0].isspace() else text.split(maxsplit=1)[0]

    @property
    def is_too_long(self) -> bool:
        return self._length > MAX_LENGTH

    def add(self, pieces: list[str]) -> None:
        """Text of the header between two markers, as it comes."""
        self.head += pieces
        self._length += sum(map(len, pieces))
        if not self._is_named:
            self._words += pieces

    def mark(self, marker: str) -> None:
        """A marker that belongs to the header."""
        self.head.append(marker)
        self._is_named = True

    @property
    def is_over(self) -> bool:
        """Nothing more of the arguments comes: they are complete, or what comes makes no sense."""
        return self.arguments.is_complete or self.arguments.is_malformed

    def feed(self, text: str, position: int) -> int:
        """Reads arguments from `position`; returns where they stopped. A token that ends messages ends them too."""
        if isinstance(text, SpecialText) and text in _BOUNDARIES:
            self.arguments.is_malformed = True
            return position
        return self.arguments.feed(text, position)


ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
TO = f" {RECIPIENT}"
FILLER = "commentary"


class Harmony(ReasoningParser):
    """Reads messages: `analysis` is reasoning, `final` and `commentary` are content, `to=functions.NAME` is a call.

    Where `calls` are read, they come out as such, and one without arguments in JSON is text with its header. Elsewhere they pass as text,
    for the parser after this one: with their header, or, where a grammar holds the answer, from ` to=functions.` on, where it begins. What
    goes to other recipients is reasoning.

    The phase is REASONING until the header of the final message, or ` to=functions.`, has come: short texts to the user in between are
    content all the same. Where the request forces a call, it is over with the first message: the next one is left to the grammar.
    """

    start_marker = ANALYSIS
    phase = Phase.REASONING

    def __init__(self, turn: Turn, *, reads_calls: bool, new_id: Callable[[], str] = new_call_id) -> None:
        self._reads_calls = reads_calls
        self._new_id = new_id
        self._is_constrained = turn.is_constrained and not reads_calls
        self._is_forced = not reads_calls and turn.tool_choice not in ("auto", "none")
        self.end_marker = f"{ENDS[0]}{ROLE}" if self._is_forced else f"{ENDS[0]}{ROLE}{FINAL}"
        self._buffer = StepBuffer(turn.added_tokens)
        self._added_tokens = turn.added_tokens
        self._header = Header(ROLE, [])
        self._call = HarmonyCall()
        self._num_calls = 0
        self._is_started = False  # the call that is being read
        self._kind: type[Text] | type[Reasoning] = Text
        self._is_outside = True  # of all messages
        self._step = self._read_start
        start = turn.phase(ANALYSIS, (FINAL, f"{CHANNEL}commentary{MESSAGE}"), (*ENDS, ROLE))
        if start is not Phase.UNDECIDED:
            self._open_message(Reasoning if start is Phase.REASONING else Text)
            self.phase = start

    @property
    def is_in_call(self) -> bool:
        """From the brace that opens the arguments to the one that closes them."""
        return self._step == self._read_arguments

    def feed(self, text: str) -> list[Event]:
        self._buffer.feed(text)
        return self._buffer.run(lambda events: self._step(events))

    def finish(self) -> list[Event]:
        """An open header is text, unless it is one of ours with nothing but its end missing."""
        rest = self._buffer.finish()
        events: list[Event] = []
        if self._step == self._read_header:
            self._header.add(rest)
            return self._header.text_if_cut()
        if self._step == self._read_call_head:
            return [Text(piece) for piece in join_pieces([*self._call.head, *rest])]
        if self._step == self._read_arguments_start:
            self._start_call(events)
            self._give_out("{}", events)
            return events
        if self._step == self._read_arguments:
            if not self._is_started:
                self._start_call(events)
            self._call.arguments.stop()
            self._give_out(self._call.arguments.take(), events)
            return events
        ends = {self._read_call_end: ENDS, self._read_after_call: ()}.get(self._step)
        if self._reads_calls and ends is not None and is_cut_marker(rest, *ends):
            return []
        return [self._kind(piece) for piece in rest]

    def _read_start(self, events: list[Event]) -> None:
        # The prompt has written the role: the first text may be its recipient.
        space, marker = self._buffer.start(RECIPIENT)
        self._step = self._read_body
        if marker is None:
            events += map(Text, space)
        else:
            self._open_call([*space, marker], events)

    def _read_body(self, events: list[Event]) -> None:
        watches_calls = self._reads_calls and self._kind is Text
        marker = self._buffer.until(lambda piece: self._say(piece, events), ROLE, CHANNEL, *ENDS, *((TO,) if watches_calls else ()))
        if marker == TO:
            self._open_call([marker], events)
        else:
            self._leave(marker)

    def _say(self, piece: str, events: list[Event]) -> None:
        if self._is_outside and not piece.isspace():
            self.phase = Phase.CONTENT
        events.append(self._kind(piece))

    def _leave(self, marker: str) -> None:
        """A message is over: by its end, or because the next one begins."""
        if marker in ENDS:
            self._open_message(Text)
            self._is_outside = True
        else:
            self._open_header(marker)

    def _open_message(self, kind: type[Text] | type[Reasoning]) -> None:
        self._kind = kind
        self._is_outside = False
        self._step = self._read_body

    def _open_header(self, marker: str) -> None:
        self._header = Header(marker, join_pieces(split_symbols(marker, self._added_tokens)))
        self._step = self._read_header
        if self._is_forced and marker == ROLE:
            self.phase = Phase.CONTENT

    def _read_header(self, events: list[Event]) -> None:
        pieces, marker = self._buffer.take_until(ROLE, CHANNEL, CONSTRAIN, MESSAGE, *ENDS, TO)
        self._header.add(pieces)
        if self._header.is_too_long:
            self._give_back(events, self._header.pieces)
            self._read_on(marker, events)
        elif marker is None:
            raise Waiting
        elif marker in (CHANNEL, CONSTRAIN):
            self._header.mark(marker)
        elif marker == MESSAGE:
            self._end_header(marker, events)
        elif marker == TO:
            self._end_at_recipient(events)
        else:
            events += self._header.text_if_cut()
            self._leave(marker)

    def _read_on(self, marker: str | None, events: list[Event]) -> None:
        """After what was no header: the marker is what it would be inside a message."""
        if marker == TO and self._reads_calls:
            self._open_call([marker], events)
        elif marker in (TO, MESSAGE, CONSTRAIN):
            events.append(Text(marker))
        elif marker is not None:
            self._leave(marker)

    def _end_header(self, marker: str, events: list[Event]) -> None:
        header = self._header
        header.close()
        is_final = self._is_constrained and self.phase is Phase.CONTENT
        if not header.is_valid or (is_final and header.kind is Reasoning):
            self._give_back(events, [*header.pieces, marker])
            return
        self._open_message(header.kind)
        if header.channel in (None, "final"):
            self.phase = Phase.CONTENT
        elif header.channel == "analysis":
            self.phase = Phase.REASONING

    def _end_at_recipient(self, events: list[Event]) -> None:
        self._header.close()
        if self._header.is_valid:
            self._open_call([TO] if self._is_constrained else [*self._header.pieces_after_role, TO], events)
        else:
            self._give_back(events, self._header.pieces)
            self._read_on(TO, events)

    def _give_back(self, events: list[Event], pieces: list[str]) -> None:
        # Text that is not a header is content, and so is the text after it.
        events += map(Text, join_pieces(pieces))
        self._open_message(Text)
        self.phase = Phase.CONTENT

    def _open_call(self, head: list[str], events: list[Event]) -> None:
        self.phase = Phase.CONTENT
        self._kind = Text
        self._is_outside = False
        if self._reads_calls:
            self._call = HarmonyCall(head)
            self._is_started = False
            self._step = self._read_call_head
        else:
            events += map(Text, join_pieces(head))
            self._step = self._pass_call_head

    def _pass_call_head(self, events: list[Event]) -> None:
        self._pass(MESSAGE, ROLE, events)

    def _pass_call_body(self, events: list[Event]) -> None:
        self._pass(ROLE, CHANNEL, events)

    def _pass(self, first: str, second: str, events: list[Event]) -> None:
        marker = self._buffer.until(text_into(events), first, second, *ENDS)
        if marker == MESSAGE or marker in ENDS:
            events.append(Text(marker))
            self._step = self._pass_call_body if marker == MESSAGE else self._read_after_call
        else:
            self._open_header(marker)

    def _read_call_head(self, events: list[Event]) -> None:
        pieces, marker = self._buffer.take_until(CHANNEL, CONSTRAIN, MESSAGE, ROLE, *ENDS, TO)
        self._call.add(pieces)
        if self._call.is_too_long:
            self._give_back(events, self._call.head)
            self._read_on(marker, events)
        elif marker is None:
            raise Waiting
        elif marker in (CHANNEL, CONSTRAIN):
            self._call.mark(marker)
        elif marker == MESSAGE and self._call.name:
            self._call.mark(marker)
            self._step = self._read_arguments_start
        else:
            self._give_back(events, self._call.head)
            self._read_on(marker, events)

    def _read_arguments_start(self, events: list[Event]) -> None:
        space, marker = self._buffer.start("{", ROLE, CHANNEL, *ENDS)
        if marker is None:
            self._give_back(events, [*self._call.head, *space])
        elif marker == "{":
            self._call.head += space
            self._step = self._read_arguments
            self._feed_arguments(marker, 0, events)
        else:
            self._start_call(events)
            self._give_out("{}", events)
            self._end_call(marker)

    def _start_call(self, events: list[Event]) -> None:
        self._is_started = True
        events.append(ToolCallStart(self._num_calls, self._call.name, self._new_id()))
        self._num_calls += 1

    def _give_out(self, fragment: str, events: list[Event]) -> None:
        if fragment:
            events.append(ToolCallArguments(self._num_calls - 1, fragment))

    def _read_arguments(self, events: list[Event]) -> None:
        piece = self._buffer.next_piece()
        start = self._buffer.offset
        self._buffer.skip(self._feed_arguments(piece, start, events) - start)
        if self._call.is_over and self._is_started:
            self._step = self._read_call_end
            events += [Text(self._call.arguments.left)] if self._call.arguments.left else []
        elif self._call.is_over:
            self._give_back(events, self._call.head)

    def _feed_arguments(self, piece: str, start: int, events: list[Event]) -> int:
        """Reads on in the arguments, which make this a call once more than their first brace has come; returns where that stopped."""
        arguments = self._call.arguments
        end = self._call.feed(piece, start)
        if end > start and not self._is_started:
            self._call.head.append(piece if isinstance(piece, SpecialText) else piece[start:end])
        if arguments.is_begun and not self._is_started:
            self._start_call(events)
        if self._is_started:
            if arguments.is_malformed:
                arguments.close()
            self._give_out(arguments.take(), events)
        return end

    def _read_call_end(self, events: list[Event]) -> None:
        space, marker = self._buffer.start(ROLE, CHANNEL, *ENDS)
        if marker is None:
            events += map(Text, space)
            self._open_message(Text)
        else:
            self._end_call(marker)

    def _end_call(self, marker: str) -> None:
        self._leave(marker)
        if marker in ENDS:
            self._step = self._read_after_call

    def _read_after_call(self, events: list[Event]) -> None:
        # Between two calls the model at times writes the name of their channel without its marker.
        space, marker = self._buffer.start(FILLER + CHANNEL, FILLER + ROLE, RECIPIENT)
        self._open_message(Text)
        self._is_outside = True
        if marker is None:
            events += map(Text, space)
        elif marker == RECIPIENT:
            self._open_call([*space, marker], events)
        else:
            self._open_header(marker.removeprefix(FILLER))


HEADERS = (
    (Literal(" "), Marker(CONSTRAIN), Literal("json"), Marker(MESSAGE)),
    (Marker(CHANNEL), Literal("commentary "), Marker(CONSTRAIN), Literal("json"), Marker(MESSAGE)),
    (Marker(CHANNEL), Literal("commentary json"), Marker(MESSAGE)),
)


class HarmonyToolFormat:
    """` to=functions.NAME`, what else the header says, and the arguments. A call that is the last one has no end but the answer's."""

    opening = TO

    def calls(self, tools: Iterable[CallableTool], *, is_single: bool) -> Structure:
        call = Either(tuple(self._call(tool, header) for tool in tools for header in HEADERS))
        separator = (Marker(ENDS[0]), Marker(ROLE), Literal(TO))
        return call if is_single else Sequence((call, Repeat(Sequence((*separator, call)))))

    def _call(self, tool: CallableTool, header: tuple[Structure, ...]) -> Structure:
        return Sequence((Literal(tool.name), *header, Value(tool.arguments)))


class HarmonyCalls(ToolParser):
    """Reads whole answers as well as what the reasoning parser leaves of them. With `tool_choice: none`, all is text."""

    tool_format = HarmonyToolFormat()

    def __init__(self, turn: Turn) -> None:
        self._harmony = None if turn.tool_choice == "none" else Harmony(turn, reads_calls=True)

    @property
    def is_in_call(self) -> bool:
        return self._harmony is not None and self._harmony.is_in_call

    def feed(self, text: str) -> list[Event]:
        if self._harmony is None:
            return [Text(text)] if text else []
        return self._harmony.feed(text)

    def finish(self) -> list[Event]:
        return [] if self._harmony is None else self._harmony.finish()


INFO = FormatInfo(
    models="gpt-oss",
    markers=(CHANNEL, TO, CONSTRAIN, MESSAGE, *ENDS, ROLE),
    quirks="the recipient precedes or follows the channel; one call per message; alone, it reads `analysis` as reasoning",
    aliases=("gpt-oss", "gpt_oss", "gptoss", "openai_gptoss", "harmony"),
    signs=(CHANNEL, MESSAGE, "functions."),
    prompt_tail=ROLE,
    example=f'{CHANNEL}commentary to=functions.weather {CONSTRAIN}json{MESSAGE}{{"city": "Oslo"}}<|call|>',
)


@hookimpl
def register_tool_parsers(register: Register) -> None:
    register("openai", HarmonyCalls, INFO)
