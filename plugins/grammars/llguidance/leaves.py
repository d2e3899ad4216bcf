"""Constraints as parts of a Lark grammar for llguidance."""

import copy
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.errors import ConstraintTooLarge, UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import Steps, at, parse_document, path, walk
from penstock.plugins.grammars.json_schema.regular import MAX_WARNINGS, left_out
from penstock.plugins.grammars.json_schema.rewrite import Fault, as_written, find_fault, leave_out, replace_keyword
from penstock.plugins.grammars.llguidance.exact_schema import ExactSchema, read_schema, schema_source
from penstock.plugins.grammars.llguidance.gbnf import GbnfError, to_lark
from penstock.plugins.grammars.llguidance.matcher import Complaint, parser_limits, read_complaint
from penstock.plugins.grammars.regex.lark import OversizedRegex, UnwritableRegex, choice, regex, to_terminal
from penstock.plugins.grammars.regex.tree import Node

MAX_ROUNDS = 32

# Known keywords that llguidance compiles in no case.
_NEVER_ENFORCED = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("uniqueItems", "contains", "minContains", "maxContains", "propertyNames", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
    }
)

# Those that it compiles in some cases, and whose absence only allows more.
_SOMETIMES_ENFORCED = frozenset(
    {"format", "pattern", "patternProperties", "minProperties", "maxProperties", "multipleOf", "oneOf", "allOf", "const", "enum"}
)

_MISTAKES = ("Expected", "must be", "Unsatisfiable")


def refusal(fault: Fault, schema: ExactSchema, spec: GrammarSpec) -> UnsupportedGrammar:
    """Names the keyword and its path, as the client has them."""
    fault = _as_client_has_it(fault, schema, parse_document(spec.text, spec.param))
    if fault.keyword is None:
        return UnsupportedGrammar(f"the schema: {fault.message}", spec.param + path(fault.steps))
    message = fault.message if fault.message.startswith(f"`{fault.keyword}`") else f"`{fault.keyword}`: {fault.message}"
    return UnsupportedGrammar(message, spec.param + path((*fault.steps, fault.keyword)))


def relaxed(schema: ExactSchema, error_of: Callable[[Any], str | None], spec: GrammarSpec) -> tuple[Any, tuple[str, ...]]:
    """What the schema holds less what cannot be enforced, and the names of that. Unchanged where all of it can be.

    Raises `UnsupportedGrammar` for a malformed schema and for what cannot be left out.
    """
    if error_of(schema.content) is None:
        return schema.content, ()
    content = copy.deepcopy(schema.content)
    dropped = [Fault(steps, keyword, "") for steps, keyword in _without_never_enforced(content)]
    for _ in range(MAX_ROUNDS):
        fault = find_fault(content, error_of)
        if fault is None:
            document = parse_document(spec.text, spec.param)
            return content, tuple(_warning(fault, schema, document, spec.param) for fault in dropped[:MAX_WARNINGS])
        dropped.append(_drop(content, fault, schema, spec))
    raise UnsupportedGrammar(f"more than {MAX_ROUNDS} keywords cannot be enforced", spec.param)


def _warning(fault: Fault, schema: ExactSchema, document: Any, param: str) -> str:
    written = _as_client_has_it(fault, schema, document)
    keyword = written.keyword or fault.keyword
    return left_out(str(keyword), param + path((*written.steps, str(keyword))))


def _as_client_has_it(fault: Fault, schema: ExactSchema, document: Any) -> Fault:
    return as_written(Fault(schema.origin(fault.steps), fault.keyword, fault.message), document)


def _without_never_enforced(schema: Any) -> list[tuple[Steps, str]]:
    dropped = []
    for steps, current in walk(schema):
        for keyword in [keyword for keyword in current if keyword in _NEVER_ENFORCED]:
            del current[keyword]
            dropped.append((steps, keyword))
    return dropped


def _drop(content: Any, fault: Fault, schema: ExactSchema, spec: GrammarSpec) -> Fault:
    if fault.keyword not in _SOMETIMES_ENFORCED or any(word in fault.message for word in _MISTAKES):
        raise refusal(fault, schema, spec)
    current = at(content, fault.steps)
    value = current[fault.keyword]
    if fault.keyword == "oneOf" and isinstance(value, list):
        replace_keyword(current, "oneOf", [{"anyOf": value}])
    else:
        leave_out(current, fault.keyword)
    return fault


_TOKEN = re.compile(
    r"""(?P<comment>(?:\#|//)[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*")
    |(?P<regex>/(?:\\.|[^/\\])+/)
    |(?P<special><[^<>\s]+>)
    |(?P<directive>%[a-z]+)
    |(?P<attribute>(?:stop|stop_capture|max_tokens|temperature)\s*=)
    |(?P<reference>@[\w-]*)
    |(?P<brace>[{}])
    |(?P<name>[\w-]+)
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_TOKEN_IDS = re.compile(r"<\[([0-9,\s-]+)\]>")
_REFUSED_DIRECTIVES = ("%llguidance", "%override", "%declare")
MAX_TOKEN_RANGE = 10_000
MAX_TERMINALS_WITHIN = 100_000  # each written out wherever it is named


def client_grammar(spec: GrammarSpec, vocabulary: Vocabulary) -> str:
    """Lark statements, lines where the client has them. Raises `UnsupportedGrammar` with line and column.

    Schemas inside get the white space that others get. Added tokens may be named, stop tokens may not.
    """
    if spec.kind is GrammarKind.LARK:
        return "".join(_Reader(spec, vocabulary).statements())
    try:
        return to_lark(spec.text)
    except GbnfError as error:
        raise UnsupportedGrammar(f"{error}, at line {error.line}, column {error.column}", spec.param) from error
    except OversizedRegex as error:
        raise ConstraintTooLarge(str(error), spec.param) from error
    except UnwritableRegex as error:
        raise UnsupportedGrammar(str(error), spec.param) from error


class _Terminals:
    """What each definition names. llguidance writes out the terminals in a terminal, which may double at every one."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self._named: dict[str, list[str]] = {}
        self._current: list[str] = []

    def name(self, text: str) -> None:
        self._current.append(text)

    def define(self, place: int) -> None:
        if self._current:
            name = self._current.pop()
            self.places[name] = place
            self._current = self._named.setdefault(name, [])

    def too_large(self) -> str | None:
        sizes: dict[str, int] = {}
        for terminal in self._named:
            pending = [terminal] if terminal[0].isupper() else []
            while pending:
                name = pending[-1]
                if name not in sizes:
                    sizes[name] = 1  # what it is while one looks at it from within
                    pending += dict.fromkeys(part for part in self._named[name] if part in self._named and part not in sizes)
                    continue
                pending.pop()
                sizes[name] = 1 + sum(sizes.get(part, 0) for part in self._named[name])
                if sizes[name] > MAX_TERMINALS_WITHIN:
                    return name
        return None


class _Reader:
    """One pass over a Lark grammar."""

    def __init__(self, spec: GrammarSpec, vocabulary: Vocabulary) -> None:
        self.spec = spec
        self.text = spec.text
        self.added = vocabulary.added_token_ids
        self.allowed = frozenset(vocabulary.added_token_ids.values()) - vocabulary.stop_token_ids

    def statements(self) -> Iterator[str]:
        depth = place = 0
        terminals = _Terminals()
        while place < len(self.text):
            token = _TOKEN.match(self.text, place)
            assert token is not None
            kind, text = token.lastgroup, token[0]
            if kind == "brace":
                depth += 1 if text == "{" else -1
                if depth < 0:
                    raise self.refusal("an unbalanced `}`", place)
            elif kind == "name":
                terminals.name(text)
            elif text == ":":
                terminals.define(place)
            elif kind == "special":
                text = self.special(text, place)
            elif kind in ("attribute", "reference") or (kind == "directive" and text in _REFUSED_DIRECTIVES):
                raise self.refusal(f"`{text.rstrip(' =')[:40]}` is refused", place)
            place = token.end()
            yield text
            if kind == "directive" and text == "%json":
                schema, place = self.schema(place)
                yield schema
        name = terminals.too_large()
        if name is not None:
            message = f"{name[:40]} is made of more than {MAX_TERMINALS_WITHIN} terminals, each written out"
            raise self.refusal(message, terminals.places[name])

    def special(self, text: str, place: int) -> str:
        if not text.startswith("<["):
            token_id = self.added.get(text)
            if token_id is None:
                raise self.refusal(f"this model has no special token {text[:40]}", place)
            self.check_token(token_id, place)
            return f"<[{token_id}]>"
        ranges = _TOKEN_IDS.fullmatch(text)
        if ranges is None:
            raise self.refusal("special tokens are given by name or by ids", place)
        for span in ranges[1].split(","):
            first, _, last = span.strip().partition("-")
            if not first.isdigit() or not (last or first).isdigit() or int(last or first) - int(first) > MAX_TOKEN_RANGE:
                raise self.refusal("not a range of token ids", place)
            for token_id in range(int(first), int(last or first) + 1):
                self.check_token(token_id, place)
        return text

    def check_token(self, token_id: int, place: int) -> None:
        if token_id not in self.allowed:
            raise self.refusal(f"token {token_id} is not a special token that a grammar may name", place)

    def schema(self, place: int) -> tuple[str, int]:
        """A schema as it is compiled, with as many line breaks as the client's, and where the client's ends."""
        start = place + len(self.text[place:]) - len(self.text[place:].lstrip())
        try:
            _, end = json.JSONDecoder().raw_decode(self.text, start)
        except (ValueError, RecursionError) as error:
            raise self.refusal("`%json` without a JSON value", place) from error
        source = self.text[start:end]
        schema = read_schema(GrammarSpec(GrammarKind.JSON_SCHEMA, source, self.spec.param))
        compiled = schema_source(schema.content, self.spec.whitespace_pattern, self.spec.param)
        return compiled.replace("{", "{" + "\n" * self.text.count("\n", place, end), 1), end

    def refusal(self, message: str, place: int) -> UnsupportedGrammar:
        line = self.text.count("\n", 0, place) + 1
        column = place - self.text.rfind("\n", 0, place)
        return UnsupportedGrammar(f"{message}, at line {line}, column {column}", self.spec.param)


SCHEMA_PREFIX = "%json "


@dataclass(frozen=True, slots=True)
class Leaf:
    """`expression` belongs in a Lark rule or, where `is_terminal`, in a terminal, which a rule then names.

    A terminal takes the longest text that it matches, so what may go on with what it allows must be joined to it in one terminal.
    `warnings` are the keywords of a lenient spec that are not enforced, each with its path.
    """

    expression: str
    is_terminal: bool = False
    warnings: tuple[str, ...] = ()


def make_leaf(spec: GrammarSpec, vocabulary: Vocabulary, *, is_relaxed: bool = False, is_inlined: bool = False) -> Leaf:
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
            return Leaf(SCHEMA_PREFIX + source, warnings=warnings)
        case GrammarKind.LARK | GrammarKind.GBNF:
            return Leaf(f"%lark {{\n{client_grammar(spec, vocabulary)}\n}}")
        case GrammarKind.STRUCTURE:
            raise AssertionError("a structure is made of leaves")


def explain(spec: GrammarSpec, complaint: Complaint) -> UnsupportedGrammar:
    """Why llguidance refuses `spec`, with the keyword and its path, or the place in a grammar."""
    if spec.kind is GrammarKind.JSON_SCHEMA and not complaint.is_about_size:
        schema = read_schema(spec)
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
