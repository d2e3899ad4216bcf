"""What a model can do, in words, for whoever asks it for something else."""

from collections.abc import Iterable

from penstock.api.context import PoolingContext
from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.model import PoolingModel
from penstock.engine.pooling.params import PoolingTask

GENERATES = "a model that generates text"
SCORING_ROUTES = ("/v1/score", "/v1/rerank")
ROUTES: dict[PoolingTask, tuple[str, ...]] = {
    "embed": ("/v1/embeddings", *SCORING_ROUTES, "/pooling"),
    "token_embed": ("/pooling",),
    "score": (*SCORING_ROUTES, "/pooling"),
    "classify": ("/classify", "/pooling"),
    "token_classify": ("/pooling",),
}


def description(model: PoolingModel) -> str:
    if "score" in model.tasks:
        return "a cross-encoder, which scores pairs of texts"
    if "classify" in model.tasks:
        return f"a classifier with {model.num_labels} labels"
    if "token_classify" in model.tasks:
        return f"a classifier of tokens with {model.num_labels} labels"
    return "an embedding model"


def routes_of(model: PoolingModel) -> list[str]:
    """Those that serve it, each once."""
    return list(dict.fromkeys(route for task, routes in ROUTES.items() if task in model.tasks for route in routes))


def check_task(context: PoolingContext, *tasks: PoolingTask) -> None:
    """Raises `InvalidRequest`, naming the routes that do serve the model, where it can do none of these."""
    if not set(tasks) & context.engine.model.tasks:
        raise InvalidRequest(what_it_is(context), "model")


def what_it_is(context: PoolingContext) -> str:
    model = context.engine.model
    return wrong_model(context.model_names[0], description(model), routes_of(model))


def wrong_model(name: str, what: str, routes: Iterable[str]) -> str:
    return f"`{name}` is {what}; it is served by {', '.join(routes)}"
