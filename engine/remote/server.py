"""The engine's side of the connections with API servers: their requests go into the engine, and each step's tokens back in one frame."""

import asyncio
import json
import logging
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from penstock.engine.adapters.registry import AdapterRegistry
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarSpec
from penstock.engine.contracts.hooks import ReasoningParserFactory, ToolParserFactory
from penstock.engine.contracts.logits_processor import LogitsProcessor, chosen_processors
from penstock.engine.contracts.parsing import Event, Text, Turn
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import PenstockError
from penstock.engine.loop import DeltaStream
from penstock.engine.remote.messages import (
    Add,
    Channel,
    Close,
    Compile,
    Deltas,
    Drain,
    EndSequence,
    Forget,
    FromServer,
    Hello,
    Merge,
    Ready,
    Refused,
    Reply,
    Report,
    ReportWanted,
    SetLogLevel,
    State,
    WireAnswer,
    WireRequest,
    delta_to_wire,
    error_to_wire,
    spec_from_wire,
)
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.sequence_factory import token_rules
from penstock.engine.speculation.proposers import Prediction
from penstock.engine.text.answer import Answer, CallLimits, PreambleParams
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

REPORT_SECONDS = 2.0  # for a server to send its metrics: those that it sent last stand for it otherwise


class ServedEngine(Protocol):
    """The part of `Engine` that connections need."""

    @property
    def is_healthy(self) -> bool: ...

    def check_admission(self, priority: int = 0) -> None: ...

    async def open(self, stream: DeltaStream) -> None: ...

    def close(self, request_id: str) -> None: ...

    def end_sequence(self, request_id: str, index: int, num_tokens: int) -> None: ...


class ServedCompiler(Protocol):
    """The part of `GrammarCompiler` that connections need."""

    async def compile(self, spec: GrammarSpec, backend_name: str | None = None, *, client: str | None = None) -> CompiledGrammar: ...


class UnreadAnswer(Answer):
    """For a sequence whose text is read in another process: takes every token, and says nothing."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(Detokenizer(tokenizer), None, None, (), False, False)

    def plain_text(self, token_id: int) -> Text | None:
        return None

    def feed(self, token_id: int) -> list[Event]:
        return []

    def finish(self) -> list[Event]:
        return []


@dataclass(kw_only=True)
class RequestReader:
    """Makes requests of what travels, by what both processes have: tokenizer, parsers, logits processors and names of adapters."""

    tokenizer: Tokenizer
    vocab_size: int
    processors: Mapping[str, LogitsProcessor]
    reasoning_parser: ReasoningParserFactory | None = None
    tool_parser: ToolParserFactory | None = None
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)

    async def read(self, wire: WireRequest, grammar: CompiledGrammar | None, call_grammar: CompiledGrammar | None = None) -> Request:
        """Raises `InvalidRequest` for a logits processor or adapter that this process does not have."""
        params = SamplingParams(**wire.params)
        make_answer = self._unread if wire.answer is None else self._answer_factory(wire, wire.answer, params)
        request = Request(
            request_id=wire.request_id,
            prompt_token_ids=wire.prompt_token_ids,
            params=params,
            make_answer=make_answer,
            grammar=grammar,
            call_grammar=call_grammar,
            call_opening=wire.call_opening,
            logits_processors=chosen_processors(self.processors, [(name, json.loads(given)) for name, given in wire.logits_processors]),
            priority=wire.priority,
            cache_salt=wire.cache_salt,
            client_id=wire.client_id,
            http_id=wire.http_id,
            deadline=wire.deadline,
            beam=None if wire.beam is None else BeamSearchParams(**wire.beam),
            exact=wire.exact,
            bad_sequences=wire.bad_sequences,
            stop_sequences=wire.stop_sequences,
            retention=wire.retention,
            adapter=None if wire.adapter is None else self.adapters.named(wire.adapter),
            preamble=None if wire.preamble is None else PreambleParams(*wire.preamble),
            measures_pressure=wire.measures_pressure,
            ends_within=wire.ends_within,
            prediction=await asyncio.to_thread(Prediction, wire.prediction) if wire.prediction else None,
        )
        if params.bad_words or params.logit_bias or params.allowed_token_ids or wire.bad_sequences:
            request.rules = await asyncio.to_thread(token_rules, params, self.tokenizer, self.vocab_size, wire.bad_sequences)
        return request

    def _unread(self) -> Answer:
        return UnreadAnswer(self.tokenizer)

    def _answer_factory(self, wire: WireRequest, answer: WireAnswer, params: SamplingParams) -> AnswerFactory:
        turn = Turn(added_tokens=self._added_tokens, response_template=self.tokenizer.response_template, **json.loads(answer.turn))
        return AnswerFactory(
            self.tokenizer,
            wire.prompt_token_ids,
            params,
            self.reasoning_parser if answer.has_reasoning else None,
            self.tool_parser if answer.has_tools else None,
            turn,
            CallLimits(max_calls=answer.call_limits[0], max_alike=answer.call_limits[1], opening=answer.call_limits[2]),
        )

    @cached_property
    def _added_tokens(self) -> frozenset[str]:
        return frozenset(token.text for token in self.tokenizer.added_tokens.values())


class EngineServer:
    """An engine for API servers in other processes, each of which has one `Connection`. Belongs to the engine's event loop.

    `merge` makes one text of the reports of all servers and of the engine's own metrics.
    """

    def __init__(
        self,
        engine: ServedEngine,
        compiler: ServedCompiler,
        reader: RequestReader,
        merge: Callable[[Sequence[bytes]], bytes],
        hello: Hello,
    ) -> None:
        self._hello = hello
        self.engine = engine
        self.compiler = compiler
        self.reader = reader
        self._merge = merge
        self.connections: set[Connection] = set()
        self._old_reports: list[bytes] = []  # of servers that have ended: what they have counted stays counted
        self._state = self._read_state()
        self._log_level: str | None = None  # where it is another one than at the start

    async def connect(self, connected: socket.socket) -> "Connection":
        """Serves the other end of a socket until it is closed."""
        connection = Connection(self, await Channel.over(connected, FromServer))
        self.connections.add(connection)
        self._state = self._read_state()
        connection.channel.send(self._hello)
        connection.channel.send(self._state)
        if self._log_level is not None:
            connection.channel.send(SetLogLevel(self._log_level))
        return connection

    @property
    def num_streams(self) -> int:
        return sum(connection.num_streams for connection in self.connections)

    def forget(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        if connection.last_report:
            self._old_reports.append(connection.last_report)

    def send_state(self) -> None:
        """Tells all servers where it has changed."""
        state = self._read_state()
        if state != self._state:
            self._state = state
            for connection in self.connections:
                connection.channel.send(state)

    def set_log_level(self, level: str) -> None:
        """Has all servers log this level and those above it, those that are started again too."""
        self._log_level = level
        for connection in self.connections:
            connection.channel.send(SetLogLevel(level))

    async def merged_metrics(self, asking: "Connection") -> bytes:
        await asyncio.gather(*(connection.ask_report() for connection in self.connections if connection is not asking))
        return self._merge([*self._old_reports, *(connection.last_report for connection in self.connections if connection.last_report)])

    def _read_state(self) -> State:
        refusal = None
        try:
            self.engine.check_admission()
        except PenstockError as error:
            refusal = error_to_wire(error)
        return State(self.engine.is_healthy, refusal)


class Connection:
    """One API server. `ready` is set once it listens, `ended` once it is gone; its requests have then been aborted."""

    def __init__(self, server: EngineServer, channel: Channel) -> None:
        self.channel = channel
        self.ready = asyncio.Event()
        self.ended = asyncio.Event()
        self.last_report = b""
        self._server = server
        self._streams: dict[int, _RemoteStream] = {}
        self._grammars: dict[int, CompiledGrammar] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # that open streams and compile grammars, by the number of these
        self._merging: set[asyncio.Task[None]] = set()
        self._reported = asyncio.Event()
        self._deltas: list[Any] = []
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._receive(), name="API server")

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def put(self, delta: Any) -> None:
        """Sends what a stream has got; all of one step goes into one frame."""
        if not self._deltas:
            self._loop.call_soon(self._send_deltas)
        self._deltas.append(delta)

    async def ask_report(self) -> None:
        """Waits for the server's metrics, for a while."""
        self._reported.clear()
        self.channel.send(ReportWanted())
        with suppress(TimeoutError):
            await asyncio.wait_for(self._reported.wait(), REPORT_SECONDS)

    def drain(self, seconds: float) -> None:
        """Tells the server to end once it has answered what it has begun, or after so long."""
        self.channel.send(Drain(seconds))

    def close(self) -> None:
        self.channel.close()

    def check_integrity(self) -> None:
        """Asserts that nothing is left of requests. For tests, between them."""
        assert not self._streams
        assert not self._tasks

    def _send_deltas(self) -> None:
        deltas, self._deltas = self._deltas, []
        self.channel.send(Deltas(deltas))
        self.channel.flush()
        self._server.send_state()

    async def _receive(self) -> None:
        try:
            while (messages := await self.channel.receive()) is not None:
                for message in messages:
                    self.take(message)
                self._server.send_state()
        except Exception:  # a frame that is none: the server is of no use any more
            log.exception("An API server sent what cannot be read")
        finally:
            self._end()

    def _end(self) -> None:
        for task in (*self._tasks.values(), *self._merging):
            task.cancel()
        for first in list(self._streams):
            self._close(first)
        self._grammars.clear()
        self.channel.close()
        self._reported.set()
        self._server.forget(self)
        self._server.send_state()
        self.ended.set()

    def take(self, message: FromServer) -> None:
        """Does what the server asks for."""
        match message:
            case Add(first, request):
                self._begin(first, self._open(first, request))
            case EndSequence(first, index, num_tokens):
                if first in self._streams:
                    self._server.engine.end_sequence(self._streams[first].request.request_id, index, num_tokens)
            case Close(first):
                self._close(first)
            case Compile(call, spec, backend, client):
                self._begin(~call, self._compile(call, spec, backend, client))
            case Forget(grammar):
                self._grammars.pop(grammar, None)
                if (compiling := self._tasks.get(~grammar)) is not None:
                    compiling.cancel()
            case Merge(call, report):
                self.last_report = report
                merging = asyncio.create_task(self._send_merged(call))
                self._merging.add(merging)
                merging.add_done_callback(self._merging.discard)
            case Report(report):
                self.last_report = report
                self._reported.set()
            case Ready():
                self.ready.set()

    def _begin(self, number: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[number] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(number))

    async def _open(self, first: int, wire: WireRequest) -> None:
        try:
            grammar = None if wire.grammar is None else self._grammars[wire.grammar]
            call_grammar = None if wire.call_grammar is None else self._grammars[wire.call_grammar]
            request = await self._server.reader.read(wire, grammar, call_grammar)
            stream = _RemoteStream(request, first, self)
            await self._server.engine.open(stream)
        except Exception as error:
            _log_unexpected(error)
            self.channel.send(Refused(first, error_to_wire(error)))
        else:
            self._streams[first] = stream

    def _close(self, first: int) -> None:
        if (stream := self._streams.pop(first, None)) is not None:
            self._server.engine.close(stream.request.request_id)
        elif (opening := self._tasks.get(first)) is not None:
            opening.cancel()

    async def _compile(self, call: int, spec: Any, backend: str | None, client: str | None) -> None:
        try:
            grammar = await self._server.compiler.compile(spec_from_wire(spec), backend, client=client)
        except Exception as error:
            _log_unexpected(error)
            self.channel.send(Reply(call, None, error_to_wire(error)))
        else:
            self._grammars[call] = grammar
            self.channel.send(Reply(call, grammar.warnings))

    async def _send_merged(self, call: int) -> None:
        self.channel.send(Reply(call, await self._server.merged_metrics(self)))


def _log_unexpected(error: Exception) -> None:
    if not isinstance(error, PenstockError):
        log.error("a request of an API server failed", exc_info=error)


class _RemoteStream(DeltaStream):
    """The deltas of a client of another process, whose sequences are numbered from `first` on."""

    def __init__(self, request: Request, first: int, connection: Connection) -> None:
        super().__init__(request)
        self._first = first
        self._connection = connection

    def send(self, deltas: list[SequenceDelta]) -> None:
        put = self._connection.put
        for delta in deltas:
            number = self._first + delta.index
            has_more = (
                delta.finish_reason is not None
                or delta.logprobs
                or delta.events
                or delta.prompt is not None
                or delta.num_predicted
                or delta.pressures
            )
            if not has_more:
                if delta.token_ids:
                    put((number, delta.token_ids))
            else:
                put(delta_to_wire(number, delta))
