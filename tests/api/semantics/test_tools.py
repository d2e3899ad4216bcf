"""What is promised of tool calls, as the official client sees it, for families that write them in different ways."""

from typing import Any

import openai
import pytest

from tests.api.semantics.conversations import HELLO, WEATHER, Conversation, converse
from tests.api.semantics.families import FAMILIES, PYTHONIC, Family, in_both_spellings

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)
BOTH_SPELLINGS = in_both_spellings(FAMILIES)
SEEN = {"skip_special_tokens": False}
NAMED: Any = {"type": "function", "function": {"name": "weather"}}


@BOTH_SPELLINGS
def test_tool_choice_says_whether_calls_are_read_and_held_to_a_grammar(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        answer = family.says(reasoning="Hm.", cities=["Oslo", "Ulm"])
        for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"tool_choice": NAMED}):
            said = await server.ask(answer, tools=[WEATHER], **fields)
            cities = ["Oslo"] if fields.get("tool_choice") is NAMED else ["Oslo", "Ulm"]
            assert (said.content, said.cities, said.finish_reason) == (None, cities, "tool_calls")
            assert (server.server.engine.requests[-1].grammar is not None) == (fields.get("tool_choice", "auto") != "auto")
            one = await server.ask(answer, tools=[WEATHER], parallel_tool_calls=False, **fields)
            assert (one.content, one.cities, one.finish_reason) == (None, ["Oslo"], "tool_calls")
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
            said = await server.ask(answer, extra_body=SEEN, **fields)
            assert (said.calls, said.finish_reason) == ([], "stop")
            assert said.content is not None
            assert family.unframed(answer).endswith(said.content)
            assert all(word in said.content for word in ("weather", "Oslo", "Ulm"))

    converse(family, scenario, has_markers=has_markers)


@BOTH_SPELLINGS
def test_what_is_no_call_after_all_is_content_as_it_stood(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        answer = family.says(reasoning="Hm.") + family.malformed
        said = await server.ask(answer, tools=[WEATHER], extra_body=SEEN)
        assert (said.content, said.calls, said.finish_reason) == (family.gap + family.unframed(family.malformed), [], "stop")

    converse(family, scenario, has_markers=has_markers)


@BOTH_SPELLINGS
def test_a_call_that_is_cut_keeps_what_came_and_finishes_with_length(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        answer = family.says(reasoning="Hm.", cities=["Nordhausen"])
        num_tokens = server.num_tokens(answer)
        whole = await server.ask(answer, tools=[WEATHER])
        lengths = []
        for limit in range(num_tokens - 24, num_tokens, 4):
            said = await server.ask(tools=[WEATHER], max_tokens=limit)
            assert said.finish_reason == "length"
            assert said.reasoning == whole.reasoning
            came = "".join(arguments for _, arguments in said.calls).partition("<")[0]  # half an end marker is not known for one
            assert whole.calls[0][1].startswith(came)
            lengths.append(len(came))
        assert lengths == sorted(lengths)
        assert lengths[-1] > 0

    converse(family, scenario, has_markers=has_markers)


@EVERY_FAMILY
def test_a_stop_string_in_a_call_cuts_it_and_after_a_call_ends_the_answer(family: Family) -> None:
    async def scenario(server: Conversation) -> None:
        said = await server.ask(family.says(reasoning="Nordhausen?", cities=["Nordhausen", "Ulm"]), tools=[WEATHER], stop="haus")
        [(_, arguments)] = said.calls
        assert (arguments, said.finish_reason, said.stop_reason) == ('{"city": "Nord', "stop", "haus")
        said = await server.ask(family.says(reasoning="Hm.", cities=["Oslo"]) + " Ulm", tools=[WEATHER], stop="Ulm")
        assert (said.cities, said.stop_reason, said.finish_reason) == (["Oslo"], "Ulm", "tool_calls")

    converse(family, scenario)


@EVERY_FAMILY
def test_calls_and_results_of_earlier_turns_are_shown_and_content_may_be_null(family: Family) -> None:
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Rain"}
    contents: list[dict[str, Any]] = [{"content": None}, {"content": ""}, {}, {"content": []}]

    async def scenario(server: Conversation) -> None:
        prompts = set()
        for content in contents:
            messages = [*HELLO, {"role": "assistant", "tool_calls": [call], **content}, result, *HELLO]
            said = await server.ask(family.says(reasoning="Hm.", cities=["Ulm"]), messages=messages, tools=[WEATHER])
            assert (said.stripped_reasoning, said.cities) == ("Hm.", ["Ulm"])
            prompts.add(server.prompt)
        [prompt] = prompts
        assert 0 < prompt.index("Oslo") < prompt.index("Rain")
        assert "None" not in prompt.partition("Oslo")[2]

    converse(family, scenario)


def test_a_format_that_calls_only_at_the_start_reads_calls_and_promises_none() -> None:
    async def scenario(server: Conversation) -> None:
        calls = PYTHONIC.written_calls("Oslo", "Ulm")
        said = await server.ask(calls, tools=[WEATHER], logprobs=True)
        assert (said.content, said.reasoning, said.cities, said.logprobs) == (None, None, ["Oslo", "Ulm"], (calls, ""))
        assert (await server.ask(tools=[WEATHER], tool_choice="none")).content == calls
        assert (await server.ask(PYTHONIC.malformed, tools=[WEATHER])).content == PYTHONIC.malformed
        for fields in ({"tool_choice": "required"}, {"tool_choice": NAMED}, {"parallel_tool_calls": False}):
            with pytest.raises(openai.BadRequestError, match="has no `tool_format`"):
                await server.ask(tools=[WEATHER], **fields)

    converse(PYTHONIC, scenario)
