"""What is read from a schema before any mask has been looked at: its short instances, and how much any beginning of one still needs."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest

from penstock.engine.constraints import instances
from penstock.engine.constraints.closing import shortest_answer
from penstock.engine.constraints.endings import EndingSearch, EndingTokens
from penstock.engine.constraints.instances import Missing, missing_at_most, short_instances
from penstock.engine.constraints.masks import allocate_bitmask
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from tests.engine.constraints.test_closing import MODELS, SCHEMAS, SHORTEST, VOCABULARY, backend, compiled
from tests.fakes import (
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    ids,
)

DATE = {"type": "string", "format": "date"}
BOUNDED: list[Any] = [
    *(SCHEMAS[name] for name in ("texts", "numbers", "rows", "anything")),
    {"type": "object", "properties": {"at": {**DATE, "description": "of today"}, "more": {"type": "array"}}, "required": ["at"]},
    {"type": "array", "prefixItems": [{"type": "integer", "minimum": 1000000}, DATE], "items": {"enum": ["a", 1]}, "minItems": 4},
    {
        "anyOf": [
            {"const": {"kind": "a long text"}},
            {"type": "array", "items": {"anyOf": [{"type": "null"}, DATE]}},
            {"type": "string", "minLength": 9},
        ]
    },
    {"type": "string", "pattern": "^(ab|c{3,})+-[0-9]{4}$"},
    {"$defs": {"a/b": {"type": ["boolean", "number"]}}, "type": "array", "items": {"$ref": "#/$defs/a~1b"}, "minItems": 3, "maxItems": 5},
    {
        "oneOf": [
            {"type": "object", "properties": {"a": {}, "b": {"const": "some"}}, "required": ["b"], "additionalProperties": False},
            {"type": "null"},
        ]
    },
]


def check_bounds(grammar: CompiledGrammar, liked: str, num_tokens: int, each: int) -> None:
    """Walks at random, and looks for an ending at places on the way: none may be longer than the bound."""
    assert grammar.schema is not None
    missing = missing_at_most(grammar.schema)
    assert missing is not None
    generator, search, matcher = random.Random(grammar.schema + liked), EndingSearch(EndingTokens(VOCABULARY)), grammar.matcher()
    for number in range(num_tokens):
        allowed = search.mask(matcher).nonzero()[0].tolist()
        wanted = [token_id for token_id in allowed if token_id in ids(liked)] or [token_id for token_id in allowed if token_id != EOS]
        if not wanted or not matcher.advance(generator.choice(wanted)):
            break
        if number % each == 0:
            ending = search.find(matcher, 0)
            if ending is not None:
                assert len(ending) <= missing.rest + 1 + missing.is_open * (number + 1), (grammar.schema, ending)


@pytest.mark.parametrize("schema", BOUNDED, ids=str)
def test_no_place_needs_more_than_the_schema_says(schema: Any) -> None:
    for liked in MODELS.values():
        check_bounds(compiled(json.dumps(schema)), liked, num_tokens=24, each=6)


@pytest.mark.thorough
def test_no_place_in_answers_to_real_schemas_needs_more() -> None:
    num_bounded = 0
    for line in (Path(__file__).parents[2] / "cli" / "real_schemas.jsonl").read_text(encoding="utf-8").split("\n")[:-1]:
        schema = json.dumps(json.loads(line)["schema"])
        if missing_at_most(schema) is None:
            continue
        try:
            grammar = compiled(schema)
        except UnsupportedGrammar:
            continue
        num_bounded += 1
        for liked in MODELS.values():
            check_bounds(grammar, liked, num_tokens=60, each=20)
    assert num_bounded > 40


def test_what_is_missing_is_found_soon() -> None:
    """Types that are listed twice are looked at once, and few characters of patterns at all."""
    nested: Any = {"type": "null"}
    for _ in range(60):
        nested = {"type": ["array", "object", "array"], "items": nested, "additionalProperties": False}
    assert missing_at_most(json.dumps(nested)) is not None
    patterns = [{"type": "string", "pattern": f"^a{{{number}}}$"} for number in range(1000)]
    assert missing_at_most(json.dumps({"anyOf": patterns[:9]})) is not None
    assert missing_at_most(json.dumps({"anyOf": patterns})) is None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (True, Missing(1, 16, is_open=True)),
        ({"const": "abc"}, Missing(5, 5)),
        ({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 22}}, "required": ["a"]}, Missing(10, 42, is_open=True)),
        ({"type": "array", "items": {"const": 1}, "minItems": 3}, Missing(17, 22)),
        # Of these nothing is known.
        ({"type": "array", "items": {"const": 1}, "uniqueItems": True}, None),
        (SCHEMAS["objects"], None),
        ({"$ref": "#"}, None),
        ({"type": "string", "pattern": "a(?=b)"}, None),
        ({"type": "string", "pattern": "(a{4000}){4000}"}, None),
        ({"type": "string", "format": "mine"}, None),
        ({"const": 1e30}, None),  # of 31 digits
        ({"type": "number", "minimum": 1e-40, "maximum": 2e-40}, None),
        ({"type": "integer", "multipleOf": 12345}, None),  # which a search does not find
        ({"type": "array", "items": {"type": "number", "multipleOf": 0.05}}, Missing(2, 30)),
        ({"type": "string", "pattern": ""}, Missing(2, 18)),  # also where a character has begun
        ({"enum": [["12e+34"]]}, Missing(10, 10)),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 100}]}, None),  # the shortest has 101 characters
        ({"oneOf": [{"type": "string"}, {"type": ["integer", "null"]}]}, Missing(2, 18)),
        ({"$defs": {"a": {"type": "null"}, "b": {"$id": "http://b", "$ref": "#/$defs/a"}}, "$ref": "#/$defs/b"}, None),
        ({"$defs": {"b": {"$id": "http://b", "$defs": {"a": {"$ref": "#/$defs/a"}}}}, "$ref": "#/$defs/b/$defs/a"}, None),
        ({"type": "object", "minProperties": 2, "properties": {}}, None),
        ({"not": {}}, None),
        (False, None),
        (3, None),
    ],
)
def test_what_is_missing_is_bounded(schema: Any, expected: Missing | None) -> None:
    assert missing_at_most(json.dumps(schema)) == expected


@pytest.mark.parametrize("by", [LlguidanceBackend, OutlinesCoreBackend])
def test_white_space_that_has_to_be_is_not_bounded(by: Callable[[Vocabulary], GrammarBackend]) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 3})
    grammar = backend(by).compile(GrammarSpec(GrammarKind.JSON_SCHEMA, schema, whitespace_pattern=" {20}"))
    assert shortest_answer(EndingTokens(VOCABULARY), grammar).missing is None
    assert shortest_answer(EndingTokens(VOCABULARY), compiled(schema, by=by)).missing is not None


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


FROM_SCHEMAS: list[tuple[Any, str]] = [
    *SHORTEST,
    ({"type": "string", "pattern": "^[a-z]*wxyz[a-z]*$"}, '"wxyz"'),
    ({"type": "string", "pattern": "^(?:ab|c)[^a]{2,}\\d$"}, '"c000"'),
    (
        {"$ref": "#/$defs/pair", "$defs": {"pair": {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "minItems": 2}}},
        "[1,null]",
    ),
    ({"allOf": [{"type": "number", "minimum": 12}, {"type": "integer", "maximum": 14}]}, "12"),
    ({"type": "object", "required": ["when"], "properties": {"when": {"type": "string", "format": "date"}}}, '{"when":"2000-01-01"}'),
]


@pytest.mark.parametrize(("schema", "expected"), FROM_SCHEMAS)
def test_the_shortest_answer_of_a_schema_is_guessed_from_it(schema: Any, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is searched for, and every token of the guess is one that the masks allow."""
    monkeypatch.delattr(EndingSearch, "find")
    grammar = compiled(json.dumps(schema))
    ending = shortest_answer(EndingTokens(VOCABULARY), grammar).shortest
    assert ending is not None
    matcher, row = grammar.matcher(), allocate_bitmask(1, VOCAB_SIZE)
    for token_id in ending:
        matcher.fill_bitmask(row[0])
        assert int(row[0, token_id // 32]) >> token_id % 32 & 1
        assert matcher.advance(token_id)
    text = TOKENIZER.decode([token_id for token_id in ending if token_id != EOS], skip_special_tokens=True)
    jsonschema.validate(json.loads(text), schema)
    assert len(text) == len(expected)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "minLength": 10**9},
        {"type": "string", "pattern": "^(?:(?:a{999}){999}){999}$"},
        {"type": "array", "items": {"type": "null"}, "minItems": 10**9},
        {"$ref": "#/$defs/n", "$defs": {"n": {"anyOf": [closed(a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/n"})] * 5}}},
        {"const": "a" * 2**16},
        {"const": "\ud800"},
        {"anyOf": [{"const": "a" * 2**11}] * 100},
    ],
)
def test_what_is_too_large_is_not_guessed(schema: Any) -> None:
    assert short_instances(json.dumps(schema)) == []


def test_what_an_array_repeats_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of ten thousand values, of which nearly two thousand items each have to be one, takes a moment and not ten seconds."""
    read: Counter[str] = Counter()
    size, parse = instances._size, re._parser.parse  # type: ignore[attr-defined]

    def sized(value: Any) -> int:
        read["values"] += 1
        return size(value)

    def parsed(pattern: str) -> Any:
        read["patterns"] += 1
        return parse(pattern)

    monkeypatch.setattr(instances, "_size", sized)
    monkeypatch.setattr(instances, "parser", SimpleNamespace(parse=parsed))
    short_instances(json.dumps({"type": "array", "minItems": 900, "items": {"enum": [f"v{number}" for number in range(1000)]}}))
    short_instances(json.dumps({"type": "array", "minItems": 900, "items": {"type": "string", "pattern": "^a|b$"}}))
    assert read["values"] < 4000
    assert read["patterns"] == 1
