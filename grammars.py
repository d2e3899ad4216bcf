"""Constraints as trees and rules: the public names for grammar backends whose library takes a grammar rather than a schema or a regex.

    grammar = grammar_rules(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}'))
    library.compile({"root": write(grammar.root), **{name: write(node) for name, node in grammar.rules.items()}})

A `Node` is a `Literal`, `Chars` (a set of characters), `Sequence`, `Either`, `Repeat`, or a `Reference` to a rule. A `CharSet` holds sorted
ranges of code points, without NUL and surrogates, which are never generated.
"""

from penstock.plugins.grammars.regex.tree import ANYTHING as ANYTHING
from penstock.plugins.grammars.regex.tree import EMPTY as EMPTY
from penstock.plugins.grammars.regex.tree import Chars as Chars
from penstock.plugins.grammars.regex.tree import CharSet as CharSet
from penstock.plugins.grammars.regex.tree import Either as Either
from penstock.plugins.grammars.regex.tree import Literal as Literal
from penstock.plugins.grammars.regex.tree import Node as Node
from penstock.plugins.grammars.regex.tree import Reference as Reference
from penstock.plugins.grammars.regex.tree import Repeat as Repeat
from penstock.plugins.grammars.regex.tree import Sequence as Sequence
from penstock.plugins.grammars.regex.tree import complement as complement
from penstock.plugins.grammars.regex.tree import either as either
from penstock.plugins.grammars.regex.tree import of as of
from penstock.plugins.grammars.rules import GrammarRules as GrammarRules
from penstock.plugins.grammars.rules import grammar_rules as grammar_rules
