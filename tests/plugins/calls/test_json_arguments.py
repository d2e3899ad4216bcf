import json

import pytest

from penstock.plugins.calls.json_call import CallKeys, JsonCall, NamedCall


def arguments_of(value: str) -> str:
    call = JsonCall()
    call.feed(f'{{"name": "f", "arguments": {value}}}', 0)
    assert call.is_complete
    return call.take_arguments()


@pytest.mark.parametrize("value", ["null", '""', '" "', "{}", '"{}"', '"\\n{}"'])
def test_what_stands_for_no_arguments_is_an_empty_object(value: str) -> None:
    assert arguments_of(value) == "{}"


def test_a_string_that_holds_an_object_is_given_out_as_that_object() -> None:
    document = {"x": [1, 'a "b" \\ é 🎉', None], "y": {}}
    assert json.loads(arguments_of(json.dumps(json.dumps(document)))) == document


@pytest.mark.parametrize(
    "value", ['"not a dict"', '"{oops}"', '"{} and more"', '"[1]"', '"5"', "5", "[1, {}]", "true", r'"{\"\ud800\": 1}"']
)
def test_any_other_value_makes_it_no_call(value: str) -> None:
    for call in (JsonCall(), NamedCall("f")):
        call.feed(f'{{"name": "f", "arguments": {value}}}' if isinstance(call, JsonCall) else value, 0)
        assert call.is_malformed
        assert not call.is_named


def test_a_string_that_is_cut_is_given_out_as_far_as_it_came() -> None:
    call = JsonCall()
    call.feed(r'{"name": "f", "arguments": "{\"x\": ', 0)
    assert call.take_arguments() == ""
    call.stop()
    assert call.take_arguments() == r'"{\"x\": '


def test_the_keys_are_those_of_the_format() -> None:
    call = JsonCall(CallKeys("tool_name", ("parameters",), "id"))
    call.feed('{"id": "7", "name": "g", "arguments": {}, "tool_name": "f", "parameters": {"x": 1}}', 0)
    assert (call.name, call.call_id, call.take_arguments(), call.is_complete) == ("f", "7", '{"x": 1}', True)


def test_a_call_with_an_id_starts_once_that_is_known_or_comes_too_late() -> None:
    call = JsonCall(CallKeys(id="id"))
    assert [call.feed(text, 0) and call.can_start for text in ('{"name": "f"', ', "id": "7"', "}")] == [False, False, True]
    late = JsonCall(CallKeys(id="id"))
    assert [late.feed(text, 0) and late.can_start for text in ('{"name": "f", "arguments": {"', '": 1}, "id": "7"}')] == [True, True]
    without = JsonCall(CallKeys(id="id"))
    assert [without.feed(text, 0) and without.can_start for text in ('{"name": "f", "id": 7', "}")] == [False, True]


def test_the_one_key_may_be_the_name() -> None:
    call = JsonCall(CallKeys(name=None))
    call.feed('{"f": {"x": 1}}', 0)
    assert (call.name, call.take_arguments(), call.is_complete) == ("f", '{"x": 1}', True)
    several = JsonCall(CallKeys(name=None))
    assert several.feed('{"f": {}, "g": {}}', 0) == len('{"f": {}, "g"')
    assert several.is_malformed


@pytest.mark.parametrize(
    "text", ['{"name": "f"}', '{"name": "f", "arguments": 1}', '{"name": "f", "arguments": [{}]}', '{"name": "f", "arguments": {oops}']
)
def test_a_bare_object_is_a_call_only_with_arguments(text: str) -> None:
    call = JsonCall(CallKeys(is_bare=True))
    call.feed(text, 0)
    assert call.is_malformed
    assert not call.can_start


def test_a_bare_object_that_begins_like_no_call_is_refused() -> None:
    call = JsonCall(CallKeys(is_bare=True))
    call.feed('{"city":', 0)
    assert call.is_refused


@pytest.mark.parametrize(
    ("text", "length", "arguments"),
    [(' {"x": 1} y', 9, '{"x": 1}'), (r'"{\"x\": 1}"', 12, '{"x": 1}'), (" null", 5, "{}"), ('""', 2, "{}")],
)
def test_named_arguments_are_an_object_or_hold_one(text: str, length: int, arguments: str) -> None:
    call = NamedCall("f")
    assert call.feed(text, 0) == length
    assert (call.is_complete, call.take_arguments()) == (True, arguments)


@pytest.mark.parametrize("text", ["x", "[1]", "1", " nil"])
def test_named_arguments_are_nothing_else(text: str) -> None:
    call = NamedCall("f")
    call.feed(text, 0)
    assert call.is_malformed
    assert not call.can_start
