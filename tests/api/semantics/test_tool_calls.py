"""What is promised of tool calls, kept by a model that says random things, as the official client sees it."""

import asyncio
import json
from typing import Any, ClassVar, Literal

import jsonschema  # type: ignore[import-untyped]
import openai
import pytest
from openai import AsyncOpenAI, pydantic_function_tool
from pydantic import BaseModel

from penstock.engine.contracts.parsing import Event, Text, ToolParser, Turn
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Evidence, Plugins
from penstock.plugins.tools.json_formats import HERMES
from penstock.serving.endpoints.bodies import decode
from penstock.serving.preparing import plan_chat
from penstock.serving.requests import ChatCompletionRequest
from tests.api.improvised import MARKER_TOKENS, MODEL, NO_MARKER_TOKENS, Improvised, improvise
from tests.api.scripted import scripted_server
from tests.api.test_chat import HELLO, joined
from tests.serving.test_tools import allowed
from tests.serving.test_tools import named as choice_of

ADDED, PLAIN = pytest.param(MARKER_TOKENS, id="added token"), pytest.param(NO_MARKER_TOKENS, id="plain text")
BOTH_SPELLINGS = pytest.mark.parametrize("tokenizer", [ADDED, PLAIN])
# By default the spellings of what comes before a call are those of the tests above.
BOTH_AFTER_REASONING = pytest.mark.parametrize(
    "tokenizer", [ADDED, pytest.param(NO_MARKER_TOKENS, id="plain text", marks=pytest.mark.thorough)]
)
CALL = "<tool_call>"


class Stay(BaseModel):
    city: Literal["Köln", "北京"]
    nights: int | None


class Flight(BaseModel):
    seat: Literal["aisle", "window"]
    legs: list[bool]


class Trip(BaseModel):
    parts: list[Stay | Flight]


class Cancellation(BaseModel):
    reason: Literal["ill", 'said "no"', "<tool_call>", "</tool_call>"]


def tool(name: str, schema: dict[str, Any] | None = None, *, strict: bool = False) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "strict": strict, "parameters": schema}}


STRICT: list[Any] = [pydantic_function_tool(Trip), pydantic_function_tool(Cancellation)]
LOOSE: list[Any] = [tool(one["function"]["name"], one["function"]["parameters"]) for one in STRICT]
SHORT = {"properties": {"to": {"maxLength": 5, "type": "string"}}, "additionalProperties": False}
FREER: list[Any] = [tool('mcp.say/"hi"', SHORT), tool("ping")]


def choices(answer: Any) -> list[dict[str, Any]]:
    """The choices of a body or of a stream's chunks, in one form."""
    if isinstance(answer, list):
        indexes = {choice.index for chunk in answer for choice in chunk.choices}
        whole = [joined(answer, index) for index in sorted(indexes)]
        return [{**one, "calls": [(name, arguments) for _, name, arguments in one["calls"].values()]} for one in whole]
    return [
        {
            "content": choice.message.content or "",
            "reasoning_content": getattr(choice.message, "reasoning_content", None) or "",
            "calls": [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()],
            "finish_reason": choice.finish_reason,
            "logprobs": [],
        }
        for choice in answer.choices
    ]


def check_calls(choice: dict[str, Any], tools: list[Any]) -> None:
    """Asserts that every call is of one of these tools, with arguments that its schema allows."""
    schemas = {one["function"]["name"]: one["function"].get("parameters") or {"maxProperties": 0} for one in tools}
    for name, arguments in choice["calls"]:
        jsonschema.validate(json.loads(arguments), {"type": "object"} | schemas[name])


async def answers(server: Improvised, num: int, **fields: Any) -> list[dict[str, Any]]:
    """The answers to `num` different questions, none of them cut, each of them the same in a stream."""

    async def one(seed: int) -> list[dict[str, Any]]:
        whole, stream = await asyncio.gather(server.ask(seed, **fields), server.stream(seed, **fields))
        assert choices(whole) == choices(stream)
        return choices(whole)

    every = [choice for whole in await asyncio.gather(*map(one, range(num))) for choice in whole]
    assert all(choice["finish_reason"] != "length" for choice in every)
    return every


@BOTH_SPELLINGS
def test_required_answers_are_calls_and_nothing_else(tokenizer: Tokenizer) -> None:
    async def scenario(server: Improvised) -> None:
        for tools in (STRICT, LOOSE, FREER):
            given = await answers(server, 6, tools=tools, tool_choice="required")
            for choice in given:
                assert (choice["content"], choice["finish_reason"]) == ("", "tool_calls")
                check_calls(choice, tools)
            assert {name for choice in given for name, _ in choice["calls"]} == {one["function"]["name"] for one in tools}
            assert max(len(choice["calls"]) for choice in given) > 1

    improvise(scenario, tokenizer=tokenizer)


@BOTH_SPELLINGS
def test_a_named_tool_is_called_once(tokenizer: Tokenizer) -> None:
    async def scenario(server: Improvised) -> None:
        for choice in await answers(server, 4, tools=STRICT, tool_choice=choice_of("Cancellation")):
            [(name, _)] = choice["calls"]
            assert (name, choice["content"], choice["finish_reason"]) == ("Cancellation", "", "tool_calls")
            check_calls(choice, STRICT)
        once = await answers(server, 4, tools=STRICT, tool_choice="required", parallel_tool_calls=False)
        assert [len(choice["calls"]) for choice in once] == [1] * 4

    improvise(scenario, tokenizer=tokenizer)


@BOTH_SPELLINGS
def test_under_auto_calls_are_held_to_strict_tools_once_the_model_opens_one(tokenizer: Tokenizer) -> None:
    async def scenario(server: Improvised) -> None:
        for fields, limit in (({}, 100), ({"parallel_tool_calls": False}, 1), ({"tool_choice": allowed("Trip")}, 100)):
            for choice in await answers(server, 3, tools=STRICT, **fields):
                assert choice["content"].startswith("Well, ")
                assert 1 <= len(choice["calls"]) <= limit
                check_calls(choice, STRICT[:1] if "tool_choice" in fields else STRICT)

    improvise(scenario, tokenizer=tokenizer, opening="Well, " + CALL)


def test_under_auto_text_is_free_and_without_a_promise_so_are_calls() -> None:
    async def scenario(server: Improvised) -> None:
        free = await answers(server, 3, tools=LOOSE)
        assert all(choice["content"] for choice in free)
        for choice in await answers(server, 3, tools=STRICT):
            assert choice["content"].startswith("I will not")

    improvise(scenario, opening="I will not <tool_cal")


@BOTH_SPELLINGS
@pytest.mark.parametrize("opening", [CALL, "{"])
def test_beside_a_constraint_the_answer_is_that_or_calls(tokenizer: Tokenizer, opening: str) -> None:
    format_ = {"type": "json_schema", "json_schema": {"name": "stay", "schema": Stay.model_json_schema()}}

    async def scenario(server: Improvised) -> None:
        for fields in ({"response_format": format_}, {"extra_body": {"guided_json": Stay.model_json_schema()}}):
            for choice in await answers(server, 3, tools=STRICT, **fields):
                assert bool(choice["calls"]) == (opening == CALL) == (not choice["content"])
                check_calls(choice, STRICT)
                if not choice["calls"]:
                    Stay.model_validate_json(choice["content"])
        [forced] = await answers(server, 1, tools=LOOSE, tool_choice="required", response_format=format_)
        assert forced["calls"]
        [alone] = await answers(server, 1, tools=LOOSE, tool_choice="none", response_format=format_)
        Stay.model_validate_json(alone["content"])
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask(tools=LOOSE, extra_body={"guided_json": UNKEPT})
        assert caught.value.param == "guided_json.properties.a.uniqueItems"
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask(tools=LOOSE, tool_choice="required", extra_body={"guided_regex": "a"})
        assert caught.value.param == "guided_regex"
        compact = await answers(server, 2, tools=STRICT, extra_body={"guided_whitespace_pattern": ""})
        assert all(" " not in arguments.replace('said \\"no', "") for choice in compact for _, arguments in choice["calls"])

    improvise(scenario, tokenizer=tokenizer, opening=opening)


def test_only_what_may_be_content_or_calls_is_left_open() -> None:
    """All other requests have one grammar or none, as they had."""
    stay: dict[str, Any] = {"guided_json": Stay.model_json_schema()}
    cases: list[tuple[dict[str, Any], bool, bool, str | None]] = [
        ({"tools": LOOSE} | stay, True, True, None),
        ({"tools": STRICT} | stay, True, True, CALL),
        ({"tools": LOOSE, "tool_choice": allowed("Trip")} | stay, True, True, CALL),
        ({"tools": LOOSE, "parallel_tool_calls": False} | stay, True, True, None),
        ({"tools": LOOSE, "use_beam_search": True, "best_of": 2} | stay, True, False, None),
        ({"tools": LOOSE, "tool_choice": "none"} | stay, True, False, None),
        ({"tools": LOOSE, "tool_choice": "required"}, True, False, None),
        ({"tools": LOOSE, "tool_choice": choice_of("Trip")}, True, False, None),
        ({"tools": STRICT}, True, False, None),
        ({"tools": LOOSE}, False, False, None),
        (stay, True, False, None),
        ({}, False, False, None),
    ]

    async def scenario(server: Improvised) -> None:
        for fields, has_grammar, is_open, opening in cases:
            body, _ = decode(json.dumps({"messages": [{"role": "user", "content": "a"}]} | fields).encode(), ChatCompletionRequest)
            prepared = plan_chat(server.context, body)
            found = (prepared.constraint.spec is not None, prepared.constraint.calls is not None, prepared.request.call_opening)
            assert found == (has_grammar, is_open, opening)

    improvise(scenario)


def test_a_call_that_is_cut_has_length() -> None:
    async def scenario(server: Improvised) -> None:
        [whole] = choices(await server.ask(tools=LOOSE, tool_choice="required"))
        for fields in ({"max_tokens": 15}, {"max_tokens": 30, "tool_choice": choice_of("Trip")}):
            cut = await server.ask(**({"tools": LOOSE, "tool_choice": "required"} | fields))
            stream = await server.stream(**({"tools": LOOSE, "tool_choice": "required"} | fields))
            assert choices(cut) == choices(stream)
            assert choices(cut)[0]["finish_reason"] == "length"
        assert whole["finish_reason"] == "tool_calls"

    improvise(scenario)


UNIQUE = {"type": "array", "items": {"type": "string", "maxLength": 1}, "maxItems": 3, "uniqueItems": True}
UNKEPT = {"type": "object", "properties": {"a": UNIQUE}, "required": ["a"], "additionalProperties": False}


def test_strict_arguments_are_exact_or_refused_and_others_as_exact_as_can_be() -> None:
    async def scenario(server: Improvised) -> None:
        for fields in ({}, {"tool_choice": "required"}, {"tool_choice": choice_of("f")}):
            with pytest.raises(openai.BadRequestError) as caught:
                await server.ask(tools=[*LOOSE, tool("f", UNKEPT, strict=True)], **fields)
            assert caught.value.param == "tools[2].function.parameters.properties.a.uniqueItems"
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask(tools=[tool("f", {"$ref": "#/$defs/none"}, strict=True)])
        assert caught.value.param is not None
        assert caught.value.param.startswith("tools[0].function.parameters")
        with pytest.raises(openai.BadRequestError) as caught:
            await server.ask(tools=STRICT, extra_body={"guided_decoding_backend": "outlines_core"})
        assert "outlines_core" in str(caught.value)
        raw = await server.client.chat.completions.with_raw_response.create(  # type: ignore[call-overload]
            model=MODEL, messages=HELLO, tools=[tool("f", UNKEPT)], tool_choice="required", max_tokens=300, temperature=0
        )
        assert "tools[0].function.parameters.properties.a.uniqueItems" in raw.headers["x-structured-output-warning"]
        check_calls(choices(raw.parse())[0], [tool("f", {"type": "object"})])

    improvise(scenario)


def test_numbers_of_tools_and_of_arguments_of_the_template_may_have_any_size() -> None:
    async def scenario(server: Improvised) -> None:
        schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 10**30}}, "required": ["a"]}
        for _ in range(2):  # the second one would wait for ever on a connection that the first one has broken
            completion = await server.ask(
                tools=[tool("f", schema)], tool_choice="required", extra_body={"chat_template_kwargs": {"seed": 10**30}}
            )
            assert completion.choices[0].message.tool_calls

    improvise(scenario)


def test_equal_requests_are_held_to_equal_grammars() -> None:
    async def run() -> None:
        async with (
            scripted_server(tool_parser=HERMES) as scripted,
            AsyncOpenAI(base_url=scripted.base_url, api_key="none") as client,
        ):
            for fields in ({"n": 1}, {"n": 2, "stream": True}, {"user": "a user"}):
                await client.chat.completions.create(model=MODEL, messages=HELLO, tools=STRICT, tool_choice="required", **fields)
            specs = [spec for spec, *_ in scripted.compiler.specs]
            assert len(specs) == 3
            assert len(set(specs)) == 1

    asyncio.run(run())


class OlderParser(ToolParser):
    """Reads no calls, and does not say how they are written either."""

    def __init__(self, turn: Turn) -> None:
        self.turns.append(turn)

    turns: ClassVar[list[Turn]] = []

    def feed(self, text: str) -> list[Event]:
        return [Text(text)]

    def finish(self) -> list[Event]:
        return []


def test_a_parser_is_told_of_the_choice_and_without_a_format_it_is_promised_nothing() -> None:
    async def run() -> None:
        async with scripted_server(tool_parser=OlderParser) as scripted, AsyncOpenAI(base_url=scripted.base_url, api_key="none") as client:
            await client.chat.completions.create(model=MODEL, messages=HELLO, tools=LOOSE)
            for choice, word in (("required", "required"), (choice_of("Trip"), "Trip"), (allowed("Trip", mode="required"), "required")):
                with pytest.raises(openai.BadRequestError, match="has no `tool_format`") as caught:
                    await client.chat.completions.create(model=MODEL, messages=HELLO, tools=LOOSE, tool_choice=choice)  # type: ignore[call-overload]
                assert caught.value.param == "tool_choice"
                assert OlderParser.turns[-1].tool_choice == word
            assert OlderParser.turns[0].tool_choice == "auto"
            assert [turn.tools for turn in OlderParser.turns] == [LOOSE] * len(OlderParser.turns)
            assert len(scripted.engine.requests) == 1

    OlderParser.turns.clear()
    asyncio.run(run())


def test_a_parser_is_told_whether_a_grammar_holds_the_answer() -> None:
    turns: list[Turn] = []

    def told(turn: Turn) -> ToolParser:
        turns.append(turn)
        return HERMES(turn)

    async def run() -> None:
        async with scripted_server(tool_parser=told) as scripted, AsyncOpenAI(base_url=scripted.base_url, api_key="none") as client:
            for tools in (LOOSE, STRICT):
                await client.chat.completions.create(model=MODEL, messages=HELLO, tools=tools)
            for request, is_constrained in zip(scripted.engine.requests, (False, True), strict=True):
                request.make_answer()
                assert turns[-1].is_constrained is is_constrained

    asyncio.run(run())


def test_a_model_of_no_known_format_is_held_to_calls_and_has_them_read() -> None:
    plugins = Plugins.start()
    plugins.recognize(Evidence(("{{ messages[0].content }}",)))

    async def scenario(server: Improvised) -> None:
        for fields in ({"tool_choice": "required"}, {"tool_choice": choice_of("Trip")}, {}):
            for choice in await answers(server, 4, tools=STRICT, **fields):
                assert (choice["finish_reason"], choice["calls"] != []) == ("tool_calls", True)
                assert "tool_choice" not in fields or choice["content"] == ""
                check_calls(choice, STRICT)

    improvise(scenario, plugins=plugins, opening=CALL)


REASONING = [
    # parser, what the template opens the answer with, how the model begins, fields, the reasoning
    ("qwen3", "<think>\n", "Hm. ", {}, True),
    ("qwen3", "", "<think>Hm. ", {}, True),
    ("qwen3", "", "", {"enable_thinking": False}, False),
    ("qwen3", "<think>\n\n</think>\n\n", "", {}, False),
    ("deepseek_r1", "<think>\n", "Hm. ", {}, True),
    ("deepseek_r1", "", "<think>Hm. ", {}, True),
    ("deepseek_r1", "<think>\n\n</think>\n\n", "", {}, False),
]


@BOTH_AFTER_REASONING
@pytest.mark.parametrize(("parser", "tail", "opening", "kwargs", "reasons"), REASONING)
def test_reasoning_is_free_and_what_follows_it_is_not(
    tokenizer: Tokenizer, parser: str, tail: str, opening: str, kwargs: dict[str, Any], reasons: bool
) -> None:
    ends = ["</think>", CALL] if reasons and parser == "qwen3" else ["</think>"]

    async def scenario(server: Improvised) -> None:
        extra = {"chat_template_kwargs": kwargs}
        for fields in ({"tool_choice": "required"}, {"tool_choice": choice_of("Cancellation"), "n": 2, "temperature": 1.0, "seed": 3}):
            for choice in await answers(server, 1, tools=STRICT, extra_body=extra, **fields):
                assert choice["reasoning_content"].strip() == ("Hm." if reasons else "")
                assert (choice["content"].strip(), choice["finish_reason"]) == ("", "tool_calls")
                assert choice["calls"]
                check_calls(choice, STRICT)

    for end in ends:
        improvise(scenario, tokenizer=tokenizer, plugins=("hermes", parser), tail=tail, opening=opening + (end if reasons else ""))


@BOTH_AFTER_REASONING
@pytest.mark.parametrize(
    ("parser", "tail", "opening", "thought"),
    [
        ("qwen3", "<think>\n", "", "Hm."),
        ("qwen3", "", "<think>", "Hm."),
        ("deepseek_r1", "<think>\n", "", f"Hm, {CALL} is how I would call."),
    ],
)
def test_calls_that_follow_reasoning_are_held_to_strict_tools_under_auto(
    tokenizer: Tokenizer, parser: str, tail: str, opening: str, thought: str
) -> None:
    """What is only said of calls while the model reasons is not held to anything."""

    async def scenario(server: Improvised) -> None:
        for fields, limit in (({}, 100), ({"parallel_tool_calls": False}, 1)):
            for choice in await answers(server, 2, tools=STRICT, **fields):
                assert (choice["reasoning_content"].strip(), choice["finish_reason"]) == (thought, "tool_calls")
                assert 1 <= len(choice["calls"]) <= limit
                check_calls(choice, STRICT)

    improvise(scenario, tokenizer=tokenizer, plugins=("hermes", parser), tail=tail, opening=f"{opening}{thought} </think>{CALL}")
