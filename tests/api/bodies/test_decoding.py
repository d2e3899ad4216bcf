import json
from typing import Any

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.serving.endpoints.bodies import REFUSED, decode
from penstock.serving.requests import ChatCompletionRequest, CompletionRequest, FieldsWithoutEffect
from penstock.serving.responses.requests import ResponsesRequest

CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def chat(**fields: Any) -> bytes:
    return json.dumps(CHAT | fields).encode()


def refusal(body: bytes, **options: bool) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        decode(body, ChatCompletionRequest, **options)
    return caught.value


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(temperature="hot"), "temperature"),
        (chat(messages=[{"role": "user"}, {"role": "user", "content": 7}]), "messages[1].content"),
        (chat(messages=[{"content": "no role"}]), "messages[0].role"),
        (chat(stop=["a", 1]), "stop[1]"),
        (chat(logits_processors=[{"name": "a"}, {"arguments": {}}]), "logits_processors[1].name"),
        (chat(seed=2**64), "seed"),
        (chat(n=1.5), "n"),
        (b"{}", "messages"),
        (b'{"messages": [], "temperature": 1' + b"0" * 400 + b"}", "temperature"),
    ],
)
def test_a_wrong_type_is_refused_with_its_path(body: bytes, param: str) -> None:
    assert refusal(body).param == param


def test_the_values_that_a_field_may_have_are_named() -> None:
    roles = "`assistant`, `developer`, `system`, `tool`, `user`"
    given = "user - at `$.n`"
    expected = f"Invalid enum value '{given}': expected one of {roles} - at `$.messages[0].role`"
    assert refusal(chat(messages=[{"role": given}])).message == expected
    with pytest.raises(InvalidRequest, match="expected one of `auto`, `disabled` - at"):
        decode(b'{"truncation": "none"}', ResponsesRequest)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "\xff"}', b'{"user": ' + b"[" * 100_000, b"NaN"])
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    assert refusal(body).param is None


def test_an_unknown_field_is_refused_with_the_nearest_known_name() -> None:
    error = refusal(chat(temprature=1))
    assert error.param == "temprature"
    assert "`temperature`" in error.message
    nested = refusal(chat(stream_options={"include_usge": True}))
    assert nested.param == "stream_options.include_usge"
    assert "`include_usage`" in nested.message


# What vLLM 0.33 gives for a request class that is written out as a whole, besides the fields that have a meaning here.
VLLM_CHAT = {"echo": False, "media_io_kwargs": None, "mm_processor_kwargs": None, "documents": None, "return_prompt_text": None}
VLLM = {
    **dict.fromkeys(["watermarking", "truncate_prompt_tokens", "truncation_side", "logprob_token_ids", "session_id", "return_token_ids"]),
    **dict.fromkeys(["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "repetition_detection", "stream_interval"]),
    **dict.fromkeys(["spaces_between_special_tokens", "return_mm_kwargs"], True),
    "request_id": "0f",
    "routed_experts_prompt_start": 0,
    "return_token_offsets": False,
}


def test_vllms_request_classes_pass_with_their_defaults() -> None:
    request, ignored = decode(chat(**VLLM, **VLLM_CHAT), ChatCompletionRequest)
    assert (request.request_id, ignored) == ("0f", ())
    body = json.dumps({"prompt": "Hi", "suffix": None, "prompt_embeds": None, "thinking_token_budget": None, **VLLM})
    assert decode(body.encode(), CompletionRequest)[1] == ()


@pytest.mark.parametrize("fields", [{"echo": True}, {"routed_experts_prompt_start": 1}, {"return_mm_kwargs": False}, {"frob": 0}])
def test_vllms_fields_that_ask_for_something_are_refused_like_other_unknown_ones(fields: dict[str, Any]) -> None:
    assert refusal(chat(**fields)).param == next(iter(fields))


def test_null_asks_for_nothing_whatever_the_field() -> None:
    request, ignored = decode(chat(frob=None, stream_options={"include_usage": True, "frob": None}), ChatCompletionRequest)
    assert request.stream_options is not None
    assert (request.stream_options.include_usage, ignored) == (True, ())


def test_unknown_fields_are_listed_where_they_are_allowed() -> None:
    body = chat(frob=1, stream_options={"x": 1, "include_usage": True}, logits_processors=[{"name": "a", "y": 2}], logit_bias={"3": 1})
    request, ignored = decode(body, ChatCompletionRequest, allow_unknown_fields=True)
    assert set(ignored) == {"frob", "stream_options.x", "logits_processors[0].y"}
    assert request.stream_options is not None
    assert request.stream_options.include_usage
    assert request.logit_bias == {3: 1}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("allowed", [False, True])
def test_a_field_that_would_change_the_result_is_refused_unless_it_is_off(name: str, allowed: bool) -> None:
    reason, neutral = REFUSED[name]
    error = refusal(chat(**{name: "something"}), allow_unknown_fields=allowed)
    assert (error.message, error.param) == (reason, name)
    for value in neutral:
        assert decode(chat(**{name: value}), ChatCompletionRequest)[1] == ()


def test_fields_without_effect_are_accepted_with_any_value() -> None:
    fields = {name: {"any": ["thing"]} for name in FieldsWithoutEffect.__struct_fields__}
    assert decode(chat(**fields), ChatCompletionRequest)[1] == ()


def test_unknown_keys_inside_messages_are_tolerated() -> None:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None,
        "annotations": [],
        "reasoning_details": [{}],
        "refusal": None,
        "audio": None,
    }
    request, ignored = decode(chat(messages=[message]), ChatCompletionRequest)
    assert request.messages[0].content is None
    assert ignored == ()


def test_no_field_that_is_refused_is_also_known() -> None:
    for kind in (ChatCompletionRequest, CompletionRequest):
        assert not set(REFUSED) & set(kind.__struct_fields__)


def test_every_field_of_openai_is_known() -> None:
    """The client library's own parameter types list them."""
    from openai.types import completion_create_params as texts
    from openai.types.chat import completion_create_params as chats

    for params, kind in (
        (chats.CompletionCreateParamsBase, ChatCompletionRequest),
        (texts.CompletionCreateParamsBase, CompletionRequest),
    ):
        unknown = set(params.__annotations__) - set(kind.__struct_fields__) - set(REFUSED)
        assert not unknown
