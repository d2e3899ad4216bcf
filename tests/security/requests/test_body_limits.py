"""Bodies with more in them than any request needs are refused before they are decoded."""

import json
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.errors import InvalidRequest
from penstock.serving import anthropic, requests
from penstock.serving.endpoints.bodies import decode
from penstock.serving.endpoints.pooling import EmbeddingRequest, RerankRequest
from penstock.serving.prompts import check_arguments
from penstock.serving.requests import (
    MAX_BRACKETS,
    MAX_ITEMS,
    MAX_KEYS,
    MAX_STRINGS,
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    FieldsWithoutEffect,
    check_json,
)
from penstock.serving.responses import items


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ({"metadata": dict.fromkeys(map(str, range(MAX_KEYS + 1)))}, "keys"),
        ({"stop": ["a"] * (MAX_STRINGS + 1)}, "strings"),
        ({"prompt": [0] * (MAX_ITEMS + 2)}, "items"),
        ({"guided_json": [[]] * (MAX_BRACKETS + 1)}, "brackets"),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (" ,\n", " : ")])
def test_too_many_of_anything_is_refused(body: object, what: str, separators: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest, match=what):
        check_json(json.dumps(body, separators=separators).encode())


def test_what_stands_in_a_text_is_not_counted() -> None:
    text = '{"a": [1, "b\\\\"], ' * MAX_ITEMS
    check_json(json.dumps({"prompt": text, "other": text[::-1]}).encode())


@given(
    st.recursive(st.text('a"\\,:[{é') | st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text('"\\:'), inner)),
    st.integers(1, 9),
)
def test_counts_are_those_of_the_decoded_body(value: object, size: int) -> None:
    """However the body is cut into pieces."""
    body = json.dumps(value, ensure_ascii=False).encode()
    keys, strings, items, brackets = count(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "SMALL", 0)
        patch.setattr(requests, "_PIECE", size)
        for name, number in (("MAX_KEYS", keys), ("MAX_STRINGS", strings), ("MAX_ITEMS", items + brackets), ("MAX_BRACKETS", brackets)):
            patch.setattr(requests, name, number)
        check_json(body)
        for name, number in (("MAX_KEYS", keys), ("MAX_STRINGS", strings), ("MAX_BRACKETS", brackets)):
            patch.setattr(requests, name, number - 1)
            with pytest.raises(InvalidRequest):
                check_json(body)
            patch.setattr(requests, name, number)


def call(arguments: str) -> ChatMessage:
    return ChatMessage(role="assistant", tool_calls=[{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize(
    ("arguments", "what"), [({str(number): 0 for number in range(MAX_KEYS // 2 + 1)}, "keys"), ([[]] * (MAX_BRACKETS // 2), "brackets")]
)
def test_arguments_of_calls_count_together_like_a_body(arguments: object, what: str) -> None:
    """They are JSON in a string of the body, and are decoded for templates that take a mapping."""
    with pytest.raises(InvalidRequest, match=f"^more than 100000 .*{what}.* in arguments of tool calls are refused$") as refusal:
        check_arguments([call(json.dumps(arguments))] * 2)
    assert refusal.value.param == "messages"
    text = 'a:{[,"' * MAX_KEYS
    check_arguments([call(json.dumps({"text": text})), call(json.dumps(arguments))])


@pytest.mark.parametrize("kind", [ChatCompletionRequest, CompletionRequest, EmbeddingRequest, RerankRequest])
@pytest.mark.parametrize("others", [{}, {"of_tomorrow": 1, "logprobs": None}])
def test_what_has_no_effect_is_neither_decoded_nor_kept(kind: type[FieldsWithoutEffect], others: dict[str, object]) -> None:
    required = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "query": "Hi", "documents": ["Hi"]}
    known = {name: value for name, value in required.items() if name in kind.__struct_fields__}
    ignored = {name: {"a": [1, {"b": "c" * 1000}]} for name in FieldsWithoutEffect.__struct_fields__}
    data = json.dumps(known | ignored | others).encode()
    num_references = sys.getrefcount(data)
    body, unknown = decode(data, kind, allow_unknown_fields=True)
    assert all(isinstance(getattr(body, name), msgspec.Raw) and not bytes(getattr(body, name)) for name in ignored)
    assert sys.getrefcount(data) == num_references
    assert unknown == (("of_tomorrow",) if others else ())


def count(value: object) -> tuple[int, int, int, int]:
    """Keys, strings, an upper bound of items, and brackets."""
    if isinstance(value, str):
        return 0, 1, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 1, 0
    inner = value.values() if isinstance(value, dict) else value
    num_keys = len(value) if isinstance(value, dict) else 0
    counts = [count(item) for item in inner]
    keys, strings, items, brackets = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0, 0)
    return keys + num_keys, strings + num_keys, items + 1, brackets + 1


def test_the_parts_of_a_message_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that a message is written again costs as much as all of it: of 16,384 parts, minutes."""
    written: list[int] = []

    class Counted(ChatMessage):
        def __setattr__(self, name: str, value: Any) -> None:
            written.append(len(value or ()))
            super().__setattr__(name, value)

    for module in (anthropic, items):
        monkeypatch.setattr(module, "ChatMessage", Counted)
    count, call = 50, {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
    thought = {"type": "thinking", "thinking": "x"}
    for message in (
        anthropic.InputMessage("user", "x"),
        anthropic.InputMessage("assistant", "x"),
        anthropic.InputMessage("assistant", [thought]),
    ):
        body = anthropic.MessagesRequest(max_tokens=1, messages=[message] * count)
        anthropic.chat_request(body, anthropic.ThinkingSigner(), takes_late_system=True)
    for item in (call, {"role": "assistant", "content": "x"}, {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "x"}]}):
        items.Conversation("").add([items.Located(each, "input") for each in [call, *[item] * count]])
    assert count <= max(written) <= 2 * count
    assert sum(written) < 20 * count
