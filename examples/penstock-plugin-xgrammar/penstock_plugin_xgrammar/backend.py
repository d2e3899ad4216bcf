"""Regexes, choices, JSON, GBNF and structures, compiled by xgrammar.

xgrammar gets rules that are written here, except for GBNF, the client's own: its translations of JSON schemas and of regexes pass over
what they do not know. White space in JSON is as in `penstock.grammars`, with up to 40 blanks at every depth, or what `whitespace_pattern`
says. Compiling runs in a sandbox; reading in what it sends releases the interpreter's lock.
"""

from typing import TYPE_CHECKING

from penstock import (
    GrammarBackend,
    GrammarKind,
    GrammarSpec,
    InvalidRequest,
    UnsupportedGrammar,
    Vocabulary,
)
from penstock.grammars import Node, grammar_rules
from penstock_plugin_xgrammar.compiler import Compiler
from penstock_plugin_xgrammar.ebnf import UnwritableGrammar, to_ebnf
from penstock_plugin_xgrammar.gbnf import check_gbnf
from penstock_plugin_xgrammar.structure import StructureRules

if TYPE_CHECKING:
    from penstock_plugin_xgrammar.matcher import XgrammarGrammar

MAX_WARNINGS = 200  # of one constraint


class XgrammarBackend(GrammarBackend):
    """Any number of threads may compile; one grammar is compiled at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
        self.compiler = Compiler(vocabulary)
        if self._stop_token_ids:
            self.compiler.prestart()

    def compile(self, spec: GrammarSpec) -> "XgrammarGrammar":
        """Raises `UnsupportedGrammar`: a keyword with its path, a position in a regex or grammar, or a bound on time and memory."""
        if not self._stop_token_ids:
            raise UnsupportedGrammar("this model has no stop token with which a constrained answer could end", spec.param)
        translation = _Translation(spec, self._vocabulary)
        try:
            ebnf = translation.ebnf()
        except UnwritableGrammar as error:
            raise UnsupportedGrammar(f"the constraint cannot be compiled: {error}", spec.param) from error
        try:
            grammar = self.compiler.compile(ebnf)
        except InvalidRequest as refusal:
            raise UnsupportedGrammar(f"xgrammar: {refusal.message}", spec.param) from refusal

        from penstock_plugin_xgrammar.matcher import XgrammarGrammar  # brings PyTorch, which `penstock plugins` does without

        return XgrammarGrammar(grammar, self._vocabulary.size, self._stop_token_ids, tuple(translation.warnings)[:MAX_WARNINGS])


class _Translation:
    """One spec, values in it included, as the text that xgrammar compiles."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self.spec = spec
        self.warnings: list[str] = []
        self._vocabulary = vocabulary
        self._rules: dict[str, Node] = {}
        self._num_values = 0

    def ebnf(self) -> str:
        if self.spec.kind is GrammarKind.GBNF:
            check_gbnf(self.spec.text, self.spec.param)
            return self.spec.text
        if self.spec.structure is None:
            return to_ebnf(self._value(self.spec), self._rules)
        structure = StructureRules(self._vocabulary, self.spec.param, self._value)
        root = structure.node(self.spec.structure)
        return to_ebnf(root, {**self._rules, **structure.rules}, structure.tokens)

    def _value(self, spec: GrammarSpec) -> Node:
        if spec.kind is GrammarKind.LARK:
            raise UnsupportedGrammar("xgrammar compiles no Lark grammars here: write it as GBNF, or name another backend", spec.param)
        if spec.kind in (GrammarKind.GBNF, GrammarKind.STRUCTURE):
            raise UnsupportedGrammar(f"xgrammar compiles no {spec.kind} inside a structure", spec.param)
        grammar = grammar_rules(spec, prefix=f"value_{self._num_values}_" if self._num_values else "")
        self._num_values += 1
        self._rules.update(grammar.rules)
        self.warnings += grammar.warnings
        return grammar.root
