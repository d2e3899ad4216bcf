"""Admission: the API key of a request, and by its headers alone whether it is answered now; what the key allows, and what it has used."""

import math
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager

from aiohttp import hdrs, web

from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.serving.context import ModelContext
from penstock.serving.endpoints.bodies import deadline_of, until
from penstock.serving.limits.keys import ApiKey, KeyRing
from penstock.serving.limits.quotas import BYTES_PER_TOKEN, Ledger, OpenRequest
from penstock.serving.metrics import LoggedTimer
from penstock.serving.options import ServerOptions
from penstock.serving.requests import MAX_TIMEOUT

KEYS: web.AppKey[KeyRing] = web.AppKey("keys", KeyRing)
LEDGER: web.AppKey[Ledger] = web.AppKey("ledger", Ledger)
KEY: web.RequestKey[ApiKey] = web.RequestKey("key", ApiKey)
OPEN: web.RequestKey[OpenRequest] = web.RequestKey("open", OpenRequest)
DEADLINE: web.RequestKey[float] = web.RequestKey("deadline", float)
TIMEOUT_HEADER = "x-request-timeout"
RATE_LIMIT_HEADERS = ", ".join(f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset"))


def key_of(http: web.Request) -> ApiKey | None:
    """The key that a request came with. None where the server or the route asks for none, and before the middleware has checked it."""
    return http.get(KEY)


def key_name(http: web.Request) -> str | None:
    """What operators know its key by."""
    key = key_of(http)
    return None if key is None else key.name


def offered_key(headers: Mapping[str, str]) -> str | None:
    """The API key that a request brings: as a bearer token, or in the header of Anthropic's or Azure's clients. None without one."""
    scheme, _, token = headers.get(hdrs.AUTHORIZATION, "").partition(" ")
    if scheme.lower() == "bearer":
        return token.strip()
    return headers.get("x-api-key", headers.get("api-key"))


def priority_of(key: ApiKey | None) -> int:
    """What a request with this key has before its body is read."""
    return 0 if key is None or key.limits.priority is None else key.limits.priority


def admit(request: web.Request, context: ModelContext, timer: LoggedTimer | None, *, is_batch: bool = False) -> None:
    """Raises `EngineUnavailable`, `QueueFull` or `RateLimitExceeded`. A request of a batch is counted, and no limit refuses it."""
    key = key_of(request)
    context.engine.check_admission(priority_of(key))
    if key is not None:
        estimate = min((request.content_length or 0) // BYTES_PER_TOKEN, context.max_model_len)
        opened = request.app[LEDGER].of(key).open(estimate, is_limited=not is_batch)
        opened.timer = timer
        request[OPEN] = opened


def check_limits(request: web.Request) -> None:
    """As `admit` of the key alone, for what is to be known before it is called. Raises `RateLimitExceeded`."""
    key = key_of(request)
    if key is not None:
        request.app[LEDGER].of(key).check()


@contextmanager
def waiting_for_model(request: web.Request, *, is_batch: bool = False) -> Iterator[None]:
    """Counts the request as an open one of its key before it is admitted. Raises `RateLimitExceeded`, but for a request of a batch."""
    key = key_of(request)
    if key is None:
        yield
        return
    held = request.app[LEDGER].of(key).hold(is_limited=not is_batch)
    try:
        yield
    finally:
        held.close()


def release(request: web.Request) -> None:
    """The request has been answered."""
    opened = request.get(OPEN)
    if opened is not None:
        opened.close()


async def open_to_the_end(request: web.Request, deltas: AsyncGenerator[SequenceDelta, None]) -> AsyncGenerator[SequenceDelta, None]:
    """The same deltas, of a request that has been answered while its generation goes on: it stays open until that ends."""
    opened = request.pop(OPEN, None)
    try:
        async with aclosing(deltas):
            async for delta in deltas:
                yield delta
    finally:
        if opened is not None:
            opened.close()


def rate_limit_headers(request: web.Request) -> dict[str, str]:
    """What is left of the limits of the request's key, if there are any; also where one of them has refused it."""
    key = key_of(request)
    return {} if key is None else request.app[LEDGER].of(key).headers()


def token_cap(request: web.Request) -> int | None:
    """The most tokens that an answer may have."""
    key = key_of(request)
    return None if key is None else key.limits.max_tokens


def set_deadline(request: web.Request, arrived: float, seconds: float | None, options: ServerOptions) -> None:
    """From the body's `timeout`, or the header, as far as the operator allows. Raises `InvalidRequest` for a header that is no time."""
    asked = header_timeout(request) if seconds is None else seconds
    deadline = deadline_of(arrived, asked, options)
    if deadline is not None:
        request[DEADLINE] = deadline


def header_timeout(request: web.Request) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT:
        raise InvalidRequest(f"`{TIMEOUT_HEADER}` is a number of seconds, above 0 and up to {MAX_TIMEOUT}", TIMEOUT_HEADER)
    return seconds


def within_deadline(request: web.Request) -> AbstractAsyncContextManager[None]:
    """As `until`, of the request's deadline."""
    return until(request.get(DEADLINE))
