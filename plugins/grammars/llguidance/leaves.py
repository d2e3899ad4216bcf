"""Constraints as parts of a Lark grammar for llguidance.

A part stands alone or, in a structure, beside others. Errors in it are found by `explain` once the whole is refused.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.engine.errors import ConstraintTooLarge, UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.plugins.grammars.json_schema.schema_faults import find_fault
from penstock.plugins.grammars.llguidance.dialects import client_grammar
from penstock.plugins.grammars.llguidance.errors import Complaint, read_complaint
from penstock.plugins.grammars.llguidance.exact_schema import read_schema
from penstock.plugins.grammars.llguidance.limits import parser_limits
from penstock.plugins.grammars.llguidance.relaxed_schema import refusal, relaxed
from penstock.plugins.grammars.llguidance.schema_source import schema_source
from penstock.plugins.grammars.regex.llguidance_regex import OversizedRegex, UnwritableRegex, to_terminal
from penstock.plugins.grammars.regex.regular import Node
from penstock.plugins.grammars.regex.text_constraints import choice, regex

SCHEMA_PREFIX = "%json "


@dataclass(frozen=True, slots=True)
class Leaf:
    """`expression` stands in a Lark rule or, where `is_terminal`, in a terminal, which a rule then names.

    A terminal takes the longest text that it matches, so what may go on with what it allows must be joined to it in one terminal.
    `warnings` are the keywords of a lenient spec that are not enforced, each with its path. For `is_inlined` see `read_schema`.
    """

    expression: str
    is_terminal: bool = False
    warnings: tuple[str, ...] = ()
    is_inlined: bool = False


def make_leaf(spec: GrammarSpec, vocabulary: Vocabulary, *, is_relaxed: bool = False, is_inlined: bool | None = None) -> Leaf:
    """Any constraint but a structure. Raises `UnsupportedGrammar` for what can be seen without compiling.

    Where `is_relaxed`, a lenient schema is made one that compiles, by compiling parts of it, which is slow.
    For `is_inlined` see `read_schema`.
    """
    match spec.kind:
        case GrammarKind.REGEX | GrammarKind.CHOICE:
            try:
                return Leaf(to_terminal(regular_tree(spec)), is_terminal=True)
            except OversizedRegex as error:
                raise ConstraintTooLarge(str(error), spec.param) from error
            except UnwritableRegex as error:
                raise UnsupportedGrammar(str(error), spec.param) from error
        case GrammarKind.JSON_SCHEMA | GrammarKind.JSON_OBJECT:
            schema = read_schema(spec, is_inlined=is_inlined)
            content, warnings = schema.content, schema.warnings
            if spec.is_lenient and is_relaxed:
                content, more = relaxed(schema, _schema_errors(spec), spec)
                warnings += more
            source = schema_source(content, spec.whitespace_pattern, spec.param)
            return Leaf(SCHEMA_PREFIX + source, warnings=warnings, is_inlined=schema.is_inlined)
        case GrammarKind.LARK | GrammarKind.GBNF:
            return Leaf(f"%lark {{\n{client_grammar(spec, vocabulary)}\n}}")
        case GrammarKind.STRUCTURE:
            raise AssertionError("a structure is made of leaves")


def explain(spec: GrammarSpec, complaint: Complaint) -> UnsupportedGrammar:
    """Why llguidance refuses `spec`, with the keyword and its path, or the place in a grammar."""
    if spec.kind is GrammarKind.JSON_SCHEMA and not complaint.is_about_size:
        schema = read_schema(spec, is_inlined=False)
        fault = find_fault(schema.content, _schema_errors(spec))
        if fault is not None:
            return refusal(fault, schema, spec)
    if complaint.line is not None and spec.kind in (GrammarKind.LARK, GrammarKind.GBNF):
        return UnsupportedGrammar(f"{complaint.message}, at line {complaint.line}, column {complaint.column}", spec.param)
    kind = ConstraintTooLarge if complaint.is_about_size else UnsupportedGrammar
    return kind(f"the constraint cannot be compiled: {complaint.message}", spec.param)


def regular_tree(spec: GrammarSpec) -> Node:
    """The tree of a regex or a choice. Raises `UnsupportedGrammar` with the position."""
    tree = choice if spec.kind is GrammarKind.CHOICE else regex
    return tree(spec.text, spec.param)


def _schema_errors(spec: GrammarSpec) -> Callable[[Any], str | None]:
    """What llguidance has against a schema."""
    from llguidance import LLMatcher

    limits = parser_limits(is_schema=True)

    def error_of(schema: Any) -> str | None:
        grammar = LLMatcher.grammar_from_json_schema(schema_source(schema, spec.whitespace_pattern, spec.param))
        is_error, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
        return read_complaint(messages[0]).message if is_error else None

    return error_of
