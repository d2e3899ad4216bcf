"""Answers: the handlers of chat, completions, tokenization and grammar checks, and how all endpoints send one, whole or as server-sent
events.

Whatever happens on the way, the engine's request is closed. /v1/grammar/check says whether a constraint can be enforced before a request
brings it.
"""

import asyncio
from collections.abc import Awaitable
from types import TracebackType
from typing import Literal, Self

import msgspec
from aiohttp import hdrs, web
from aiohttp.abc import AbstractStreamWriter
from msgspec import Struct

from penstock.api.requests import CONTEXT, MODEL, SHARED, begin_timer, caller_of, client_of, read_admitted_body, read_body
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.serving.context import ServerContext, queue_for
from penstock.serving.endpoints.answers import HEADERS, Answer, FirstDelta, StreamFormat, chunked, joined_headers, whole
from penstock.serving.endpoints.bodies import served_model
from penstock.serving.endpoints.chat import answer_chat
from penstock.serving.endpoints.completions import answer_completion
from penstock.serving.endpoints.tokenization import DetokenizeRequest, TokenizeRequest, answer_text, answer_tokens
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest, ConstraintFields
from penstock.serving.structured_outputs import plan_constraint

# The response to a request that waited so long for its model that it was begun: the stream goes on in it.
BEGUN: web.RequestKey[web.StreamResponse] = web.RequestKey("begun", web.StreamResponse)


class Outbox:
    """Streams with events to be written: together, after the handlers that a step has woken, so that each has one write for the step."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: "EventStream") -> None:
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


OUTBOX: web.AppKey[Outbox] = web.AppKey("outbox", Outbox)


class EventStream:
    """One streamed response. Entering it sends the headers; leaving it sends what ends the stream.

    An exception inside becomes the events of the format's `failure`: the status is long sent. Cancellation, and a client that is gone, pass
    through. One that has not read for `write_timeout_seconds` is taken for gone, and its connection is cut: what is unread would pile up
    here.
    """

    def __init__(
        self,
        request: web.Request,
        *,
        keep_alive_seconds: float,
        headers: dict[str, str],
        write_timeout_seconds: float = 0.0,
        stream_format: StreamFormat | None = None,
    ) -> None:
        self.response = request.get(BEGUN) or web.StreamResponse(headers={**HEADERS, **headers})
        self._format = stream_format or StreamFormat()
        self._request = request
        self._keep_alive_seconds = keep_alive_seconds
        self._write_timeout = write_timeout_seconds or None
        self._loop = asyncio.get_running_loop()
        self._last_write = 0.0
        self._unsent: list[bytes] = []
        self._outbox = request.app[OUTBOX]
        self._protocol = request.protocol
        self._is_gone = False
        self._writer: AbstractStreamWriter | None = None
        self._is_chunked = False
        self._keep_alive: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writer = await self.response.prepare(self._request)
        self._is_chunked = self.response.headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        self._last_write = self._loop.time()
        if self._keep_alive_seconds > 0:
            self._keep_alive = asyncio.create_task(self._write_when_idle())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if self._keep_alive is not None:
            self._keep_alive.cancel()
            await asyncio.gather(self._keep_alive, return_exceptions=True)
        if error is not None and not isinstance(error, Exception):
            self._unsent.clear()
            return False
        try:
            if isinstance(error, ConnectionResetError):
                return True  # the client is gone: no answer can be sent
            if error is not None:
                self._unsent.append(self._format.failure(error))
            last = b"".join((*self._unsent, self._format.ending))
            self._unsent.clear()
            await self._read_in_time(self.response.write_eof(last))
        except ConnectionResetError:
            return True
        return True

    async def send(self, data: bytes) -> None:
        """Sends events; waits while the client does not read. Raises `ConnectionResetError` if it is gone, or has not read for too long."""
        if not data:
            return
        if self._is_gone or self._protocol.transport is None:
            raise ConnectionResetError("the client is gone")
        self._last_write = self._loop.time()
        if not self._unsent:
            self._outbox.add(self)
        self._unsent.append(data)
        if self._protocol.writing_paused:
            assert self._writer is not None, "the stream has not begun"
            await self._read_in_time(self._writer.drain())

    def flush(self) -> None:
        """Writes what is unsent. Not through the response: its checks and coroutines take longer than all else that a token takes here."""
        data = b"".join(self._unsent)
        self._unsent.clear()
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            self._is_gone = True
        elif data:
            transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    async def _read_in_time(self, writing: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._write_timeout):
                await writing
        except TimeoutError:
            if self._protocol.transport is not None:
                self._protocol.transport.abort()
            raise ConnectionResetError("the client does not read its stream") from None

    async def _write_when_idle(self) -> None:
        while True:
            due = self._last_write + self._keep_alive_seconds
            if self._loop.time() < due:
                await asyncio.sleep(due - self._loop.time())
                continue
            self._last_write = self._loop.time()
            if self._protocol.writing_paused:
                continue  # the client has not read what is there
            try:
                await self.send(self._format.keep_alive)
            except ConnectionResetError:
                return  # the next event finds out


async def send(http: web.Request, answer: Answer, headers: dict[str, str]) -> web.StreamResponse:
    """Sends one body, or a stream, with `headers` beside the answer's own. Raises what the engine raises, as long as nothing was sent."""
    sending = (_stream if answer.is_streamed else _send_whole)(http, answer, headers | answer.headers)
    # A task of its own: in the handler's, each token would resume all middleware around it, which takes longer than the token.
    task = asyncio.create_task(sending)
    try:
        return await task
    except asyncio.CancelledError:
        if task.done() and not task.cancelled():  # the client went once it had all of the answer
            return task.result()
        raise


async def _send_whole(http: web.Request, answer: Answer, headers: dict[str, str]) -> web.StreamResponse:
    content, more = await whole(answer, http.app[SHARED].workers)
    return encoded_response(content, headers=joined_headers(headers, more))


async def _stream(http: web.Request, answer: Answer, headers: dict[str, str]) -> web.StreamResponse:
    workers, options = http.app[SHARED].workers, http.app[SHARED].options
    source = FirstDelta(chunked(answer))
    try:
        # An error before the first token keeps its status, unless the client has to wait so long that it needs a sign of life.
        await source.wait(options.keep_alive_interval or None)
        stream = EventStream(
            http,
            keep_alive_seconds=options.keep_alive_interval,
            headers=headers,
            write_timeout_seconds=options.write_timeout,
            stream_format=answer.fold,
        )
        async with stream:
            async for events in source.events(answer.fold, workers):
                await stream.send(events)
        return stream.response
    finally:
        await source.close()


def json_response(body: msgspec.Struct, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return encoded_response(msgspec.json.encode(body), status=status, headers=headers)


def encoded_response(content: bytes, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=content, status=status, content_type="application/json", headers=headers)


async def create_chat_completion(http: web.Request) -> web.StreamResponse:
    """Answers a conversation, in one body or in a stream of its parts."""
    timer = begin_timer(http)
    body, size, headers = await read_admitted_body(http, ChatCompletionRequest)
    return await send(http, await answer_chat(http.app[CONTEXT], body, size, caller_of(http), timer), headers)


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continues one prompt or several. The text is the model's own: no parser reads it."""
    timer = begin_timer(http)
    body, size, headers = await read_admitted_body(http, CompletionRequest)
    return await send(http, await answer_completion(http.app[CONTEXT], body, size, caller_of(http), timer), headers)


async def tokenize(request: web.Request) -> web.Response:
    """The tokens of a text, or of a conversation as the model sees it."""
    body, size, headers = await read_body(request, TokenizeRequest)
    return encoded_response(await answer_tokens(request.app[MODEL], body, size), headers=headers)


async def detokenize(request: web.Request) -> web.Response:
    """The text of tokens."""
    body, size, headers = await read_body(request, DetokenizeRequest)
    return encoded_response(await answer_text(request.app[MODEL], body, size), headers=headers)


class GrammarCheckRequest(ConstraintFields, kw_only=True, forbid_unknown_fields=True):
    """A constraint in any spelling that other requests have for it."""


class Refused(Struct):
    """What cannot be enforced, and the path of its field."""

    message: str
    path: str | None


class GrammarCheck(Struct):
    """`exact`: the whole constraint is enforced; `lenient`: all but what `not_enforced` names; `refused`: a request would get a 400."""

    verdict: Literal["exact", "lenient", "refused"]
    not_enforced: tuple[str, ...] = ()
    refusal: Refused | None = None
    object: str = "grammar.check"


async def check_grammar(http: web.Request) -> web.Response:
    """Compiles the constraint as a request's, with the same backends and limits; the result is cached for it."""
    context = http.app[CONTEXT]
    body, size, headers = await read_body(http, GrammarCheckRequest)
    served_model(context, body.model)
    return json_response(await checked(context, body, size, client_of(http)), headers=headers)


async def checked(context: ServerContext, body: GrammarCheckRequest, size: int, client: str | None) -> GrammarCheck:
    constraint = await context.workers.run(queue_for(size), lambda: plan_constraint(context, body))
    if constraint.spec is None:
        raise InvalidRequest("give a constraint, such as `guided_json` or `response_format`")
    try:
        grammar = await context.grammar_compiler.compile(constraint.spec, constraint.backend, client=client)
    except UnsupportedGrammar as error:
        return GrammarCheck("refused", refusal=Refused(error.message, error.param))
    return GrammarCheck("lenient" if grammar.warnings else "exact", tuple(grammar.warnings))
