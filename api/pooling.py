"""POST /v1/embeddings, /pooling, /classify, /v1/score and /v1/rerank."""

import base64
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType
from torch import Tensor

from penstock.api.bodies import ARRIVED, BATCH_TIMERS, CLIENT, POOLING, REQUEST_METRICS, TIMER, read_admitted_body, served_model
from penstock.api.errors import json_response
from penstock.api.limits.admission import within_deadline
from penstock.api.routes import Route, azure_path
from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import ScoreLimits
from penstock.engine.pooling.model import PoolingParams, PoolingTask
from penstock.serving.context import check_task
from penstock.serving.pooling import (
    InputFields,
    PoolingFields,
    PoolingTimer,
    PoolingUsage,
    Side,
    check_size,
    read_inputs,
    score_pairs,
    token_limit,
    usage_of,
)
from penstock.serving.requests import Int32
from penstock.serving.workers import queue_for

EncodingFormat = Literal["float", "base64"]


def written(data: Tensor, encoding: EncodingFormat | None) -> Any:
    """Nested lists of the tensor's shape, or base64 of its float32 numbers, little-endian and row after row."""
    if encoding != "base64":
        return data.tolist()
    return base64.b64encode(data.numpy().astype("<f4", copy=False).tobytes()).decode("ascii")


class VectorFields(InputFields, kw_only=True):
    encoding_format: EncodingFormat | None = None
    dimensions: Int32 | None = None
    normalize: bool | None = None


class PoolingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """Without `task` the model's own first one is computed."""

    task: PoolingTask | None = None


class ClassificationRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """All its fields are those of every endpoint with inputs."""


class EmbeddingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """All its fields are those of vectors."""


class PooledData(Struct):
    """`data` is a list of numbers, for tasks over tokens one list for each token, or base64 of all their little-endian float32."""

    index: int
    data: Any
    object: str = "pooling"


class Classification(Struct):
    """`probs` are in the order of the labels' numbers. `label` is the name of the most probable one, null where the model gives none."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class Embedding(Struct):
    """`embedding` is a list of numbers, or base64 of their little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


Entry = TypeVar("Entry", bound=Struct)


class PoolingResponse(Struct, Generic[Entry]):
    """`data` has an entry for each input, or each pair of texts, in their order."""

    id: str
    created: int
    model: str
    data: Sequence[Entry]
    usage: PoolingUsage
    object: str = "list"

    @classmethod
    def of(cls, kind: str, model: str, data: Sequence[Entry], usage: PoolingUsage) -> "PoolingResponse[Entry]":
        return cls(f"{kind}-{uuid.uuid4().hex}", int(time.time()), model, data, usage)


def begin_timer(request: web.Request) -> PoolingTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log."""
    timer = PoolingTimer(request.app[BATCH_TIMERS if CLIENT in request else REQUEST_METRICS], request[ARRIVED])
    request[TIMER] = timer
    return timer


async def pool(http: web.Request) -> web.Response:
    """One tensor for each input."""

    def params(body: PoolingRequest) -> PoolingParams:
        return PoolingParams(task=body.task, dimensions=body.dimensions, normalize=body.normalize)

    def entry(body: PoolingRequest, index: int, data: Tensor) -> Struct:
        return PooledData(index, written(data, body.encoding_format))

    return await _answer(http, PoolingRequest, "pool", params, entry)


async def create_embeddings(http: web.Request) -> web.Response:
    """One vector for each input."""

    def params(body: EmbeddingRequest) -> PoolingParams:
        return PoolingParams(task="embed", dimensions=body.dimensions, normalize=body.normalize)

    def entry(body: EmbeddingRequest, index: int, data: Tensor) -> Struct:
        return Embedding(index, written(data, body.encoding_format))

    return await _answer(http, EmbeddingRequest, "embd", params, entry)


async def classify(http: web.Request) -> web.Response:
    """A classification for each input."""
    labels = http.app[POOLING].engine.model.id2label

    def entry(body: ClassificationRequest, index: int, data: Tensor) -> Struct:
        probs: list[float] = data.tolist()
        return Classification(index, labels.get(probs.index(max(probs))), probs, len(probs))

    return await _answer(http, ClassificationRequest, "classify", lambda body: PoolingParams(task="classify"), entry)


Body = TypeVar("Body", bound=InputFields)


async def _answer(
    http: web.Request,
    kind: type[Body],
    prefix: str,
    params_of: Callable[[Body], PoolingParams],
    entry: Callable[[Body, int, Tensor], Struct],
) -> web.Response:
    """Without a task, it is the model's own first one."""
    context, timer = http.app[POOLING], begin_timer(http)
    body, size, headers = await read_admitted_body(http, kind)
    model = timer.model = served_model(context, body.model)
    params = params_of(body)
    check_task(context, params.task or context.engine.model.default_task)
    inputs = await read_inputs(context, body, size)
    async with within_deadline(http):
        outputs = await timer.pool(context.engine, inputs, params, priority=body.priority)

    def write() -> web.Response:
        data = [entry(body, index, output.data) for index, output in enumerate(outputs)]
        return json_response(PoolingResponse.of(prefix, model, data, usage_of(inputs)), headers=headers)

    return await context.workers.run(queue_for(sum(output.data.numel() for output in outputs)), write)


Texts = str | list[str]


class ScoreRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """The two sides under one of the four pairs of names that vLLM has for them."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None


class ScoreEntry(Struct):
    index: int
    score: float
    object: str = "score"


NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def create_scores(http: web.Request) -> web.Response:
    """A score for each pair: one text against one or many, or as many against as many."""
    context, timer = http.app[POOLING], begin_timer(http)
    body, _, headers = await read_admitted_body(http, ScoreRequest)
    model = timer.model = served_model(context, body.model)
    first, second = sides(body)
    check_size(first, second)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens))
    async with within_deadline(http):
        scores, usage = await score_pairs(context, timer, first, second, limits, body.priority)
    data = [ScoreEntry(index, score.value) for index, score in enumerate(scores)]
    return json_response(PoolingResponse.of("score", model, data, usage), headers=headers)


def sides(body: ScoreRequest) -> tuple[Side, Side]:
    """Raises `InvalidRequest` unless one pair of names is there, and no other name."""
    given = {name: texts for names in NAMES for name in names if (texts := getattr(body, name)) is not None}
    for one, two in NAMES:
        if set(given) == {one, two}:
            return Side.of(one, given[one]), Side.of(two, given[two])
    missing = next((name for names in NAMES for name in names if set(names) & set(given) and name not in given), "text_1")
    raise InvalidRequest("give `text_1` and `text_2`, or `queries` and `documents`, and no other texts", missing)


class RerankDocument(Struct, forbid_unknown_fields=True):
    text: str


class RerankRequest(PoolingFields, kw_only=True, forbid_unknown_fields=True):
    """`top_n` None or 0: all of them. `max_tokens_per_doc` is Cohere's: documents are cut to so many tokens."""

    query: str | RerankDocument
    documents: list[str | RerankDocument]
    top_n: Annotated[int, Meta(ge=0)] | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None


class RerankResult(Struct):
    """`index` is the document's place in the request."""

    index: int
    relevance_score: float
    document: RerankDocument | UnsetType = UNSET


class ApiVersion(Struct):
    version: str


class BilledTokens(Struct):
    input_tokens: int
    output_tokens: int = 0


class RerankMeta(Struct):
    """Cohere's place for the version and the usage."""

    api_version: ApiVersion
    tokens: BilledTokens


class RerankResponse(Struct):
    """Jina's fields; Cohere's are the same but for `meta`. The best document comes first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: PoolingUsage
    meta: RerankMeta | UnsetType = UNSET
    object: str = "list"


async def rerank(http: web.Request) -> web.Response:
    """As Jina has it: the documents come back unless `return_documents` is false."""
    answer, headers = await _rerank(http, returns_documents=True)
    return json_response(answer, headers=headers)


async def rerank_v2(http: web.Request) -> web.Response:
    """As Cohere's second version has it: the documents stay away unless they are asked for, and there is `meta`."""
    answer, headers = await _rerank(http, returns_documents=False)
    answer.meta = RerankMeta(ApiVersion("2"), BilledTokens(answer.usage.prompt_tokens))
    return json_response(answer, headers=headers)


async def _rerank(http: web.Request, *, returns_documents: bool) -> tuple[RerankResponse, dict[str, str]]:
    context, timer = http.app[POOLING], begin_timer(http)
    body, _, headers = await read_admitted_body(http, RerankRequest)
    model = timer.model = served_model(context, body.model)
    query, documents = Side.of("query", text_of(body.query)), Side("documents", [text_of(document) for document in body.documents])
    check_size(query, documents)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens), body.max_tokens_per_doc)
    async with within_deadline(http):
        scores, usage = await score_pairs(context, timer, query, documents, limits, body.priority)
    if body.return_documents is not None:
        returns_documents = body.return_documents
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index].value)
    results = [
        RerankResult(index, scores[index].value, RerankDocument(documents.texts[index]) if returns_documents else UNSET)
        for index in best_first[: body.top_n or None]
    ]
    return RerankResponse(f"rerank-{uuid.uuid4().hex}", model, results, usage), headers


def text_of(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


POOLING_ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        create_embeddings,
        request=EmbeddingRequest,
        response=PoolingResponse[Embedding],
        aliases=(azure_path("/v1/embeddings"),),
        is_admitted=True,
    ),
    Route(
        "POST",
        "/v1/score",
        create_scores,
        request=ScoreRequest,
        response=PoolingResponse[ScoreEntry],
        aliases=("/score",),
        is_admitted=True,
    ),
    Route("POST", "/v1/rerank", rerank, request=RerankRequest, response=RerankResponse, aliases=("/rerank",), is_admitted=True),
    Route("POST", "/v2/rerank", rerank_v2, request=RerankRequest, response=RerankResponse, is_admitted=True),
    Route("POST", "/pooling", pool, request=PoolingRequest, response=PoolingResponse[PooledData], is_admitted=True),
    Route("POST", "/classify", classify, request=ClassificationRequest, response=PoolingResponse[Classification], is_admitted=True),
)
