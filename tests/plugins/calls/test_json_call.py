"""One call in JSON: the object, and the arguments alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plugins.calls.json_call import CallKeys, JsonCall, NamedCall
from penstock.plugins.json.scanner import JsonScanner, State

documents = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


def scan(text: str) -> tuple[State, int]:
    scanner = JsonScanner()
    position = 0
    while position < len(text) and not scanner.is_over:
        position = scanner.take(text, position)
    return scanner.state, position


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return True


@given(documents, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_every_document_is_read_to_its_end(document: object, ensure_ascii: bool, indent: int | str | None) -> None:
    text = json.dumps([document], ensure_ascii=ensure_ascii, indent=indent)
    assert scan(text) == (State.COMPLETE, len(text))


@given(st.text('{}[],:"\\u0123-+.eE tfalsrunx\n', max_size=12))
def test_what_is_read_to_its_end_is_json_and_nothing_else_is(body: str) -> None:
    text = f"[{body}]"
    state, position = scan(text)
    assert (state is State.COMPLETE and position == len(text)) == is_json(text)


@given(documents, st.integers(0, 1000))
def test_a_document_may_be_cut_anywhere(document: object, cut: int) -> None:
    text = json.dumps({"a": document})
    scanner = JsonScanner()
    for part in (text[: cut % len(text)], text[cut % len(text) :]):
        position = 0
        while position < len(part):
            position = scanner.take(part, position)
    assert scanner.state is State.COMPLETE


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("{,", 1),
        ("[,", 1),
        ("[1,]", 3),
        ('{"a",', 4),
        ('{"a":}', 5),
        ("01", 1),
        ("-x", 1),
        ("1.x", 2),
        ("1ex", 2),
        ("truu", 3),
        ('"\\x', 2),
        ('"\\u00g', 5),
        ('"\n', 1),
        ("NaN", 0),
        ("[1 2", 3),
        ("}", 0),
        ("[}", 1),
    ],
)
def test_the_first_wrong_character_is_found(text: str, good: int) -> None:
    assert scan("[" + text) == (State.MALFORMED, 1 + good)


def test_deep_nesting_needs_no_recursion() -> None:
    assert scan("[" * 100_000 + "]" * 100_000) == (State.COMPLETE, 200_000)


@given(st.dictionaries(st.text(), documents, max_size=4), st.booleans(), st.sampled_from([None, 2]))
def test_arguments_are_given_out_as_they_were_written(document: object, name_first: bool, indent: int | None) -> None:
    keys = [("name", "f"), ("arguments", document), ("other", [document])]
    text = json.dumps(dict(keys if name_first else reversed(keys)), indent=indent)
    whole, by_character = JsonCall(), JsonCall()
    assert whole.feed(text, 0) == len(text)
    for char in text:
        by_character.feed(char, 0)
    assert whole.is_complete
    assert by_character.is_complete
    assert whole.name == by_character.name == "f"
    arguments = whole.arguments.take()
    assert arguments == by_character.arguments.take()
    assert arguments in text
    assert json.loads(arguments) == document


def test_a_name_written_with_escapes_is_decoded() -> None:
    call = JsonCall()
    call.feed(r'{"n\u0061me": "\u0066\n"}', 0)
    assert (call.name, call.arguments.take(), call.is_complete) == ("f\n", "{}", True)


def test_parameters_are_arguments_too() -> None:
    call = JsonCall()
    call.feed('{"name": "f", "parameters": {"x": 1}}', 0)
    assert call.arguments.take() == '{"x": 1}'


def test_only_the_outer_object_names_the_call() -> None:
    call = JsonCall()
    call.feed('{"a": {"name": "g", "arguments": 1}, "name": "f", "arguments": {"name": "h"}}', 0)
    assert (call.name, call.arguments.take()) == ("f", '{"name": "h"}')


def test_a_key_that_comes_again_is_passed_over() -> None:
    call = JsonCall()
    call.feed('{"name": "f", "name": "g", "arguments": {}, "arguments": 2}', 0)
    assert (call.name, call.arguments.take()) == ("f", "{}")


@pytest.mark.parametrize(
    "text", ["[]", '"f"', "1 ", "{}", '{"name": 1', '{"name": ""', '{"name": {"', r'{"name": "\ud800"', '{"arguments": {}}']
)
def test_what_is_no_call_is_malformed(text: str) -> None:
    call = JsonCall()
    call.feed(text, 0)
    assert call.is_malformed
    assert not call.is_complete


def test_reading_stops_where_the_object_ends() -> None:
    assert JsonCall().feed(' {"name": "f"} x', 0) == len(' {"name": "f"}')


def arguments_of(value: str) -> str:
    call = JsonCall()
    call.feed(f'{{"name": "f", "arguments": {value}}}', 0)
    assert call.is_complete
    return call.arguments.take()


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
    assert call.arguments.take() == ""
    call.arguments.stop()
    assert call.arguments.take() == r'"{\"x\": '


def test_the_keys_are_those_of_the_format() -> None:
    call = JsonCall(CallKeys("tool_name", ("parameters",), "id"))
    call.feed('{"id": "7", "name": "g", "arguments": {}, "tool_name": "f", "parameters": {"x": 1}}', 0)
    assert (call.name, call.call_id, call.arguments.take(), call.is_complete) == ("f", "7", '{"x": 1}', True)


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
    assert (call.name, call.arguments.take(), call.is_complete) == ("f", '{"x": 1}', True)
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
    assert (call.is_complete, call.arguments.take()) == (True, arguments)


@pytest.mark.parametrize("text", ["x", "[1]", "1", " nil"])
def test_named_arguments_are_nothing_else(text: str) -> None:
    call = NamedCall("f")
    call.feed(text, 0)
    assert call.is_malformed
    assert not call.can_start
