"""The engine of `ray.serve.llm`: `LLMServer` with `engine_cls=PenstockEngine`, in place of vLLM's.

`ray.serve.llm` itself imports the classes of requests and answers from vLLM or SGLang, one of which has to be installed; this module
imports neither it nor them before a request comes.
"""

import asyncio
import importlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.engine.control.sleep import forget_prefixes
from penstock.engine.errors import ConfigurationError
from penstock.integrations.embedded import load
from penstock.llm.model import engine_arguments
from penstock.serving.context import LocalContext, ModelContext
from penstock.serving.endpoints.handlers import Handlers

ANSWERS = "ray.llm._internal.serve.core.configs.openai_api_models"


class PenstockEngine:
    """Has the methods of Ray's `LLMEngine`. Requests and answers are the pydantic models of `ray.serve.llm`.

    The model is that of `model_loading_config`; `engine_kwargs` are the keyword arguments of `LLM`. Raises `ConfigurationError`.
    """

    def __init__(self, llm_config: Any) -> None:
        loading = llm_config.model_loading_config
        source = loading.model_source or loading.model_id
        if not isinstance(source, str):
            raise ConfigurationError("model_source: only a path or a name is read; fetch a model from a bucket before")
        arguments = engine_arguments(source, {"enable_lora": llm_config.lora_config is not None, **(llm_config.engine_kwargs or {})})
        self._arguments = replace(
            arguments,
            server=replace(arguments.server, trust_request_chat_template=False),  # these clients are not the caller of a library
            served_model_names=(loading.model_id,),
        )
        self._context: ModelContext | None = None
        self._handlers: Handlers | None = None

    async def start(self) -> None:
        """Loads the model. Raises `ConfigurationError`."""
        context = (await asyncio.to_thread(load, self._arguments)).context
        assert isinstance(context, ModelContext), "keyword arguments name one model"
        await context.engine.start()
        self._context, self._handlers = context, Handlers(context)

    @property
    def context(self) -> LocalContext:
        """Raises `NotImplementedError` where the model does not generate text."""
        if not isinstance(self._context, LocalContext):
            raise NotImplementedError("this is for models that generate text")
        return self._context

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Events as text where the request wants a stream, else one answer; an error is one answer as well."""
        async for item in self._answers("/v1/chat/completions", request, raw_request_info, "ChatCompletionResponse"):
            yield item

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """As `chat`."""
        async for item in self._answers("/v1/completions", request, raw_request_info, "CompletionResponse"):
            yield item

    async def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for item in self._answers("/v1/embeddings", request, raw_request_info, "EmbeddingResponse"):
            yield item

    async def score(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for item in self._answers("/v1/score", request, raw_request_info, "ScoreResponse"):
            yield item

    async def tokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for item in self._answers("/tokenize", request, raw_request_info, "TokenizeResponse"):
            yield item

    async def detokenize(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        async for item in self._answers("/detokenize", request, raw_request_info, "DetokenizeResponse"):
            yield item

    async def transcriptions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """An error: no audio is read."""
        async for item in self._answers("/v1/audio/transcriptions", None, raw_request_info, "TranscriptionResponse"):
            yield item

    async def _answers(self, path: str, request: Any, info: Any, kind: str) -> AsyncGenerator[Any, None]:
        assert self._handlers is not None, "Ray starts the engine before it asks anything of it"
        headers = {name.lower(): value for name, value in (info.headers if info is not None else {}).items()}
        # What the client has not set is left to this server's own defaults, and vLLM's fields that it does not know are left out.
        body = b"{}" if request is None else request.model_dump_json(exclude_unset=True).encode()
        reply = await self._handlers.answer("POST", path, body, request_id=headers.get("x-request-id"))
        if not isinstance(reply.content, bytes):
            async with aclosing(reply.content) as pieces:
                async for piece in pieces:
                    for event in events_in(piece):
                        yield event
            return
        answers = importlib.import_module(ANSWERS)
        if reply.status == 200:
            yield getattr(answers, kind).model_validate_json(reply.content)
        else:
            yield answers.ErrorResponse(error=answers.ErrorInfo(**error_fields(reply.content, reply.status)))

    async def check_health(self) -> None:
        """Raises `RuntimeError` where the engine has failed, upon which Serve replaces the replica."""
        if self._context is None or not self._context.engine.is_healthy:
            raise RuntimeError("the engine has failed")

    def routing_stats(self) -> dict[str, Any]:
        """The load, and where KV events are published, for routers that know the cache."""
        stats = self.context.engine.stats()
        found: dict[str, Any] = {"num_running": stats.num_running, "num_waiting": stats.num_waiting, "kv_cache_usage": stats.kv_cache_usage}
        if self._arguments.engine.kv_events is not None:
            found["kv_events_endpoint"] = self._arguments.engine.kv_events
        return found

    async def resolve_lora(self, lora_model: Any) -> None:
        """Loads an adapter from `local_path`, in place of the one that has not been asked for for longest where there is no room.

        Raises `InvalidRequest`.
        """
        adapters = self.context.adapters
        if adapters.get(lora_model.model_id) is not None:
            adapters.touch(lora_model.model_id)
            return
        if len(adapters) >= adapters.max_adapters:
            adapters.drop_oldest()
        await adapters.load(lora_model.model_id, Path(lora_model.local_path))

    async def reset_prefix_cache(self) -> None:
        forget_prefixes(self.context.engine.core.scheduler)

    async def sleep(self, **options: Any) -> None:
        """Frees the KV cache, and with `level` 2 the weights. Raises `TypeError` for other options."""
        await self._sleep(**options)

    async def _sleep(self, level: int = 1) -> None:
        await self.context.engine.sleeper.sleep(level, "wait")

    async def wakeup(self, **options: Any) -> None:
        """Raises `TypeError` for options: all of it wakes."""
        if options:
            raise TypeError(f"wakeup() has no options here, got {', '.join(options)}")
        await self.context.engine.sleeper.wake()

    async def is_sleeping(self) -> bool:
        return not self.context.engine.sleeper.is_awake

    async def pause(self, **options: Any) -> None:
        raise NotImplementedError("pause() is not supported: use sleep()")

    async def resume(self, **options: Any) -> None:
        raise NotImplementedError("resume() is not supported: use wakeup()")

    async def is_paused(self) -> bool:
        return False

    async def start_profile(self) -> None:
        raise NotImplementedError("profiles are taken through the server's --admin interface, which a replica has not")

    stop_profile = start_profile

    async def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[Any]:
        raise NotImplementedError("collective_rpc() is not supported: ranks carry out the orders of rank 0 alone")

    async def build_asgi_app(self) -> Any:
        raise NotImplementedError("direct streaming is not supported: requests come through the ingress of ray.serve.llm")

    async def shutdown(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            await context.engine.stop(0)
            context.close()


def events_in(piece: bytes) -> list[str]:
    """Server-sent events, of which a handler gives one or several at a time, each whole."""
    *whole, rest = piece.decode().split("\n\n")
    assert not rest, "a handler ends each event"
    return [f"{event}\n\n" for event in whole]


def error_fields(content: bytes, status: int) -> Mapping[str, Any]:
    """The fields of Ray's `ErrorInfo`, whose `code` is the status."""
    error = msgspec.json.decode(content)["error"]
    return {"message": error["message"], "type": error["type"], "param": error["param"], "code": status}
