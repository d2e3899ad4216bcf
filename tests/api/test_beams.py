"""Beam search over HTTP, with an engine that really searches."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import openai
import pytest
from openai import AsyncOpenAI

from penstock.api.app import build_app
from penstock.engine.core import EngineStats
from penstock.engine.deltas import SequenceDelta
from penstock.engine.loop import Engine
from penstock.engine.request import Request
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.context import Workers
from tests.api.scripted import MODEL, CancellingServer, RecordingCompiler, client_of, scripted_context
from tests.fakes import LETTERS, TOKENIZER, beam_request, content, generate, make_core, undecided

Scenario = Callable[[AsyncOpenAI], Awaitable[None]]
PROMPT = "a prompt"


@dataclass(frozen=True)
class Searching:
    """What the scripted server's context takes for an engine."""

    engine: Engine
    tokenizer: Tokenizer = TOKENIZER

    def check_admission(self, priority: int = 0) -> None:
        self.engine.check_admission(priority)

    def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        return self.engine.generate(request)

    def stats(self) -> EngineStats:
        return self.engine.stats()


def serve(scenario: Scenario, **settings: Any) -> None:
    async def run() -> None:
        engine = Engine(make_core(undecided))
        await engine.start()
        try:
            with Workers() as workers:
                context = scripted_context(cast(Any, Searching(engine)), RecordingCompiler(), workers, **settings)
                async with CancellingServer(build_app(context)) as server, client_of(str(server.make_url("/v1"))) as client:
                    await asyncio.wait_for(scenario(client), 60)
            engine.check_integrity()
        finally:
            await engine.stop()

    asyncio.run(run())


def texts_of(beam: BeamSearchParams) -> list[str]:
    """What the engine finds."""
    deltas = generate(make_core(undecided), beam_request("r", PROMPT, beam))
    return [content(deltas, delta.index) for delta in deltas if delta.finish_reason is not None]


async def search(client: AsyncOpenAI, *, n: int = 3, **fields: Any) -> Any:
    body = {"use_beam_search": True} | fields
    return await client.completions.create(model=MODEL, prompt=PROMPT, n=n, max_tokens=8, extra_body=body)


def test_answers_are_the_engine_s_best_first_whatever_the_model_s_authors_recommend() -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        answer = await search(client)
        assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(texts_of(BeamSearchParams(3, 8))))
        assert answer.usage.prompt_tokens == len(PROMPT)
        assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length"}
        longer = await search(client, length_penalty=3.0, early_stopping="never", ignore_eos=True, n=2, best_of=4)
        beam = BeamSearchParams(4, 8, ignore_eos=True, length_penalty=3.0, early_stopping="never", n=2)
        assert [choice.text for choice in longer.choices] == texts_of(beam)

    serve(scenario, default_sampling={"temperature": 0.6, "top_p": 0.9, "top_k": 20})


def test_a_conversation_is_answered_by_searching_too() -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        messages: Any = [{"role": "user", "content": "Hi"}]
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, n=2, max_tokens=8, extra_body={"use_beam_search": True, "best_of": 3}
        )
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert len({choice.message.content for choice in answer.choices}) == 2

    serve(scenario)


def test_several_prompts_are_searched_beside_each_other() -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        body = {"use_beam_search": True}
        answer = await client.completions.create(model=MODEL, prompt=[PROMPT, "x"], n=2, max_tokens=8, extra_body=body)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert [choice.text for choice in answer.choices[:2]] == texts_of(BeamSearchParams(2, 8))

    serve(scenario)


def test_answers_that_are_not_there_to_be_found_are_left_out() -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        answer = await search(client, allowed_token_ids=LETTERS[:1])
        assert [choice.text for choice in answer.choices] == ["a" * 8]

    serve(scenario)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 9}, "n"),
        ({"best_of": 9}, "best_of"),
        ({"logprobs": 1}, "logprobs"),
        ({"top_p": 0.5}, "top_p"),
        ({"thinking_token_budget": 3}, "thinking_token_budget"),
    ],
)
def test_what_cannot_be_searched_for_is_refused_by_the_client_s_own_words(fields: dict[str, Any], param: str) -> None:
    async def scenario(client: AsyncOpenAI) -> None:
        with pytest.raises(openai.BadRequestError) as refusal:
            await search(client, **fields)
        assert refusal.value.param == param
        assert f"`{param}`" in refusal.value.message

    serve(scenario)
