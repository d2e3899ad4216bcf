"""Text completions through the official client, over an engine that replays texts."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.api.scripted import MAX_MODEL_LEN, MODEL, Scripted, scripted_server

Scenario = Callable[[AsyncOpenAI, Scripted], Coroutine[Any, Any, None]]


def serve(scenario: Scenario, *answers: str, **settings: Any) -> None:
    async def run() -> None:
        async with (
            scripted_server({"answers": list(answers) or ["Hello"]} | settings.pop("engine", {}), **settings) as scripted,
            AsyncOpenAI(base_url=scripted.base_url, api_key="none", max_retries=0) as client,
        ):
            await asyncio.wait_for(scenario(client, scripted), 20)

    asyncio.run(run())


async def ask(client: AsyncOpenAI, **fields: Any) -> Any:
    return await client.completions.create(model=MODEL, **fields)


async def streamed(client: AsyncOpenAI, **fields: Any) -> list[Any]:
    return [chunk async for chunk in await client.completions.create(model=MODEL, stream=True, **fields)]


def text_of(chunks: list[Any], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


@pytest.mark.parametrize("tokens_per_step", [1, 5, 100])
def test_a_stream_adds_up_to_the_whole_text(tokens_per_step: int) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        variants: list[dict[str, Any]] = [
            {},
            {"n": 2},
            {"echo": True},
            {"logprobs": 2},
            {"echo": True, "logprobs": 2},
            {"stop": "lo"},
            {"max_tokens": 3},
        ]
        for fields in variants:
            whole = await ask(client, prompt="Say: ", **fields)
            chunks = await streamed(client, prompt="Say: ", stream_options={"include_usage": True}, **fields)
            for choice in whole.choices:
                assert choice.text == text_of(chunks, choice.index)
                parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
                assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
                if choice.logprobs is not None:
                    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
                        joined = [item for part in parts if part.logprobs for item in getattr(part.logprobs, name)]
                        assert joined == getattr(choice.logprobs, name)
            assert chunks[-1].choices == []
            assert chunks[-1].usage == whole.usage

    serve(scenario, "Héllo ", "wörld 🙂", engine={"tokens_per_step": tokens_per_step})


def test_all_four_forms_of_prompts_are_numbered_through() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        ids = scripted.engine.tokenizer.encode("ab", add_special_tokens=False)
        forms: list[tuple[Any, list[str]]] = [
            ("ab", ["ab"]),
            (["ab", "c"], ["ab", "c"]),
            (ids, ["ab"]),
            ([ids, ids[:1], ids], ["ab", "a", "ab"]),
        ]
        for prompt, texts in forms:
            whole = await ask(client, prompt=prompt, n=2, echo=True)
            assert [choice.index for choice in whole.choices] == list(range(2 * len(texts)))
            assert [choice.text for choice in whole.choices] == [text + answer for text in texts for answer in ("x", "y")]
            assert whole.usage.prompt_tokens == sum(map(len, texts))
            assert whole.usage.completion_tokens == 2 * len(texts)

    serve(scenario, "x", "y")


def test_a_prompt_can_be_scored_without_generating() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        whole = await ask(client, prompt="aé", echo=True, max_tokens=0, logprobs=1)
        [choice] = whole.choices
        assert (choice.text, choice.finish_reason, whole.usage.completion_tokens) == ("aé", "length", 0)
        assert choice.logprobs.token_logprobs == [None, -1.5, -1.5]
        assert choice.logprobs.top_logprobs[0] is None
        assert choice.logprobs.text_offset == [0, 1, 1], "the two bytes of one character start at the same place"
        assert scripted.engine.requests[0].params.prompt_logprobs == 1

    serve(scenario)


def test_the_default_is_sixteen_tokens_where_they_fit() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for prompt in ("a", "a" * (MAX_MODEL_LEN - 4)):
            await ask(client, prompt=prompt)
        assert [request.params.max_tokens for request in scripted.engine.requests] == [16, 4]

    serve(scenario)


def test_special_tokens_are_shown_only_where_asked_for_and_take_no_room_otherwise() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        hidden = await ask(client, prompt="x", logprobs=0)
        assert hidden.choices[0].text == "ab"
        assert hidden.choices[0].logprobs.tokens == ["a", "<|im_end|>", "b"]
        assert hidden.choices[0].logprobs.text_offset == [0, 1, 1]
        shown = await ask(client, prompt="x", logprobs=0, extra_body={"skip_special_tokens": False})
        assert shown.choices[0].text == "a<|im_end|>b"
        assert shown.choices[0].logprobs.text_offset == [0, 1, 11]

    serve(scenario, "a<|im_end|>b")


def test_no_parser_reads_completions() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        whole = await ask(client, prompt="x", max_tokens=100)
        assert whole.choices[0].text == "a</think>b"
        assert whole.usage.completion_tokens_details.reasoning_tokens == 0

    serve(scenario, "a</think>b", thinks=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": None}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], [2, "a"]]}, "prompt[1][1]"),
    ({"prompt": [100000]}, "prompt"),
    ({"prompt": [[1], [-1]]}, "prompt[1]"),
    ({"prompt": [10**40]}, "prompt"),
    ({"prompt": "x" * 5000}, "prompt"),
    ({"prompt": ["a", [1] * 5000]}, "prompt[1]"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
    ({"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
    ({"prompt": "a", "logprobs": 21}, "logprobs"),
    ({"prompt": "a", "logprobs": True}, "logprobs"),
    ({"prompt": "a", "suffix": "b"}, "suffix"),
    ({"prompt": "a", "best_of": 2}, "best_of"),
    ({"prompt": "a", "use_beam_search": True, "n": 2, "best_of": 1}, "best_of"),
    ({"prompt": "a", "use_beam_search": True, "stream": True}, "stream"),
    ({"prompt": "a", "use_beam_search": 2}, "use_beam_search"),
    ({"prompt": "a", "length_penalty": 2}, "length_penalty"),
    ({"prompt": "a", "messages": []}, "messages"),
]


def test_bad_requests_are_refused_with_the_path() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for fields, param in REFUSED:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/completions", body={"model": MODEL} | fields, cast_to=object)
            assert caught.value.param == param, fields
        assert scripted.engine.requests == []

    serve(scenario)
