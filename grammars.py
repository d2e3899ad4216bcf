"""Constraints as trees and rules: the public names for grammar backends whose library takes a grammar rather than a schema or a regex.

    grammar = grammar_rules(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'))
    library.compile({"root": write(grammar.root), **{name: write(node) for name, node in grammar.rules.items()}})

A `Node` is a `Literal`, `Chars` (a set of characters), `Sequence`, `Either`, `Repeat`, or a `Reference` to a rule. A `CharSet` holds sorted
ranges of code points, without NUL and surrogates, which are never generated.
"""

from penstock.plugins.grammars.regex.tree import (
    ANYTHING,
    EMPTY,
    Chars,
    CharSet,
    Either,
    Literal,
    Node,
    Reference,
    Repeat,
    Sequence,
    complement,
    either,
    of,
)
from penstock.plugins.grammars.rules import GrammarRules, grammar_rules

__all__ = [
    "ANYTHING",
    "EMPTY",
    "CharSet",
    "Chars",
    "Either",
    "GrammarRules",
    "Literal",
    "Node",
    "Reference",
    "Repeat",
    "Sequence",
    "complement",
    "either",
    "grammar_rules",
    "of",
]
