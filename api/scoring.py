"""POST /v1/score, /v1/rerank and /v2/rerank."""

import time
import uuid
from typing import Annotated

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics import begin_pooling_timer
from penstock.engine.errors import InvalidRequest
from penstock.engine.pooling.scoring import ScoreLimits
from penstock.serving.pooling import PoolingFields, PoolingUsage, Side, check_size, score_pairs, token_limit

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


class ScoreResponse(Struct):
    id: str
    created: int
    model: str
    data: list[ScoreEntry]
    usage: PoolingUsage
    object: str = "list"


NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))


async def create_scores(http: web.Request) -> web.Response:
    """A score for each pair: one text against one or many, or as many against as many."""
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, _, headers = await read_admitted_body(http, ScoreRequest)
    model = served_model(context, body.model)
    first, second = sides(body)
    check_size(first, second)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens))
    scores, usage = await score_pairs(context, timer, first, second, limits, body.priority)
    data = [ScoreEntry(index, score.value) for index, score in enumerate(scores)]
    return json_response(ScoreResponse(f"score-{uuid.uuid4().hex}", int(time.time()), model, data, usage), headers=headers)


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
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, _, headers = await read_admitted_body(http, RerankRequest)
    model = served_model(context, body.model)
    query, documents = Side.of("query", text_of(body.query)), Side("documents", [text_of(document) for document in body.documents])
    check_size(query, documents)
    limits = ScoreLimits(token_limit(context, body.truncate_prompt_tokens), body.max_tokens_per_doc)
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
