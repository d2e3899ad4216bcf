"""How a route is declared: once, for the application that serves it and for the OpenAPI document that describes it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from msgspec import Struct

from penstock.api.requests import leave_expectation
from penstock.engine.errors import InvalidRequest, NoSuchObject
from penstock.serving.endpoints.errors import ErrorBody

JSON = "application/json"


@dataclass(frozen=True, slots=True)
class Route:
    """A method and a path, with the types of what goes over them. The handler's docstring describes it in the document.

    `path` is aiohttp's, in which `{name:.+}` may hold slashes; `aliases` are other paths of the same handler. `request` and `response` are
    the types of the bodies, `query` has the parameters of the query, and `events` is the type of the data of server-sent events, if the
    answer may be streamed. `errors` are the types of the bodies of errors. `media_type` is the response's,
    `request_media_type` the request's. `is_admitted` where the handler refuses by the headers what the engine takes no more of.
    """

    method: str
    path: str
    handler: Handler
    request: Any = None
    response: Any = None
    events: Any = None
    query: type[Struct] | None = None
    aliases: tuple[str, ...] = ()
    errors: tuple[Any, ...] = (ErrorBody,)
    media_type: str = JSON
    request_media_type: str = JSON
    is_admitted: bool = False

    @property
    def paths(self) -> tuple[str, ...]:
        return (self.path, *self.aliases)


ROUTES: web.AppKey[list[Route]] = web.AppKey("routes", list)


def add_routes(app: web.Application, routes: Iterable[Route]) -> None:
    """Serves the routes, and has the document describe them."""
    for route in routes:
        app[ROUTES].append(route)
        for path in route.paths:
            add_path(app, route.method, path, route.handler)


def add_refusal(app: web.Application, method: str, paths: Iterable[str], message: str) -> None:
    """Answers on paths of other kinds of models with a 400. The document leaves them out."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise InvalidRequest(message, "model")

    for path in paths:
        add_path(app, method, path, refuse)


def add_unavailable(app: web.Application, routes: Iterable[Route], flag: str) -> None:
    """Answers on routes that only a flag switches on with a 404 that names it. The document leaves them out."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        raise NoSuchObject(f"this server was started without {flag}, which {request.path} needs")

    for route in routes:
        for path in route.paths:
            add_path(app, route.method, path, refuse)


def add_path(app: web.Application, method: str, path: str, handler: Handler) -> None:
    if method == hdrs.METH_GET:
        app.router.add_get(path, handler)  # and HEAD
    else:
        app.router.add_route(method, path, handler, expect_handler=leave_expectation)


def azure_path(path: str) -> str:
    """Where Azure's clients look for a path under `/v1`."""
    return f"/openai/deployments/{{deployment:.+}}{path.removeprefix('/v1')}"


def path_template(path: str) -> str:
    """The path as OpenAPI writes it: without the patterns of its parameters."""
    return re.sub(r"\{(\w+):[^}]*\}", r"{\1}", path)


def path_parameters(path: str) -> list[str]:
    return re.findall(r"\{(\w+)", path)
