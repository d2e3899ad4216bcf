"""What models write in the place of JSON."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.plugins.json.repair import JsonRepair
from penstock.plugins.json.scanner import JsonScanner, State

documents = st.dictionaries(
    st.text(),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    ),
    max_size=4,
)
ALPHABET = "{}[]()<,:='\"\\u01a.-+e \n\tTrue"


def fed(text: str, size: int = 1000) -> tuple[JsonRepair, str]:
    """A reader that was given the text in pieces, and what of it it left."""
    reader = JsonRepair()
    for start in range(0, len(text), size):
        piece = text[start : start + size]
        end = reader.feed(piece, 0)
        if reader.is_complete or reader.is_malformed:
            return reader, text[start + end :]
    return reader, ""


@given(documents, st.booleans(), st.sampled_from([None, 1, "\t"]), st.integers(1, 5))
def test_json_passes_as_it_was_written(document: dict[str, Any], ensure_ascii: bool, indent: int | str | None, size: int) -> None:
    text = json.dumps(document, ensure_ascii=ensure_ascii, indent=indent)
    reader, rest = fed(f"{text} more", size)
    assert (reader.is_complete, reader.take(), rest) == (True, text, " more")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "x\ny\tz\r\x01"}', {"a": "x\ny\tz\r\x01"}),
        (r'{"a": "C:\dir \u12G \alpha"}', {"a": r"C:\dir \u12G \alpha"}),
        ('{"a": "line \\\n break"}', {"a": "line \\\n break"}),
        ('{"a": "say "hi" now", "b": "d["k"]"}', {"a": 'say "hi" now', "b": 'd["k"]'}),
        ('{"a": "he said "go", ok", "b": "x", c: 1, "d": "y", }', {"a": 'he said "go", ok', "b": "x", "c": 1, "d": "y"}),
        ('{"a": "say "x" , y, z: no"}', {"a": 'say "x" , y, z: no'}),
        ('{"a": "b", c d', {"a": 'b", c d'}),
        ("{'a': 'it\\'s \"x\"', \"b\": 'y'}", {"a": 'it\'s "x"', "b": "y"}),
        ("{a: True, b-2 : None, c=False}", {"a": True, "b-2": None, "c": False}),
        ('{"a": oops, "b": f(1, [2]), "c": 1 2}', {"a": "oops", "b": "f(1, [2])", "c": "1 2"}),
        ('{"a": +5, "b": 007, "c": .5, "d": NaN}', {"a": 5, "b": 7, "c": 0.5, "d": "NaN"}),
        ('{"a": [1, 2,], "b": [,3,,4], }', {"a": [1, 2], "b": [3, 4]}),
        ('{"a": "x"\n "b": ["y" "z"]}', {"a": "x", "b": ["y", "z"]}),
        ('{"a": , "b", "c": [1], "d":}', {"a": None, "b": None, "c": [1], "d": None}),
        ('{"a": [{"b": [1, 2}', {"a": [{"b": [1, 2]}]}),
    ],
)
def test_what_is_meant_is_plain(text: str, value: Any) -> None:
    for size in (1, 2, 1000):
        reader, _ = fed(text, size)
        reader.close()
        assert json.loads(reader.take()) == value


@pytest.mark.parametrize(
    ("text", "closed", "left", "rest"),
    [
        ("{oops}", "{}", "oops", "}"),
        ('{"a": 1, two words}', '{"a": 1}', ", two ", "words}"),
        ('{"a": 1]', '{"a": 1}', "", "]"),
        ('{"a": "b"</end>', '{"a": "b"}', "", "</end>"),
        ('{"a": tru```', '{"a": "tru"}', "", "```"),
        ('{"a": {"b": 1} oops', '{"a": {"b": 1} }', "", "oops"),
    ],
)
def test_what_makes_no_sense_ends_the_object_and_nothing_of_it_is_lost(text: str, closed: str, left: str, rest: str) -> None:
    for size in (1, 2, 1000):
        reader, unread = fed(text, size)
        assert reader.is_malformed
        reader.close()
        assert (reader.take(), reader.left, unread) == (closed, left, rest)


@given(st.text(ALPHABET, max_size=24), st.integers(1, 3))
def test_what_is_closed_is_json_however_it_was_cut(body: str, size: int) -> None:
    closed: list[str] = []
    for reader, _ in (fed(f"{{{body}", size), fed(f"{{{body}")):
        written = reader.take()
        reader.close()
        closed.append(written + reader.take())
    assert closed[0] == closed[1]
    assert isinstance(json.loads(closed[0]), dict)


@given(st.text(ALPHABET, max_size=24))
def test_what_is_cut_is_the_beginning_of_json(body: str) -> None:
    reader, _ = fed(f"{{{body}")
    if reader.is_malformed:
        reader.close()
    reader.stop()
    text, scanner, position = reader.take(), JsonScanner(), 0
    while position < len(text) and not scanner.is_over:
        position = scanner.take(text, position)
    assert scanner.state is not State.MALFORMED, text
