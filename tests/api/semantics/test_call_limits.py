"""Models that would go on calling: where their answers end, streamed and not, however the engine runs."""

import json
from typing import Any

import pytest

from penstock.engine.text.tokenizer import Tokenizer
from tests.api.improvised import MARKER_TOKENS, NO_MARKER_TOKENS, Improvised, improvise
from tests.api.semantics.test_tool_calls import choices, tool
from tests.api.test_chat import joined

PLAIN = pytest.param(NO_MARKER_TOKENS, id="plain text", marks=pytest.mark.thorough)  # as in test_tool_calls.py
BOTH_SPELLINGS = pytest.mark.parametrize("tokenizer", [pytest.param(MARKER_TOKENS, id="added token"), PLAIN])
ENGINES = pytest.mark.parametrize("engine", [{}, {"is_async": True}, {"rows_for_weights": 8.0}], ids=["plain", "overlap", "speculation"])
TOOLS = [tool("roll", {"properties": {"sides": {"type": "integer"}}, "required": ["sides"], "additionalProperties": False})]


def written(*sides: int) -> str:
    """So many calls as the model writes them."""
    return "\n".join(f'<tool_call>\n{{"name": "roll", "arguments": {{"sides": {number}}}}}\n</tool_call>' for number in sides)


def arguments(*sides: int) -> list[tuple[str, str]]:
    return [("roll", f'{{"sides": {number}}}') for number in sides]


async def said(server: Improvised, **fields: Any) -> list[dict[str, Any]]:
    """The choices of an answer, which are the same in a stream."""
    whole = await server.ask(tools=TOOLS, **fields)
    assert choices(whole) == choices(await server.stream(tools=TOOLS, **fields))
    return choices(whole)


@ENGINES
@BOTH_SPELLINGS
def test_a_forced_answer_ends_where_a_call_repeats_the_one_before(tokenizer: Tokenizer, engine: dict[str, Any]) -> None:
    async def scenario(server: Improvised) -> None:
        for fields in ({}, {"n": 3, "temperature": 1.0, "seed": 5}):
            for choice in await said(server, tool_choice="required", **fields):
                assert (choice["content"], choice["calls"], choice["finish_reason"]) == ("", arguments(6, 20, 6), "tool_calls")

    improvise(scenario, tokenizer=tokenizer, opening=written(6, 20, 6, *[6] * 30), **engine)


@ENGINES
def test_reasoning_before_the_calls_changes_nothing(engine: dict[str, Any]) -> None:
    async def scenario(server: Improvised) -> None:
        for choice in await said(server, tool_choice="required", n=2):
            assert choice["reasoning_content"].strip() == "A die."
            assert (choice["content"].strip(), choice["calls"], choice["finish_reason"]) == ("", arguments(6), "tool_calls")

    opening = f"A die.</think>{written(*[6] * 30)}"
    improvise(scenario, plugins=("hermes", "deepseek_r1"), tail="<think>\n", opening=opening, **engine)


@ENGINES
def test_under_auto_equal_calls_are_meant_until_there_are_too_many(engine: dict[str, Any]) -> None:
    async def scenario(server: Improvised) -> None:
        [choice] = await said(server, max_tokens=3000)
        assert (choice["content"], choice["calls"], choice["finish_reason"]) == ("", arguments(*[6] * 16), "tool_calls")
        [choice] = await said(server, extra_body={"max_tool_calls": 2})
        assert (choice["calls"], choice["finish_reason"]) == (arguments(6, 6), "tool_calls")

    improvise(scenario, opening=written(*[6] * 40), **engine)


def test_a_forced_answer_has_sixteen_calls_unless_the_request_says_otherwise() -> None:
    async def scenario(server: Improvised) -> None:
        for fields, number in (({}, 16), ({"max_tool_calls": 3}, 3), ({"max_tool_calls": 18}, 18), ({"max_tool_calls": 1}, 1)):
            [choice] = await said(server, tool_choice="required", max_tokens=3000, extra_body=fields)
            assert (choice["calls"], choice["finish_reason"]) == (arguments(*range(number)), "tool_calls")
        server.context.options = type(server.context.options)(max_tool_calls=2, keep_alive_interval=0)
        [choice] = await said(server, tool_choice="required")
        assert choice["calls"] == arguments(0, 1)
        [choice] = await said(server, max_tokens=3000)
        assert len(choice["calls"]) == 20, "none of these calls was forced, and no two are equal"

    improvise(scenario, opening=written(*range(20)))


@BOTH_SPELLINGS
def test_what_a_cut_leaves_of_a_forced_call_is_no_content(tokenizer: Tokenizer) -> None:
    async def scenario(server: Improvised) -> None:
        text = written(6, 20)
        for limit in range(1, server.num_tokens(text), 3):
            whole = await server.ask(tools=TOOLS, tool_choice="required", max_tokens=limit)
            [message] = [choice.message for choice in whole.choices]
            assert (message.content, whole.choices[0].finish_reason) == (None, "length")
            stream = await server.stream(tools=TOOLS, tool_choice="required", max_tokens=limit)
            assert joined(stream, 0)["content"] == ""
            assert choices(whole) == choices(stream)
            calls = choices(whole)[0]["calls"]
            for (_, came), (_, complete) in zip(calls, arguments(6, 20), strict=False):
                assert complete.startswith(came)
        stopped = await server.ask(tools=TOOLS, tool_choice="required", stop="name")
        assert (stopped.choices[0].message.content, stopped.choices[0].finish_reason) == (None, "stop")

    improvise(scenario, tokenizer=tokenizer, opening=written(6, 20))


def test_under_auto_markup_that_a_grammar_forced_is_no_content_and_text_before_it_is() -> None:
    async def scenario(server: Improvised) -> None:
        opening = server.num_tokens("Well, <tool_call>")
        for fields, content in (({"parallel_tool_calls": False}, "Well, "), ({}, 'Well, <tool_call>\n{"name"')):
            [choice] = await said(server, max_tokens=opening + len('\n{"name"'), **fields)
            assert (choice["content"], choice["calls"], choice["finish_reason"]) == (content, [], "length")

    improvise(scenario, opening="Well, " + written(6))


def test_the_bound_of_a_request_is_a_positive_number() -> None:
    async def scenario(server: Improvised) -> None:
        for bound in (0, -1, "3"):
            with pytest.raises(Exception, match="max_tool_calls"):
                await server.ask(tools=TOOLS, extra_body={"max_tool_calls": bound})
        [choice] = await said(server, tool_choice="required", extra_body={"max_tool_calls": 1})
        assert json.loads(choice["calls"][0][1]) == {"sides": 6}

    improvise(scenario, opening=written(6, 20))
