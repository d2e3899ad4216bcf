"""POST /v1/embeddings."""

import time
import uuid

from aiohttp import web

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics.pooling_metrics import begin_pooling_timer
from penstock.api.model_abilities import check_task
from penstock.api.pooling.embedding_protocol import Embedding, EmbeddingRequest, EmbeddingResponse
from penstock.api.pooling.pooling_inputs import read_inputs, usage_of
from penstock.api.pooling.vectors import MANY_NUMBERS, written
from penstock.api.workers import run
from penstock.engine.pooling.params import PoolingParams


async def create_embeddings(http: web.Request) -> web.Response:
    """One vector for each input, in their order."""
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, headers = await read_admitted_body(http, EmbeddingRequest)
    model = served_model(context, body.model)
    check_task(context, "embed")
    params = PoolingParams(task="embed", dimensions=body.dimensions, normalize=body.normalize)
    inputs = await read_inputs(context, body)
    outputs = await timer.pool(context.engine, inputs, params, priority=body.priority)

    def write() -> web.Response:
        data = [Embedding(index, written(output.data, body.encoding_format)) for index, output in enumerate(outputs)]
        answer = EmbeddingResponse(f"embd-{uuid.uuid4().hex}", int(time.time()), model, data, usage_of(inputs))
        return json_response(answer, headers=headers)

    return await run(context, write, is_long=sum(output.data.numel() for output in outputs) > MANY_NUMBERS)
