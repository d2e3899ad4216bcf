from itertools import pairwise
from typing import Any

import pytest

from penstock.engine.errors import UnsupportedGrammar
from tests.plugins.grammars.llguidance.test_backend import accepts, schema_grammar

ENDLESS = {"type": "object", "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]}


def with_member(definition: Any, **more: Any) -> dict[str, Any]:
    properties = {"a": {"$ref": "#/$defs/n"}, "b": {"type": "null"}}
    return {"type": "object", "properties": properties, "additionalProperties": False, "$defs": {"n": definition}, **more}


@pytest.mark.parametrize(
    "definition",
    [
        ENDLESS,
        {"$ref": "#/$defs/n"},
        {"allOf": [{"$ref": "#/$defs/n"}, {"type": "object"}]},
        {"anyOf": [ENDLESS, {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}]},
        {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}], "minItems": 1},
        {"type": ["object", "array"], "items": ENDLESS, "minItems": 2, "properties": {"x": {"$ref": "#/$defs/n"}}, "required": ["x"]},
    ],
)
def test_a_member_that_would_never_end_is_not_begun(definition: Any) -> None:
    grammar = schema_grammar(with_member(definition))
    assert accepts(grammar, '{"b": null}')
    assert not accepts(grammar, '{"a"')
    with pytest.raises(UnsupportedGrammar, match="leads back") as caught:
        schema_grammar(with_member(definition, required=["a"]), param="p")
    assert caught.value.param == "p.properties.a.$ref"


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        ({**ENDLESS, "required": []}, '{"x": {"x": {}}}'),
        ({**ENDLESS, "type": ["object", "null"]}, '{"x": {"x": null}}'),
        ({"anyOf": [ENDLESS, {"type": "string"}]}, '{"x": {"x": "y"}}'),
        ({"type": "array", "items": {"$ref": "#/$defs/n"}}, "[[], [[]]]"),
        (
            {"type": "object", "properties": {"x": {"type": "array", "items": {"$ref": "#/$defs/n"}}}, "required": ["x"]},
            '{"x": [{"x": []}]}',
        ),
    ],
)
def test_recursion_that_may_end_goes_on(definition: Any, value: str) -> None:
    assert accepts(schema_grammar(with_member(definition, required=["a"])), f'{{"a": {value}}}')


def test_a_document_that_requires_itself_is_refused() -> None:
    with pytest.raises(UnsupportedGrammar, match="leads back") as caught:
        schema_grammar({"type": "object", "properties": {"child": {"$ref": "#"}}, "required": ["child"]}, param="p")
    assert caught.value.param == "p.properties.child.$ref"


@pytest.mark.parametrize("step", [1, -1])
def test_long_chains_of_definitions_are_told_from_endless_ones(step: int) -> None:
    chain = [f"d{number}" for number in range(40)][::step]
    followed = {
        name: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{after}"}}, "required": ["x"]} for name, after in pairwise(chain)
    }
    ending = {**followed, chain[-1]: {"type": "null"}}
    assert accepts(
        schema_grammar({"$ref": f"#/$defs/{chain[0]}", "$defs": dict(sorted(ending.items()))}), '{"x": ' * 39 + "null" + "}" * 39
    )
    with pytest.raises(UnsupportedGrammar, match="leads back"):
        schema_grammar({"$ref": f"#/$defs/{chain[0]}", "$defs": {**followed, chain[-1]: {"$ref": f"#/$defs/{chain[0]}"}}})
