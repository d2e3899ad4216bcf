import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import pytest

from penstock.api.bodies import decode
from penstock.api.errors import body_of
from penstock.engine.errors import InvalidRequest
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.anthropic import CountTokensRequest, MessagesRequest, ThinkingSigner, chat_request
from penstock.serving.context import ServerContext
from penstock.serving.preparing import ChatOptions, count_prompt_tokens, prepare_chat, prepare_completion
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest
from penstock.serving.workers import Workers
from tests.api.mutations import CHAT, COMPLETION, CONSTRAINED, MESSAGES, mutated_bodies
from tests.api.scripted import RecordingCompiler, ScriptedEngine, byte_tokenizer, scripted_context

Take = Callable[[ServerContext, bytes, bool], Coroutine[Any, Any, object]]


async def take_chat(context: ServerContext, data: bytes, allow_unknown_fields: bool) -> object:
    body, _ = decode(data, ChatCompletionRequest, allow_unknown_fields=allow_unknown_fields)
    return await prepare_chat(context, body, len(data))


async def take_completion(context: ServerContext, data: bytes, allow_unknown_fields: bool) -> object:
    body, _ = decode(data, CompletionRequest, allow_unknown_fields=allow_unknown_fields)
    return await prepare_completion(context, body, len(data), "id")


async def take_messages(context: ServerContext, data: bytes, allow_unknown_fields: bool) -> object:
    body, _ = decode(data, MessagesRequest, allow_unknown_fields=True)
    conversion = chat_request(body, ThinkingSigner(), takes_late_system=allow_unknown_fields)
    return await prepare_chat(context, conversion.body, len(data), ChatOptions(clamps_max_tokens=True))


async def take_count(context: ServerContext, data: bytes, allow_unknown_fields: bool) -> object:
    body, _ = decode(data, CountTokensRequest, allow_unknown_fields=True)
    conversion = chat_request(body, ThinkingSigner(), takes_late_system=allow_unknown_fields)
    return await count_prompt_tokens(context, conversion.body, len(data))


@pytest.mark.parametrize(
    ("take", "whole"),
    [(take_chat, CHAT), (take_completion, COMPLETION), (take_completion, CONSTRAINED), (take_messages, MESSAGES), (take_count, MESSAGES)],
)
def test_a_mutated_body_becomes_a_request_or_is_refused(take: Take, whole: dict[str, Any]) -> None:
    async def run() -> None:
        taken = refused = 0
        with Workers() as workers:
            engine = ScriptedEngine(byte_tokenizer())
            context = scripted_context(engine, RecordingCompiler(), workers, reasoning_parser=FORMATS["deepseek_r1"], tool_parser=HERMES)
            await take(context, msgspec.json.encode(whole), False)
            for number, data in enumerate(mutated_bodies(whole, 1000, seed=1)):
                try:
                    await take(context, data, number % 3 == 0)
                    taken += 1
                except InvalidRequest as error:
                    refused += 1
                    msgspec.json.encode(body_of(error))
        assert taken > 50
        assert refused > 300

    asyncio.run(run())
