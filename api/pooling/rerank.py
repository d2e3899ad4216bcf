"""POST /v1/rerank and /v2/rerank: documents in the order of how well they answer a query."""

import uuid

from aiohttp import web
from msgspec import UNSET

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics.pooling_metrics import begin_pooling_timer
from penstock.api.pooling.pooling_inputs import token_limit
from penstock.api.pooling.rerank_protocol import (
    ApiVersion,
    BilledTokens,
    RerankDocument,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    RerankResult,
)
from penstock.api.pooling.scores import Side, check_size, score_pairs
from penstock.engine.pooling.scoring import ScoreLimits


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
    body, headers = await read_admitted_body(http, RerankRequest)
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
