"""The whole server over the default model, spoken to by the official client. One server for all tests here, in a thread of its own."""

import asyncio
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from tests.api.bodies.mutations import CHAT, COMPLETION, mutated_bodies
from tests.api.structured_outputs.test_clients import Province
from tests.api.threaded_server import ThreadedServer

MODEL = "scripted"
FLAGS = [
    "--dtype",
    "float32",
    "--max-model-len",
    "1024",
    "--kv-cache-memory",
    "200MiB",
    "--compile",
    "off",
    "--served-model-name",
    "scripted",
]
THINK = ["--chat-template", "think", "--thinking-token-budget", "8"]
ASK: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


class Server(ThreadedServer):
    def __init__(self) -> None:
        super().__init__([*FLAGS, *THINK, "--plugin", "deepseek_r1", "--plugin", "hermes"])
        self.client: Any = openai.OpenAI(base_url=self.url, api_key="none", max_retries=0)

    def chat(self, **fields: Any) -> Any:
        return self.client.chat.completions.create(**{"model": MODEL, "messages": ASK, "max_tokens": 24, "temperature": 0} | fields)

    def complete(self, **fields: Any) -> Any:
        return self.client.completions.create(**{"model": MODEL, "prompt": "Once upon a time", "temperature": 0} | fields)

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            with urllib.request.urlopen(urllib.request.Request(self.url + path, body)) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def check_idle(self) -> None:
        """Asserts that nothing is left of the requests so far."""

        async def check() -> None:
            stats = self.context.engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)
            self.context.engine.check_integrity()

        self.call(check())

    def close(self) -> None:
        self.client.close()
        super().close()


@pytest.fixture(scope="module")
def server(default_model_dir: Path) -> Iterator[Server]:
    running = Server()
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _nothing_is_left(server: Server) -> Iterator[None]:
    yield
    server.check_idle()


def streamed_text(chunks: Any) -> tuple[str, str]:
    """Reasoning and content of one streamed answer."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
    return reasoning, "".join(delta.content or "" for delta in deltas)


def test_streamed_and_whole_answers_are_the_same(server: Server) -> None:
    whole = server.chat()
    message = whole.choices[0].message
    chunks = list(server.chat(stream=True, stream_options={"include_usage": True}))
    assert streamed_text(chunks) == (message.reasoning_content, message.content)
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens <= whole.usage.completion_tokens


def test_an_answer_is_the_same_alone_and_among_others(server: Server) -> None:
    questions = [f"Tell me about the number {number}." for number in range(8)]

    def ask(question: str) -> tuple[str, str]:
        return streamed_text(server.chat(messages=[{"role": "user", "content": question}], stream=True, max_tokens=16))

    alone = [ask(question) for question in questions[:2]]
    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(ask, questions))
    assert together[:2] == alone


def test_a_constraint_begins_after_the_reasoning(server: Server) -> None:
    for body, pattern in (
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, r"[0-9]{3}-[a-f]{2}"),
        ({"guided_choice": ["yes", "no"]}, r"yes|no"),
    ):
        message = server.chat(extra_body=body, max_tokens=60).choices[0].message
        assert re.fullmatch(pattern, message.content)
        assert message.reasoning_content
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "enum": [1, 2]}},
        "required": ["age"],
        "additionalProperties": False,
    }
    answer = server.chat(extra_body={"guided_json": schema}, max_tokens=60).choices[0].message.content
    assert json.loads(answer)["age"] in (1, 2)


class Walk(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kilometres: Literal[1, 2, 3]


class Ride(BaseModel):
    model_config = ConfigDict(extra="forbid")
    by: Literal["bus", "自行车"]


class Trip(BaseModel):
    first: Walk | Ride
    then: Walk | Ride | None


class Visit(BaseModel):
    model_config = ConfigDict(extra="forbid")
    province: Province  # type: ignore[valid-type]
    by: Walk | Ride


class Nap(BaseModel):
    minutes: Literal[10, 20]


def test_a_forced_call_is_of_its_model_after_the_reasoning(server: Server) -> None:
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 250, "temperature": 0, "parallel_tool_calls": False}
    fields["tools"] = [openai.pydantic_function_tool(Trip), openai.pydantic_function_tool(Nap)]
    [required] = server.client.chat.completions.parse(tool_choice="required", **fields).choices
    with server.client.chat.completions.stream(tool_choice={"type": "function", "function": {"name": "Trip"}}, **fields) as stream:
        [named] = stream.get_final_completion().choices
    for choice, kind in ((required, Trip | Nap), (named, Trip)):
        assert choice.finish_reason == "tool_calls"
        assert choice.message.reasoning_content
        assert not choice.message.content
        [call] = choice.message.tool_calls
        assert isinstance(call.function.parsed_arguments, kind)


def test_helpers_of_clients_give_models_after_the_reasoning(server: Server) -> None:
    """The model's vocabulary has none of these characters: they are spelled in bytes."""
    fields: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 120, "temperature": 0}
    [whole] = server.client.chat.completions.parse(response_format=Visit, **fields).choices
    with server.client.chat.completions.stream(response_format=Visit, **fields) as stream:
        [streamed] = stream.get_final_completion().choices
    assert isinstance(whole.message.parsed, Visit)
    assert streamed.message.parsed == whole.message.parsed
    assert whole.message.reasoning_content
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client: Any = instructor.from_openai(server.client, mode=mode)
        assert isinstance(client.create(response_model=Visit, max_retries=0, **fields), Visit)


def test_a_stop_string_ends_the_text_before_it(server: Server) -> None:
    whole = server.complete(max_tokens=24).choices[0].text
    stop = whole[10:14]
    choice = server.complete(max_tokens=24, stop=stop).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)


def test_a_seed_repeats_n_different_answers(server: Server) -> None:
    def texts() -> list[str]:
        choices = server.complete(n=3, temperature=1.0, seed=7, max_tokens=12).choices
        return [choice.text for choice in choices]

    assert texts() == texts()
    assert len(set(texts())) == 3


def test_scoring_a_text_gives_what_generating_it_gave(server: Server) -> None:
    generated = server.complete(prompt="1, 2, 3,", max_tokens=6, logprobs=1).choices[0]
    scored = server.complete(prompt="1, 2, 3," + generated.text, max_tokens=0, echo=True, logprobs=1).choices[0]
    count = len(generated.logprobs.tokens)
    assert scored.logprobs.tokens[-count:] == generated.logprobs.tokens
    # Layers of few bits round their inputs to 8 bits, and what was computed in another order may be rounded the other way.
    assert scored.logprobs.token_logprobs[-count:] == pytest.approx(generated.logprobs.token_logprobs, abs=3e-2)
    assert scored.logprobs.token_logprobs[0] is None


def test_cached_tokens_are_counted(server: Server) -> None:
    prompt = "The quick brown fox jumps over the lazy dog. " * 4
    server.complete(prompt=prompt, max_tokens=1)
    usage = server.complete(prompt=prompt, max_tokens=1).usage
    assert usage.prompt_tokens_details.cached_tokens >= 16


def test_a_client_that_leaves_frees_its_sequence(server: Server) -> None:
    stream = server.complete(max_tokens=300, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()

    async def until_idle() -> None:
        async with asyncio.timeout(20):
            while server.context.engine.stats().num_running:  # noqa: ASYNC110 - the engine has no event for being idle
                await asyncio.sleep(0.01)

    server.call(until_idle())


SHORT_CHAT = CHAT | {"max_tokens": 3, "logits_processors": [{"name": "no_repeat_ngram", "arguments": {"size": 3}}]}


@pytest.mark.parametrize(("path", "whole"), [("/chat/completions", SHORT_CHAT), ("/completions", COMPLETION)])
def test_mutated_bodies_are_answered_or_refused_while_others_stream(server: Server, path: str, whole: dict[str, Any]) -> None:
    with ThreadPoolExecutor(9) as clients:
        undisturbed = clients.submit(lambda: streamed_text(server.chat(stream=True, max_tokens=200)))
        answers = list(clients.map(lambda body: server.post(path, body), mutated_bodies(whole, 100, seed=3)))
        assert undisturbed.result() == streamed_text(server.chat(stream=True, max_tokens=200))
    for status, body in answers:
        assert status in (200, 400, 404), body
        assert b"InternalServerError" not in body
        if status != 200:
            assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
    assert sum(status == 200 for status, _ in answers) > 5
