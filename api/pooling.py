"""POST /v1/embeddings, /pooling, /classify, /v1/score and /v1/rerank."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from penstock.api.answers import encoded_response
from penstock.api.requests import ARRIVED, BATCH_TIMERS, CLIENT, POOLING, REQUEST_METRICS, TIMER, caller_of, read_admitted_body
from penstock.api.routes import Route, azure_path
from penstock.serving.context import PoolingContext
from penstock.serving.endpoints.bodies import Caller
from penstock.serving.endpoints.pooling import (
    Classification,
    ClassificationRequest,
    Embedding,
    EmbeddingRequest,
    PooledData,
    PoolingRequest,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreEntry,
    ScoreRequest,
    answer_classification,
    answer_embedding,
    answer_pooling,
    answer_ranking,
    answer_ranking_v2,
    answer_score,
)
from penstock.serving.pooling import PoolingFields, PoolingTimer

Body = TypeVar("Body", bound=PoolingFields)


def begin_timer(request: web.Request) -> PoolingTimer:
    """The timer of this HTTP request: what it counts goes to `/metrics` and into the access log."""
    timer = PoolingTimer(request.app[BATCH_TIMERS if CLIENT in request else REQUEST_METRICS], request[ARRIVED])
    request[TIMER] = timer
    return timer


async def _answer(
    http: web.Request, kind: type[Body], answer: Callable[[PoolingContext, Body, int, Caller, PoolingTimer], Awaitable[bytes]]
) -> web.Response:
    timer = begin_timer(http)
    body, size, headers = await read_admitted_body(http, kind)
    return encoded_response(await answer(http.app[POOLING], body, size, caller_of(http), timer), headers=headers)


async def pool(http: web.Request) -> web.Response:
    """One tensor for each input."""
    return await _answer(http, PoolingRequest, answer_pooling)


async def create_embeddings(http: web.Request) -> web.Response:
    """One vector for each input."""
    return await _answer(http, EmbeddingRequest, answer_embedding)


async def classify(http: web.Request) -> web.Response:
    """A classification for each input."""
    return await _answer(http, ClassificationRequest, answer_classification)


async def create_scores(http: web.Request) -> web.Response:
    """A score for each pair: one text against one or many, or as many against as many."""
    return await _answer(http, ScoreRequest, answer_score)


async def rerank(http: web.Request) -> web.Response:
    """As Jina has it: the documents come back unless `return_documents` is false."""
    return await _answer(http, RerankRequest, answer_ranking)


async def rerank_v2(http: web.Request) -> web.Response:
    """As Cohere's second version has it: the documents stay away unless they are asked for, and there is `meta`."""
    return await _answer(http, RerankRequest, answer_ranking_v2)


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
