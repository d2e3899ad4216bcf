"""Tools, calls and results in conversations whose template has no place for them."""

import json
from typing import Any

import pytest

from penstock.engine.contracts.parsing import ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.manager import Plugins
from penstock.plugins.tools.json_formats import HERMES, mistral
from penstock.serving.templates.rendering import ChatTemplate, load_chat_template
from penstock.serving.tools import ToolPrompt, written_call

WEATHER = {"type": "function", "function": {"name": "weather", "description": "It tells.", "parameters": {"type": "object"}}}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Rain in Oslo?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}
RESULTS = [{"role": "tool", "tool_call_id": "1", "content": "sunny"}, {"role": "tool", "tool_call_id": "1", "content": "rainy"}]
WRITTEN = '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
RESPONSES = "<tool_response>\nsunny\n</tool_response>\n<tool_response>\nrainy\n</tool_response>"

# As SmolLM2's: whatever role there is, it is written.
ANY_ROLE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
# As Gemma 2's and early Mistral's: no system message, and turns have to alternate.
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
KNOWING = (
    "{% for t in tools or [] %}[{{ t.function.name }}: {{ t.function.description }}]{% endfor %}{% for m in messages %}<{{ m.role }}>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}CALL {{ c.function.name }}{{ c.function.arguments }}{% endfor %}</s>{% endfor %}"
)


def prompt(source: str, *messages: dict[str, Any], tools: list[dict[str, Any]] | None = None, told: ToolPrompt | None = None) -> str:
    return ChatTemplate(source, tool_prompt=told or ToolPrompt()).render(messages, tools).text


def test_tools_are_told_in_the_system_message() -> None:
    alone, joined = prompt(ANY_ROLE, USER, tools=[WEATHER]), prompt(ANY_ROLE, SYSTEM, USER, tools=[WEATHER])
    assert alone.startswith("<system># Tools\n")
    assert joined.startswith("<system>Be brief.\n\n# Tools\n")
    for text in (alone, joined):
        assert text.count("<system>") == 1
        assert json.dumps(WEATHER) in text
        assert '<tool_call>\n{"name": "<function-name>", "arguments": <args-json-object>}\n</tool_call></s><user>Rain' in text
    assert prompt(ANY_ROLE, SYSTEM, USER) == "<system>Be brief.</s><user>Rain in Oslo?</s><assistant>"


def test_without_a_system_message_tools_are_told_in_the_first_message_of_the_user() -> None:
    text = prompt(ALTERNATING, USER, {"role": "assistant", "content": "No."}, USER, tools=[WEATHER])
    assert text.startswith("<user># Tools\n")
    assert text.endswith("\n\nRain in Oslo?</s><assistant>No.</s><user>Rain in Oslo?</s><assistant>")


@pytest.mark.parametrize("source", [ANY_ROLE, ALTERNATING, load_chat_template("think")], ids=["any role", "alternating", "think"])
def test_calls_and_results_are_shown_by_templates_that_do_not_know_them(source: str) -> None:
    for tools in (None, [WEATHER]):
        text = prompt(source, USER, CALLS, *RESULTS, USER, tools=tools)
        assert f"{WRITTEN}\n{WRITTEN}" in text
        assert f"{RESPONSES}\n\nRain in Oslo?" in text
        assert text.index(WRITTEN) < text.index(RESPONSES)
        assert not any(word in text for word in ("<tool>", "|>tool", "None"))
        assert f"{RESPONSES}<" in prompt(source, USER, CALLS, *RESULTS, tools=tools)


@pytest.mark.parametrize(
    "calls", [[{}], [{"function": "f"}], [{"function": {}}], [{"name": "f"}], [{"function": {"name": "f", "arguments": '{"a": '}}]]
)
def test_odd_calls_of_earlier_turns_are_no_error(calls: list[dict[str, Any]]) -> None:
    text = prompt(ANY_ROLE, USER, {"role": "assistant", "content": "Well.", "tool_calls": calls}, *RESULTS, tools=[WEATHER])
    assert "Well." in text
    assert RESPONSES in text


def test_a_template_that_fails_at_tools_is_spared_them() -> None:
    source = ANY_ROLE + "{% if tools %}{{ 1 // 0 }}{% endif %}{% for m in messages if m.tool_calls %}{{ m.tool_calls.none.no }}{% endfor %}"
    text = prompt(source, USER, CALLS, *RESULTS, tools=[WEATHER])
    assert all(part in text for part in ("# Tools", WRITTEN, RESPONSES))


def test_a_template_that_knows_tools_is_given_them() -> None:
    text = prompt(KNOWING, USER, CALLS, *RESULTS, tools=[WEATHER])
    shown = 'CALL weather{"city": "Zürich"}'
    assert text == f"[weather: It tells.]<user>Rain in Oslo?</s><assistant>{shown}{shown}</s><tool>sunny</s><tool>rainy</s>"


def test_a_template_of_a_format_that_no_parser_reads_is_not() -> None:
    default = ToolPrompt(HERMES.tool_format, is_default=True)
    text = prompt(KNOWING, USER, CALLS, *RESULTS, tools=[WEATHER], told=default)
    assert text.startswith("<system># Tools\n")
    assert f"{WRITTEN}\n{WRITTEN}" in text
    assert "CALL" not in text
    hermes = prompt(KNOWING + "{# <tool_call> #}", USER, CALLS, tools=[WEATHER], told=default)
    assert hermes.startswith("[weather: It tells.]")


def test_the_form_is_that_of_the_tool_parser() -> None:
    told = ToolPrompt(getattr(mistral(Turn()), "tool_format", None))
    text = prompt(ANY_ROLE, USER, CALLS, tools=[WEATHER], told=told)
    assert '[TOOL_CALLS] [{"name": "<function-name>", "arguments": <args-json-object>}]' in text
    assert '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Zürich"}}]' in text
    other = ToolPrompt(None, example="weather(city='Oslo')")
    assert prompt(ANY_ROLE, USER, tools=[WEATHER], told=other).endswith("weather(city='Oslo')</s><user>Rain in Oslo?</s><assistant>")
    assert "# Tools" not in prompt(ANY_ROLE, USER, tools=[WEATHER], told=ToolPrompt(None)), "no form is known that could be told"


def test_calls_are_written_as_their_parsers_read_them() -> None:
    num_written = 0
    for name, factory in Plugins.start(["none"]).tool_parsers.items():
        turn = Turn(tools=[WEATHER], tool_choice="auto")
        tool_format = getattr(factory(turn), "tool_format", None)
        text = None if tool_format is None else written_call(tool_format, "weather", '{"city": "Oslo"}')
        if text is not None:
            parser = factory(turn)
            events = [*parser.feed(text), *parser.finish()]
            assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["weather"], name
            assert "".join(event.fragment for event in events if isinstance(event, ToolCallArguments)) == '{"city": "Oslo"}', name
            num_written += 1
    assert num_written > 15
