import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plugins.calls.schema_values import ANY_TYPE, TextValue, Types, to_json, types_of


def types(*names: str) -> Types:
    return frozenset(names)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "string"}, types("string")),
        ({"type": ["integer", "null"]}, types("integer", "null")),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, types("string", "null")),
        ({"oneOf": [{"$ref": "#/$defs/Place"}, {"type": "array"}]}, types("object", "array")),
        ({"allOf": [{"description": "x"}, {"type": "number"}]}, types("number")),
        ({"type": "integer", "nullable": True}, types("integer", "null")),
        ({"enum": ["a", 1, None]}, types("string", "integer", "null")),
        ({"const": True}, types("boolean")),
        ({"items": {}}, types("array")),
        ({"type": "float"}, types("number")),
        ({"type": "dict"}, types("object")),
        ({"type": "date"}, types("string")),
        ({"$ref": "#/$defs/Tree"}, types("object", "string")),
        ({}, None),
        ({"anyOf": [{"type": "string"}, {}]}, None),
        ({"$ref": "#/$defs/Missing"}, None),
        (True, None),
        (None, None),
    ],
)
def test_the_types_of_a_parameter_are_found_in_its_schema(schema: object, expected: Types | None) -> None:
    root = {
        "$defs": {
            "Place": {"properties": {"lat": {"type": "number"}}},
            "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Place"}, {"type": "string"}]},
        }
    }
    assert types_of(schema, root) == expected


@pytest.mark.parametrize(
    ("text", "of", "expected"),
    [
        ("42", None, '"42"'),
        ("42", types("string"), '"42"'),
        ('"quoted"', types("string"), '"\\"quoted\\""'),
        (" 42\n", types("integer"), "42"),
        ("018956", types("integer"), "18956"),
        ("+5", types("integer"), "5"),
        ("5.0", types("integer"), "5"),
        ("5.5", types("integer"), '"5.5"'),
        ("9" * 5000, types("integer"), "9" * 5000),
        ("1.50", types("number"), "1.50"),
        (".5", types("number"), "0.5"),
        ("1e999", types("number"), "1e999"),
        ("NaN", types("number"), '"NaN"'),
        ("ten", types("number"), '"ten"'),
        ('"42"', types("integer"), "42"),
        ("True", types("boolean"), "true"),
        ("0", types("boolean"), "false"),
        ("yes", types("boolean"), '"yes"'),
        ("None", types("integer", "null"), "null"),
        ("null", types("integer"), "null"),
        ("null", types("string"), '"null"'),
        ("null", types("string", "null"), "null"),
        ("None", types("string", "null"), '"None"'),
        ("", types("array", "null"), "null"),
        ("some text", types("string", "integer", "null"), '"some text"'),
        ("7", types("string", "integer"), "7"),
        ('{"k": [1,\n true]}', types("object"), '{"k": [1,\n true]}'),
        ("{'k': 'it''s', 'n': None}", types("object"), '{"k": "its", "n": null}'),
        ("('a', 1)", types("array"), '["a", 1]'),
        ('"{\\"k\\": 1}"', types("object"), '{"k": 1}'),
        ('[{\\"k\\": \\"a\\\\nb\\"}]', types("array"), '[{"k": "a\\nb"}]'),
        ('[\\"a", 1]', types("array"), '"[\\\\\\"a\\", 1]"'),
        ("[" * 3000 + "]" * 3000, types("array"), "[" * 3000 + "]" * 3000),
        ("[" * 3000, types("array"), '"' + "[" * 3000 + '"'),
        ("a, b", types("array"), '"a, b"'),
        ("早安 🎉", types("string"), '"早安 🎉"'),
        ("{'\\d': 1}", types("object"), '{"\\\\d": 1}'),
    ],
)
def test_text_is_coerced_by_its_types_or_else_stays_a_string(text: str, of: Types | None, expected: str) -> None:
    assert to_json(text, of) == expected


def test_where_the_format_says_json_quotes_are_those_of_a_string() -> None:
    assert to_json('"a"', ANY_TYPE, is_json=True) == '"a"'
    assert to_json('"a"', types("string"), is_json=True) == '"a"'
    assert to_json("42", types("string"), is_json=True) == '"42"'
    assert to_json("2025-08-01", ANY_TYPE, is_json=True) == '"2025-08-01"'


TYPES = st.one_of(st.none(), st.sets(st.sampled_from(sorted(ANY_TYPE)), min_size=1).map(frozenset))
WORDS = st.sampled_from(
    ["null", "None", "tru", "true", "False", "1", "-", ".5", "e9", '"', "{", "}", "[", "]", ":", ",", " ", "\n", "a", "\\", "é"]
)


@settings(max_examples=300)
@given(st.lists(WORDS, max_size=8), TYPES, st.booleans())
def test_a_value_that_arrives_in_pieces_is_the_same_as_a_whole_one(words: list[str], of: Types | None, is_json: bool) -> None:
    value = TextValue(of, is_json=is_json)
    text = "".join(words)
    assert "".join([*(value.feed(word) for word in text), value.finish()]) == to_json(text, of, is_json=is_json)
    json.loads(to_json(text, of, is_json=is_json))


@pytest.mark.parametrize(("text", "expected"), [("\na\n", "a"), ("\n\na\n\n", "\na\n"), ("a", "a"), ("\n", ""), ("\n\n", ""), ("", "")])
def test_one_line_break_at_either_end_belongs_to_the_format(text: str, expected: str) -> None:
    for pieces in ([text], list(text)):
        value = TextValue(None, trims_newline=True)
        assert json.loads("".join([*map(value.feed, pieces), value.finish()])) == expected


def test_a_string_comes_out_as_soon_as_it_can_be_nothing_else() -> None:
    value = TextValue(types("string", "null"))
    assert [value.feed(char) for char in "nuts"] == ["", "", '"nut', "s"]
    assert value.finish() == '"'


def test_a_string_inside_json_is_known_while_it_lasts() -> None:
    value = TextValue(types("object"))
    value.feed('{"k": "')
    assert value.is_in_json_string
    value.feed('v"')
    assert not value.is_in_json_string


@pytest.mark.parametrize(("text", "cut"), [("4", "4"), ('{"a": [1', '{"a": [1'), ("{'a", "\"{'a"), ("Tru", '"Tru'), ("", "")])
def test_a_value_that_is_cut_is_the_beginning_of_json(text: str, cut: str) -> None:
    value = TextValue(types("object", "integer", "boolean"))
    assert value.feed(text) == ""
    assert value.cut() == cut
