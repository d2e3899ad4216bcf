import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.grammars.json_schema.regular import MAX_CHARACTERS, MAX_WARNINGS
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar
from tests.plugins.grammars.grammar_walks import PERSON, SPECIAL, STOPS, VOCABULARY, allowed, check_forks, patterns, subjects, tokenized

BACKEND = LlguidanceBackend(VOCABULARY)


def compiled(kind: GrammarKind, text: str, **options: Any) -> LlguidanceGrammar:
    return BACKEND.compile(GrammarSpec(kind, text, **options))


def schema_grammar(schema: Any, **options: Any) -> LlguidanceGrammar:
    return compiled(GrammarKind.JSON_SCHEMA, json.dumps(schema), **options)


def accepts(grammar: LlguidanceGrammar, text: str, seed: int = 0) -> bool:
    """Walks a text token by token; at each step the mask, `advance` and what may end must agree."""
    matcher = grammar.matcher()
    for token_id in tokenized(text, random.Random(seed)):
        is_allowed = token_id in allowed(matcher)
        assert matcher.advance(token_id) == is_allowed
        if not is_allowed:
            return False
    stops = allowed(matcher) & STOPS
    assert stops in (set(), STOPS)
    return bool(stops)


def refusal(kind: GrammarKind, text: str, **options: Any) -> UnsupportedGrammar:
    with pytest.raises(UnsupportedGrammar) as caught:
        compiled(kind, text, **options)
    return caught.value


@settings(max_examples=150)
@given(patterns, st.lists(subjects, min_size=1, max_size=12), st.integers(0, 2**32))
def test_a_regex_accepts_exactly_what_fullmatch_does(pattern: str, texts: list[str], seed: int) -> None:
    grammar = compiled(GrammarKind.REGEX, pattern)
    for text in texts:
        assert accepts(grammar, text, seed) == bool(re.fullmatch(pattern, text)), (pattern, text)


@settings(max_examples=50)
@given(st.lists(st.text(st.sampled_from('aabbc1字é"\\\n\x7f'), max_size=5), min_size=1, max_size=5), st.lists(subjects, max_size=5))
def test_a_choice_accepts_its_members_and_nothing_else(choices: list[str], others: list[str]) -> None:
    grammar = compiled(GrammarKind.CHOICE, json.dumps(choices))
    for text in (*choices, *others):
        assert accepts(grammar, text) == (text in choices), text


def test_a_random_walk_through_a_schema_ends_in_an_instance() -> None:
    rng = random.Random(7)
    grammar = schema_grammar(PERSON)
    for _ in range(5):
        matcher = grammar.matcher()
        text = b""
        for step in range(3000):
            choices = sorted(allowed(matcher))
            assert choices
            if step > 30:
                choices = sorted(set(choices) & STOPS) or sorted(set(choices) & {ord('"'), ord("}"), ord("]")}) or choices
            token_id = rng.choice(choices)
            assert matcher.advance(token_id)
            if token_id in STOPS:
                break
            text += VOCABULARY.token_bytes[token_id] or b""
        person = json.loads(text)
        assert {"name", "kind"} <= person.keys() <= PERSON["properties"].keys()
        assert [name for name in PERSON["properties"] if name in person] == list(person)


def test_properties_come_in_the_order_of_the_schema() -> None:
    grammar = schema_grammar({"type": "object", "properties": {"z": {"type": "integer"}, "a": {"type": "integer"}}, "required": ["a", "z"]})
    assert accepts(grammar, '{"z": 1, "a": 2}')
    assert not accepts(grammar, '{"a": 2, "z": 1}')


def test_white_space_is_what_json_dumps_writes_on_one_line() -> None:
    person = {"name": "a", "kind": "a", "addresses": [{"city": "b"}], "score": 1}
    for grammar in (schema_grammar(PERSON), compiled(GrammarKind.JSON_OBJECT, "")):
        assert accepts(grammar, json.dumps(person))
        assert accepts(grammar, json.dumps(person, separators=(",", ":")))
        for written, unwritten in (
            (": ", ":  "),
            (": ", " :"),
            (": ", ":\t"),
            (", ", " ,"),
            (", ", ",\n"),
            ("{", "{ "),
            ("}", " }"),
            ("]", "\n]"),
        ):
            assert not accepts(grammar, json.dumps(person).replace(written, unwritten, 1))


def test_white_space_is_what_the_request_asks_for() -> None:
    compact = schema_grammar(PERSON, whitespace_pattern="")
    assert accepts(compact, '{"name":"a","kind":3}')
    assert not accepts(compact, '{"name": "a","kind":3}')
    spaces = schema_grammar(PERSON, whitespace_pattern=r" {0,2}")
    assert accepts(spaces, '{  "name":"a", "kind":3}')
    assert not accepts(spaces, '{"name":"a",\n"kind":3}')
    assert "at position 1" in refusal(GrammarKind.JSON_SCHEMA, "{}", whitespace_pattern="a(?=b)").message


def test_any_json_object_is_an_object() -> None:
    grammar = compiled(GrammarKind.JSON_OBJECT, "")
    assert accepts(grammar, '{"a": [1, {"b": null}], "字": "é"}')
    assert not accepts(grammar, "[]")
    assert not accepts(grammar, '{"a": "\\u00e9"}')  # a character that prints is spelled as itself


def test_a_fork_goes_on_by_itself() -> None:
    check_forks(compiled(GrammarKind.JSON_OBJECT, "").matcher())


def test_special_tokens_and_the_text_of_a_stop_token_never_match() -> None:
    matcher = schema_grammar({"type": "string"}).matcher()
    for byte in b'"a<end':
        assert matcher.advance(byte)
        assert not allowed(matcher) & {*SPECIAL, *STOPS}
        assert not any(matcher.advance(token_id) for token_id in (*SPECIAL, *STOPS))


def test_tokens_that_spell_the_same_are_all_allowed() -> None:
    twice = replace(VOCABULARY, token_bytes=(*VOCABULARY.token_bytes, b"ab"))
    grammar = LlguidanceBackend(twice).compile(GrammarSpec(GrammarKind.REGEX, "ab"))
    assert {256, len(twice.token_bytes) - 1} <= allowed(grammar.matcher())


@pytest.mark.parametrize(
    ("schema", "param", "message"),
    [
        ({"properties": {"a": {"not": {"format": "date"}}}}, ".properties.a.not", "`not` is not supported"),
        ({"type": "array", "items": {"uniqueItems": True}}, ".items.uniqueItems", "`uniqueItems` is not supported"),
        (
            {"$defs": {"b": {"if": {"format": "date"}, "else": False}}, "anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]},
            ".$defs.b.if",
            "`if` is not supported",
        ),
        ({"properties": {"a": {"oneOf": [{"format": "date"}, {"minLength": 3}]}}}, ".properties.a.oneOf", "may share values"),
        (
            {"$defs": {"t": {"items": {"$ref": "#/$defs/t"}, "not": {"format": "date"}}}, "$ref": "#/$defs/t"},
            ".$defs.t.not",
            "`not` is not supported",
        ),
        ({"prefixItems": [True, {"format": "idn-email"}]}, ".prefixItems[1].format", "idn-email"),
        ({"properties": {"a": {"pattern": "(?:a(?=b))+"}}}, ".properties.a.pattern", "look-around"),
        ({"items": {"pattern": "(x{1000}){1000}"}}, ".items.pattern", "more than 200000 characters"),
        ({"items": {"pattern": "(x{1000,}){1000,}"}}, ".items.pattern", "more than 200000 characters"),
        ({"patternProperties": {"(x{1000}){1000}": {}}}, ".patternProperties.(x{1000}){1000}", "more than 200000 characters"),
        ({"propertyNames": {"pattern": "(x{1000}){1000}"}}, ".propertyNames.pattern", "more than 200000 characters"),
        ({"maxProperties": 9, "properties": {f"p{i}": {} for i in range(40)}}, ".maxProperties", "so many properties"),
        ({"anyOf": [{"patternProperties": {"(?:(?!a)b)+": {}}}]}, ".anyOf[0].patternProperties", "look-around"),
        ({"properties": {"a": {"type": "banana"}}}, ".properties.a.type", "banana"),
        ({"properties": []}, ".properties", "must be an object"),
        ({"items": {"minLength": -1}}, ".items.minLength", "positive integer"),
        ({"items": {"$ref": "#/$defs/a"}}, ".items.$ref", "leads nowhere"),
        ({"items": {"$ref": "https://example.com/schema.json"}}, ".items.$ref", "another document"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, ".required", "unsatisfiable"),
        ({"type": "object", "properties": {"a": {"enum": []}}, "required": ["a"]}, ".properties.a.enum", "empty"),
        ({"enum": [1, 2**53 + 1]}, ".enum", "2^53"),
        ({"type": "object", "x-guidance": {"lenient": True}}, ".x-guidance", "refused"),
        ({"properties": {"a": {"const": "\ud800"}}}, ".properties.a.const", "surrogate"),
        ({"properties": {f"p{i}": {} for i in range(1501)}}, ".properties", "1500 properties"),
        ({"type": "string", "pattern": "("}, ".pattern", "unclosed group"),
        ({"properties": {"a": {"type": "string", "format": "date", "minLength": "x"}}}, ".properties.a.minLength", "positive integer"),
        ({"items": {"if": {"required": ["x"]}, "then": {"items": {"maxLength": -1}}}}, ".items.if", "positive integer"),
        ({"items": {"propertyNames": {"pattern": "("}}}, ".items.propertyNames", "unclosed group"),
        ({"allOf": [{}], "dependentSchemas": {"x": {"minLength": -1}}}, ".dependentSchemas", "positive integer"),
        ({"items": {"oneOf": [{"type": "string"}, {"type": "banana"}]}}, ".items.oneOf[1].type", "no type"),
        ({"not": {"properties": {"x": {"type": ["string", "banana"]}}}}, ".not.properties.x.type", "no type"),
    ],
)
def test_a_refusal_names_the_keyword_and_its_path(schema: Any, param: str, message: str) -> None:
    error = refusal(GrammarKind.JSON_SCHEMA, json.dumps(schema), param="tools[0].parameters")
    assert error.param == f"tools[0].parameters{param}"
    assert message in error.message
    assert "\n" not in error.message


def test_a_refusal_does_not_quote_the_schema() -> None:
    for schema in ({"enum": "字" * 500}, {"items": {"type": "object", "title": "secret", "not": {"patternProperties": {"secret": {}}}}}):
        message = refusal(GrammarKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False)).message
        assert len(message) < 250
        assert "secret" not in message


def test_what_says_nothing_is_not_refused() -> None:
    schema = {"title": "A", "type": "array", "uniqueItems": False, "description": "b", "items": {"type": "integer", "default": 1}}
    assert accepts(schema_grammar(schema), "[1, 1]")


def test_bounds_beyond_what_doubles_hold_are_never_crossed() -> None:
    grammar = schema_grammar({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1})
    assert accepts(grammar, str(2**53))
    assert not accepts(grammar, str(2**63))
    assert not accepts(grammar, str(-(2**63) - 1))


def test_classes_in_patterns_have_no_set_operators() -> None:
    grammar = schema_grammar({"type": "string", "pattern": "^[a&&b]$"})
    assert accepts(grammar, '"&"')
    assert accepts(grammar, '"a"')
    assert not accepts(grammar, '"c"')


def test_nul_is_spelled_as_an_escape() -> None:
    grammar = schema_grammar({"enum": ["a\0b"]})
    assert accepts(grammar, '"a\\u0000b"')
    assert "NUL" in refusal(GrammarKind.CHOICE, '["a\\u0000b"]').message


def test_a_lenient_schema_loses_what_cannot_be_enforced_by_name() -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": "string", "format": "regex", "not": {"format": "date"}},
            "b": {"oneOf": [{"format": "date"}, {"minLength": 3}]},
            "c": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        },
        "required": ["a"],
        "additionalProperties": False,
    }
    grammar = schema_grammar(schema, is_lenient=True, param="response_format")
    assert set(grammar.warnings) == {
        "`not` at response_format.properties.a.not",
        "`uniqueItems` at response_format.properties.c.uniqueItems",
        "`format` at response_format.properties.a.format",
        "`oneOf` at response_format.properties.b.oneOf",
    }
    assert accepts(grammar, '{"a": "x", "b": "long", "c": [1, 1]}')
    assert not accepts(grammar, '{"a": "x", "c": ["1"]}')
    assert not accepts(grammar, '{"b": "long"}')


def test_a_lenient_schema_that_can_be_enforced_has_no_warnings() -> None:
    assert schema_grammar(PERSON, is_lenient=True).warnings == ()


def test_a_lenient_schema_loses_patterns_that_are_too_large() -> None:
    large = "^(x{1000}){1000}$"
    grammar = schema_grammar(
        {
            "patternProperties": {large: False},
            "additionalProperties": False,
            "properties": {
                "a": {"type": "string", "pattern": large},
                "b": {"type": "object", "propertyNames": {"pattern": large}, "required": ["c"]},
            },
            "type": "object",
        },
        is_lenient=True,
        param="p",
    )
    assert set(grammar.warnings) == {
        f"`patternProperties` at p.patternProperties.{large}",
        "`pattern` at p.properties.a.pattern",
        "`propertyNames` at p.properties.b.propertyNames.pattern",
    }
    assert accepts(grammar, '{"a": "y", "b": {"c": 1}, "d": 2}')
    assert not accepts(grammar, '{"a": 1}')
    assert not accepts(grammar, '{"a": "y", "b": {}}')


def test_what_a_lenient_schema_loses_is_named_where_it_stands() -> None:
    overlapping = {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "z$": {}}, "additionalProperties": False}
    part = {"properties": {"p": {"type": "string", "format": "date"}, "q": overlapping}}
    grammar = schema_grammar({"if": {"required": ["x"]}, "then": part, "type": "object"}, is_lenient=True, param="p")
    assert grammar.warnings == ("`if` at p.if",)
    grammar = schema_grammar(overlapping, is_lenient=True, param="p")
    assert grammar.warnings == ("`patternProperties` at p.patternProperties",)
    assert accepts(grammar, '{"abz": 1, "b": "x"}')


def test_a_mistake_is_refused_in_a_lenient_schema_too() -> None:
    schemas: list[dict[str, Any]] = [{"type": "banana"}, {"pattern": 5}, {"enum": []}, {"$ref": "#/$defs/a"}]
    for schema in schemas:
        refusal(GrammarKind.JSON_SCHEMA, json.dumps(schema), is_lenient=True)


def test_a_vocabulary_without_stop_tokens_is_refused() -> None:
    backend = LlguidanceBackend(replace(VOCABULARY, stop_token_ids=frozenset()))
    with pytest.raises(UnsupportedGrammar, match="no stop token"):
        backend.compile(GrammarSpec(GrammarKind.JSON_OBJECT, ""))


def test_a_regex_is_refused_with_its_position() -> None:
    assert "at position 2" in refusal(GrammarKind.REGEX, "ab(?=c)").message


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer.load(default_model_dir)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    return tokenizer.vocabulary(tokenizer.vocab_size, [*tokenizer.eos_token_ids, 0])


def test_names_in_characters_without_tokens_can_all_be_chosen(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    names = [f"{first}{second}" for first in "北上广深杭成" for second in "京海州圳都"] + ["乌鲁木齐"]
    assert len(names) == 31
    backend = LlguidanceBackend(vocabulary)
    enum = backend.compile(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps({"enum": names})))
    choice = backend.compile(GrammarSpec(GrammarKind.CHOICE, json.dumps(names)))
    row = torch.zeros((vocabulary.size + 31) // 32, dtype=torch.int32)
    for name in names:
        for grammar, text in ((enum, f'"{name}"'), (choice, name)):
            matcher = grammar.matcher()
            for token_id in tokenizer.encode(text, add_special_tokens=False):
                matcher.fill_bitmask(row)
                assert int(row[token_id // 32]) >> token_id % 32 & 1
                assert matcher.advance(token_id)
            assert matcher.finished


def test_every_added_token_and_stop_token_is_masked_inside_a_string(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    grammar = LlguidanceBackend(vocabulary).compile(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "string"}'))
    matcher = grammar.matcher()
    row = torch.zeros((vocabulary.size + 31) // 32, dtype=torch.int32)
    for token_id in tokenizer.encode('"a <|im_', add_special_tokens=False):
        assert matcher.advance(token_id)
        matcher.fill_bitmask(row)
        for special in {*vocabulary.added_token_ids.values(), *vocabulary.stop_token_ids}:
            assert not int(row[special // 32]) >> special % 32 & 1
            assert not matcher.advance(special)


@pytest.mark.parametrize("part", [{"type": "null", "$dynamicRef": "#a"}, {"oneOf": [{"minimum": 1}, {"maximum": 2}]}])
def test_what_is_said_of_a_lenient_schema_stays_short_however_long_its_names_are(part: Any) -> None:
    schema = {"properties": {"a" * 10_000: {"anyOf": [part] * 300}}, "additionalProperties": {"allOf": [part] * 2}}
    warnings = schema_grammar(schema, is_lenient=True).warnings
    assert 0 < len(warnings) <= MAX_WARNINGS
    assert max(map(len, warnings)) == MAX_CHARACTERS
