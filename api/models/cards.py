"""GET /v1/models: what is served, by all of its names, as OpenAI's API and as Anthropic's have it."""

from aiohttp import web

from penstock.api.bodies import SHARED, check_model, served_names
from penstock.api.errors import json_response, speaks_anthropic
from penstock.api.messages import ModelQuery, model_info, model_page
from penstock.api.routes import Route
from penstock.engine.errors import NoSuchModel
from penstock.serving.endpoints.models import ModelCard, ModelList, model_card


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
