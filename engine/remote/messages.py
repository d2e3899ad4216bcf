"""What an API server's process and the engine's say to each other: msgpack frames over a socket, and the objects that travel in them."""

import asyncio
import dataclasses
import socket
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from penstock.engine import errors
from penstock.engine.contracts import structure
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import Event, Preamble, Reasoning, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import ClientFault, ExactDraws, FinishReason, GrammarFault, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import PenstockError
from penstock.engine.kv_cache.blocks import Retention

LENGTH_BYTES = 4  # before each frame, little-endian
READ_LIMIT = 2**20  # bytes that are read from the socket before they are asked for

T = TypeVar("T")


class Message(Struct, array_like=True, tag=True):
    """One of the messages in a frame. `call` numbers a question, which a `Reply` with the same number answers."""


class WireAnswer(Struct, array_like=True):
    """How the engine reads a request's text: `AnswerFactory` without what both processes have.

    `turn` is without the tokenizer's part, in JSON: tools may hold integers that are too large for MessagePack.
    """

    has_reasoning: bool
    has_tools: bool
    turn: bytes
    call_limits: tuple[int | None, int | None, str | None]


class WireRequest(Struct, array_like=True):
    """A request, with the name of its adapter. Without `answer` the engine does not read its text.

    `grammar` is what a `Compile` of this connection has given, and so is `call_grammar`.
    `params` and `beam` are the fields that differ from their defaults, `logits_processors` are names and arguments, these in JSON.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: dict[str, Any]
    answer: WireAnswer | None
    grammar: int | None
    logits_processors: list[tuple[str, bytes]]
    priority: int
    cache_salt: str
    client_id: int | str | None
    deadline: float | None
    beam: dict[str, Any] | None
    bad_sequences: tuple[tuple[int, ...], ...]
    stop_sequences: tuple[tuple[int, ...], ...]
    retention: Retention | None = None
    prediction: list[int] = []
    adapter: str | None = None
    exact: bool = False
    preamble: tuple[int, tuple[int, ...], str | None, bool] | None = None
    measures_pressure: bool = False
    http_id: str | None = None
    call_grammar: int | None = None
    call_opening: str | None = None
    ends_within: bool = False


class Add(Message):
    """Begins a stream. Its sequences are numbered from `first` on, in all streams of the connection."""

    first: int
    request: WireRequest


class EndSequence(Message):
    """The text of one sequence of the stream that begins with `first` has ended with its first `num_tokens`."""

    first: int
    index: int
    num_tokens: int


class Close(Message):
    """Ends the stream that begins with this sequence, and aborts what is left of it."""

    first: int


class Compile(Message):
    call: int
    spec: Any
    backend: str | None
    client: str | None


class Forget(Message):
    """The grammar is not used any more, or its compilation not waited for."""

    grammar: int


class Merge(Message):
    """Asks for the metrics of all processes; `report` are this one's."""

    call: int
    report: bytes


class Report(Message):
    """The metrics of this process, which `ReportWanted` has asked for."""

    report: bytes


class Ready(Message):
    """The server listens."""


class WireError(Struct, array_like=True):
    """An exception. `kind` is its name in `engine.errors`."""

    kind: str
    message: str
    param: str | None = None
    retry_after: int = 1


class Refused(Message):
    """The stream that begins with this sequence has not been opened."""

    first: int
    error: WireError


class Reply(Message):
    call: int
    value: Any
    error: WireError | None = None


class State(Message):
    """What of the engine's state requests depend on. `refusal` is what `check_admission` raises."""

    is_healthy: bool
    refusal: WireError | None


class ReportWanted(Message):
    """Asks for a `Report`."""


class Drain(Message):
    """The server is to take no more requests, and to end once it has answered those that it has, or after `seconds`."""

    seconds: float


class SetLogLevel(Message):
    """The server is to log this level and those above it."""

    level: str


class Hello(Message):
    """The first message: what is known of the model once it has been loaded. `default_sampling` holds where requests say nothing."""

    directory: str
    max_model_len: int
    vocab_size: int
    stop_token_ids: frozenset[int]
    default_sampling: dict[str, Any] = {}


class WirePrompt(Struct, array_like=True):
    """`PromptInfo` without model outputs."""

    num_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...] | None
    queue_seconds: float
    prefill_seconds: float


class WireDelta(Struct, array_like=True):
    """A `SequenceDelta`, or the first two of these fields where the others have their defaults, as for most tokens of a stream."""

    number: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_reasoning_tokens: int = 0
    logprobs: list[TokenLogprobs] = []
    prompt: WirePrompt | None = None
    events: list[tuple[Any, ...]] = []
    error: tuple[str, str] | None = None
    cumulative_logprob: float | None = None
    beam_score: float | None = None
    num_predicted: int = 0
    num_predicted_right: int = 0
    exact: ExactDraws | None = None
    num_preamble_tokens: int = 0
    pressures: list[tuple[int, float]] = []
    is_closed: bool | None = None


class Deltas(Message):
    deltas: list[WireDelta]


FromServer = Add | EndSequence | Close | Compile | Forget | Merge | Report | Ready
FromEngine = Deltas | Refused | Reply | State | ReportWanted | Drain | SetLogLevel | Hello

encode = msgspec.msgpack.Encoder().encode
_ARRAY = b"\xdd"  # begins an array in MessagePack, with its length in the next four bytes


class Channel:
    """One end of a connection: frames of messages in each direction. What is sent within one turn of the loop goes into one frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, received: Any) -> None:
        """`received` is the type of the messages that come in."""
        self._reader = reader
        self._writer = writer
        self._decode = msgspec.msgpack.Decoder(list[received]).decode
        self._outbox: list[bytes] = []
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def over(cls, connected: socket.socket, received: Any) -> "Channel":
        """The end that this socket is."""
        reader, writer = await asyncio.open_unix_connection(sock=connected, limit=READ_LIMIT)
        return cls(reader, writer, received)

    def send(self, message: Any) -> None:
        """Raises `OverflowError` or `TypeError` for what cannot be encoded. Of messages after the connection has ended, nothing is kept."""
        encoded = encode(message)
        if not self._outbox:
            self._loop.call_soon(self.flush)
        self._outbox.append(encoded)

    def flush(self) -> None:
        if not self._outbox:
            return
        frame = b"".join((_ARRAY, len(self._outbox).to_bytes(4, "big"), *self._outbox))
        self._outbox.clear()
        if not self._writer.is_closing():
            self._writer.write(len(frame).to_bytes(LENGTH_BYTES, "little") + frame)

    async def receive(self) -> list[Any] | None:
        """The messages of the next frame; None at the connection's end."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
            return self._decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def close(self) -> None:
        self.flush()
        self._writer.close()


def error_to_wire(error: BaseException) -> WireError:
    """Exceptions of other types than the engine's arrive as a `RuntimeError` that says which."""
    if not isinstance(error, PenstockError):
        return WireError("RuntimeError", f"{type(error).__name__} in the engine's process: {error}")
    return WireError(type(error).__name__, str(error), getattr(error, "param", None), getattr(error, "retry_after", 1))


def error_from_wire(wire: WireError) -> Exception:
    """The same exception anew."""
    kind = getattr(errors, wire.kind, RuntimeError)
    if issubclass(kind, errors.InvalidRequest):
        return kind(wire.message, wire.param)
    if issubclass(kind, errors.QueueFull | errors.EngineUnavailable):
        return kind(wire.message, wire.retry_after)
    raised: Exception = kind(wire.message)
    return raised


_EVENTS = {kind.__name__: kind for kind in (Text, Reasoning, ToolCallStart, ToolCallArguments, Preamble)}
_FAULTS: dict[str, type[str]] = {kind.__name__: kind for kind in (str, ClientFault, GrammarFault)}


def prompt_to_wire(prompt: PromptInfo) -> WirePrompt:
    return WirePrompt(prompt.num_tokens, prompt.num_cached_tokens, prompt.logprobs, prompt.queue_seconds, prompt.prefill_seconds)


def prompt_from_wire(wire: WirePrompt) -> PromptInfo:
    return PromptInfo(wire.num_tokens, wire.num_cached_tokens, wire.logprobs, wire.queue_seconds, wire.prefill_seconds)


def delta_to_wire(number: int, delta: SequenceDelta) -> WireDelta:
    """All but `beams`, which no client is shown."""
    prompt = delta.prompt
    return WireDelta(
        number,
        delta.token_ids,
        delta.finish_reason,
        delta.stop_reason,
        delta.num_reasoning_tokens,
        delta.logprobs,
        None if prompt is None else prompt_to_wire(prompt),
        [(type(event).__name__, *dataclasses.astuple(event)) for event in delta.events],
        None if delta.error is None else (type(delta.error).__name__, str(delta.error)),
        delta.cumulative_logprob,
        delta.beam_score,
        delta.num_predicted,
        delta.num_predicted_right,
        delta.exact,
        delta.num_preamble_tokens,
        delta.pressures,
        delta.is_closed,
    )


def delta_from_wire(index: int, wire: WireDelta) -> SequenceDelta:
    prompt = wire.prompt
    return SequenceDelta(
        index,
        wire.token_ids,
        [_event(*event) for event in wire.events],
        wire.logprobs,
        wire.finish_reason,
        wire.stop_reason,
        None if prompt is None else prompt_from_wire(prompt),
        wire.num_reasoning_tokens,
        wire.num_preamble_tokens,
        wire.num_predicted,
        wire.num_predicted_right,
        wire.pressures,
        wire.is_closed,
        None if wire.error is None else _FAULTS.get(wire.error[0], str)(wire.error[1]),
        cumulative_logprob=wire.cumulative_logprob,
        beam_score=wire.beam_score,
        exact=wire.exact,
    )


def _event(kind: str, *fields: Any) -> Event:
    event: Event = _EVENTS[kind](*fields)
    return event


_STRUCTURES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        GrammarSpec,
        structure.Literal,
        structure.Marker,
        structure.FreeText,
        structure.TextUntil,
        structure.Value,
        structure.Sequence,
        structure.Either,
        structure.Repeat,
    )
}


def spec_to_wire(value: Any) -> Any:
    """A constraint, or a part of one: a dataclass as {its name: its fields}, all else as it is."""
    if isinstance(value, tuple):
        return [spec_to_wire(item) for item in value]
    name = type(value).__name__
    if name in _STRUCTURES:
        return {name: [spec_to_wire(getattr(value, field.name)) for field in dataclasses.fields(value)]}
    return value


def spec_from_wire(wire: Any) -> Any:
    if isinstance(wire, list):
        return tuple(map(spec_from_wire, wire))
    if not isinstance(wire, dict):
        return wire
    [(name, fields)] = wire.items()
    if name == "GrammarSpec":
        return GrammarSpec(GrammarKind(fields[0]), *map(spec_from_wire, fields[1:]))
    return _STRUCTURES[name](*map(spec_from_wire, fields))


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass that differ from their defaults, of which each has one."""
    plain = type(value)()
    return {
        field.name: getattr(value, field.name)
        for field in dataclasses.fields(value)
        if getattr(value, field.name) != getattr(plain, field.name)
    }
