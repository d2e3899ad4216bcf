"""The engine of another process: the interface of `Engine` over a socket, and text read in this process wherever no token depends on it."""

import asyncio
import itertools
import json
import logging
import socket
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

from penstock.engine.constraints.limits import check_size
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher, GrammarSpec
from penstock.engine.contracts.logits_processor import ChosenProcessor, LogitsProcessor
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import ENGINE_FAILED, EngineUnavailable, InvalidRequest
from penstock.engine.remote.messages import (
    Add,
    Channel,
    Close,
    Compile,
    Deltas,
    Drain,
    EndSequence,
    Forget,
    FromEngine,
    Hello,
    Merge,
    Message,
    Ready,
    Refused,
    Reply,
    Report,
    ReportWanted,
    SetLogLevel,
    State,
    WireAnswer,
    WireDelta,
    WireRequest,
    changed_fields,
    delta_from_wire,
    error_from_wire,
    spec_to_wire,
)
from penstock.engine.request import AnswerFactory, Request

log = logging.getLogger(__name__)

HAS_WHOLE_TEXT = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.TIMED_OUT)


class RemoteEngine:
    """Speaks to a connection of `EngineServer`. Belongs to the event loop that has started it.

    `processors` are the logits processors by name, the same in both processes. `report` gives this process's metrics.
    """

    def __init__(self, connected: socket.socket, processors: Mapping[str, LogitsProcessor]) -> None:
        self._socket = connected
        self._processors = processors
        self._streams: dict[int, _Stream] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._next_sequence = 0
        self._state = State(is_healthy=False, refusal=None)
        self._is_lost = asyncio.Event()
        self.report: Callable[[], bytes] = bytes
        self.hello: asyncio.Future[Hello]
        self.draining = asyncio.Event()
        self.drain_seconds = 0.0

    async def start(self) -> None:
        """Begins to read what the engine's process sends. Raises `EngineUnavailable` where it ends before its `Hello`."""
        self.hello = asyncio.get_running_loop().create_future()
        self._channel = await Channel.over(self._socket, FromEngine)
        self._task = asyncio.create_task(self._receive(), name="engine")
        await self.hello

    async def stop(self, drain_seconds: float = 0.0) -> None:
        """Ends the connection, which aborts what is left of the requests."""
        for stream in set(self._streams.values()):
            stream.end(FinishReason.ABORT)
        self._channel.close()
        await self._task

    @property
    def is_healthy(self) -> bool:
        return self._state.is_healthy and not self._is_lost.is_set()

    async def failed(self) -> None:
        """Returns when the engine's process has ended the connection, or has died."""
        await self._is_lost.wait()

    def check_admission(self, priority: int = 0) -> None:
        """By the state that the engine has sent last; it checks again when it gets the request."""
        if self._is_lost.is_set():
            raise EngineUnavailable(ENGINE_FAILED)
        if self._state.refusal is not None:
            raise error_from_wire(self._state.refusal)

    def send_ready(self) -> None:
        """This process serves from now on."""
        self._channel.send(Ready())

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        """As `Engine.generate`. A request that cannot travel is an `InvalidRequest`."""
        wire = self._request_to_wire(request)
        if self._is_lost.is_set():
            raise EngineUnavailable(ENGINE_FAILED)
        stream = _Stream.of(request, self._next_sequence, self.hello.result().stop_token_ids, reads_text=wire.answer is None)
        try:
            self._channel.send(Add(stream.first, wire))
        except OverflowError as error:
            raise InvalidRequest(
                "an integer of the request has more than 64 bits, which several API servers cannot send to the engine"
            ) from error
        self._next_sequence += request.params.n
        for number in stream.numbers:
            self._streams[number] = stream
        try:
            while stream.unfinished:
                wire_delta = await stream.next()
                index = wire_delta.number - stream.first
                if index not in stream.unfinished:
                    continue  # its text has ended: these tokens are beyond
                delta = stream.read(index, wire_delta)
                if delta.finish_reason is not None and wire_delta.finish_reason is None:
                    self._channel.send(EndSequence(stream.first, index, stream.num_tokens[index]))
                yield delta
        finally:
            for number in stream.numbers:
                del self._streams[number]
            self._channel.send(Close(stream.first))

    async def compile(self, spec: GrammarSpec, backend_name: str | None = None, *, client: str | None = None) -> CompiledGrammar:
        """As `GrammarCompiler.compile`, by the compiler of the engine's process."""
        check_size(spec)
        call = next(self._numbers)
        try:
            warnings = await self._ask(call, Compile(call, spec_to_wire(spec), backend_name, client))
        except asyncio.CancelledError:
            self._channel.send(Forget(call))
            raise
        grammar = RemoteGrammar(call, tuple(warnings))
        weakref.finalize(grammar, _from_any_thread, asyncio.get_running_loop(), partial(self._channel.send, Forget(call))).atexit = False
        return grammar

    async def merged_metrics(self) -> bytes:
        """The metrics of all processes, as text."""
        call = next(self._numbers)
        merged: bytes = await self._ask(call, Merge(call, self.report()))
        return merged

    async def _ask(self, call: int, question: Message) -> Any:
        if self._is_lost.is_set():
            raise EngineUnavailable(ENGINE_FAILED)
        answer = self._calls[call] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(question)
            return await answer
        finally:
            del self._calls[call]

    async def _receive(self) -> None:
        while (messages := await self._channel.receive()) is not None:
            for message in messages:
                self._take(message)
        self._is_lost.set()
        if not self.hello.done():
            self.hello.set_exception(EngineUnavailable(ENGINE_FAILED))
        for stream in set(self._streams.values()):
            stream.end(FinishReason.ERROR, ENGINE_FAILED)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineUnavailable(ENGINE_FAILED))

    def _take(self, message: FromEngine) -> None:
        match message:
            case Deltas(deltas):
                for delta in deltas:
                    if delta.number in self._streams:
                        self._streams[delta.number].queue.put_nowait(delta)
            case Refused(first, error):
                if first in self._streams:
                    self._streams[first].queue.put_nowait(error_from_wire(error))
            case Reply(call, value, error):
                self._answer(call, value, None if error is None else error_from_wire(error))
            case State():
                self._state = message
            case ReportWanted():
                self._channel.send(Report(self.report()))
            case Drain(seconds):
                self.drain_seconds = seconds
                self.draining.set()
            case SetLogLevel(level):
                logging.getLogger("penstock").setLevel(level.upper())
            case Hello():
                self.hello.set_result(message)

    def _answer(self, call: int, value: Any, error: Exception | None) -> None:
        answer = self._calls.get(call)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result(value)
        else:
            answer.set_exception(error)

    def _request_to_wire(self, request: Request) -> WireRequest:
        if request.outputs:
            raise InvalidRequest("`outputs` are not available with several API servers", "outputs")
        grammar, call_grammar = request.grammar, request.call_grammar
        for used in (grammar, call_grammar):
            assert used is None or isinstance(used, RemoteGrammar), "the grammar was compiled in another process"
        return WireRequest(
            request.request_id,
            request.prompt_token_ids,
            changed_fields(request.params),
            _answer_to_wire(request) if _depends_on_text(request) else None,
            grammar.number if isinstance(grammar, RemoteGrammar) else None,
            [self._processor_to_wire(chosen) for chosen in request.logits_processors],
            request.priority,
            request.cache_salt,
            request.client_id,
            request.deadline,
            None if request.beam is None else changed_fields(request.beam),
            request.bad_sequences,
            request.stop_sequences,
            request.retention,
            [] if request.prediction is None else request.prediction.token_ids,
            None if request.adapter is None else request.adapter.name,
            request.exact,
            None if request.preamble is None else astuple(request.preamble)[:4],  # the last is found where the grammar is
            request.measures_pressure,
            request.http_id,
            call_grammar.number if isinstance(call_grammar, RemoteGrammar) else None,
            request.call_opening,
            request.ends_within,
        )

    def _processor_to_wire(self, chosen: ChosenProcessor) -> tuple[str, bytes]:
        for name, processor in self._processors.items():
            if processor is chosen.processor:
                return name, json.dumps(dict(chosen.arguments)).encode()
        raise InvalidRequest(f"{chosen.processor!r} is registered under no name", "logits_processors")


class RemoteGrammar(CompiledGrammar):
    """A grammar that the engine's process has compiled, and keeps until this object is gone."""

    num_bytes = 0

    def __init__(self, number: int, warnings: tuple[str, ...]) -> None:
        self.number = number
        self.warnings = warnings

    def matcher(self) -> GrammarMatcher:
        raise AssertionError("only the engine's process follows the grammar")


def _from_any_thread(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with suppress(RuntimeError):  # the loop is closed, and so is the connection
        loop.call_soon_threadsafe(call)


def _depends_on_text(request: Request) -> bool:
    """Whether the next token depends on what the tokens before it say."""
    has_budget = request.params.thinking_token_budget is not None
    return request.grammar is not None or request.beam is not None or has_budget or bool(request.stop_sequences)


def _answer_to_wire(request: Request) -> WireAnswer:
    factory = request.make_answer
    assert isinstance(factory, AnswerFactory), "the engine cannot make this answer"
    turn, limits = factory.turn, factory.call_limits
    fields = {
        "prompt_tail": turn.prompt_tail,
        "tools": turn.tools,
        "tool_choice": turn.tool_choice,
        "chat_template_kwargs": turn.chat_template_kwargs,
        "continued": turn.continued,
        "is_constrained": turn.is_constrained,
    }
    return WireAnswer(
        factory.reasoning is not None,
        factory.tools is not None,
        json.dumps(fields).encode(),
        (limits.max_calls, limits.max_alike, limits.opening),
    )


@dataclass(slots=True, eq=False)
class _Stream:
    """The deltas of one request, and its sequences that have not ended. `answers` are there where their text is read here.

    `stop_token_ids` are the model's own.
    """

    request: Request
    first: int
    stop_token_ids: frozenset[int]
    answers: list[Any]
    unfinished: set[int]
    num_tokens: list[int]
    queue: "asyncio.Queue[WireDelta | Exception]"

    @classmethod
    def of(cls, request: Request, first: int, stop_token_ids: frozenset[int], *, reads_text: bool) -> "_Stream":
        n = request.params.n
        answers = [request.make_answer() for _ in range(n)] if reads_text else []
        return cls(request, first, stop_token_ids, answers, set(range(n)), [0] * n, asyncio.Queue())

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.request.params.n)

    async def next(self) -> WireDelta:
        """Raises why the request was refused."""
        item = await self.queue.get()
        if isinstance(item, Exception):
            raise item
        return item

    def end(self, reason: FinishReason, error: str | None = None) -> None:
        """Ends every sequence that has not ended."""
        for number in self.numbers:
            self.queue.put_nowait(WireDelta(number, [], reason, error=None if error is None else ("str", error)))

    def read(self, index: int, wire: WireDelta) -> SequenceDelta:
        delta = delta_from_wire(index, wire)
        if self.answers:
            try:
                self._read_text(delta)
            except Exception as error:  # a plug-in's parser: whatever it raises ends its own sequence
                log.exception("An answer could not be read")
                delta.finish_reason, delta.error = FinishReason.ERROR, f"reading the answer raised {type(error).__name__}: {error}"
            self.num_tokens[index] += len(delta.token_ids)
        if delta.finish_reason is not None:
            self.unfinished.discard(index)
        return delta

    def _read_text(self, delta: SequenceDelta) -> None:
        """As `ResultProcessor` does with each token: the text may end the sequence before the delta's last one."""
        answer, params = self.answers[delta.index], self.request.params
        stop_id = delta.token_ids[-1] if delta.finish_reason is FinishReason.STOP and delta.token_ids else None
        if stop_id not in self.stop_token_ids and stop_id not in params.stop_token_ids:
            stop_id = None
        num_read = len(delta.token_ids) - (stop_id is not None)
        for place, token_id in enumerate(delta.token_ids[:num_read]):
            num_reasoning_tokens = answer.num_reasoning_tokens
            delta.events += answer.feed(token_id)
            if delta.logprobs and answer.num_reasoning_tokens > num_reasoning_tokens:
                delta.logprobs[place] = replace(delta.logprobs[place], is_reasoning=True)
            if answer.has_ended:
                del delta.token_ids[place + 1 :], delta.logprobs[place + 1 :]
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, answer.stop_match
                break
        else:
            if stop_id in params.stop_token_ids and params.include_stop_str_in_output:
                delta.events += answer.feed(stop_id)
        if delta.finish_reason in HAS_WHOLE_TEXT:
            delta.events += answer.finish()
            if delta.finish_reason is FinishReason.LENGTH and answer.has_ended:
                delta.finish_reason, delta.stop_reason = FinishReason.STOP, answer.stop_match
        delta.num_reasoning_tokens = answer.num_reasoning_tokens
