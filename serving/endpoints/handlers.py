"""The endpoints of one model as calls of Python, for programs that bring HTTP of their own, or have none; `api/` has them with aiohttp."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from msgspec import Struct
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from penstock.engine.errors import ConfigurationError, InvalidRequest, NoSuchObject, PenstockError
from penstock.serving.context import GENERATES, ModelContext, PoolingContext, ServerContext, wrong_model, wrong_task
from penstock.serving.endpoints.answers import HEADERS, Answer, FirstDelta, chunked, joined_headers, whole
from penstock.serving.endpoints.bodies import Caller, check_fields, deadline_of, decoded, ignored_fields_header
from penstock.serving.endpoints.chat import answer_chat
from penstock.serving.endpoints.completions import answer_completion
from penstock.serving.endpoints.errors import body_of, retry_headers, status_of
from penstock.serving.endpoints.models import NO_AUDIO, NOT_SERVED, POOLING_PATHS, SPOKEN, Health, ModelList, model_card
from penstock.serving.endpoints.tokenization import DetokenizeRequest, TokenizeRequest, answer_text, answer_tokens
from penstock.serving.observability.metrics import ServerMetrics
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest

JSON = {"Content-Type": "application/json"}

# (context, body, its size in bytes, caller, timer) -> the beginning of an answer that is generated, or a whole body
Begin = Callable[[Any, Any, int, Caller, Any], Awaitable[Answer | bytes]]

GENERATION: Mapping[str, tuple[type[Struct], Begin]] = {
    "/v1/chat/completions": (ChatCompletionRequest, answer_chat),
    "/v1/completions": (CompletionRequest, answer_completion),
}
TOKENIZATION: Mapping[str, tuple[type[Struct], Callable[[ModelContext, Any, int], Awaitable[bytes]]]] = {
    "/tokenize": (TokenizeRequest, answer_tokens),
    "/detokenize": (DetokenizeRequest, answer_text),
}


@dataclass(frozen=True, slots=True)
class Reply:
    """What a request is answered with. Where that is a stream, `content` has its events as they come, and closing it aborts the request."""

    status: int
    headers: dict[str, str]
    content: bytes | AsyncGenerator[bytes, None]


class Handlers:
    """Answers requests with the model of `context`, whose engine has been started. Raises `ConfigurationError` for models of speech.

    What belongs to HTTP is the program's: API keys with their limits, hosts, the size of bodies, the access log and traces. A stream that
    is silent gets no comments. Nothing here imports aiohttp, but for the images that a prompt has as URLs.
    """

    def __init__(self, context: ModelContext) -> None:
        self._context = context
        self._endpoints: Mapping[str, tuple[type[Struct], Begin]] = GENERATION
        self._metrics: ServerMetrics
        self._begin_timer: Callable[[float], Any]
        if isinstance(context, ServerContext):
            metrics = context.make_metrics()
            self._metrics, self._begin_timer = metrics, metrics.begin
            self._refused = dict.fromkeys(POOLING_PATHS, wrong_model(context.model_names[0], GENERATES, GENERATION))
        elif not isinstance(context, PoolingContext):
            raise ConfigurationError("models of speech are served over HTTP alone")
        else:
            from penstock.serving.endpoints.pooling import ENDPOINTS  # imports torch
            from penstock.serving.pooling import PoolingTimer

            pooling_metrics = context.make_metrics()
            self._metrics, self._begin_timer = pooling_metrics, lambda arrived: PoolingTimer(pooling_metrics, arrived)
            self._endpoints = ENDPOINTS
            self._refused = dict.fromkeys(GENERATION, wrong_task(context))
        self._refused |= {path: message for message, paths in ({NO_AUDIO: SPOKEN} | NOT_SERVED).items() for path in paths}

    async def answer(self, method: str, path: str, body: bytes = b"", *, client: str | None = None, request_id: str | None = None) -> Reply:
        """`client` is what work is counted for, and `request_id` is for operators. What is wrong is a reply as well, as the server's."""
        try:
            if method == "POST":
                return await self._post(path, body, Caller(client=client, request_id=request_id))
            return await self._get(path)
        except Exception as error:
            return Reply(status_of(error), JSON | retry_headers(error), msgspec.json.encode(body_of(error)))

    async def _get(self, path: str) -> Reply:
        context = self._context
        match path:
            case "/health" if context.engine.is_healthy:
                return reply(Health("ok"))
            case "/health":
                return replace(reply(Health("unhealthy")), status=503)
            case "/v1/models":
                return reply(ModelList([model_card(model) for model in context.descriptions()]))
            case "/metrics":
                return Reply(200, {"Content-Type": CONTENT_TYPE_LATEST}, await context.metrics_text(self._metrics))
        raise nothing_at(path)

    async def _post(self, path: str, data: bytes, caller: Caller) -> Reply:
        context, arrived = self._context, time.monotonic()
        if path in TOKENIZATION:
            kind, tokenization = TOKENIZATION[path]
            body, headers = await self._read(data, kind)
            return Reply(200, JSON | headers, await tokenization(context, body, len(data)))
        if path in self._refused:
            raise InvalidRequest(self._refused[path], "model")
        if path not in self._endpoints:
            raise nothing_at(path)
        kind, begin = self._endpoints[path]
        context.engine.check_admission()
        body, headers = await self._read(data, kind)
        check_fields(body, None, context.options)
        caller = replace(
            caller, deadline=deadline_of(arrived, body.timeout, context.options), request_id=caller.request_id or body.request_id
        )
        answer = await begin(context, body, len(data), caller, self._begin_timer(arrived))
        if isinstance(answer, bytes):
            return Reply(200, JSON | headers, answer)
        headers |= answer.headers
        if answer.is_streamed:
            return await self._stream(answer, headers)
        content, more = await whole(answer, context.workers)
        return Reply(200, JSON | joined_headers(headers, more), content)

    async def _read(self, data: bytes, kind: type[Struct]) -> tuple[Any, dict[str, str]]:
        """The decoded body, and the headers that it calls for. Raises `InvalidRequest`."""
        workers, allow = self._context.workers, self._context.options.allow_unknown_fields
        body, ignored = await decoded(workers, data, kind, allow_unknown_fields=allow)
        return body, ignored_fields_header(ignored)

    async def _stream(self, answer: Answer, headers: dict[str, str]) -> Reply:
        """Raises what the engine raises before the first token."""
        source, workers = FirstDelta(chunked(answer)), self._context.workers

        async def content() -> AsyncGenerator[bytes, None]:
            try:
                yield b""  # read below: closing a generator that has not begun would run nothing of it
                async for events in source.events(answer.fold, workers):
                    if events:
                        yield events
            except Exception as error:
                yield answer.fold.failure(error)
            finally:
                await source.close()
            yield answer.fold.ending

        try:
            await source.wait(None)
        except BaseException:
            await source.close()
            raise
        pieces = content()
        await anext(pieces)
        return Reply(200, HEADERS | headers, pieces)


def reply(body: Struct) -> Reply:
    return Reply(200, JSON, msgspec.json.encode(body))


def nothing_at(path: str) -> PenstockError:
    return NoSuchObject(f"there is nothing at {path}")
