"""From an HTTP request to its decoded body."""

import asyncio
from typing import TypeVar
from urllib.parse import quote

from aiohttp import HttpVersion11, hdrs, web

from penstock.api.common_protocol import RequestFields
from penstock.api.context import SHARED, ServerOptions, SharedContext
from penstock.api.decoding import decode
from penstock.api.workers import run
from penstock.engine.errors import InvalidRequest, NoSuchModel

T = TypeVar("T")
Fields = TypeVar("Fields", bound=RequestFields)

REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
LONG_BODY = 2**16  # bytes; decoding less takes under a millisecond
IGNORED_HEADER = "x-ignored-fields"
MAX_HEADER = 1000
MIN_BYTES_PER_SECOND = 16 * 1024


async def read_body(request: web.Request, kind: type[T]) -> tuple[T, dict[str, str]]:
    """The decoded body, and the response headers that it calls for.

    A `request_id` in it becomes the request's unless the header gave it one. Where the path names a model, that one is asked for.

    Raises `InvalidRequest` for whatever is wrong with it, and aiohttp's own 413 and 408 where it is too large or too slow.
    """
    context = request.app[SHARED]
    data = await receive(request)
    allow = context.options.allow_unknown_fields
    body, ignored = await run(context, lambda: decode(data, kind, allow_unknown_fields=allow), is_long=len(data) >= LONG_BODY)
    if isinstance(body, RequestFields):
        if body.request_id is not None and request.headers.get("x-request-id") != request[REQUEST_ID]:
            request[REQUEST_ID] = body.request_id
        body.model = request.match_info.get("deployment", body.model)
    return body, ignored_fields_header(ignored)


async def read_admitted_body(request: web.Request, kind: type[Fields]) -> tuple[Fields, dict[str, str]]:
    """As `read_body`, for what the engine will be asked to do: raises `QueueFull` or `EngineUnavailable` before anything is read."""
    context = request.app[SHARED]
    context.engine.check_admission()
    body, headers = await read_body(request, kind)
    check_priority(context.options, body.priority)
    return body, headers


def check_priority(options: ServerOptions, priority: int | None) -> None:
    """Raises `InvalidRequest` for a priority with which a request would go before those that the operator lets requests ask for."""
    bound = options.min_priority
    if priority is not None and bound is not None and priority < bound:
        raise InvalidRequest(f"`priority` must be at least {bound} on this server (--min-priority), got {priority}", "priority")


async def receive(request: web.Request) -> bytes:
    """The body as it was sent, inflated. Raises aiohttp's 413 where it is larger than it may be, and 408 where it arrives too slowly.

    The deadline is extended by what arrives, at a minimum rate. A total deadline that suits a large body on a slow link would be just as
    long for a client that sends a byte now and then.
    """
    await send_continue(request)
    options = request.app[SHARED].options
    body = bytearray()
    try:
        async with asyncio.timeout(options.read_timeout_seconds or None) as deadline:
            async for chunk in request.content.iter_any():
                body += chunk
                if len(body) > options.max_body_bytes:
                    raise web.HTTPRequestEntityTooLarge(max_size=options.max_body_bytes, actual_size=len(body))
                if (due := deadline.when()) is not None:
                    deadline.reschedule(due + len(chunk) / MIN_BYTES_PER_SECOND)
    except TimeoutError:
        raise web.HTTPRequestTimeout from None
    return bytes(body)


async def send_continue(request: web.Request) -> None:
    """Tells a client that waits for it to send the body. By now its key is known to be right, and the body not to be too large."""
    expected = request.headers.get(hdrs.EXPECT)
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="the only expectation that can be met is 100-continue")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun


async def leave_expectation(request: web.Request) -> None:
    """What aiohttp would answer to an `Expect` before any middleware has run: `receive` does, when the body is wanted."""


def ignored_fields_header(names: tuple[str, ...]) -> dict[str, str]:
    """Names come from the client: whatever could break out of a header is percent-encoded."""
    return {IGNORED_HEADER: quote(", ".join(names), safe=" ,.[]")[:MAX_HEADER]} if names else {}


def served_model(context: SharedContext, name: str | None) -> str:
    """The name to answer with. Raises `NoSuchModel` where nothing is served under the one asked for."""
    if not name:
        return context.model_names[0]
    if name not in context.model_names:
        raise NoSuchModel(f"The model `{name}` does not exist. Served here: {', '.join(context.model_names)}.", "model")
    return name


def offered_key(request: web.Request) -> str | None:
    """The API key that a request brings: as a bearer token, or in the header of Azure's clients. None where there is none."""
    scheme, _, token = request.headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return request.headers.get("api-key")
