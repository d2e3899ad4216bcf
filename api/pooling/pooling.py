"""POST /pooling: what the model computes, as it is."""

import time
import uuid
from typing import Any

from aiohttp import web
from msgspec import Struct

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.common_protocol import Int32
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics.pooling_metrics import begin_pooling_timer
from penstock.api.model_abilities import check_task
from penstock.api.pooling.pooling_inputs import read_inputs, usage_of
from penstock.api.pooling.pooling_protocol import EncodingFormat, InputFields, PoolingUsage
from penstock.api.pooling.vectors import MANY_NUMBERS, written
from penstock.api.workers import run
from penstock.engine.pooling.params import PoolingParams, PoolingTask


class PoolingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """Without `task` the model's own first one is computed."""

    task: PoolingTask | None = None
    encoding_format: EncodingFormat | None = None
    dimensions: Int32 | None = None
    normalize: bool | None = None


class PooledData(Struct):
    """`data` is a list of numbers, for tasks over tokens one list for each token, or base64 of all their little-endian float32."""

    index: int
    data: Any
    object: str = "pooling"


class PoolingResponse(Struct):
    id: str
    created: int
    model: str
    data: list[PooledData]
    usage: PoolingUsage
    object: str = "list"


async def pool(http: web.Request) -> web.Response:
    """One tensor for each input, in their order."""
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, headers = await read_admitted_body(http, PoolingRequest)
    model = served_model(context, body.model)
    task = body.task or context.engine.model.default_task
    check_task(context, task)
    inputs = await read_inputs(context, body)
    params = PoolingParams(task=task, dimensions=body.dimensions, normalize=body.normalize)
    outputs = await timer.pool(context.engine, inputs, params, priority=body.priority)

    def write() -> web.Response:
        data = [PooledData(index, written(output.data, body.encoding_format)) for index, output in enumerate(outputs)]
        answer = PoolingResponse(f"pool-{uuid.uuid4().hex}", int(time.time()), model, data, usage_of(inputs))
        return json_response(answer, headers=headers)

    return await run(context, write, is_long=sum(output.data.numel() for output in outputs) > MANY_NUMBERS)
