"""GET /v1/models: what is served, by all of its names, as OpenAI's API and as Anthropic's have it."""

import time

from aiohttp import web
from msgspec import UNSET, Struct, UnsetType

from penstock.api.bodies import SHARED, check_model, served_names
from penstock.api.errors import json_response, speaks_anthropic
from penstock.api.messages import ModelQuery, model_info, model_page
from penstock.api.routes import Route
from penstock.engine.errors import NoSuchModel
from penstock.serving.context import ModelDescription

_STARTED = int(time.time())


class ModelCard(Struct):
    """`state` is there where the server has several models; the length of the context is null before the first load of one."""

    id: str
    root: str
    max_model_len: int | None
    tasks: list[str]
    parent: str | None = None
    created: int = _STARTED
    object: str = "model"
    owned_by: str = "penstock"
    state: str | UnsetType = UNSET


class ModelList(Struct):
    data: list[ModelCard]
    object: str = "list"
    models: tuple[()] = ()  # Codex wants the key, and goes by its own list where this one is empty


def model_card(model: ModelDescription) -> ModelCard:
    state = UNSET if model.state is None else model.state
    return ModelCard(model.name, model.root, model.max_model_len, list(model.tasks), model.parent, state=state)


async def list_models(request: web.Request) -> web.Response:
    """The models that are served, by all of their names; with the header `anthropic-version`, in pages as Anthropic's API has them."""
    page, names = model_page(request), served_names(request)
    if speaks_anthropic(request):
        return json_response(page)
    return json_response(ModelList([model_card(model) for model in request.app[SHARED].descriptions() if model.name in names]))


async def show_model(request: web.Request) -> web.Response:
    """One model that is served. Its name may hold slashes."""
    context, name = request.app[SHARED], request.match_info["name"]
    check_model(request, name)
    found = next((model for model in context.descriptions() if model.name == name), None)
    if found is None:
        served = f"The model `{name}` does not exist. Served here: {', '.join(served_names(request))}."
        raise NoSuchModel(f"model: {name}" if speaks_anthropic(request) else served, "model")
    return json_response(model_info(found) if speaks_anthropic(request) else model_card(found))


MODEL_ROUTES = (
    Route("GET", "/v1/models", list_models, response=ModelList, query=ModelQuery, aliases=("/openai/models",)),
    Route("GET", "/v1/models/{name:.+}", show_model, response=ModelCard, aliases=("/openai/models/{name:.+}",)),
)
