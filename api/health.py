"""GET /health, /ping and /version: for load balancers and for people."""

import msgspec
from aiohttp import web

from penstock import __version__
from penstock.api.context import SHARED
from penstock.api.errors import json_response
from penstock.api.middleware import GATE

RETRY_LATER = {"Retry-After": "1"}


class Health(msgspec.Struct):
    status: str


class Version(msgspec.Struct):
    version: str


async def show_health(request: web.Request) -> web.Response:
    """200 while the engine can serve; 503 when it cannot, or when the server is stopping and traffic should go elsewhere."""
    if not request.app[GATE].is_open:
        return json_response(Health("stopping"), status=503, headers=RETRY_LATER)
    if not request.app[SHARED].engine.is_healthy:
        return json_response(Health("unhealthy"), status=503, headers=RETRY_LATER)
    return json_response(Health("ok"))


async def show_version(request: web.Request) -> web.Response:
    return json_response(Version(__version__))
