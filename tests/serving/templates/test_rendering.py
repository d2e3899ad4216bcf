"""From messages to prompt and tail."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import Phase, Turn
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.serving.context import JobQueue, Workers
from penstock.serving.templates.rendering import SHIPPED, ChatTemplate, RenderedPrompt, common_prefix, load_chat_template, shipped_names
from tests.serving.templates.test_template_environment import ENDLESS

USER = {"role": "user", "content": "Hello"}
ANSWER = {"role": "assistant", "content": "Hi"}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def render(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any) -> RenderedPrompt:
    return ChatTemplate(source).render(messages, tools, **options)


def shipped(name: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any) -> RenderedPrompt:
    return render(load_chat_template(name), messages, tools, **options)


def test_the_tail_is_what_opens_the_assistants_turn() -> None:
    prompt = shipped("chatml", [USER])
    assert prompt.text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.tail == "<|im_start|>assistant\n"


def test_a_template_that_always_opens_the_turn_has_a_tail_too() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</s>{% endfor %}{{ '<assistant><think>\n' }}"
    history = [USER, {"role": "assistant", "content": "<think>a</think>b"}, USER]
    assert render(template, history).tail == "</s><assistant><think>\n"
    assert render("{{ messages | length }}", history).tail == ""


def test_a_template_that_wants_parts_gets_them() -> None:
    template = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
    assert render(template, [USER, ANSWER]).text == "[Hello][Hi]"
    strict = "{% for m in messages %}{{ (m.content | selectattr('type', 'equalto', 'text') | first).text }}{% endfor %}"
    assert render(strict, [USER, ANSWER]).text == "HelloHi"
    assert render(strict, [USER, ANSWER], continue_final_message=True).text == "HelloHi"


def test_without_a_generation_prompt_there_is_no_tail() -> None:
    assert shipped("chatml", [USER], add_generation_prompt=False) == RenderedPrompt("<|im_start|>user\nHello<|im_end|>\n", "")


def test_think_opens_reasoning_in_the_prompt() -> None:
    prompt = shipped("think", [USER])
    assert prompt.text.endswith("<|im_start|>assistant\n<think>\n")
    assert Turn(prompt_tail=prompt.tail).phase("<think>", "</think>") is Phase.REASONING


def test_think_closes_reasoning_where_thinking_is_off() -> None:
    prompt = shipped("think", [USER], template_kwargs={"enable_thinking": False})
    assert Turn(prompt_tail=prompt.tail).phase("<think>", "</think>") is Phase.CONTENT


def test_think_leaves_the_reasoning_of_earlier_turns_out() -> None:
    history = [USER, {"role": "assistant", "content": "<think>\nsecret\n</think>\n\nHi", "reasoning_content": "secret"}, USER]
    prompt = shipped("think", history)
    assert "secret" not in prompt.text
    assert "<|im_start|>assistant\nHi<|im_end|>" in prompt.text


def test_markers_in_the_history_are_not_in_the_tail() -> None:
    history = [{"role": "user", "content": "what does </think> mean?"}, {"role": "assistant", "content": "<think>a</think>b"}, USER]
    assert shipped("chatml", history).tail == "<|im_start|>assistant\n"


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_templates_take_every_role_and_spelling(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "assistant", "content": "Sunny.", "tool_calls": None},
        USER,
    ]
    text = shipped(name, messages, [WEATHER]).text
    assert all(part in text for part in ("Be brief.", "one\ntwo", "sunny", "Sunny.", "Hello"))
    assert "None" not in text


@pytest.mark.parametrize("name", shipped_names())
def test_shipped_templates_refuse_an_unknown_role(name: str) -> None:
    with pytest.raises(InvalidRequest, match="Unknown role: narrator") as refusal:
        shipped(name, [USER, {"role": "narrator", "content": "Meanwhile"}])
    assert refusal.value.param == "messages"


def test_chatml_describes_tools_and_shows_earlier_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Zürich"}'}}
    text = shipped("chatml", [USER, {"role": "assistant", "content": "", "tool_calls": [call]}], [WEATHER]).text
    assert '{"type": "function", "function": {"name": "weather"' in text
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>' in text


@pytest.mark.parametrize(
    "template",
    [
        "{{ '=' + messages[0].tool_calls[0].function.arguments + '=' }}",
        "{{ '=' ~ messages[0].tool_calls[0].function.arguments ~ '=' }}",
        "={{ messages[0].tool_calls[0].function.arguments }}=",
        "={{ messages[0].tool_calls[0].function.arguments | tojson }}=",
        "={% for k, v in messages[0].tool_calls[0].function.arguments.items() %}{{ {k: v} | tojson }}{% endfor %}=",
    ],
)
def test_call_arguments_suit_templates_that_want_text_and_those_that_want_a_mapping(template: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    assert render(template, [{"role": "assistant", "content": None, "tool_calls": [call]}]).text == '={"a": 1}='


def test_arguments_that_are_not_json_stay_text() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": '}}
    template = "{{ messages[0].tool_calls[0].function.arguments }}"
    assert render(template, [{"role": "assistant", "tool_calls": [call]}]).text == '{"a": '


def test_absent_content_is_empty_text() -> None:
    assert render("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]).text == "[]"


def test_reasoning_is_there_under_both_names() -> None:
    template = "{{ messages[0].reasoning_content }}{{ messages[0].reasoning }}"
    for name in ("reasoning", "reasoning_content"):
        assert render(template, [{"role": "assistant", "content": "", name: "why"}]).text == "whywhy"


def test_a_part_that_is_not_text_is_refused_by_its_path() -> None:
    with pytest.raises(InvalidRequest, match="image_url") as refusal:
        shipped("chatml", [USER, {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image_url"}]}])
    assert refusal.value.param == "messages[1].content[1]"


def test_a_continued_message_ends_the_prompt_and_is_in_the_tail() -> None:
    prompt = shipped(
        "chatml", [USER, {"role": "assistant", "content": "<think>\nWell, "}], add_generation_prompt=False, continue_final_message=True
    )
    assert prompt.text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n<think>\nWell, "
    assert prompt.tail == "<|im_start|>assistant\n<think>\nWell, "


def test_a_continued_message_keeps_the_spaces_that_a_template_trims() -> None:
    template = "{% for m in messages %}[{{ m.content | trim }}]{% endfor %}"
    assert render(template, [USER, {"role": "assistant", "content": "One "}], continue_final_message=True).text == "[Hello][One "


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        render("{{ messages[0].content }}", [USER, ANSWER], continue_final_message=True)
    assert refusal.value.param == "continue_final_message"


def test_a_template_that_refuses_what_comes_before_still_continues() -> None:
    template = "{{ messages[0].content if messages else raise_exception('no messages') }}"
    assert render(template, [ANSWER], continue_final_message=True) == RenderedPrompt("Hi", "Hi", "Hi")


@given(st.lists(st.tuples(st.sampled_from(["user", "assistant", "system"]), st.text(max_size=20)), min_size=1, max_size=6))
@settings(max_examples=40)
def test_the_tail_always_ends_the_text_and_never_reaches_into_the_history(turns: list[tuple[str, str]]) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    for name in shipped_names():
        opened, closed = shipped(name, messages), shipped(name, messages, add_generation_prompt=False)
        assert opened.text == closed.text + opened.tail


@given(st.text("ab", max_size=8), st.text("ab", max_size=8))
def test_a_common_prefix_is_common_and_longest(left: str, right: str) -> None:
    size = common_prefix(left, right)
    assert left[:size] == right[:size]
    assert left[size : size + 1] != right[size : size + 1] or size == len(left) == len(right)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0].nothing.at.all }}", "nothing"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses"),
    ],
)
def test_a_template_that_fails_is_the_clients_to_know_about(template: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as refusal:
        render(template, [USER])
    assert refusal.value.param == "messages"


def test_an_endless_template_is_stopped_and_its_thread_serves_the_next_request() -> None:
    async def scenario() -> str:
        with Workers() as workers:
            with pytest.raises(InvalidRequest, match="did not finish"):
                await workers.run(JobQueue.SHORT, lambda: ChatTemplate(ENDLESS, time_limit=0.05).render([USER]))
            return (await workers.run(JobQueue.SHORT, lambda: ChatTemplate("fine").render([USER]))).text

    assert asyncio.run(scenario()) == "fine"


def test_a_requests_own_template_is_used_and_its_syntax_errors_are_400() -> None:
    assert render("server", [USER], template="{{ messages[0].content }}!").text == "Hello!"
    with pytest.raises(InvalidRequest, match="line 1"):
        render("server", [USER], template="{% if %}")


def test_template_variables_come_from_the_tokenizer_and_the_request() -> None:
    template = ChatTemplate("{{ bos_token }}{{ style }}", {"bos_token": "<s>"})
    assert template.render([USER], template_kwargs={"style": "terse"}).text == "<s>terse"


def test_tools_choose_their_own_template_where_there_is_one() -> None:
    template = ChatTemplate("plain", tool_source="with tools")
    assert template.render([USER]).text == "plain"
    assert template.render([USER], [WEATHER]).text == "with tools"


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(InvalidRequest, match="--chat-template"):
        ChatTemplate(None).render([USER])


def test_a_server_template_that_is_not_jinja_stops_the_start() -> None:
    with pytest.raises(ConfigurationError, match="line 1"):
        ChatTemplate("{% endfor %}")


def test_templates_are_found_by_path_and_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine", encoding="utf-8")
    assert load_chat_template(str(file)) == "mine"
    assert "<think>" in load_chat_template("think")
    assert load_chat_template(str(SHIPPED / "think.jinja")) == load_chat_template("think")


def test_an_unknown_template_name_lists_the_shipped_ones() -> None:
    with pytest.raises(ConfigurationError, match="chatml, think"):
        load_chat_template("thinker")


def test_a_template_that_cannot_be_read_stops_the_start(tmp_path: Path) -> None:
    file = tmp_path / "binary.jinja"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigurationError, match="cannot read"):
        load_chat_template(str(file))
