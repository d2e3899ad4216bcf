"""The pressure of a constraint, by the field that was being written."""

import itertools
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from penstock.engine.contracts.parsing import Event, Text, ToolCallArguments, ToolCallStart
from penstock.engine.deltas import SequenceDelta
from penstock.serving.constraints.pressure import FieldPressure, PathReader, PressureReader
from penstock.serving.endpoints.answers import joined


def fields_of(tokens: list[tuple[str, float]], root: str = "$") -> dict[str, float]:
    """By path, of a document in tokens, each with its pressure."""
    fields: dict[str, float] = {}
    reader = PathReader(root, fields)
    for text, nats in tokens:
        reader.add(nats)
        reader.read(text)
    reader.finish()
    return fields


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([('{"', 1), ("na", 2), ("me", 4), ('": ', 8), ('"', 16), ("Os", 32), ('lo"', 64), ("}", 128)], {"$": 129, "$.name": 126}),
        (
            [('{"a": ', 1), ("[", 2), ("1", 4), (", ", 8), ("23", 16), ("]", 32), ("}", 64)],
            {"$": 65, "$.a": 2, "$.a[0]": 12, "$.a[1]": 48},
        ),
        ([("{", 1), ("}", 2)], {"$": 3}),
        ([('{"a', 1), ('b": {"c d": tr', 2), ("ue", 4), ("}", 8)], {"$": 1, "$.ab": 10, "$.ab['c d']": 4}),
        ([('{"a": 1', 1), (", ", 2), ('"b', 4), ("c", 8)], {"$": 13, "$.a": 2}),  # a number ends with what follows it; the key is cut
        ([("yes", 1), (" and", 2), (" no", 4)], {"$": 7}),
        ([('"a', 1), ('b"', 2), (" ", 4)], {"$": 7}),
        ([('{"\\u0061\\n": ', 0), ("0", 1)], {"$['a\\n']": 1}),
        ([('{"é\'\\"\\\\": ', 0), ("0", 1)], {"$['é\\'\"\\\\']": 1}),
    ],
)
def test_a_token_counts_for_the_field_that_it_begins_in(tokens: list[tuple[str, float]], expected: dict[str, float]) -> None:
    assert fields_of(tokens) == expected


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab"\\é', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab .'", max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(document=JSON, cuts=st.lists(st.integers(0, 60)), numbers=st.lists(st.integers(0, 9), min_size=80, max_size=80))
def test_all_pressure_is_in_some_field_however_the_text_is_cut(document: Any, cuts: list[int], numbers: list[int]) -> None:
    text = json.dumps(document, ensure_ascii=False)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    tokens = [(text[start:stop], numbers[index]) for index, (start, stop) in enumerate(itertools.pairwise(places))]
    assert sum(fields_of(list(tokens)).values()) == sum(nats for _, nats in tokens)


def test_half_of_a_surrogate_pair_in_a_name_can_be_sent() -> None:
    [path] = fields_of([('{"\\ud83d ": ', 0), ("0", 1)])
    assert msgspec.json.decode(msgspec.json.encode(path)) == path == "$['\\ud83d ']"


def told(events: list[Event], pressures: list[tuple[int, float]]) -> SequenceDelta:
    return SequenceDelta(0, events=events, pressures=pressures)


def test_several_tokens_of_a_step_keep_their_places() -> None:
    """As with draft tokens, and with steps that are sent together."""
    parts = [
        told([Text('{"a": '), Text("1")], [(0, 1.0), (1, 2.0)]),
        told([Text(", "), Text('"b": 2'), Text("}")], [(0, 4.0), (1, 8.0), (2, 16.0)]),
    ]
    for deltas in (parts, [joined(*parts)]):
        reader = PressureReader()
        for delta in deltas:
            reader.feed(delta)
        result = reader.result()
        assert (result.nats, result.worst) == (31.0, FieldPressure("$.b", 24.0))


def test_the_arguments_of_a_call_have_paths_of_their_own() -> None:
    reader = PressureReader()
    reader.feed(
        told([ToolCallStart(0, "look", "x"), ToolCallArguments(0, '{"at": '), ToolCallArguments(0, '"Oslo"')], [(0, 1.0), (2, 5.0)])
    )
    assert reader.result().worst == FieldPressure("$.tool_calls[0].function.arguments.at", 5.0)


def test_without_pressure_no_field_is_the_worst() -> None:
    reader = PressureReader()
    reader.feed(told([Text("1")], [(0, 0.0)]))
    assert (reader.result().nats, reader.result().worst) == (0.0, UNSET)
