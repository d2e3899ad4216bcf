"""What Serve's proxy sends requests to: passes them on to replicas, and to another one where a replica is lost before it has answered."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from ray.exceptions import RayActorError, WorkerCrashedError
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from penstock.integrations.embedded import REPLICA_HEADER, Call, Head
from penstock.integrations.routing import PromptFields
from penstock.serving.endpoints.errors import error_body
from penstock.serving.observability.exposition import merged_text

log = logging.getLogger("penstock.ray")

LOST = (RayActorError, WorkerCrashedError, ReplicaUnavailableError)
METRICS_PATH = "/metrics"
METRICS_SECONDS = 10.0  # as long as Prometheus waits for an answer by default
MAX_ATTEMPTS = 5  # replicas that one request may lose: a request that ends them all should not go on for ever
ATTEMPTS_HEADER = "x-attempts"  # of an answer that is not from the first replica that had the request
LOST_MESSAGE = "the replica that had this request has ended"


class ReplicaLost(Exception):
    """The replica is gone, and nothing of the answer has been sent."""


class Ingress:
    """A deployment without a model. `multiplexed` has requests routed by the model that they ask for."""

    def __init__(self, replicas: DeploymentHandle[Any], *, is_multiplexed: bool = False) -> None:
        self._handle = replicas.options(stream=True, method_name="answer")
        self._is_multiplexed = is_multiplexed

    async def __call__(self, request: Request) -> Response:
        try:
            body = await request.body()
        except ClientDisconnect:
            return Response(status_code=400)
        path = request.url.path.removeprefix(request.scope.get("root_path", "")) or "/"  # below the application's `route_prefix`
        target = path + (f"?{request.url.query}" if request.url.query else "")
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.headers.raw]
        call = Call(request.method, target, headers, body)
        client = None if request.client is None else request.client.host
        if request.method == "GET" and path == METRICS_PATH:
            return await self.metrics(call, client)
        try:
            head, pieces = await self.begun(call, client)
        except BackPressureError as error:
            return error_response(503, str(error), "overloaded")
        except ReplicaLost:
            return error_response(503, LOST_MESSAGE, "replica_lost")
        return StreamingResponse(pieces, head.status, dict(head.headers))

    async def metrics(self, call: Call, client: str | None) -> Response:
        """Those of all replicas that answer, each with its name. A refusal, such as for want of a key, is a replica's own."""
        answers = await self._handle.broadcast("answer_whole", call, client).results_async(
            timeout_s=METRICS_SECONDS, return_exceptions=True
        )
        texts: dict[str, str] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                log.warning("a replica has not said its metrics: %s", type(answer).__name__)
                continue
            head, body = answer
            headers = {name.lower(): value for name, value in head.headers}
            if head.status != 200:
                return Response(body, head.status, headers)
            texts[headers[REPLICA_HEADER]] = body.decode()
        return Response(merged_text(texts, "replica"), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def begun(self, call: Call, client: str | None) -> tuple[Head, AsyncGenerator[bytes, None]]:
        """The answer's head and the rest, from the first replica that gives one. Raises `ReplicaLost` after `MAX_ATTEMPTS`.

        What a lost replica has generated before that was sent to no client, so another replica may begin again.
        """
        fields = PromptFields.of(call.body)
        handle = (
            self._handle.options(multiplexed_model_id=fields.model_name) if self._is_multiplexed and fields.model_name else self._handle
        )
        prefixes = fields.prefixes()
        for attempt in range(MAX_ATTEMPTS):
            answer = pieces_of(handle.remote(call, prefixes, client))
            try:
                head = await anext(answer)
                first = await anext(answer, b"")
            except LOST as error:
                log.warning("a replica is lost, attempt %d: %s", attempt + 1, type(error).__name__)
                await asyncio.sleep(0.1 * attempt)
                continue
            except BaseException:
                await answer.aclose()
                raise
            assert isinstance(head, Head)
            assert isinstance(first, bytes)
            is_stream = any(value.startswith("text/event-stream") for name, value in head.headers if name.lower() == "content-type")
            if attempt:
                head.headers.append((ATTEMPTS_HEADER, str(attempt + 1)))
            return head, rest_of(first, answer, is_stream=is_stream)
        raise ReplicaLost


async def pieces_of(response: Any) -> AsyncGenerator[Head | bytes, None]:
    """Of a streaming call through a handle. Closing this generator aborts the request."""
    try:
        async for piece in response:
            yield piece
    finally:
        response.cancel()


async def rest_of(first: bytes, pieces: AsyncGenerator[Head | bytes, None], *, is_stream: bool) -> AsyncGenerator[bytes, None]:
    """The body. Where the replica is lost, a stream ends with an error, and any other body is cut short."""
    async with aclosing(pieces):
        yield first
        try:
            async for piece in pieces:
                assert isinstance(piece, bytes)
                yield piece
        except LOST:
            if not is_stream:
                raise
            yield b"data: %b\n\ndata: [DONE]\n\n" % msgspec.json.encode(error_body(503, LOST_MESSAGE, code="replica_lost"))


def error_response(status: int, message: str, code: str) -> Response:
    content = msgspec.json.encode(error_body(status, message, code=code))
    return Response(content, status, {"Retry-After": "1"}, "application/json")
