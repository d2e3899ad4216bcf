"""Bodies of the Messages API, and the chat requests that they become."""

from typing import Any

import msgspec
import pytest

from penstock.engine.errors import InvalidRequest
from penstock.serving.anthropic import (
    Conversion,
    CountTokensRequest,
    MessagesRequest,
    ThinkingSigner,
    call_id_of,
    chat_request,
    tool_use_id,
)
from penstock.serving.requests import ChatMessage

SIGNER = ThinkingSigner()
HELLO = {"role": "user", "content": "Hello"}
WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = {"type": "tool_use", "id": "toolu_call_1", "name": "weather", "input": {"city": "Köln", "days": [1, 2]}}
EPHEMERAL = {"type": "ephemeral"}


def convert(*messages: dict[str, Any], takes_late_system: bool = True, **fields: Any) -> Conversion:
    given = {"max_tokens": 100, "messages": messages or [HELLO]} | fields
    body = msgspec.json.decode(msgspec.json.encode(given), type=MessagesRequest)
    return chat_request(body, SIGNER, takes_late_system=takes_late_system)


def said(*messages: dict[str, Any], **options: Any) -> list[tuple[str, str | list[dict[str, Any]] | None]]:
    return [(message.role, message.content) for message in convert(*messages, **options).body.messages]


def test_blocks_of_text_are_lines_and_neighbours_of_one_role_are_one_message() -> None:
    first = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": EPHEMERAL}]}
    assert said(first, {"role": "ctx", "content": "c"}, {"role": "msg", "content": "d"}) == [("user", "a\nb\nc\nd")]


def test_an_assistants_turn_is_one_message_with_its_thinking_and_its_calls() -> None:
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": SIGNER.sign("Hm.")}
    redacted = {"type": "redacted_thinking", "data": "xyz"}
    parts = [{"role": "assistant", "content": [thinking, redacted, {"type": "text", "text": "Let me "}]}]
    parts += [{"role": "assistant", "content": [{"type": "text", "text": "look."}, CALL]}]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": CALL["id"], "content": "rain"}]}
    *_, assistant, tool = convert(HELLO, *parts, result).body.messages
    function = {"name": "weather", "arguments": '{"city": "Köln", "days": [1, 2]}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    assert assistant == ChatMessage(role="assistant", content="Let me look.", reasoning_content="Hm.", tool_calls=calls)
    assert tool == ChatMessage(role="tool", tool_call_id="call_1", content="rain")


def test_results_are_messages_before_what_the_user_says_and_errors_say_so() -> None:
    found = {"type": "search_result", "title": "Title", "source": "https://a.b", "content": [{"type": "text", "text": "found"}]}
    results = [
        {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "rain"}, found]},
        {"type": "tool_result", "tool_use_id": "toolu_2", "content": "no such city", "is_error": True},
        {"type": "tool_result", "tool_use_id": "toolu_3"},
    ]
    assert said({"role": "user", "content": [*results, {"type": "text", "text": "And now?"}]}) == [
        ("tool", "rain\nTitle\nhttps://a.b\nfound"),
        ("tool", "Error: no such city"),
        ("tool", ""),
        ("user", "And now?"),
    ]


def test_documents_of_text_are_text() -> None:
    sources: list[dict[str, Any]] = [
        {"type": "text", "media_type": "text/plain", "data": "body"},
        {"type": "content", "content": "body"},
        {"type": "content", "content": [{"type": "text", "text": "body"}]},
    ]
    blocks = [{"type": "document", "source": source, "title": "Title", "context": "Context"} for source in sources]
    assert said({"role": "user", "content": blocks}) == [("user", "\n".join(["Title\nContext\nbody"] * 3))]


@pytest.mark.parametrize(
    ("content", "path"),
    [
        ([{"type": "text", "text": "a"}, {"type": "audio"}], "messages[1].content[1]"),
        ([{"type": "image", "source": {"type": "file", "file_id": "x"}}], "messages[1].content[0].source.type"),
        ([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "image"}]}], "messages[1].content[0].content[0].source"),
        ([{"type": "document", "source": {"type": "base64", "data": ""}}], "messages[1].content[0].source"),
        ([{"type": "text"}], "messages[1].content[0].text"),
        ([{"text": "no type"}], "messages[1].content[0]"),
        ([{"type": ["text"]}], "messages[1].content[0]"),
        ([{"type": "thinking", "thinking": "not the user's"}], "messages[1].content[0]"),
        ([{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1y"}}], "messages[1].content[0].cache_control.ttl"),
        ([{"type": "tool_result", "tool_use_id": "x", "content": [{"type": "tool_result"}]}], "messages[1].content[0].content[0]"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_path(content: list[dict[str, Any]], path: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        convert(HELLO, {"role": "user", "content": content})
    assert refusal.value.param == path


def test_changed_thinking_is_refused_and_that_of_others_accepted() -> None:
    def thought(thinking: str, signature: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [{"type": "thinking", "thinking": thinking, "signature": signature}]}

    with pytest.raises(InvalidRequest, match="signature") as refusal:
        convert(HELLO, thought("changed", SIGNER.sign("original")), HELLO)
    assert refusal.value.param == "messages[1].content[0].signature"
    for signature in ("EqQBCgIYAhIM", "", ThinkingSigner().sign("of another server"), "penstock-é"):
        assert convert(HELLO, thought("Hm.", signature), HELLO).body.messages[1].reasoning_content == "Hm."


def test_the_block_that_changes_at_every_turn_is_no_part_of_the_system_prompt() -> None:
    def system(version: int) -> list[dict[str, Any]]:
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={version};"}
        return [billing, {"type": "text", "text": "Be brief."}, {"type": "text", "text": "Be kind."}]

    assert said(HELLO, system=system(1)) == said(HELLO, system=system(2)) == [("system", "Be brief.\nBe kind."), ("user", "Hello")]
    assert said(HELLO, system=system(1)[:1]) == said(HELLO, system="") == [("user", "Hello")]


def test_a_system_message_in_the_middle_is_marked_for_templates_that_take_none_there() -> None:
    messages: list[dict[str, Any]] = [HELLO, {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}]
    assert said(*messages, system="S") == [("system", "S"), ("user", "Hello"), ("system", "Be brief.")]
    marked = [("system", "S"), ("user", "Hello\n<system>\nBe brief.\n</system>")]
    assert said(*messages, system="S", takes_late_system=False) == marked
    assert said(*messages[1:], HELLO, system="S", takes_late_system=False) == [("system", "S\nBe brief."), ("user", "Hello")]


@pytest.mark.parametrize("call_id", ["call_0a1b", "abcDEF123", "functions.weather:0", "-a", "é", "a b", "toolu_x"])
def test_ids_of_calls_survive_the_way_to_the_client_and_back(call_id: str) -> None:
    written = tool_use_id(call_id)
    assert written.startswith("toolu_")
    assert all(character.isascii() and (character.isalnum() or character in "_-") for character in written)
    assert call_id_of(written) == call_id


@pytest.mark.parametrize("foreign", ["toolu_", "toolu_-%%%", "toolu_-_w", "call_1", ""])
def test_ids_of_others_are_taken_as_they_are(foreign: str) -> None:
    assert call_id_of(foreign) in (foreign, foreign.removeprefix("toolu_"))


def test_tools_are_functions_in_their_order_and_those_of_the_provider_are_skipped() -> None:
    own = WEATHER | {"description": "d", "strict": True, "type": "custom", "cache_control": EPHEMERAL, "input_examples": []}
    conversion = convert(tools=[{"type": "web_search_20250305", "name": "web_search"}, own, {"type": "bash_20250124", "name": "bash"}])
    function = {"name": "weather", "description": "d", "parameters": WEATHER["input_schema"], "strict": True}
    assert conversion.body.tools == [{"type": "function", "function": function}]
    assert conversion.skipped == ["tools[0]: web_search_20250305", "tools[2]: bash_20250124"]


def test_blocks_of_the_providers_tools_are_skipped() -> None:
    blocks = [{"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}, {"type": "text", "text": "Found."}]
    conversion = convert(HELLO, {"role": "assistant", "content": blocks}, HELLO)
    assert conversion.skipped == ["messages[1].content[0]: server_tool_use"]
    assert conversion.body.messages[1].content == "Found."


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, ("auto", None)),
        ({"type": "any"}, ("required", None)),
        ({"type": "none"}, ("none", None)),
        ({"type": "tool", "name": "weather"}, ({"type": "function", "function": {"name": "weather"}}, None)),
        ({"type": "auto", "disable_parallel_tool_use": True}, ("auto", False)),
        ({"type": "any", "disable_parallel_tool_use": False}, ("required", None)),
    ],
)
def test_every_tool_choice_has_its_own_in_chat(choice: dict[str, Any], expected: tuple[Any, Any]) -> None:
    chat = convert(tools=[WEATHER], tool_choice=choice).body
    assert (chat.tool_choice, chat.parallel_tool_calls) == expected


def test_a_choice_among_tools_that_were_all_skipped_is_none() -> None:
    chat = convert(tools=[{"type": "web_search_20250305", "name": "web_search"}], tool_choice={"type": "auto"}).body
    assert (chat.tools, chat.tool_choice) == (None, None)


def test_thinking_and_effort_are_what_chat_has_for_them() -> None:
    def fields(**given: Any) -> tuple[Any, Any, Any]:
        chat = convert(**given).body
        return chat.chat_template_kwargs, chat.thinking_token_budget, chat.reasoning_effort

    on = {"enable_thinking": True, "thinking": True}
    assert fields() == (None, None, None)
    assert fields(thinking={"type": "enabled", "budget_tokens": 50}) == (on, 50, None)
    assert fields(thinking={"type": "adaptive"}, output_config={"effort": "high"}) == (on, None, "high")
    assert fields(thinking={"type": "disabled"}, output_config={"effort": "high"}) == (None, None, "none")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 100}}, "max_tokens"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].type"),
        ({"messages": [HELLO, {"role": "assistant", "content": [CALL]}]}, "messages[1]"),
    ],
)
def test_contradictions_are_refused_by_name(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        convert(**fields)
    assert refusal.value.param == path


@pytest.mark.parametrize("place", ["output_config", "output_format"])
def test_the_output_format_is_a_strict_response_format(place: str) -> None:
    output = {"type": "json_schema", "schema": {"type": "object"}}
    fields: dict[str, Any] = {place: {"format": output} if place == "output_config" else output}
    response_format = convert(**fields).body.response_format
    assert response_format is not None
    assert response_format.json_schema is not None
    assert (response_format.type, response_format.json_schema.schema, response_format.json_schema.strict) == (
        "json_schema",
        {"type": "object"},
        True,
    )


def test_sampling_and_stop_strings_are_chats() -> None:
    chat = convert(
        temperature=0.5, top_k=3, top_p=0.9, stop_sequences=["a"], stream=True, metadata={"user_id": "u"}, cache_salt="salt"
    ).body
    assert chat.cache_salt == "salt"
    assert (chat.max_tokens, chat.temperature, chat.top_k, chat.top_p, chat.stop, chat.stream) == (100, 0.5, 3, 0.9, ["a"], True)


def test_a_last_message_of_the_assistant_is_continued() -> None:
    assert convert(HELLO, {"role": "assistant", "content": "The answer"}).body.continue_final_message
    assert not convert(HELLO).body.continue_final_message


@pytest.mark.parametrize(
    "marked",
    [
        {"cache_control": EPHEMERAL | {"ttl": "1h"}},
        {"system": [{"type": "text", "text": "S", "cache_control": EPHEMERAL | {"ttl": "1h"}}]},
        {"tools": [WEATHER | {"cache_control": EPHEMERAL | {"ttl": "1h"}}, WEATHER | {"name": "other", "cache_control": EPHEMERAL}]},
    ],
)
def test_the_longest_cache_control_is_the_retention_of_prompt_and_answer(marked: dict[str, Any]) -> None:
    assert convert().retention is None
    retention = convert(**marked).retention
    assert retention is not None
    assert retention.output is not None
    rules = [retention.rule_of(block, 16, 40) for block in range(4)]
    assert {rule.seconds for rule in rules if rule is not None} == {3600.0}
    assert None not in rules


def test_a_count_needs_no_max_tokens() -> None:
    body = msgspec.convert({"messages": [HELLO], "thinking": {"type": "enabled", "budget_tokens": 5}}, CountTokensRequest)
    assert chat_request(body, SIGNER, takes_late_system=True).body.thinking_token_budget == 5
