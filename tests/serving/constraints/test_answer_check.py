"""Warnings and verdicts on the wire, with real checks, over an engine that replays texts."""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import ClientSession

from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.messages import MAX_HEADER, WARNING_HEADER, warning_header
from penstock.serving.options import ServerOptions
from tests.api.scripted import MODEL, Scripted, scripted_server

SCHEMA = {"type": "object", "properties": {"a": {"not": {"const": 1}}}}
LENIENT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}
EXACT: dict[str, Any] = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}}
WARNINGS = ("`not` at $.properties.a",)
GOOD, BAD = '{"a": 2}', '{"a": 1}'
VALID = {"valid": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'

Scenario = Callable[[Scripted], Coroutine[Any, Any, None]]


def serve(scenario: Scenario, answers: list[str], warnings: tuple[str, ...] = WARNINGS, **settings: Any) -> None:
    async def run() -> None:
        async with scripted_server({"answers": answers}, **settings) as scripted:
            scripted.compiler.warnings = warnings
            await asyncio.wait_for(scenario(scripted), 20)

    asyncio.run(run())


@dataclass
class Answered:
    """`found` are the verdicts by their choices' index: in a stream, those of the chunks that say how the choices ended."""

    found: dict[int, Any]
    headers: Mapping[str, str]
    text: str


async def ask(scripted: Scripted, path: str, *, stream: bool, key: str = "none", **fields: Any) -> Answered:
    source = {"messages": [{"role": "user", "content": "Hi"}]} if path.startswith("/chat") else {"prompt": "Hi", "max_tokens": 50}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        ClientSession(headers=headers) as client,
        client.post(scripted.base_url + path, json={"model": MODEL, "stream": stream} | source | fields) as response,
    ):
        text = await response.text()
        assert response.status == 200, text
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    bodies = [json.loads(line) for line in lines if line.startswith("{")]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert all(choice["finish_reason"] for choice in choices if "structured_output" in choice)
    found = {choice["index"]: choice.get("structured_output") for choice in choices if choice["finish_reason"]}
    return Answered(found, response.headers, text)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_a_lenient_grammar_is_announced_and_each_choice_is_checked(path: str, stream: bool) -> None:
    async def scenario(scripted: Scripted) -> None:
        answered = await ask(scripted, path, stream=stream, n=3, **LENIENT)
        assert answered.headers[WARNING_HEADER] == WARNINGS[0]
        assert answered.found[0] == VALID
        assert answered.found[1]["valid"] is False
        assert answered.found[1]["path"] == "$.a"
        assert answered.found[2]["valid"] is False
        assert "JSON" in answered.found[2]["error"]

    serve(scenario, [GOOD, BAD, '{"a": 2'])


def test_an_answer_is_checked_against_the_schema_as_it_is_written_unless_the_request_asks_for_the_closed_one() -> None:
    async def scenario(scripted: Scripted) -> None:
        answered = await ask(scripted, "/chat/completions", stream=False, **LENIENT)
        assert answered.found[0] == VALID
        answered = await ask(scripted, "/chat/completions", stream=False, guided_additional_properties="closed", **LENIENT)
        assert answered.found[0]["valid"] is False

    serve(scenario, ['{"a": 2, "unnamed": 1}'])


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_are_checked_choice_by_choice_and_without_their_echo(stream: bool) -> None:
    async def scenario(scripted: Scripted) -> None:
        answered = await ask(scripted, "/completions", stream=stream, prompt=["x", "y"], n=2, echo=True, **LENIENT)
        assert [answered.found[index]["valid"] for index in range(4)] == [True, False, True, False]

    serve(scenario, [GOOD, BAD])


@pytest.mark.parametrize("fields", [EXACT, {"guided_json": SCHEMA}, {}])
@pytest.mark.parametrize("path", ["/chat/completions", "/completions"])
def test_what_is_enforced_whole_is_neither_announced_nor_checked(path: str, fields: dict[str, Any]) -> None:
    async def scenario(scripted: Scripted) -> None:
        answered = await ask(scripted, path, stream=False, **fields)
        assert WARNING_HEADER not in answered.headers
        assert answered.found == {0: None}

    serve(scenario, [BAD])


def test_an_answer_that_is_cut_stays_as_it_is() -> None:
    async def scenario(scripted: Scripted) -> None:
        answered = await ask(scripted, "/completions", stream=False, **LENIENT | {"max_tokens": 5})
        (choice,) = json.loads(answered.text)["choices"]
        assert (choice["finish_reason"], choice["text"]) == ("length", GOOD[:5])
        assert answered.found[0]["valid"] is False

    serve(scenario, [GOOD])


def test_reasoning_is_no_part_of_what_is_checked() -> None:
    async def scenario(scripted: Scripted) -> None:
        for separate in (True, False):
            fields = LENIENT | {"separate_reasoning": separate, "chat_template_kwargs": {"enable_thinking": True}}
            answered = await ask(scripted, "/chat/completions", stream=True, **fields)
            assert answered.found == {0: VALID}

    serve(scenario, [f"Well.</think>{GOOD}"], thinks=True)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_checked_instead_of_the_content(stream: bool) -> None:
    async def scenario(scripted: Scripted) -> None:
        answered = await ask(scripted, "/chat/completions", stream=stream, n=2, tools=[TOOL], tool_choice="required")
        assert answered.headers[WARNING_HEADER] == WARNINGS[0]
        assert answered.found[0] == VALID
        assert (answered.found[1]["valid"], answered.found[1]["path"]) == (False, "$.tool_calls[1].function.arguments.a")

    serve(scenario, [CALL.format(GOOD), CALL.format(GOOD) + CALL.format(BAD)], tool_parser=HERMES)


def test_work_is_held_to_the_api_key_or_else_the_address() -> None:
    async def scenario(scripted: Scripted) -> None:
        await ask(scripted, "/chat/completions", stream=False, **LENIENT)
        await ask(scripted, "/completions", stream=False, **LENIENT)
        assert scripted.compiler.clients == ["127.0.0.1"] * 2

    async def scenario_with_keys(scripted: Scripted) -> None:
        for key in ("one", "two", "one"):
            await ask(scripted, "/chat/completions", stream=False, key=key, **LENIENT)
        first, second, third = scripted.compiler.clients
        assert first == third != second
        assert "one" not in str(first)

    serve(scenario, [GOOD])
    serve(scenario_with_keys, [GOOD], options=ServerOptions(keep_alive_interval=0, api_keys=("one", "two")))


def test_a_header_is_bounded_and_holds_only_what_a_header_may() -> None:
    assert warning_header(()) == {}
    value = warning_header(("`not` at $.ü\r\nx: 1\ud800", "\x00" * 2000))[WARNING_HEADER]
    assert len(value) == MAX_HEADER
    assert value.isprintable()
    assert value.isascii()
