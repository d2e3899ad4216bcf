import json
import random
import re
from collections.abc import Iterator
from datetime import date
from enum import Enum
from typing import Any, Literal
from uuid import UUID

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.plugins.grammars.outlines_core import OutlinesCoreBackend
from penstock.plugins.grammars.outlines_matcher import OutlinesCoreGrammar

MERGES = (
    "ab",
    "abc",
    "aa",
    "bc",
    '"a',
    '":',
    '": "',
    '",',
    '"}',
    "{\n",
    "  ",
    "    ",
    "\n  ",
    "12",
    "0.",
    "true",
    "null",
    "字",
    "中文",
    "é",
    "12\n",
    "a\0",
)
FIRST_MERGE = 256
SPECIAL = (FIRST_MERGE + len(MERGES), FIRST_MERGE + len(MERGES) + 1)
STOPS = frozenset({SPECIAL[1], SPECIAL[1] + 1})
SIZE = 300  # wider than the tokens, and no multiple of 32
VOCABULARY = Vocabulary(
    (*(bytes([byte]) for byte in range(256)), *(text.encode() for text in MERGES), None, None, b"<end>"), SIZE, STOPS, "bytes and merges"
)
BACKEND = OutlinesCoreBackend(VOCABULARY)
TEXT_TOKENS = [
    (token_id, text) for token_id, text in enumerate(VOCABULARY.token_bytes) if text and token_id not in STOPS and b"\0" not in text
]


def compiled(kind: GrammarKind, text: str, **options: Any) -> OutlinesCoreGrammar:
    return BACKEND.compile(GrammarSpec(kind, text, **options))


def schema_grammar(schema: Any, **options: Any) -> OutlinesCoreGrammar:
    return compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), **options)


def allowed(matcher: GrammarMatcher) -> set[int]:
    row = torch.full(((SIZE + 31) // 32,), -1, dtype=torch.int32)
    matcher.fill_bitmask(row)
    return {word * 32 + bit for word, packed in enumerate(row.tolist()) if packed for bit in range(32) if packed >> bit & 1}


def tokenized(text: str, rng: random.Random) -> Iterator[int]:
    """One of the many ways to spell a text."""
    rest = text.encode()
    while rest:
        token_id, token = rng.choice([(token_id, token) for token_id, token in TEXT_TOKENS if rest.startswith(token)])
        yield token_id
        rest = rest[len(token) :]


def accepts(grammar: OutlinesCoreGrammar, text: str, rng: random.Random) -> bool:
    """Walks a text token by token; at each step the mask, `advance` and what may end must agree."""
    matcher = grammar.matcher()
    for token_id in tokenized(text, rng):
        is_allowed = token_id in allowed(matcher)
        assert matcher.advance(token_id) == is_allowed
        if not is_allowed:
            return False
    stops = allowed(matcher) & STOPS
    assert stops in (set(), STOPS)
    return bool(stops)


def random_answer(grammar: OutlinesCoreGrammar, rng: random.Random, patience: int = 30) -> str:
    """A random walk over what is allowed, which after `patience` tokens leans towards what closes something."""
    matcher = grammar.matcher()
    text = b""
    for step in range(3000):
        choices = sorted(allowed(matcher))
        assert choices, f"dead end after {text!r}"
        if step > patience and rng.random() < 0.7:
            for closing in (STOPS, {ord('"')}, {ord("}"), ord("]")}):
                if closing & set(choices):
                    choices = sorted(closing & set(choices))
                    break
        token_id = rng.choice(choices)
        assert matcher.advance(token_id)
        if token_id in STOPS:
            return text.decode()
        text += VOCABULARY.token_bytes[token_id] or b""
    raise AssertionError(f"no end in sight: {text[:200]!r}")


atoms = st.sampled_from(["a", "b", "c", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", "é", "字", "[^\\W\\d]", '"', "1", r"\."])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(?:" + "|".join(parts) + ")"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}", "*?", "{,2}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)
subjects = st.text(st.sampled_from('aaabbc1字é". \n²'), max_size=8)


@settings(max_examples=400, deadline=None)
@given(patterns, st.lists(subjects, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_a_regex_accepts_exactly_what_fullmatch_does(pattern: str, texts: list[str], rng: random.Random) -> None:
    grammar = compiled(GrammarKind.REGEX, pattern)
    for text in texts:
        assert accepts(grammar, text, rng) == bool(re.fullmatch(pattern, text)), (pattern, text)


@settings(max_examples=100, deadline=None)
@given(patterns, st.integers(0, 2**32))
def test_a_random_walk_ends_in_a_full_match(pattern: str, seed: int) -> None:
    rng = random.Random(seed)
    matcher = compiled(GrammarKind.REGEX, pattern).matcher()
    text = b""
    for _ in range(40):
        token_id = rng.choice(sorted(allowed(matcher)))
        assert matcher.advance(token_id)
        if token_id in STOPS:
            assert re.fullmatch(pattern, text.decode())
            return
        text += VOCABULARY.token_bytes[token_id] or b""


@settings(max_examples=60, deadline=None)
@given(patterns, st.sampled_from(["", "^"]), st.sampled_from(["", "$"]), st.lists(subjects, max_size=8), st.randoms(use_true_random=False))
def test_a_schemas_pattern_is_searched_for_in_the_decoded_string(
    pattern: str, start: str, end: str, texts: list[str], rng: random.Random
) -> None:
    grammar = schema_grammar({"type": "string", "pattern": f"{start}(?:{pattern}){end}"})
    expected = re.compile(f"{start}(?:{pattern}){end.replace('$', chr(92) + 'Z')}", re.ASCII)
    for text in texts:
        assert accepts(grammar, json.dumps(text, ensure_ascii=False), rng) == bool(expected.search(text)), text


def test_a_number_may_go_on_after_it_could_have_ended() -> None:
    matcher = compiled(GrammarKind.REGEX, r"[0-9]+(\.[0-9]+)?").matcher()
    assert matcher.advance(ord("1"))
    assert STOPS | {ord("."), ord("7")} <= allowed(matcher)


def test_names_in_characters_without_tokens_can_all_be_chosen() -> None:
    names = [f"{first}{second}" for first in "北上广深杭成" for second in "京海州圳都"] + ["乌鲁木齐"]
    assert len(names) == 31
    grammar = compiled(GrammarKind.CHOICE, json.dumps(names))
    enum = schema_grammar({"enum": names})
    rng = random.Random(0)
    for name in names:
        assert accepts(grammar, name, rng)
        assert accepts(enum, json.dumps(name, ensure_ascii=False), rng)
    assert not accepts(grammar, "北", rng)


def test_special_tokens_and_the_text_of_a_stop_token_never_match() -> None:
    matcher = schema_grammar({"type": "string"}).matcher()
    for text in ('"', "a", "字", "<end"):
        for byte in text.encode():
            assert matcher.advance(byte)
        assert not allowed(matcher) & {*SPECIAL, *STOPS}
        assert not any(matcher.advance(token_id) for token_id in (*SPECIAL, *STOPS))


def test_stop_tokens_are_masked_until_the_object_is_closed_and_then_only_they_remain() -> None:
    matcher = schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}).matcher()
    for byte in b'{"a": 12}':
        assert not allowed(matcher) & STOPS
        assert not matcher.finished
        assert matcher.advance(byte)
    assert matcher.finished
    assert allowed(matcher) == STOPS


def test_nothing_is_allowed_after_a_stop_token_until_it_is_taken_back() -> None:
    matcher = compiled(GrammarKind.REGEX, "a+").matcher()
    assert matcher.advance(ord("a"))
    before = allowed(matcher)
    assert matcher.advance(max(STOPS))
    assert matcher.finished
    assert allowed(matcher) == set()
    assert not matcher.advance(ord("a"))
    matcher.rollback(1)
    assert not matcher.finished
    assert allowed(matcher) == before


@pytest.mark.parametrize("seed", range(5))
def test_rollback_restores_every_mask(seed: int) -> None:
    rng = random.Random(seed)
    matcher = schema_grammar(PERSON).matcher()
    masks = []
    for _ in range(60):
        masks.append(allowed(matcher))
        assert matcher.advance(rng.choice(sorted(masks[-1] - STOPS)))
        if allowed(matcher) <= STOPS:
            break
    while masks:
        num_tokens = min(rng.randint(1, 7), len(masks))
        matcher.rollback(num_tokens)
        assert allowed(matcher) == masks[-num_tokens]
        del masks[-num_tokens:]


def test_forced_tokens_are_what_the_mask_leaves_and_change_nothing() -> None:
    matcher = compiled(GrammarKind.REGEX, "xyz(a|b)").matcher()
    assert matcher.forced_tokens() == [ord("x"), ord("y"), ord("z")]
    assert allowed(matcher) == {ord("x")}
    for token_id in matcher.forced_tokens():
        assert matcher.advance(token_id)
    assert matcher.forced_tokens() == []
    assert matcher.advance(ord("a"))
    assert matcher.finished
    assert matcher.forced_tokens() == []


def test_sequences_with_one_grammar_do_not_disturb_each_other() -> None:
    grammar = compiled(GrammarKind.REGEX, "a{3}")
    first, second = grammar.matcher(), grammar.matcher()
    assert first.advance(ord("a"))
    assert second.forced_tokens() == []  # "a" or "aa"
    assert first.advance(FIRST_MERGE + MERGES.index("aa"))
    assert first.finished
    assert not second.finished


PERSON = {
    "title": "Person",
    "type": "object",
    "$defs": {
        "Address": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 5}, "zip": {"type": "string", "pattern": r"^\d{3}$"}},
            "required": ["city"],
        }
    },
    "properties": {
        "name": {"type": "string", "minLength": 1, "description": "given name"},
        "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
        "kind": {"enum": ["a", "b\n", 3, None], "title": "Kind"},
        "addresses": {"type": "array", "items": {"$ref": "#/$defs/Address"}, "maxItems": 2},
        "score": {"type": ["number", "boolean"]},
        "pair": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": "x"}], "minItems": 2, "maxItems": 2},
    },
    "required": ["name", "kind"],
    "additionalProperties": False,
}
PETS = {
    "$defs": {
        "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}}, "required": ["kind", "lives"]},
        "Dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}}, "required": ["kind"]},
    },
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "discriminator": {"propertyName": "kind"},
}
SCHEMAS = [
    PETS,
    PERSON,
    {"type": "object", "properties": {name: {"type": "boolean"} for name in "abcde"}},
    {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "integer"}, "minItems": 1}},
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "array", "items": {"type": "string", "pattern": "a|^b"}, "minItems": 2, "maxItems": 3},
    {"type": "string", "pattern": r'^["\\/\n\x01]+$'},
    {"type": "string", "format": "date"},
    {"oneOf": [{"type": "integer"}, {"type": "string"}, {"type": "object", "properties": {"t": {"const": 1}}, "required": ["t"]}]},
    {"enum": [{"a": [1, 2.5, {"b": None}]}, [], {}, 'é"\\', True]},
    {"allOf": [{"$ref": "#/definitions/n"}], "definitions": {"n": {"type": "number"}}},
    {"properties": {"a b~/": {"type": "null"}}, "required": ["a b~/"]},
    {"type": "array", "items": {"type": "number", "minimum": 0, "maximum": 1}, "minItems": 4, "maxItems": 4},
    {"type": "integer", "minimum": 18},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=range(len(SCHEMAS)))
def test_every_random_walk_is_json_that_the_schema_validates(schema: Any) -> None:
    grammar = schema_grammar(schema)
    for seed in range(30):
        text = random_answer(grammar, random.Random(seed))
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


class Color(Enum):
    RED = "red"
    BLUE = "blau"


class Author(BaseModel):
    name: str = Field(min_length=1, max_length=4, description="as on the cover")
    born: date | None = None


class Book(BaseModel):
    """Everything that people put into their models."""

    title: str
    authors: list[Author] = Field(max_length=2)
    color: Color = Color.RED
    language: Literal["de", "en"] = "en"
    rating: float = Field(ge=0, le=5)
    pages: int = Field(gt=0)
    size: tuple[int, int]
    tags: dict[str, bool] = {}
    isbn: UUID | None = None


def test_what_pydantic_generates_validates_as_its_model() -> None:
    grammar = schema_grammar(Book.model_json_schema())
    for seed in range(30):
        Book.model_validate_json(random_answer(grammar, random.Random(seed)))


@pytest.mark.parametrize("layout", [{"separators": (",", ":")}, {}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}])
def test_compact_plain_and_indented_json_are_all_accepted(layout: dict[str, Any]) -> None:
    person = {
        "name": "Ann é字\n",
        "kind": "b\n",
        "addresses": [{"city": "x"}, {"city": "", "zip": "123"}],
        "score": -1.5e-07,
        "pair": [True, "x"],
    }
    rng = random.Random(0)
    assert accepts(schema_grammar(PERSON), json.dumps(person, ensure_ascii=False, **layout), rng)
    assert accepts(schema_grammar({"type": "object", "properties": {}, "additionalProperties": False}), "{}", rng)


def test_white_space_is_bounded_and_follows_the_clients_own_pattern() -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}
    rng = random.Random(0)
    free = schema_grammar(schema)
    assert not any(accepts(free, text, rng) for text in ('{\n\n"a":1}', '{   "a":1}', '{"a":1} ', ' {"a":1}', "{\n" + " " * 41 + '"a":1}'))
    compact = schema_grammar(schema, whitespace_pattern="")
    assert accepts(compact, '{"a":1}', rng)
    assert not accepts(compact, '{"a": 1}', rng)


def test_properties_keep_the_schemas_order() -> None:
    grammar = schema_grammar({"type": "object", "properties": {"z": {"const": 1}, "a": {"const": 2}}})
    rng = random.Random(0)
    assert [accepts(grammar, text, rng) for text in ('{"z":1,"a":2}', '{"a":2,"z":1}', '{"a":2}', "{}")] == [True, False, True, True]


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"type": "object", "properties": {"a": {"type": "number", "minimum": 0.5}}}, ".properties.a.minimum"),
        ({"type": "array", "items": {"type": "number", "multipleOf": 2}}, ".items.multipleOf"),
        ({"type": "array", "items": {"type": "null"}, "uniqueItems": True}, ".uniqueItems"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": True}, ".additionalProperties"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "patternProperties": {}}, ".patternProperties"),
        ({"type": "object", "properties": {"a": {"type": "null"}}, "required": ["b"]}, ".required"),
        ({"type": "object", "properties": {"a": {}}}, ".properties.a"),
        ({"type": "object"}, ""),
        ({"anyOf": [{"type": "null"}, {"not": {}, "type": "null"}]}, ".anyOf[1].not"),
        ({"anyOf": [{"type": "null"}], "type": "object"}, ".type"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, ".oneOf"),
        ({"type": "string", "pattern": "(?=a)"}, ".pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, ".maxLength"),
        ({"type": "string", "format": "email"}, ".format"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, ".$defs.a.items.$ref"),
        ({"$ref": "other.json"}, ".$ref"),
        ({"type": "string", "surprise": 1}, ".surprise"),
        ({"type": "array", "items": {"type": "string"}, "minItems": -1}, ".minItems"),
        (True, ""),
    ],
)
def test_what_cannot_be_said_exactly_is_refused_with_its_path(schema: Any, path: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        schema_grammar(schema, param="response_format.json_schema.schema")
    assert caught.value.param == f"response_format.json_schema.schema{path}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.REGEX, ".*a.{20}"),
        (GrammarKind.REGEX, "(x{1000}){1000}"),
        (GrammarKind.REGEX, r"\w{1,400}"),
        (GrammarKind.REGEX, "(((a?){90}){90}){90}"),
        (GrammarKind.REGEX, "(" * 5000),
        (GrammarKind.REGEX, "a{999999999999}"),
        (GrammarKind.CHOICE, json.dumps([f"{i:020}" for i in range(20_000)])),
        (GrammarKind.JSON_SCHEMA, json.dumps({"enum": [f"{i:020}" for i in range(20_000)]})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "string", "maxLength": 10**6})),
        (GrammarKind.JSON_SCHEMA, json.dumps({"type": "array", "items": {"type": "integer"}, "maxItems": 10**5})),
        (GrammarKind.JSON_SCHEMA, "[" * 100_000),
        (GrammarKind.JSON_SCHEMA, '{"items":' * 90 + "{}" + "}" * 90),
        (
            GrammarKind.JSON_SCHEMA,
            json.dumps(
                {
                    "$defs": {
                        f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2, "maxItems": 2}
                        for i in range(30)
                    }
                    | {"d30": {"type": "null"}},
                    "$ref": "#/$defs/d0",
                }
            ),
        ),
        (GrammarKind.JSON_OBJECT, ""),
    ],
)
def test_what_would_take_too_much_is_refused(kind: GrammarKind, text: str) -> None:
    # The bounds are for a real vocabulary: one of 49,152 tokens, here made of one merge many times over.
    vocabulary = Vocabulary((*VOCABULARY.token_bytes[:256], *([b"ab"] * 48_000)), 49_152, frozenset({49_000}), "large")
    with pytest.raises(UnsupportedGrammar) as caught:
        OutlinesCoreBackend(vocabulary).compile(GrammarSpec(kind, text, "guided"))
    assert caught.value.param is not None
    assert len(caught.value.message) < 300


def test_sixty_optional_properties_compile() -> None:
    names = [f"p{i}" for i in range(60)]
    grammar = schema_grammar({"type": "object", "properties": {name: {"type": "boolean"} for name in names}})
    rng = random.Random(0)
    assert accepts(grammar, json.dumps({names[3]: True, names[50]: False}), rng)
    assert not accepts(grammar, json.dumps({names[50]: True, names[3]: False}), rng)
