"""Refusals under overload: answered by the headers of a request alone, before aiohttp makes an object of it.

An overloaded server refuses many more requests than it answers, and on a machine whose cores compute the model each refusal delays a step.
What a handler would refuse whatever is in the body is therefore refused as soon as its headers have been parsed, with the same answer.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import msgspec
from aiohttp import HttpVersion11, hdrs, web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.helpers import rfc822_formatted_time

from penstock.api.errors import anthropic_body_of, body_of, status_of
from penstock.api.middleware import (
    GATE,
    HTTP_REQUESTS,
    MAX_LOGGED,
    SERVER_NAME,
    TRACER,
    AccessEntry,
    access_log,
    is_allowed_host,
    request_id_of,
)
from penstock.api.requests import KEYS, LEDGER, SHARED, is_anthropic, offered_key, priority_of
from penstock.api.routes import ROUTES
from penstock.engine.errors import EngineUnavailable, PenstockError, QueueFull
from penstock.serving.limits.keys import ApiKey

ServerHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

LOG_SECONDS = 0.2  # that a line of the access log waits for others: each time they are written, a thread has to be woken

# Of requests that the middleware may answer differently: from web pages, or before the body is sent.
LEFT_TO_MIDDLEWARE = (hdrs.ORIGIN, "Sec-Fetch-Site", hdrs.EXPECT)


@dataclass(frozen=True, slots=True)
class Answer:
    """What the answers to requests that are refused for the same reason have in common. Most of the headers are before the body."""

    refusal: tuple[type[PenstockError], str, int] | None
    head: str
    body: bytes

    def is_of(self, error: QueueFull | EngineUnavailable) -> bool:
        return self.refusal == (type(error), str(error), error.retry_after)


NO_ANSWER = Answer(None, "", b"")


def answer_of(error: QueueFull | EngineUnavailable, status: int, body: msgspec.Struct) -> Answer:
    data = msgspec.json.encode(body)
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nRetry-After: {error.retry_after}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\nServer: {SERVER_NAME}\r\n"
    )
    return Answer((type(error), str(error), error.retry_after), head, data)


class Refusals:
    """Answers the requests that the engine takes no more of. Handlers get all others, and check once more.

    What the middleware would answer instead, such as a wrong API key, is left to it. So is everything where traces are exported, as these
    are made of aiohttp's requests.
    """

    def __init__(self, app: web.Application) -> None:
        self._context = app[SHARED]
        self._keys, self._ledger, self._gate, self._requests = app[KEYS], app[LEDGER], app[GATE], app[HTTP_REQUESTS]
        paths = (path for route in app[ROUTES] if route.is_admitted for path in route.paths)
        self._paths = frozenset() if TRACER in app else frozenset(path for path in paths if "{" not in path)
        self._last = NO_ANSWER
        self._lines: list[tuple[float, AccessEntry]] = []

    def answer(self, method: str, path: str, headers: Mapping[str, str], client: str | None) -> bytes | None:
        """The whole response to a request of HTTP/1.1 whose connection stays open; None where it is not refused, or not here.

        `path` is as it was sent, with its query. A request that is refused has been counted and logged.
        """
        if path not in self._paths or method != hdrs.METH_POST or not self._gate.is_open:
            return None
        arrived, options, key = time.monotonic(), self._context.options, None
        if options.requires_key:
            offered = offered_key(headers)
            key = None if offered is None else self._keys.find(offered)
            if key is None:
                return None
        try:
            self._context.engine.check_admission(priority_of(key))
            return None
        except (QueueFull, EngineUnavailable) as error:
            refusal = error
        if int(headers.get(hdrs.CONTENT_LENGTH, 0)) > options.max_body_size or any(name in headers for name in LEFT_TO_MIDDLEWARE):
            return None
        if not self._is_host(headers.get(hdrs.HOST), options.allowed_hosts):
            return None
        return self._refuse(refusal, path, headers, key, client, arrived)

    def _is_host(self, host: str | None, allowed: tuple[str, ...]) -> bool:
        return not allowed or host is None or "*" in allowed or is_allowed_host(host, allowed)

    def _refuse(
        self,
        error: QueueFull | EngineUnavailable,
        path: str,
        headers: Mapping[str, str],
        key: ApiKey | None,
        client: str | None,
        arrived: float,
    ) -> bytes:
        status, request_id = status_of(error), request_id_of(headers)
        self._requests.count(hdrs.METH_POST, path, status)
        id_headers = f"x-request-id: {request_id}\r\n"
        if is_anthropic(path, headers):
            answer = answer_of(error, status, anthropic_body_of(error, request_id))
            id_headers += f"request-id: {request_id}\r\n"
        elif self._last.is_of(error):
            answer = self._last
        else:
            answer = self._last = answer_of(error, status, body_of(error))
        if key is not None:
            id_headers += "".join(f"{name}: {value}\r\n" for name, value in self._ledger.of(key).headers().items())
        if access_log.isEnabledFor(logging.INFO):
            name, refusal = None if key is None else key.name, {"error": str(error)[:MAX_LOGGED]}
            seconds = time.monotonic() - arrived
            self._log(AccessEntry(client, hdrs.METH_POST, path, path, status, request_id, seconds, name, None, refusal))
        return f"{answer.head}Date: {rfc822_formatted_time()}\r\n{id_headers}\r\n".encode() + answer.body

    def _log(self, entry: AccessEntry) -> None:
        if not self._lines:
            asyncio.get_running_loop().call_later(LOG_SECONDS, self.write_lines)
        self._lines.append((time.time(), entry))

    def write_lines(self) -> None:
        """Writes the lines of the access log that wait."""
        lines, self._lines = self._lines, []
        for at, entry in lines:
            record = access_log.makeRecord(access_log.name, logging.INFO, __file__, 0, entry, (), None)
            record.created, record.msecs = at, at % 1 * 1000
            access_log.handle(record)

    def before(self, handler: ServerHandler) -> ServerHandler:
        """The handler of a server, which sees what is not refused here."""

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            data = None
            if request.keep_alive and request.version == HttpVersion11:
                data = self.answer(request.method, request.raw_path, request.headers, request.remote)
            return await handler(request) if data is None else _Refusal(data)

        return handle


class _Refusal(web.StreamResponse):
    """A response whose bytes are ready. The connection stays open."""

    _keep_alive = True

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._data = data

    async def prepare(self, request: web.BaseRequest) -> AbstractStreamWriter:
        await request.writer.write(self._data)
        return request.writer

    async def write_eof(self, data: bytes = b"") -> None:
        """There is no more."""


REFUSALS: web.AppKey[Refusals] = web.AppKey("refusals", Refusals)


def refuse_early(app: web.Application) -> None:
    """To be called when the application has its routes."""
    app[REFUSALS] = refusals = Refusals(app)

    async def write_lines(app: web.Application) -> None:
        refusals.write_lines()

    app.on_cleanup.append(write_lines)
