"""GET /v1/models: what is served, under every name it is served by."""

import time

import msgspec
from aiohttp import web

from penstock.api.context import SHARED, SharedContext
from penstock.api.errors import json_response
from penstock.engine.errors import NoSuchModel

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
