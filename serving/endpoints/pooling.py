"""Embeddings, scores, classifications and rankings."""

import base64
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType
from torch import Tensor

from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.engine import ScoreLimits
from penstock.engine.pooling.model import PoolingParams, PoolingTask
from penstock.serving.context import PoolingContext, check_task, queue_for
from penstock.serving.endpoints.bodies import Caller, served_model, until
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


def text_of(document: str | RerankDocument) -> str:
    return document if isinstance(document, str) else document.text


async def answer_pooling(context: PoolingContext, body: PoolingRequest, size: int, caller: Caller, timer: PoolingTimer) -> bytes:
    """A `PoolingResponse` of `PooledData`, encoded, as all answers here are. Without a task, it is the model's own first one.

    Raises `InvalidRequest`, `EngineUnavailable` or `DeadlineExceeded`.
    """
    params = PoolingParams(task=body.task, dimensions=body.dimensions, normalize=body.normalize)

    def entry(index: int, data: Tensor) -> Struct:
        return PooledData(index, written(data, body.encoding_format))

    return await _answer(context, body, size, caller, timer, "pool", params, entry)


async def answer_embedding(context: PoolingContext, body: EmbeddingRequest, size: int, caller: Caller, timer: PoolingTimer) -> bytes:
    """Of `Embedding`. As `answer_pooling`."""
    params = PoolingParams(task="embed", dimensions=body.dimensions, normalize=body.normalize)

    def entry(index: int, data: Tensor) -> Struct:
        return Embedding(index, written(data, body.encoding_format))

    return await _answer(context, body, size, caller, timer, "embd", params, entry)


async def answer_classification(
    context: PoolingContext, body: ClassificationRequest, size: int, caller: Caller, timer: PoolingTimer
) -> bytes:
    """Of `Classification`. As `answer_pooling`."""
    labels = context.engine.model.id2label

    def entry(index: int, data: Tensor) -> Struct:
        probs: list[float] = data.tolist()
        return Classification(index, labels.get(probs.index(max(probs))), probs, len(probs))

    return await _answer(context, body, size, caller, timer, "classify", PoolingParams(task="classify"), entry)


async def _answer(
    context: PoolingContext,
    body: InputFields,
    size: int,
    caller: Caller,
    timer: PoolingTimer,
    prefix: str,
    params: PoolingParams,
    entry: Callable[[int, Tensor], Struct],
) -> bytes:
    model = timer.model = served_model(context, body.model)
    check_task(context, params.task or context.engine.model.default_task)
    inputs = await read_inputs(context, body, size)
    async with until(caller.deadline):
        outputs = await timer.pool(context.engine, inputs, params, priority=body.priority)

    def write() -> bytes:
        data = [entry(index, output.data) for index, output in enumerate(outputs)]
        return msgspec.json.encode(PoolingResponse.of(prefix, model, data, usage_of(inputs)))

    return await context.workers.run(queue_for(sum(output.data.numel() for output in outputs)), write)


async def answer_score(context: PoolingContext, body: ScoreRequest, size: int, caller: Caller, timer: PoolingTimer) -> bytes:
    """Of `ScoreEntry`. As `answer_pooling`."""
    model = timer.model = served_model(context, body.model)
    first, second = sides(body)
    check_size(first, second)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens))
    async with until(caller.deadline):
        scores, usage = await score_pairs(context, timer, first, second, limits, body.priority)
    data = [ScoreEntry(index, score.value) for index, score in enumerate(scores)]
    return msgspec.json.encode(PoolingResponse.of("score", model, data, usage))


async def answer_ranking(context: PoolingContext, body: RerankRequest, size: int, caller: Caller, timer: PoolingTimer) -> bytes:
    """A `RerankResponse` as Jina has it: the documents come back unless `return_documents` is false. Raises as `answer_pooling`."""
    return msgspec.json.encode(await _ranked(context, body, caller, timer, returns_documents=True))


async def answer_ranking_v2(context: PoolingContext, body: RerankRequest, size: int, caller: Caller, timer: PoolingTimer) -> bytes:
    """As Cohere's second version has it: the documents stay away unless they are asked for, and there is `meta`."""
    answer = await _ranked(context, body, caller, timer, returns_documents=False)
    answer.meta = RerankMeta(ApiVersion("2"), BilledTokens(answer.usage.prompt_tokens))
    return msgspec.json.encode(answer)


async def _ranked(
    context: PoolingContext, body: RerankRequest, caller: Caller, timer: PoolingTimer, *, returns_documents: bool
) -> RerankResponse:
    model = timer.model = served_model(context, body.model)
    query, documents = Side.of("query", text_of(body.query)), Side("documents", [text_of(document) for document in body.documents])
    check_size(query, documents)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens), body.max_tokens_per_doc)
    async with until(caller.deadline):
        scores, usage = await score_pairs(context, timer, query, documents, limits, body.priority)
    if body.return_documents is not None:
        returns_documents = body.return_documents
    best_first = sorted(range(len(scores)), key=lambda index: -scores[index].value)
    results = [
        RerankResult(index, scores[index].value, RerankDocument(documents.texts[index]) if returns_documents else UNSET)
        for index in best_first[: body.top_n or None]
    ]
    return RerankResponse(f"rerank-{uuid.uuid4().hex}", model, results, usage)


ENDPOINTS: Mapping[str, tuple[type[Struct], Callable[..., Awaitable[bytes]]]] = {
    "/v1/embeddings": (EmbeddingRequest, answer_embedding),
    "/v1/score": (ScoreRequest, answer_score),
    "/v1/rerank": (RerankRequest, answer_ranking),
    "/v2/rerank": (RerankRequest, answer_ranking_v2),
    "/pooling": (PoolingRequest, answer_pooling),
    "/classify": (ClassificationRequest, answer_classification),
}
