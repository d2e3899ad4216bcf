"""The grammar backend `xgrammar`: regexes, choices, JSON, GBNF and structures. It needs the extra `penstock[xgrammar]`.

xgrammar gets rules that are written here, except for GBNF, the client's own: its translations of JSON schemas and of regexes pass over
what they do not know. White space in JSON is as in `json_text`, with up to 40 blanks at every depth, or what `whitespace_pattern` says.
Compiling runs in a sandbox; reading in what it sends releases the interpreter's lock.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.hooks import Register, hookimpl
from penstock.plugins.grammars.json_schema.document import parse_document
from penstock.plugins.grammars.json_schema.regular import MAX_WARNINGS
from penstock.plugins.grammars.regex import lark as text_constraints
from penstock.plugins.grammars.regex.tree import Node
from penstock.plugins.grammars.xgrammar.compiler import Compiler
from penstock.plugins.grammars.xgrammar.ebnf import UnwritableGrammar, to_ebnf
from penstock.plugins.grammars.xgrammar.gbnf import check_gbnf
from penstock.plugins.grammars.xgrammar.schema import SchemaRules
from penstock.plugins.grammars.xgrammar.structure import StructureRules

if TYPE_CHECKING:
    from penstock.plugins.grammars.xgrammar.matcher import XgrammarGrammar


@hookimpl
def register_grammar_backends(register: Register) -> None:
    # Also without the library: the error for a request that names the backend then says what to install.
    register("xgrammar", XgrammarBackend)


class XgrammarBackend:
    """Any number of threads may compile; one grammar is compiled at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
        self.compiler = Compiler(vocabulary)
        if self._is_installed and self._stop_token_ids:
            self.compiler.prestart()

    @property
    def _is_installed(self) -> bool:
        return importlib.util.find_spec("xgrammar") is not None

    def compile(self, spec: GrammarSpec) -> "XgrammarGrammar":
        """Raises `UnsupportedGrammar`: a keyword with its path, a position in a regex or grammar, or a bound on time and memory."""
        if not self._is_installed:
            raise UnsupportedGrammar("the backend xgrammar is not installed: pip install 'penstock[xgrammar]'", spec.param)
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

        from penstock.plugins.grammars.xgrammar.matcher import XgrammarGrammar

        return XgrammarGrammar(grammar, self._vocabulary.size, self._stop_token_ids, tuple(translation.warnings)[:MAX_WARNINGS])


class _Translation:
    """One spec, values in it included, as the text that xgrammar compiles."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self.spec = spec
        self.warnings: list[str] = []
        self._vocabulary = vocabulary
        self._rules: dict[str, Node] = {}
        self._num_schemas = 0

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
        match spec.kind:
            case GrammarKind.REGEX:
                return text_constraints.regex(spec.text, spec.param)
            case GrammarKind.CHOICE:
                return text_constraints.choice(spec.text, spec.param)
            case GrammarKind.JSON_SCHEMA:
                return self._schema(parse_document(spec.text, spec.param), spec)
            case GrammarKind.JSON_OBJECT:
                return self._schema({"type": "object"}, spec)
            case GrammarKind.LARK:
                raise UnsupportedGrammar("xgrammar compiles no Lark grammars here: write it as GBNF, or name another backend", spec.param)
            case GrammarKind.GBNF | GrammarKind.STRUCTURE:
                raise UnsupportedGrammar(f"xgrammar compiles no {spec.kind} inside a structure", spec.param)

    def _schema(self, schema: Any, spec: GrammarSpec) -> Node:
        pattern = spec.whitespace_pattern
        whitespace = None if pattern is None else text_constraints.regex(pattern, spec.param)
        prefix = f"schema_{self._num_schemas}_" if self._num_schemas else ""
        self._num_schemas += 1
        rules = SchemaRules(schema, spec.param, whitespace, prefix=prefix, is_lenient=spec.is_lenient)
        root = rules.start()
        self._rules.update(rules.rules)
        self.warnings += rules.warnings
        return root
