"""Chat completions through the official client, over an engine that replays texts."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import openai
import pytest
from openai import AsyncAzureOpenAI, AsyncOpenAI, DefaultAsyncHttpxClient
from openai.types.chat import ChatCompletionChunk, ChatCompletionTokenLogprob

from penstock import LogitsRow
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.options import ServerOptions
from penstock.serving.requests import DEFAULT_LIMIT, ChatCompletionRequest, ReasoningField
from tests.api.scripted import MAX_MODEL_LEN, MODEL, Scripted, client_of, scripted_server

THINKING = {"enable_thinking": True}
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
WEATHER: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
Scenario = Callable[[AsyncOpenAI, Scripted], Coroutine[Any, Any, None]]


def serve(scenario: Scenario, **settings: Any) -> None:
    """Runs a scenario against a fresh server."""

    async def run() -> None:
        async with (
            scripted_server(**settings) as scripted,
            client_of(scripted.base_url) as client,
        ):
            await asyncio.wait_for(scenario(client, scripted), 20)

    asyncio.run(run())


async def ask(client: AsyncOpenAI, **fields: Any) -> Any:
    """The whole answer. Untyped, since the library's types know no fields but OpenAI's."""
    return await client.chat.completions.create(**{"model": MODEL, "messages": HELLO} | fields)


async def streamed(client: AsyncOpenAI, **fields: Any) -> list[Any]:
    fields = {"model": MODEL, "messages": HELLO} | fields
    return [chunk async for chunk in await client.chat.completions.create(stream=True, **fields)]


def joined(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """What a client makes of a stream: the fields of one choice's message, and how it finished."""
    whole: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "finish_reason": None, "logprobs": []}
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        assert whole["finish_reason"] is None, "a chunk after the choice's end"
        whole["content"] += choice.delta.content or ""
        whole["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or ():
            if call.id:
                assert call.index == len(whole["calls"])
                assert call.function.arguments == ""
                whole["calls"][call.index] = [call.id, call.function.name, ""]
            whole["calls"][call.index][2] += call.function.arguments
        whole["logprobs"] += all_logprobs(choice)
        whole["finish_reason"] = choice.finish_reason
    return whole


def all_logprobs(choice: Any) -> list[Any]:
    """Those of the reasoning, then those of the rest."""
    if choice.logprobs is None:
        return []
    reasoning: list[Any] = getattr(choice.logprobs, "reasoning_content", [])
    return [*map(ChatCompletionTokenLogprob.model_validate, reasoning), *choice.logprobs.content]


ANSWERS = [
    "Hello there.",
    "I think so.</think>\n\nYes — ünïcödé 🙂.",
    "never closed",
    "</think>straight",
    f"Let me see.</think>I look. {CALL}\n{CALL}",
    f"</think>{CALL}",
    "</think><tool_call>no call</tool_call>",
    "",
]


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("tokens_per_step", [1, 7, 1000])
def test_a_stream_adds_up_to_the_whole_answer(answer: str, tokens_per_step: int) -> None:
    async def compare(client: AsyncOpenAI, options: dict[str, Any]) -> None:
        fields: dict[str, Any] = {"model": MODEL, "messages": HELLO, "tools": WEATHER, "logprobs": True, "top_logprobs": 2}
        fields["extra_body"] = {"chat_template_kwargs": THINKING} | options
        whole = await ask(client, **fields)
        chunks = await streamed(client, **fields)
        stream = joined(chunks)
        [choice] = whole.choices
        assert (choice.message.content or "") == stream["content"]
        assert (choice.message.reasoning_content or "") == stream["reasoning_content"]
        assert choice.finish_reason == stream["finish_reason"]
        calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
        assert calls == [(name, arguments) for _, name, arguments in stream["calls"].values()]
        assert all(json.loads(arguments) for _, arguments in calls) or choice.finish_reason == "length"
        assert all_logprobs(choice) == stream["logprobs"]
        num_hidden = whole.usage.completion_tokens_details.reasoning_tokens if "include_reasoning" in options else 0
        assert len(stream["logprobs"]) == whole.usage.completion_tokens - num_hidden

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for option in ("include_reasoning", "separate_reasoning", "stream_reasoning"):
            await compare(client, {option: False})
        await compare(client, {})
        await compare(client, {"max_tokens": 20})

    serve(scenario, thinks=True, tool_parser=HERMES, engine={"answers": [answer], "tokens_per_step": tokens_per_step})


def test_reasoning_and_content_come_apart() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        chunks = await streamed(client, stream_options={"include_usage": True})
        stream = joined(chunks)
        assert (stream["reasoning_content"], stream["content"], stream["finish_reason"]) == ("Hm.", "Yes", "stop")
        for number, chunk in enumerate(chunks[:-1]):
            delta = chunk.choices[0].delta.to_dict()
            assert delta.pop("role", None) == ("assistant" if number == 0 else None)
            assert set(delta) >= {"reasoning_content"}, "a key that clients may read whatever the delta holds"
            assert sum(value is not None for value in delta.values()) == 1, "a delta holds one kind of thing"
            assert chunk.usage is None
        last = chunks[-1]
        assert last.choices == []
        assert last.usage.completion_tokens == len("Hm.Yes") + 1
        assert last.usage.completion_tokens_details.reasoning_tokens == len("Hm.") + 1
        assert last.usage.prompt_tokens_details.cached_tokens == 16
        assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].id.startswith("chatcmpl-")

    serve(scenario, thinks=True, engine={"answers": ["Hm.</think>Yes"]})


def deepseeks_sample(chunks: list[ChatCompletionChunk]) -> str:
    """What is not reasoning is content, in each chunk: as in the documentation of DeepSeek's API, with a heading before each part."""
    shown: list[str] = []
    for chunk in chunks:
        delta: Any = chunk.choices[0].delta
        heading, text = ("[reasoning]", delta.reasoning_content) if delta.reasoning_content else ("[content]", delta.content)
        if heading not in shown:
            shown.append(heading)
        shown.append("" + text)
    return "".join(shown)


@pytest.mark.parametrize("options", [{}, {"stream_reasoning": False}, {"stream_interval": 3}])
def test_a_client_that_takes_all_but_reasoning_for_content_shows_both_in_order(options: dict[str, Any]) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        assert deepseeks_sample(await streamed(client, extra_body=options)) == "[reasoning]Hm.[content]Yes"

    serve(scenario, thinks=True, engine={"answers": ["Hm.</think>Yes"]})


def test_without_a_reasoning_parser_the_role_comes_first_and_no_delta_speaks_of_reasoning() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        chunks = await streamed(client)
        assert chunks[0].choices[0].delta.to_dict() == {"role": "assistant", "content": "", "refusal": None}
        assert not any(hasattr(chunk.choices[0].delta, "reasoning_content") for chunk in chunks)
        assert not hasattr((await ask(client)).choices[0].message, "reasoning_content")

    serve(scenario)


@pytest.mark.parametrize(
    ("field", "names"),
    [("reasoning_content", {"reasoning_content"}), ("reasoning", {"reasoning"}), ("both", {"reasoning_content", "reasoning"})],
)
@pytest.mark.parametrize("answer", ["Hm.</think>Yes", "</think>Yes"])
def test_reasoning_has_the_names_that_the_operator_chose(field: ReasoningField, names: set[str], answer: str) -> None:
    reasoning = answer.partition("</think>")[0]

    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        message = (await ask(client)).choices[0].message.to_dict()
        assert {name: message[name] for name in message if name.startswith("reasoning")} == dict.fromkeys(names, reasoning or None)
        deltas = [chunk.choices[0].delta.to_dict() for chunk in await streamed(client)]
        for delta in deltas:
            assert {name for name in delta if name.startswith("reasoning")} == names
        assert all("".join(str(delta[name] or "") for delta in deltas) == reasoning for name in names)

    serve(scenario, thinks=True, engine={"answers": [answer]}, options=ServerOptions(reasoning_field=field))


def test_every_answer_and_chunk_has_the_servers_fingerprint() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        scripted.context.system_fingerprint = "fp_1"
        assert (await ask(client)).system_fingerprint == "fp_1"
        assert {chunk.system_fingerprint for chunk in await streamed(client, stream_options={"include_usage": True})} == {"fp_1"}
        completion = await client.completions.create(model=MODEL, prompt="a")
        assert completion.system_fingerprint == "fp_1"
        async for part in await client.completions.create(model=MODEL, prompt="a", stream=True):
            assert part.system_fingerprint == "fp_1"

    serve(scenario)


def text_of(chunk: ChatCompletionChunk) -> str:
    return chunk.choices[0].delta.content or ""


@pytest.mark.parametrize(
    ("interval", "texts"),
    [(1, list("Hello there.")), (4, ["H", "ello", " the", "re."]), (11, ["H", "ello there."]), (99, ["H", "ello there."])],
)
def test_a_stream_has_a_chunk_for_as_many_tokens_as_were_asked_for(interval: int, texts: list[str]) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        extra = {"stream_interval": interval}
        chunks = await streamed(client, n=2, extra_body=extra)
        for index in range(2):
            assert [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].index == index and text_of(chunk)] == texts
        completion = await client.completions.create(model=MODEL, prompt="a", stream=True, extra_body=extra)
        assert [part.choices[0].text async for part in completion] == texts

    serve(scenario)


@pytest.mark.parametrize("names_deployment", [True, False])
def test_azures_client_works_as_it_is(names_deployment: bool) -> None:
    async def scenario(server: AsyncOpenAI, scripted: Scripted) -> None:
        async with AsyncAzureOpenAI(
            azure_endpoint=str(server.base_url).removesuffix("/v1/"),
            azure_deployment="alias" if names_deployment else None,
            api_key="key",
            api_version="2024-10-21",
            max_retries=0,
            http_client=DefaultAsyncHttpxClient(verify=False),
        ) as client:
            model = "whatever the deployment is of" if names_deployment else "alias"
            answer = await ask(client, model=model)
            assert (answer.model, answer.choices[0].message.content) == ("alias", "Hello there.")
            assert "".join(text_of(chunk) for chunk in await streamed(client, model=model)) == "Hello there."
            completion = await client.completions.create(model=model, prompt="a")
            assert (completion.model, completion.choices[0].text) == ("alias", "Hello there.")
            if not names_deployment:
                assert [card.id async for card in client.models.list()] == [MODEL, "alias"]
                with pytest.raises(openai.NotFoundError, match="does not exist"):
                    await ask(client, model="another")

    serve(scenario, options=ServerOptions(api_keys=("none", "key")))


def test_reasoning_can_stay_in_the_content_be_dropped_or_come_at_once() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        async def split(**options: Any) -> tuple[str | None, str | None]:
            whole = await ask(client, extra_body=options)
            message = whole.choices[0].message
            assert whole.usage.completion_tokens_details.reasoning_tokens == len("Hm.") + 1
            return message.content, message.reasoning_content

        assert await split() == ("Yes", "Hm.")
        assert await split(separate_reasoning=False) == ("<think>Hm.</think>Yes", None)
        assert await split(separate_reasoning=False, chat_template_kwargs=THINKING) == ("Hm.</think>Yes", None), "the prompt has the marker"
        assert await split(include_reasoning=False) == ("Yes", None)
        chunks = await streamed(client, extra_body={"stream_reasoning": False})
        pieces = [getattr(chunk.choices[0].delta, "reasoning_content", None) for chunk in chunks]
        assert [piece for piece in pieces if piece] == ["Hm."]

    serve(scenario, thinks=True, engine={"answers": ["Hm.</think>Yes"]})


def test_without_a_parser_the_text_is_content() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        whole = await ask(client)
        assert whole.choices[0].message.content == "<think>a</think>b"
        assert "reasoning_content" not in whole.choices[0].message.model_fields_set

    serve(scenario, engine={"answers": ["<think>a</think>b"]})


def test_a_call_finishes_with_tool_calls_unless_it_was_cut() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        whole = await ask(client, tools=WEATHER)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Köln"}
        cut = await ask(client, tools=WEATHER, max_tokens=30)
        assert cut.choices[0].finish_reason == "length"
        none = await ask(client, tools=WEATHER, tool_choice="none")
        assert none.choices[0].finish_reason == "stop"
        assert none.choices[0].message.content == CALL, "markup stays visible"

    serve(scenario, tool_parser=HERMES, engine={"answers": [CALL]})


def test_parallel_tool_calls_false_keeps_the_first_call() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        both = await ask(client, tools=WEATHER)
        assert len(both.choices[0].message.tool_calls) == 2
        first = await ask(client, tools=WEATHER, parallel_tool_calls=False)
        assert len(first.choices[0].message.tool_calls) == 1

    serve(scenario, tool_parser=HERMES, engine={"answers": [CALL + "\n" + CALL]})


def test_n_answers_are_told_apart_by_index() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        whole = await ask(client, n=3)
        assert [choice.message.content for choice in whole.choices] == ["one", "two", "three"]
        chunks = await streamed(client, n=3, stream_options={"include_usage": True, "continuous_usage_stats": True})
        assert [joined(chunks, index)["content"] for index in range(3)] == ["one", "two", "three"]
        assert [chunk.choices[0].delta.role for chunk in chunks[:3]] == ["assistant"] * 3
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert counts == sorted(counts)
        assert chunks[-1].usage == whole.usage

    serve(scenario, engine={"answers": ["one", "two", "three"]})


def test_stop_strings_end_the_content_and_are_reported() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for stop in ("END", ["nope", "END"]):
            whole = await ask(client, stop=stop)
            [choice] = whole.choices
            assert (choice.message.content, choice.finish_reason, choice.stop_reason) == ("before ", "stop", "END")
        extra = {"include_stop_str_in_output": True}
        whole = await ask(client, stop="END", extra_body=extra)
        assert whole.choices[0].message.content == "before END"
        assert joined(await streamed(client, stop="END"))["content"] == "before "

    serve(scenario, engine={"answers": ["before END after"]})


def test_logprobs_name_tokens_and_never_hold_minus_infinity() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        whole = await ask(client, logprobs=True, top_logprobs=3)
        first, second = whole.choices[0].logprobs.content
        assert (first.token, first.logprob, first.bytes) == ("H", -1.5, [72])
        assert [top.logprob for top in second.top_logprobs] == [-0.25, -1.5, -9999.0]
        named = await ask(client, logprobs=True, extra_body={"return_tokens_as_token_ids": True, "prompt_logprobs": 1})
        ids = scripted.engine.tokenizer.encode("Hi", add_special_tokens=False)
        content = named.choices[0].logprobs.content
        assert [token.token for token in content] == [f"token_id:{token_id}" for token_id in ids]
        assert content[0].top_logprobs == []
        assert named.prompt_logprobs[0] is None
        assert len(named.prompt_logprobs) == named.usage.prompt_tokens

    serve(scenario, engine={"answers": ["Hi"]})


def test_fields_reach_the_engine() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        await client.chat.completions.create(
            model="alias",
            messages=[{"role": "developer", "content": "Be brief"}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            max_completion_tokens=7,
            temperature=0.5,
            logit_bias={"12": 500},
            seed=3,
            user="a user",
            extra_body={
                "top_k": 5,
                "min_p": 0.1,
                "thinking_token_budget": 9,
                "priority": -2,
                "cache_salt": "mine",
                "allowed_token_ids": [1, 2],
                "bad_words": ["no"],
                "logits_processors": [
                    {"name": "double", "arguments": {"factor": 3}},
                    {"name": "add", "arguments": {"amount": 4}},
                    {"name": "scale", "arguments": {"factor": 5}},
                ],
                "guided_regex": "a+",
                "guided_decoding_backend": "recording",
                "chat_template_kwargs": THINKING,
            },
        )
        [request] = scripted.engine.requests
        params = request.params
        assert (params.max_tokens, params.temperature, params.top_k, params.seed, params.top_p) == (7, 0.5, 5, 3, 0.75)
        assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ({12: 500.0}, (1, 2), ("no",))
        assert (params.thinking_token_budget, request.priority, request.cache_salt) == (9, -2, "mine")
        double, add, scale = (chosen.begin(LogitsRow("r")).row for chosen in request.logits_processors)
        assert (double.state([], 2.0), add.arguments, scale.state) == (6.0, {"amount": 4}, 5)
        assert request.grammar is not None
        assert scripted.compiler.specs[0][1] == "recording"
        prompt = "<|im_start|>system\nBe brief<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
        assert request.prompt_token_ids == scripted.engine.tokenizer.encode(prompt, add_special_tokens=False)

    serve(scenario, thinks=True, default_sampling={"top_p": 0.75, "temperature": 0.1}, default_thinking_budget=4)


def test_a_default_bound_is_told_from_the_requests_own() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for fields, max_tokens, reason in (({}, 5, DEFAULT_LIMIT), ({"max_tokens": 5}, 5, None), ({"max_completion_tokens": 9}, 9, None)):
            await ask(client, **fields)
            params = scripted.engine.requests[-1].params
            assert (params.max_tokens, params.length_stop_reason) == (max_tokens, reason)

    serve(scenario, default_sampling={"max_tokens": 5})


def test_the_servers_thinking_budget_holds_where_the_request_has_none() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for budget, expected in ((None, 4), (-1, None), (0, 0)):
            await ask(client, extra_body={"thinking_token_budget": budget})
            assert scripted.engine.requests[-1].params.thinking_token_budget == expected

    serve(scenario, thinks=True, default_thinking_budget=4)


def test_the_servers_thinking_budget_leaves_room_for_the_end_marker_and_content() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        marker = len(scripted.engine.tokenizer.encode("</think>", add_special_tokens=False))
        for beside, expected in ((1, 0), (2, 1), (3, 1), (9, 4)):
            await ask(client, max_tokens=marker + beside)
            assert scripted.engine.requests[-1].params.thinking_token_budget == expected

    serve(scenario, thinks=True, default_thinking_budget=4)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[1].image_url.url",
    ),
    ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": 3}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": 10**9}, "max_completion_tokens"),
    ({"min_tokens": 10**9}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"early_stopping": True}, "early_stopping"),
    ({"best_of": 3}, "best_of"),
    ({"top_k": -7}, "top_k"),
    ({"thinking_token_budget": -2}, "thinking_token_budget"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"stop": [""]}, "stop"),
    ({"stop": "x" * 1025}, "stop"),
    ({"stop": ["x", "x" * 1025]}, "stop[1]"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ({"stream": True, "stream_options": {"include_usge": True}}, "stream_options.include_usge"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs.chat_template"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"tools": []}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"tools": WEATHER, "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": WEATHER, "tool_choice": {"type": "function", "function": {"name": "whether"}}}, "tool_choice"),
    ({"tools": WEATHER}, "tools"),
    ({"tools": WEATHER, "tool_choice": "required"}, "tools"),
    ({"tools": [*WEATHER, *WEATHER]}, "tools[1].function.name"),
    ({"response_format": {"type": "yaml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_regex": "a", "guided_decoding_backend": "none such"}, "guided_decoding_backend"),
    ({"guided_grammar": "expression ::= x"}, "guided_grammar"),
    ({"logits_processors": [{"name": "triple"}]}, "logits_processors[0].name"),
    ({"logits_processors": [{"name": "double", "arguments": {"factor": -1}}]}, "logits_processors[0].arguments"),
    ({"logits_processors": [{"name": "double", "arguments": {"by": 1}}]}, "logits_processors[0].arguments"),
    ({"logits_processors": [{"name": "add"}, {"name": "add", "arguments": {"client_id": 1}}]}, "logits_processors[1].arguments"),
    ({"logits_processors": [{"name": "scale", "arguments": {"factor": -1}}]}, "logits_processors[0].arguments"),
    ({"logits_processors": [{"name": "scale"}]}, "logits_processors[0].arguments"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_are_refused_with_the_path_before_anything_is_sent(stream: bool) -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        for fields, param in REFUSED:
            body = {"model": MODEL, "messages": HELLO} | ({"stream": True} if stream and "stream_options" not in fields else {}) | fields
            with pytest.raises(openai.BadRequestError) as caught:
                await client.post("/chat/completions", body=body, cast_to=object)
            assert caught.value.param == param, fields
            assert caught.value.type == "BadRequestError"
        assert scripted.engine.requests == []

    serve(scenario)


def test_what_does_not_fit_the_context_is_refused_with_the_numbers() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        with pytest.raises(
            openai.BadRequestError, match=rf"maximum context length is {MAX_MODEL_LEN} tokens.*your prompt has \d+ "
        ) as caught:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x" * 5000}])
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
        with pytest.raises(openai.BadRequestError, match=rf"\(\d+ in the prompt, {MAX_MODEL_LEN} for the answer\)") as caught:
            await ask(client, max_tokens=MAX_MODEL_LEN)
        assert caught.value.code == "context_length_exceeded"

    serve(scenario)


def test_an_unknown_model_is_404() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            await client.chat.completions.create(model="gpt-9", messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    serve(scenario)


@pytest.mark.parametrize(
    ("reasoning", "field", "value"),
    [
        ({"effort": "high", "summary": "auto"}, "reasoning_effort", "high"),
        ({"enabled": False}, "reasoning_effort", "none"),
        ({"max_tokens": 7}, "thinking_token_budget", 7),
        ({"exclude": True}, "include_reasoning", False),
    ],
)
def test_reasoning_is_another_spelling_of_fields_that_count_before_it(reasoning: dict[str, Any], field: str, value: object) -> None:
    said = {"messages": [{"role": "user", "content": "Hi"}], "reasoning": reasoning}
    assert getattr(msgspec.convert(said, ChatCompletionRequest), field) == value
    other = {"reasoning_effort": "low", "thinking_token_budget": 9, "include_reasoning": True}[field]
    assert getattr(msgspec.convert({**said, field: other}, ChatCompletionRequest), field) == other


def test_messages_have_every_field_that_openais_schema_requires() -> None:
    async def scenario(client: AsyncOpenAI, scripted: Scripted) -> None:
        [choice] = (await ask(client, logprobs=True)).choices
        assert choice.message.to_dict().items() >= {"refusal": None, "annotations": []}.items()
        assert choice.logprobs.to_dict()["refusal"] is None

    serve(scenario)
