"""The admin interface as a server of its own: its key, what it refuses, and its errors."""

import asyncio
import contextlib
import hmac
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler, Middleware

from penstock.api.admin.routes import ADMIN_ROUTES, ADMINISTRATION, Administration
from penstock.api.admin.sockets import BACKLOG, shown_address
from penstock.api.answers import json_response
from penstock.api.errors import body_of, status_of
from penstock.api.middleware import SERVER_NAME, is_allowed_host
from penstock.api.requests import offered_key
from penstock.api.routes import ROUTES, add_routes
from penstock.engine.errors import ConfigurationError, EngineUnavailable, InvalidRequest, PenstockError
from penstock.serving.context import LocalContext
from penstock.serving.endpoints.errors import error_body
from penstock.serving.options import Arguments

log = logging.getLogger("penstock.admin")

MAX_BODY = 64 * 2**10  # bytes


@asynccontextmanager
async def administered(arguments: Arguments, administration: Administration, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serves the admin interface, where there is a listener, and puts the model to sleep where it is idle, if that is wanted."""
    tasks: list[asyncio.Task[None]] = []
    async with contextlib.AsyncExitStack() as on_exit:
        if listener is not None:
            assert arguments.admin is not None
            host = "" if arguments.admin.path else arguments.admin.host
            runner = web.AppRunner(build_admin_app(administration, host, arguments.admin_key), handler_cancellation=True, access_log=None)
            await runner.setup()
            on_exit.push_async_callback(runner.cleanup)
            await web.SockSite(runner, listener, backlog=BACKLOG).start()
            log.info("the admin interface is at %s", shown_address(listener))
        if arguments.sleep_idle_seconds and isinstance(administration.context, LocalContext):
            sleeper = administration.context.engine.sleeper
            with refused_at_start("--sleep-idle-seconds"):
                sleeper.check_can_sleep()
            sleeping = sleeper.sleep_when_idle(arguments.sleep_idle_seconds, int(arguments.sleep_idle_level))
            tasks.append(asyncio.create_task(sleeping, name="sleep when idle"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.contextmanager
def refused_at_start(flag: str) -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        raise ConfigurationError(f"{flag}: {error.message}") from error


def build_admin_app(administration: Administration, host: str, key: str | None) -> web.Application:
    """`host` is the name or address that it listens at, empty for a Unix socket."""
    middlewares = [answer_errors, refuse_browsers(host)]
    if key is not None:
        middlewares.append(require_admin_key(key))
    app = web.Application(middlewares=middlewares, client_max_size=MAX_BODY)
    app[ADMINISTRATION] = administration
    app[ROUTES] = []
    app.on_response_prepare.append(_name_server)
    add_routes(app, ADMIN_ROUTES)
    return app


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Outermost: errors as bodies, of the form that the API has, and a line in the log for all that changes something."""
    status = 0
    try:
        response = await handler(request)
        status = response.status
        return response
    except (PenstockError, web.HTTPException) as error:
        status = status_of(error)
        headers = {"Retry-After": str(error.retry_after)} if isinstance(error, EngineUnavailable) else {}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers[hdrs.ALLOW] = ", ".join(sorted(error.allowed_methods))
        return json_response(body_of(error), status=status, headers=headers)
    except Exception as error:
        status = 500
        return json_response(body_of(error), status=status)
    finally:
        if request.method != hdrs.METH_GET or status >= 400:
            log.info("%s %s %d", request.method, request.rel_url.raw_path, status)


def refuse_browsers(host: str) -> Middleware:
    """No page has business here, whatever its origin: not by a form, not by a script, and not by a name that resolves to this machine."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.headers.get(hdrs.HOST)
        is_addressed = not host or named is None or is_allowed_host(named, (host.lower(),))
        if hdrs.ORIGIN in request.headers or "Sec-Fetch-Site" in request.headers or not is_addressed:
            return json_response(error_body(403, "the admin interface is not for browsers"), status=403)
        return await handler(request)

    return check


def require_admin_key(key: str) -> Middleware:
    expected = key.encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        offered = offered_key(request.headers)
        if offered is not None and hmac.compare_digest(offered.encode("utf-8", "surrogateescape"), expected):
            return await handler(request)
        message = "send the admin key as `Authorization: Bearer KEY`" if offered is None else "the admin key is wrong"
        return json_response(error_body(401, message), status=401, headers={hdrs.WWW_AUTHENTICATE: "Bearer"})

    return check


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[hdrs.SERVER] = SERVER_NAME
