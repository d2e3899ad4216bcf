"""Schemas with values that make no sense where they are: refused like others, with the place."""

import json
import random
from contextlib import suppress
from typing import Any

import pytest

from penstock.engine.constraints.limits import check_limits
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import reachable
from penstock.plugins.grammars.llguidance import exact_schema
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from tests.plugins.grammars.grammar_walks import VOCABULARY

LLGUIDANCE = LlguidanceBackend(VOCABULARY)
OUTLINES = OutlinesCoreBackend(VOCABULARY)
TO_ROOT = {"$ref": "#"}
NULL = {"type": "null"}
NO_HOST = "http://["
KEYWORDS = (
    *("type", "properties", "required", "items", "prefixItems", "anyOf", "oneOf", "allOf", "not", "if", "then", "else", "$ref", "$defs"),
    *("enum", "const", "minimum", "multipleOf", "minLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "contains"),
    *("minContains", "minProperties", "patternProperties", "propertyNames", "additionalProperties", "unevaluatedProperties"),
    *("unevaluatedItems", "dependentRequired", "dependentSchemas", "dependencies", "$id", "$anchor", "$schema"),
)
ODD: tuple[Any, ...] = (
    *(None, True, 0, -1, 1.5, "", "a", [], {}, [[]], [{}], [1], ["a"], {"a": 1}, {"a": []}, {"a": TO_ROOT}, [TO_ROOT], TO_ROOT, NULL),
    *([NULL, "x"], "#", "#/properties/a", "#/$defs/a", NO_HOST, "string", ["object", "null"], [["x"]], 2**70, "(", "date"),
)


def compile_with(backend: LlguidanceBackend | OutlinesCoreBackend, schema: Any, *, is_lenient: bool = False) -> None:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "p", is_lenient=is_lenient)
    check_limits(spec)
    backend.compile(spec)


@pytest.mark.parametrize("is_lenient", [False, True])
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"anyOf": [{"$ref": "#/anyOf/" + "9" * 5000}, NULL]}, ".anyOf[0].$ref"),
        ({"$id": "http://a/", "anyOf": [{"$ref": NO_HOST}, NULL]}, ".anyOf[0].$ref"),
        ({"$id": NO_HOST, "anyOf": [{"$ref": "b"}, NULL]}, ".anyOf[0].$ref"),
        ({"$anchor": "a", "$defs": [1], "not": NULL, "anyOf": [{"$ref": "#/not"}]}, ".$defs"),
        ({"$anchor": "a", "$defs": 5, "anyOf": [TO_ROOT]}, ".$defs"),
        ({"type": "array", "items": {"anyOf": 5}}, ".items.anyOf"),
        ({"allOf": 5, "anyOf": [TO_ROOT]}, ".anyOf"),
        ({"type": "object", "required": [{}], "properties": {"a": TO_ROOT}}, ".required"),
        ({"type": "object", "properties": {"b": {"type": "object", "required": [{}]}}}, ".properties.b.required"),
        ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True, "minItems": -1}, ".minItems"),
    ],
)
def test_what_is_no_schema_is_refused_with_its_place(schema: Any, path: str, is_lenient: bool) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        compile_with(LLGUIDANCE, schema, is_lenient=is_lenient)
    assert caught.value.param == f"p{path}"


@pytest.mark.parametrize("backend", [LLGUIDANCE, OUTLINES])
def test_nothing_that_stands_in_a_schema_is_more_than_refused(backend: LlguidanceBackend | OutlinesCoreBackend) -> None:
    rng = random.Random(0)

    def schema(depth: int) -> Any:
        if depth == 0 or rng.random() < 0.2:
            return rng.choice((True, NULL, {"type": "string"}, {"enum": ["a", "b"]}, TO_ROOT, {}))
        below = schema(depth - 1)
        return {rng.choice(KEYWORDS): rng.choice((rng.choice(ODD), below, {"a": below}, [below])) for _ in range(3)}

    for number in range(1000):
        with suppress(UnsupportedGrammar):
            compile_with(backend, schema(3), is_lenient=number % 2 == 0)


def test_many_unknown_types_are_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_searches = 0

    def counted(document: Any) -> frozenset[int]:
        nonlocal num_searches
        num_searches += 1
        return reachable(document)

    monkeypatch.setattr(exact_schema, "reachable", counted)
    unknown = {"type": "x"}
    compile_with(LLGUIDANCE, {"not": NULL, "$defs": {"a": unknown, "b": unknown}})
    assert num_searches == 1
    with pytest.raises(UnsupportedGrammar, match="no type") as caught:
        compile_with(LLGUIDANCE, {"not": NULL, "$defs": {"a": unknown, "b": unknown}, "anyOf": [{"$ref": "#/$defs/b"}]})
    assert caught.value.param == "p.$defs.b.type"
