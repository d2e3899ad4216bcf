"""Which constraints are promised to have quick masks, and that the promise reaches the engine."""

import json
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.plugins.grammars.json_schema.regular import MAX_LENGTH, MAX_VALUES, has_quick_masks
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE

VOCABULARY = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})


def schema(content: Any, **options: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(content), **options)


@pytest.mark.parametrize(
    "content",
    [
        True,
        {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}, "b": {"type": "array", "items": {"type": "integer"}}}},
        {"anyOf": [{"type": "null"}, {"enum": ["a", "b"]}, {"type": "string", "format": "date"}]},
        {"$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "$ref": "#/$defs/n"},
        {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"},
        {"type": "string", "pattern": "^[A-Z]{3}-\\d{4}$"},
    ],
)
def test_ordinary_schemas_have_quick_masks(content: Any) -> None:
    assert has_quick_masks(schema(content))
    assert LlguidanceBackend(VOCABULARY).compile(schema(content)).has_quick_masks


@pytest.mark.parametrize(
    "content",
    [
        {"type": "string", "pattern": "^a+$"},
        {"type": "object", "properties": {"a": {"items": {"pattern": "a"}}}},
        {"type": "string", "pattern": "^[ab]{0,30}a[ab]{0,30}$"},
        {"type": "string", "pattern": "^a|b$"},
        {"type": "string", "pattern": "^(ab?){9}$"},
        {"type": "object", "patternProperties": {"^a": True}},
        {"type": "string", "maxLength": MAX_LENGTH + 1},
        {"anyOf": [{"type": "string", "maxLength": length} for length in range(40)]},
        {"enum": list(range(MAX_VALUES + 1))},
    ],
)
def test_demanding_ones_are_not_promised_to(content: Any) -> None:
    assert not has_quick_masks(schema(content))


def test_white_space_of_the_client_s_own_is_not_promised_to_be_quick() -> None:
    assert has_quick_masks(schema({"type": "object"}, whitespace_pattern=""))
    assert not has_quick_masks(schema({"type": "object"}, whitespace_pattern="[ \\n]*"))


def test_grammars_of_the_client_s_are_not_promised_to_be_quick() -> None:
    grammar = LlguidanceBackend(VOCABULARY).compile(GrammarSpec(GrammarKind.LARK, 'start: "a"+', "guided_grammar"))
    assert not grammar.has_quick_masks


def test_what_is_looked_up_is_quick() -> None:
    assert OutlinesCoreBackend(VOCABULARY).compile(GrammarSpec(GrammarKind.REGEX, "a+b", "guided_regex")).has_quick_masks
