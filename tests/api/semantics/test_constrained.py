"""What is promised of answers that reason first and are then held to a form, for families that write both in different ways.

A model that says random things begins with its reasoning.
"""

import json
from collections.abc import Sequence
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from tests.api.improvised import Improvised, improvise
from tests.api.semantics.conversations import plugins_of
from tests.api.semantics.families import FAMILIES, Family
from tests.api.semantics.test_tool_calls import answers, check_calls
from tests.api.semantics.test_tool_calls import tool as function

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "北京"]}, "nights": {"type": ["integer", "null"], "minimum": 0, "maximum": 9}},
    "required": ["city", "nights"],
    "additionalProperties": False,
}
TOOLS = [function("stay", SCHEMA, strict=True), function("leave")]
TAILS = {"deepseek_v3": "<think>", "kimi_k2": "<think>"}  # of prompts; the other families open their reasoning themselves, or always do
REASONS = [
    pytest.param(family, has_markers, id=f"{family}-{'added tokens' if has_markers else 'plain text'}")
    for family in FAMILIES
    for has_markers in (True, False)
    # Where a start marker of several tokens is the model's to write, a constraint holds from the start.
    if family.reasoning in TAILS or family.thought.startswith("{}") or family.name == "gpt_oss" or (has_markers and not family.is_spelled)
]


def reason(family: Family, has_markers: bool, scenario: Any, reasoning: str = "Hm.", *, end: Sequence[str] = ()) -> None:
    """Runs the scenario where the model says `reasoning`, and what ends it unless there is another `end`."""
    start, own_end = family.thought.split("{}")
    opening = start + reasoning + "".join(end or own_end)
    if family.name == "gpt_oss" and not end:
        opening += "<|channel|>final<|message|>"
    improvise(
        scenario,
        opening=opening,
        tail=TAILS.get(family.reasoning, ""),
        plugins=plugins_of(family.reasoning, family.tools),
        tokenizer=family.tokenizer(has_markers=has_markers),
    )


@pytest.mark.parametrize(("family", "has_markers"), REASONS)
def test_reasoning_is_free_and_all_content_is_of_the_schema(family: Family, has_markers: bool) -> None:
    async def scenario(server: Improvised) -> None:
        for choice in await answers(server, 2, extra_body={"guided_json": SCHEMA}):
            jsonschema.validate(json.loads(choice["content"]), SCHEMA)
            assert (choice["reasoning_content"].strip(), choice["finish_reason"]) == ("Hm.", "stop")

    reason(family, has_markers, scenario)


@pytest.mark.parametrize(("family", "has_markers"), REASONS)
def test_a_forced_call_comes_after_the_reasoning(family: Family, has_markers: bool) -> None:
    async def scenario(server: Improvised) -> None:
        named = {"type": "function", "function": {"name": "stay"}}
        for fields in ({"tool_choice": "required"}, {"tool_choice": named}):
            for choice in await answers(server, 1, tools=TOOLS, **fields):
                assert (choice["reasoning_content"].strip(), choice["content"], choice["finish_reason"]) == ("Hm.", "", "tool_calls")
                check_calls(choice, TOOLS[:1] if fields["tool_choice"] is named else TOOLS)
                assert len(choice["calls"]) == 1 or fields["tool_choice"] is not named

    reason(family, has_markers, scenario, end=["<|end|><|start|>assistant"] if family.name == "gpt_oss" else [])


@pytest.mark.parametrize(("family", "has_markers"), REASONS)
def test_the_thinking_budget_closes_the_reasoning_and_the_form_is_kept(family: Family, has_markers: bool) -> None:
    async def scenario(server: Improvised) -> None:
        num_start_tokens = len(family.tokenizer(has_markers=has_markers).encode(family.thought.split("{}")[0], add_special_tokens=False))
        extra = {"thinking_token_budget": num_start_tokens + 7}
        [held] = await answers(server, 1, extra_body=extra | {"guided_json": SCHEMA})
        jsonschema.validate(json.loads(held["content"]), SCHEMA)
        [called] = await answers(server, 1, extra_body=extra, tools=TOOLS, tool_choice="required")
        check_calls(called, TOOLS)
        for choice in (held, called):
            assert choice["reasoning_content"].strip() == "m" * 7
        unlimited = await server.ask(extra_body={"thinking_token_budget": -1}, max_tokens=60)
        assert unlimited.choices[0].message.content is None
        assert unlimited.usage.completion_tokens_details.reasoning_tokens == 60

    reason(family, has_markers, scenario, "m" * 100)


@pytest.mark.parametrize("opening", ["", "<tool_call>"])
def test_a_parameter_of_free_text_ends_at_its_tag_and_stays_within_the_limits(opening: str) -> None:
    tools = [function("note", {"type": "object", "properties": {"text": {"type": "string"}}})]

    async def scenario(server: Improvised) -> None:
        for about in range(5):
            answer = await server.ask(about, tools=tools, parallel_tool_calls=False, max_tokens=300)
            assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")

    improvise(scenario, plugins=("qwen3_coder",), opening=opening)
