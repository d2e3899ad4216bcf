from typing import Any

import msgspec
import pytest

from penstock.engine.errors import InvalidRequest
from penstock.serving.prompts import template_kwargs
from penstock.serving.requests import ChatMessage
from penstock.serving.templates.rendering import prepare_messages


def messages_of(*given: dict[str, Any], knows_developer: bool = False) -> list[dict[str, Any]]:
    read = msgspec.convert(list(given), list[ChatMessage])
    return prepare_messages([msgspec.structs.asdict(message) for message in read], knows_developer=knows_developer)


def test_developer_is_system_to_a_template_that_does_not_know_it() -> None:
    message = {"role": "developer", "content": "x"}
    assert messages_of(message)[0]["role"] == "system"
    assert messages_of(message, knows_developer=True)[0]["role"] == "developer"


def test_reasoning_is_taken_under_both_its_names() -> None:
    for name in ("reasoning", "reasoning_content"):
        assert messages_of({"role": "assistant", "content": "x", name: "hm"})[0]["reasoning_content"] == "hm"
    assert "reasoning_content" not in messages_of({"role": "assistant", "content": "x", "reasoning": {"effort": "low"}})[0]


def test_calls_and_their_results_go_through_and_unknown_keys_do_not() -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    called, result = messages_of(
        {"role": "assistant", "content": None, "tool_calls": calls, "audio": None, "x": 1},
        {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "1"},
    )
    assert called == {"role": "assistant", "content": "", "tool_calls": [{**calls[0], "function": {"name": "f", "arguments": {}}}]}
    assert result == {"role": "tool", "content": "7", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("part", "path"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}, "text": "sneaky"}, "messages[1].content[1]"),
        ({"type": "input_audio"}, "messages[1].content[1]"),
        ({"text": "no type"}, "messages[1].content[1]"),
        ({"type": ["text"]}, "messages[1].content[1]"),
        ({"type": "text"}, "messages[1].content[1].text"),
        ({"type": "text", "text": 7}, "messages[1].content[1].text"),
        ({"type": "refusal", "text": "x"}, "messages[1].content[1].refusal"),
    ],
)
def test_content_that_is_not_text_is_refused_with_its_path(part: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        messages_of({"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a"}, part]})
    assert caught.value.param == path


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least one"):
        messages_of()


def test_an_effort_reaches_the_template_and_none_turns_thinking_off() -> None:
    assert template_kwargs(None, None, {}) == {}
    assert template_kwargs({"a": 1}, "low", {}) == {"a": 1, "reasoning_effort": "low"}
    assert template_kwargs(None, "none", {}) == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False}
    assert template_kwargs({"enable_thinking": True}, "none", {})["enable_thinking"]


def test_the_operators_template_arguments_hold_where_the_request_says_nothing() -> None:
    defaults = {"enable_thinking": True, "style": "plain"}
    assert template_kwargs(None, None, defaults) == defaults
    assert template_kwargs({"style": "formal"}, None, defaults) == {"enable_thinking": True, "style": "formal"}
    assert template_kwargs(None, "none", defaults)["enable_thinking"] is False


@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "documents", "tokenize", "add_generation_prompt"])
def test_the_requests_own_fields_cannot_come_in_as_template_arguments(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        template_kwargs({name: "x"}, None, {})
    assert caught.value.param == f"chat_template_kwargs.{name}"
