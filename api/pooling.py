"""POST /v1/embeddings, /pooling and /classify."""

import base64
import time
import uuid
from collections.abc import Mapping
from typing import Any, Literal

from aiohttp import web
from msgspec import Struct
from torch import Tensor

from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.context import POOLING
from penstock.api.errors import json_response
from penstock.api.metrics import begin_pooling_timer
from penstock.engine.pooling.engine import PoolingOutput
from penstock.engine.pooling.params import PoolingParams, PoolingTask
from penstock.serving.context import check_task
from penstock.serving.pooling import InputFields, PoolingUsage, read_inputs, usage_of
from penstock.serving.requests import Int32
from penstock.serving.workers import MANY, run

EncodingFormat = Literal["float", "base64"]


MANY_NUMBERS = 2**14  # writing fewer takes a few milliseconds


def written(data: Tensor, encoding: EncodingFormat | None) -> Any:
    """Nested lists of the tensor's shape, or base64 of its float32 numbers, little-endian and row after row."""
    if encoding != "base64":
        return data.tolist()
    return base64.b64encode(data.numpy().astype("<f4", copy=False).tobytes()).decode("ascii")


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


class ClassificationRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    """All its fields are those of every endpoint with inputs."""


class Classification(Struct):
    """`probs` are in the order of the labels' numbers. `label` is the name of the most probable one, null where the model gives none."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassificationResponse(Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: PoolingUsage
    object: str = "list"


async def classify(http: web.Request) -> web.Response:
    """A classification for each input, in their order."""
    context, timer = http.app[POOLING], begin_pooling_timer(http)
    body, headers = await read_admitted_body(http, ClassificationRequest)
    model = served_model(context, body.model)
    check_task(context, "classify")
    inputs = await read_inputs(context, body)
    outputs = await timer.pool(context.engine, inputs, PoolingParams(task="classify"), priority=body.priority)

    def write() -> web.Response:
        labels = context.engine.model.id2label
        data = [classification(index, output, labels) for index, output in enumerate(outputs)]
        answer = ClassificationResponse(f"classify-{uuid.uuid4().hex}", int(time.time()), model, data, usage_of(inputs))
        return json_response(answer, headers=headers)

    return await run(context, write, is_long=len(outputs) > MANY)


def classification(index: int, output: PoolingOutput, labels: Mapping[int, str]) -> Classification:
    probs: list[float] = output.data.tolist()
    return Classification(index, labels.get(probs.index(max(probs))), probs, len(probs))


class EmbeddingRequest(InputFields, kw_only=True, forbid_unknown_fields=True):
    encoding_format: EncodingFormat | None = None
    dimensions: Int32 | None = None
    normalize: bool | None = None


class Embedding(Struct):
    """`embedding` is a list of numbers, or base64 of their little-endian float32."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    object: str = "list"


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
