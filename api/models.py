"""GET /v1/models, /health, /ping, /version and /metrics."""

import time

import msgspec
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from penstock import __version__
from penstock.api.bodies import REQUEST_METRICS, SHARED
from penstock.api.errors import json_response
from penstock.api.middleware import GATE
from penstock.engine.errors import NoSuchModel
from penstock.serving.context import SharedContext

_STARTED = int(time.time())


class ModelCard(msgspec.Struct):
    id: str
    root: str
    max_model_len: int
    created: int = _STARTED
    object: str = "model"
    owned_by: str = "penstock"


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


def model_card(context: SharedContext, name: str) -> ModelCard:
    return ModelCard(id=name, root=context.model_names[0], max_model_len=context.max_model_len)


async def list_models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    context = request.app[SHARED]
    return json_response(ModelList([model_card(context, name) for name in context.model_names]))


async def show_model(request: web.Request) -> web.Response:
    """GET /v1/models/{name}. Names may hold slashes."""
    context = request.app[SHARED]
    name = request.match_info["name"]
    if name not in context.model_names:
        raise NoSuchModel(f"the model {name!r} is not served here; these are: {', '.join(context.model_names)}", "model")
    return json_response(model_card(context, name))


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


async def show_metrics(request: web.Request) -> web.Response:
    """GET /metrics."""
    return web.Response(body=request.app[REQUEST_METRICS].expose(), headers={"Content-Type": CONTENT_TYPE_LATEST})
