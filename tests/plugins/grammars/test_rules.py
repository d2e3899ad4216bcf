"""`penstock.grammars`: constraints as trees and rules."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedKind
from penstock.grammars import Either, GrammarRules, Literal, Node, Reference, Repeat, Sequence, grammar_rules

TREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": {},
}


def rules_of(schema: Any, prefix: str = "", **options: Any) -> GrammarRules:
    return grammar_rules(GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "guided_json", **options), prefix)


def references(node: Node) -> Iterator[str]:
    match node:
        case Reference(name):
            yield name
        case Sequence(items) | Either(items):
            for item in items:
                yield from references(item)
        case Repeat(item):
            yield from references(item)


def test_every_reference_is_to_a_rule_and_rules_recur() -> None:
    grammar = rules_of(TREE)
    needed = {name for node in (grammar.root, *grammar.rules.values()) for name in references(node)}
    assert needed <= set(grammar.rules)
    assert any(name.startswith("ref_") for name in needed)


def test_schemas_with_prefixes_of_their_own_share_a_grammar() -> None:
    first, second = rules_of(TREE), rules_of({"type": "array", "items": {"type": "string"}}, "other_", whitespace_pattern="")
    shared = first.rules.keys() & second.rules.keys()
    assert shared == {"string"}
    assert all(first.rules[name] == second.rules[name] for name in shared)
    assert all(name.startswith("other_") for name in second.rules.keys() - shared)


def test_what_a_lenient_schema_leaves_out_is_named() -> None:
    assert rules_of({"type": "string"}).warnings == ()
    (warning,) = rules_of({"type": "number", "multipleOf": 7}, is_lenient=True).warnings
    assert "guided_json.multipleOf" in warning


def test_a_choice_and_a_regex_are_trees_without_rules() -> None:
    choice = grammar_rules(GrammarSpec(GrammarKind.CHOICE, '["a", "b"]'))
    assert choice == GrammarRules(Either((Literal("a"), Literal("b"))), {})
    assert grammar_rules(GrammarSpec(GrammarKind.REGEX, "a|b")).rules == {}


@pytest.mark.parametrize("kind", [GrammarKind.LARK, GrammarKind.GBNF, GrammarKind.STRUCTURE])
def test_other_kinds_are_refused(kind: GrammarKind) -> None:
    with pytest.raises(UnsupportedKind, match=kind):
        grammar_rules(GrammarSpec(kind, ""))
