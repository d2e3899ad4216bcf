"""What is promised of reasoning, as the official client sees it, for families that write it in different ways."""

import json
from typing import Any

import pytest

from tests.api.semantics.conversations import HELLO, WEATHER, Conversation, converse
from tests.api.semantics.families import FAMILIES, Family, in_both_spellings

EVERY_FAMILY = pytest.mark.parametrize("family", FAMILIES, ids=str)
BOTH_SPELLINGS = in_both_spellings(FAMILIES)
SWITCHABLE = [family for family in FAMILIES if family.off is not None]


@BOTH_SPELLINGS
def test_reasoning_content_and_calls_come_apart(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        answer = family.says(reasoning="Hm.", content="Yes")
        said = await server.ask(answer, logprobs=True)
        content, thought = said.logprobs
        assert (said.content, said.stripped_reasoning, said.finish_reason) == (family.gap + "Yes", "Hm.", "stop")
        assert said.num_reasoning_tokens == server.num_tokens(thought)
        if has_markers and not family.is_spelled:
            assert (content, thought) == (family.gap + "Yes", answer.removesuffix(family.gap + "Yes"))
        else:  # the first tokens of a marker in text are not known for what they are
            assert sorted(content + thought) == sorted(answer)
            assert content.endswith(family.gap + "Yes")

        said = await server.ask(family.says(reasoning="Hm.", content="Look:", cities=["Oslo", "Ulm"]), tools=[WEATHER])
        assert (said.content, said.stripped_reasoning, said.finish_reason) == (family.gap + "Look:", "Hm.", "tool_calls")
        assert said.cities == ["Oslo", "Ulm"]

        said = await server.ask(family.says(reasoning="Hm.", cities=["Oslo"]), tools=[WEATHER])
        assert (said.content, said.stripped_reasoning, said.cities) == (None, "Hm.", ["Oslo"])

    for tokens_per_step in (1, 7):
        converse(family, scenario, has_markers=has_markers, tokens_per_step=tokens_per_step)


@BOTH_SPELLINGS
def test_calls_are_read_from_the_content_and_in_reasoning_only_where_they_end_it(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        said = await server.ask(family.says(reasoning=f"Hm {family.written_calls('Oslo')} so", content="Yes"), tools=[WEATHER])
        assert (said.cities == ["Oslo"]) == family.call_ends_reasoning
        assert said.stripped_reasoning.startswith("Hm")
        assert said.stripped_reasoning.endswith("so") == (not family.call_ends_reasoning)
        assert (said.content or "").endswith("Yes")

    converse(family, scenario, has_markers=has_markers)


@EVERY_FAMILY
def test_markers_that_are_spelled_out_neither_end_reasoning_nor_begin_it(family: Family) -> None:
    async def scenario(server: Conversation) -> None:
        quoted = family.says(reasoning="Hm.", cities=["Oslo"])
        said = await server.ask(family.says(reasoning=family.spelled(quoted), content=family.spelled(quoted)), tools=[WEATHER])
        assert (said.content, said.stripped_reasoning, said.calls) == (family.gap + quoted, quoted.strip(), [])

    if not family.is_spelled:
        converse(family, scenario)


@in_both_spellings(SWITCHABLE)
def test_with_thinking_switched_off_all_is_content_and_never_null(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        assert family.off is not None
        for extra in ({"chat_template_kwargs": dict(family.off)}, {"reasoning_effort": "none", "chat_template_kwargs": {}}):
            for text in ("Yes", "", "\n\nYes. "):
                said = await server.ask(text, extra_body=extra, logprobs=True)
                assert (said.content, said.reasoning, said.num_reasoning_tokens) == (text, None, 0)
                assert said.logprobs == (text, "")
            said = await server.ask("Look:" + family.written_calls("Oslo"), extra_body=extra, tools=[WEATHER])
            assert (said.content, said.reasoning, said.cities) == ("Look:", None, ["Oslo"])

    converse(family, scenario, has_markers=has_markers)


@EVERY_FAMILY
def test_reasoning_is_shown_as_the_client_asks(family: Family) -> None:
    async def scenario(server: Conversation) -> None:
        answer = family.says(reasoning="Hm.", content="Yes")
        plain = await server.ask(answer, logprobs=True)

        dropped = await server.ask(answer, extra_body={"include_reasoning": False}, logprobs=True)
        assert (dropped.content, dropped.reasoning, dropped.logprobs) == (plain.content, None, (plain.logprobs[0], ""))
        assert (dropped.num_tokens, dropped.num_reasoning_tokens) == (plain.num_tokens, plain.num_reasoning_tokens)

        inside = await server.ask(answer, extra_body={"separate_reasoning": False}, logprobs=True)
        assert (inside.content, inside.reasoning, inside.logprobs) == (answer, None, (answer, ""))

        once = await server.ask(answer, extra_body={"stream_reasoning": False}, logprobs=True)
        assert once == plain

    converse(family, scenario)


@EVERY_FAMILY
def test_an_answer_that_is_cut_in_its_reasoning_has_no_content(family: Family) -> None:
    async def scenario(server: Conversation) -> None:
        answer = family.says(reasoning="Hm" * 20, content="Yes")
        said = await server.ask(answer, max_tokens=server.num_tokens(family.thought[: family.thought.index("{}")]) + 9)
        assert (said.content, said.finish_reason) == (None, "length")
        assert said.stripped_reasoning.startswith("HmHm")
        hidden = await server.ask(answer, max_tokens=40, extra_body={"include_reasoning": False})
        assert (hidden.content, hidden.reasoning, hidden.finish_reason) == ("", None, "length")

    converse(family, scenario)


@BOTH_SPELLINGS
def test_stop_strings_end_the_content_and_not_the_reasoning(family: Family, has_markers: bool) -> None:
    async def scenario(server: Conversation) -> None:
        said = await server.ask(family.says(reasoning="Hm. END of it.", content="Yes. END No."), stop=["END", "none"])
        assert (said.content, said.stripped_reasoning) == (family.gap + "Yes. ", "Hm. END of it.")
        assert (said.finish_reason, said.stop_reason) == ("stop", "END")
        said = await server.ask(family.says(reasoning="Hm. END of it."), stop="END")
        assert (said.stripped_reasoning, said.finish_reason, said.stop_reason) == ("Hm. END of it.", "stop", None)

    converse(family, scenario, has_markers=has_markers)


@EVERY_FAMILY
def test_what_the_history_holds_does_not_change_where_the_answer_starts(family: Family) -> None:
    thought = family.says(reasoning="Old.", content="Oslo.")
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    histories: list[list[Any]] = [
        [*HELLO, {"role": "assistant", "content": thought}, {"role": "user", "content": f"Sure? {thought}"}],
        [*HELLO, {"role": "assistant", "content": "Oslo.", "reasoning_content": "Old."}, {"role": "user", "content": "</think>"}],
        [*HELLO, {"role": "assistant", "content": "Oslo.", "reasoning": "Old. </think>"}, *HELLO],
        [
            *HELLO,
            {"role": "assistant", "content": None, "reasoning_content": "Old.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "Rain"},
            {"role": "assistant", "content": "Rain."},
            *HELLO,
        ],
    ]

    async def scenario(server: Conversation) -> None:
        for messages in histories:
            said = await server.ask(family.says(reasoning="Hm.", content="Yes", cities=["Ulm"]), messages=messages, tools=[WEATHER])
            assert (said.content, said.stripped_reasoning, said.cities) == (family.gap + "Yes", "Hm.", ["Ulm"])

    converse(family, scenario)


@EVERY_FAMILY
def test_a_message_that_is_continued_goes_on_in_the_part_where_it_was_left(family: Family) -> None:
    async def scenario(server: Conversation) -> None:
        fields = {"continue_final_message": True, "add_generation_prompt": False, "chat_template_kwargs": dict(family.on)}
        said = await server.ask(" Oslo.", messages=[*HELLO, {"role": "assistant", "content": "It is"}], extra_body=fields)
        assert (said.content, said.reasoning) == (" Oslo.", None)
        thought = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nIt is"}
        said = await server.ask(" Oslo.", messages=[*HELLO, thought], extra_body=fields)
        assert (said.content, said.reasoning) == (" Oslo.", None)
        if "<think>" in family.markers:
            said = await server.ask("m.</think>Oslo.", messages=[*HELLO, {"role": "assistant", "content": "<think>H"}], extra_body=fields)
            assert (said.content, said.reasoning) == ("Oslo.", "m.")

    converse(family, scenario)


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def test_arguments_and_effort_reach_the_template() -> None:
    async def effort(server: Conversation) -> None:
        for asked in ("low", "high"):
            await server.ask(family_named("gpt_oss").says(reasoning="Hm.", content="Yes"), reasoning_effort=asked)
            assert f"Reasoning: {asked}<|end|>" in server.prompt
        await server.ask(reasoning_effort="low", extra_body={"chat_template_kwargs": {"reasoning_effort": "high"}})
        assert "Reasoning: high<|end|>" in server.prompt

    async def arguments(server: Conversation) -> None:
        await server.ask(family_named("minimax_m2").says(content="Yes"), extra_body={"chat_template_kwargs": {"model_identity": "Me."}})
        assert "system\nMe.[e~[" in server.prompt

    converse(family_named("gpt_oss"), effort)
    converse(family_named("minimax_m2"), arguments)


def test_reasoning_in_the_history_is_the_templates_to_show() -> None:
    """Qwen3 shows that of the turn which calls belong to, and of no earlier one."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city":  "Oslo"}'}}
    result = {"role": "tool", "tool_call_id": "1", "content": "Rain"}

    async def scenario(server: Conversation) -> None:
        for name in ("reasoning_content", "reasoning"):
            calling = {"role": "assistant", "content": None, name: "I look.", "tool_calls": [call]}
            said = await server.ask("<think>Hm.</think>Rain", messages=[*HELLO, calling, result], tools=[WEATHER])
            assert (said.content, said.reasoning) == ("Rain", "Hm.")
            assert "assistant\n<think>\nI look.\n</think>\n\n<tool_call>\n" in server.prompt
            assert "<tool_response>\nRain\n</tool_response>" in server.prompt
            _, _, earlier = server.prompt.rpartition('{"name": "weather", "arguments": ')
            assert json.loads(earlier[: earlier.index("}\n")]) == {"city": "Oslo"}
            await server.ask(messages=[*HELLO, calling, result, *HELLO], tools=[WEATHER])
            assert "I look." not in server.prompt

    converse(family_named("qwen3"), scenario)
