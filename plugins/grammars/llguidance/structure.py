"""Constraints made of parts, as one grammar for llguidance.

Its lexer takes the longest match among the lexemes that are allowed at a place, and never reconsiders. Adjacent regular parts are therefore
one lexeme, in which every way to read them is kept; markers that are added tokens are symbols that no lexeme can hold."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.contracts.parsing import SpecialText
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import parse_document
from penstock.plugins.grammars.llguidance import edges as part_edges
from penstock.plugins.grammars.llguidance.edges import Edges, Indistinct
from penstock.plugins.grammars.llguidance.leaves import Leaf, regular_tree
from penstock.plugins.grammars.regex import tree as regular
from penstock.plugins.grammars.regex.syntax import RegexError, parse, python_dialect
from penstock.plugins.grammars.regex.tree import ANY, CharSet, of, union
from penstock.plugins.markers import join_pieces, split_symbols

_MAX_STATES = 500
_MAX_LENGTH = 20_000  # of an expression; markers that overlap with themselves in many places make long ones

MarkerEdges = dict[int, dict[int, str]]  # expressions from one state to another


def text_regex(bans: Collection[str], marker: str | None = None) -> str | None:
    """Text in which none of the `bans` comes up: up to the end of the first `marker`, or any at all.

    None where the expression would be too long, or nothing could match.
    """
    markers = {*bans} if marker is None else {*bans, marker}
    prefixes = {text[:end] for text in markers for end in range(len(text) + 1)}
    banned = {prefix for prefix in prefixes if any(map(prefix.endswith, bans))}
    ends = set() if marker is None else {prefix for prefix in prefixes if prefix.endswith(marker)} - banned
    states = sorted(prefixes - banned - ends, key=len)
    if not states or len(states) > _MAX_STATES:
        return None
    numbers = {state: number for number, state in enumerate(states)} | dict.fromkeys(ends, len(states))
    final = len(states)
    edges = {number: _marker_edges(state, markers, prefixes, numbers) for number, state in enumerate(states)}
    if marker is None:
        for outgoing in edges.values():
            outgoing[final] = ""
    for number in range(final - 1, 0, -1):
        if not _eliminate(edges, number):
            return None
    rest = edges[0].get(final)
    return None if rest is None else f"(?:{edges[0][0]})*{_grouped(rest)}"


def _marker_edges(state: str, markers: Iterable[str], prefixes: Container[str], numbers: dict[str, int]) -> dict[int, str]:
    """Where each character leads to: those of no marker, and of none that could go on here, to the start."""
    targets: dict[int, str] = defaultdict(str)
    special = ""
    for character in sorted(set("".join(markers))):
        longest = state + character
        while longest not in prefixes:
            longest = longest[1:]
        if longest:
            special += character
            if longest in numbers:
                targets[numbers[longest]] += character
    return {0: f"[^{_spelled(special)}]"} | {target: f"[{_spelled(characters)}]" for target, characters in targets.items()}


def _eliminate(edges: MarkerEdges, state: int) -> bool:
    """Goes around the state; False where an expression would become too long."""
    outgoing = edges.pop(state)
    loop = outgoing.pop(state, None)
    repeated = "" if loop is None else f"(?:{loop})*"
    for others in edges.values():
        into = others.pop(state, None)
        if into is None:
            continue
        for target, onwards in outgoing.items():
            path = f"{_grouped(into)}{repeated}{_grouped(onwards)}"
            others[target] = f"{others[target]}|{path}" if target in others else path
            if len(others[target]) > _MAX_LENGTH:
                return False
    return True


def _grouped(expression: str) -> str:
    return f"(?:{expression})" if "|" in expression else expression


def _spelled(characters: str) -> str:
    return "".join(f"\\x{{{ord(character):x}}}" for character in characters)


_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<set>\[(?:\\.|[^\]\\\n])*\])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_REACHING_FURTHER = frozenset('%.~/"[')  # directives, ranges, negation, and what the pattern above did not read


def gbnf_alphabet(source: str) -> CharSet:
    return _alphabet(source, has_sets=True)


def lark_alphabet(source: str) -> CharSet:
    """Brackets hold what is optional there, so a grammar that has them is not looked into."""
    return _alphabet(source, has_sets=False)


def _alphabet(source: str, *, has_sets: bool) -> CharSet:
    """More than there are where that is not plain to see, up to all."""
    chars: CharSet = ()
    for token in _TOKEN.finditer(source):
        match token.lastgroup, token[0]:
            case "string", text:
                chars = union(chars, _of_string(text))
            case "pattern", text if not has_sets:
                chars = union(chars, _of_pattern(text[1:-1]) if text.endswith("/") else ANY)
            case "set", text if has_sets:
                chars = union(chars, _of_pattern(text))
            case "comment", _:
                pass
            case _, text:
                if token.lastgroup != "other" or text in _REACHING_FURTHER:
                    return ANY
    return chars


def _of_string(quoted: str) -> CharSet:
    try:
        text = json.loads(quoted.removesuffix("i"))
    except ValueError:
        return ANY
    return of(text + text.upper() + text.lower() if quoted.endswith("i") else text)


def _of_pattern(pattern: str) -> CharSet:
    try:
        return _of_node(parse(pattern, python_dialect()))
    except RegexError:
        return ANY


def _of_node(node: regular.Node) -> CharSet:
    match node:
        case regular.Literal(text):
            return of(text)
        case regular.Chars(chars):
            return chars
        case regular.Sequence(items) | regular.Either(items):
            return union(*map(_of_node, items))
        case regular.Repeat(item, _, _):
            return _of_node(item)
        case regular.Look():
            return ANY
        case _:
            return ()  # anchors


ToLeaf = Callable[[GrammarSpec, Vocabulary], Leaf]

_ANY = "/(?s:.*)/"
_MORE = "/(?s:.+)/"
_NOTHING = '""'


def to_lark(structure: Structure, to_leaf: ToLeaf, vocabulary: Vocabulary) -> tuple[str, tuple[str, ...]]:
    """Lark statements, and the warnings of all values. `to_leaf` translates what a `Value` holds.

    Raises what that raises, and `UnsupportedGrammar` for parts that llguidance's lexer could not tell apart.
    """
    try:
        return _translated(_Translation(to_leaf, vocabulary), structure)
    except Indistinct as error:
        try:
            return _translated(_Translation(to_leaf, vocabulary, are_options_apart=True), structure)
        except Indistinct:
            raise UnsupportedGrammar(f"the parts cannot be told apart: {error}") from error


def _translated(translation: "_Translation", structure: Structure) -> tuple[str, tuple[str, ...]]:
    return translation.run(structure), tuple(dict.fromkeys(translation.warnings))


@dataclass(frozen=True, slots=True)
class _Part:
    """`body` is an expression in a Lark rule and, where `is_lexeme`, also in a terminal."""

    body: str
    edges: Edges
    is_lexeme: bool = False


class _Translation:
    """`are_options_apart`: text that may be left out is a lexeme of its own where it has a clear end, not part of the one before it.

    Neither is always right: on its own it may be covered by free text, and in one lexeme it begins like what could follow in its place.
    """

    def __init__(self, to_leaf: ToLeaf, vocabulary: Vocabulary, *, are_options_apart: bool = False) -> None:
        self._are_options_apart = are_options_apart
        self.warnings: list[str] = []
        self._vocabulary = vocabulary
        self._added_tokens = frozenset(vocabulary.added_token_ids)
        self._to_leaf = to_leaf
        self._lines: list[str] = []
        self._names: dict[str, str] = {}  # of terminals, by their bodies
        self._values: dict[GrammarSpec, _Part] = {}  # one that comes up several times is one rule

    def run(self, structure: Structure) -> str:
        start = self._joined(self._parts(structure)).body
        return "\n".join([f"start: {start}", *self._lines, ""])

    def _parts(self, structure: Structure) -> list[_Part]:
        match structure:
            case Literal(text):
                return [_text(text)] if text else []
            case Marker(text):
                return self._marker(text)
            case FreeText(without):
                return [self._free_text(without)]
            case TextUntil(marker, without):
                return self._text_until(marker, without)
            case Value(spec):
                return self._parts(spec.structure) if spec.structure is not None else [self._value(spec)]
            case Sequence(items):
                return [part for item in items for part in self._parts(item)]
            case Either(items):
                return [self._either([self._parts(item) for item in items])]
            case Repeat(item, minimum, maximum):
                return self._repeat(self._parts(item), minimum, maximum)

    def _marker(self, text: str) -> list[_Part]:
        """As `MarkerBuffer` looks for it: the added tokens in it as such, and what is left as text."""
        ids = self._vocabulary.added_token_ids
        symbols = join_pieces(split_symbols(text, self._added_tokens))
        return [
            _Part(f"<[{ids[symbol]}]>", part_edges.ADDED_TOKEN) if isinstance(symbol, SpecialText) else _text(symbol) for symbol in symbols
        ]

    def _is_text(self, marker: str) -> bool:
        return self._added_tokens.isdisjoint(split_symbols(marker, self._added_tokens))

    def _free_text(self, without: tuple[str, ...]) -> _Part:
        """A marker with an added token in it cannot come up in text."""
        bans = [marker for marker in without if self._is_text(marker)]
        return _Part(_text_body(bans), part_edges.free_text(bans), is_lexeme=True)

    def _text_until(self, marker: str, without: tuple[str, ...]) -> list[_Part]:
        if not self._is_text(marker):
            return [self._free_text(without), *self._marker(marker)]
        bans = [ban for ban in without if self._is_text(ban)]
        return [_Part(_text_body(bans, marker), part_edges.text_until(marker, bans), is_lexeme=True)]

    def _value(self, spec: GrammarSpec) -> _Part:
        part = self._values.get(spec)
        if part is None:
            leaf = self._to_leaf(spec, self._vocabulary)
            self.warnings += leaf.warnings
            body = leaf.expression if leaf.is_terminal else self._rule(leaf.expression)
            part = self._values[spec] = _Part(body, _edges(spec), leaf.is_terminal)
        return part

    def _either(self, arms: list[list[_Part]]) -> _Part:
        assert arms, "a choice has at least one part"
        is_lexeme = all(part.is_lexeme for arm in arms for part in arm)
        parts = [_lexeme(arm) if is_lexeme else self._joined(arm) for arm in arms]
        body = " | ".join(part.body for part in parts)
        edges = (part_edges.lexeme_either if is_lexeme else part_edges.either)([part.edges for part in parts])
        return _Part(f"({body})" if is_lexeme else self._rule(body), edges, is_lexeme)

    def _repeat(self, parts: list[_Part], minimum: int, maximum: int | None) -> list[_Part]:
        if maximum == 0 or not parts:
            return []
        is_lexeme = all(part.is_lexeme for part in parts)
        part = _lexeme(parts) if is_lexeme else self._joined(parts)
        if is_lexeme and self._are_options_apart and not part.edges.more and not part.edges.is_nullable:
            is_lexeme, part = False, self._terminal(part)
        edges = (part_edges.lexeme_repeat if is_lexeme else part_edges.repeat)(part.edges, minimum, maximum)
        times = "*" if (minimum, maximum) == (0, None) else f"{{{minimum},{'' if maximum is None else maximum}}}"
        body = f"({part.body}){times}" if is_lexeme else self._rule(self._rule(part.body) + times)
        return [_Part(body, edges, is_lexeme)]

    def _joined(self, parts: list[_Part]) -> _Part:
        """One after the other, in a rule: adjacent lexemes are joined."""
        joined: list[_Part] = []
        for is_lexeme, run in groupby(parts, key=lambda part: part.is_lexeme):
            neighbours = list(run)
            joined += [self._terminal(_lexeme(neighbours))] if is_lexeme else neighbours
        body = " ".join(part.body for part in joined) or _NOTHING
        return _Part(body, part_edges.sequence([part.edges for part in joined]))

    def _rule(self, body: str) -> str:
        # Names keep the parentheses from nesting.
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _terminal(self, part: _Part) -> _Part:
        name = self._names.get(part.body)
        if name is None:
            name = self._names[part.body] = f"TEXT_{len(self._names)}"
            self._lines.append(f"{name}: {part.body}")
        return _Part(name, part.edges)


def _lexeme(parts: list[_Part]) -> _Part:
    body = " ".join(part.body for part in parts) or _NOTHING
    return _Part(body, part_edges.lexeme_sequence([part.edges for part in parts]), is_lexeme=True)


def _text(text: str) -> _Part:
    return _Part(_quoted(text), part_edges.literal(text), is_lexeme=True)


def _text_body(bans: list[str], marker: str | None = None) -> str:
    """Text without the `bans`; with a `marker`, up to the end of the first one. Not `lazy`: nothing that goes on from there matches."""
    regex = text_regex(bans, marker) if bans or marker is not None else None
    if regex is not None:
        return f"/{regex}/"
    body = " & ".join([_ANY, *(f"~({_ANY} {_quoted(ban)} {_ANY})" for ban in bans)])
    return f"({body})" if marker is None else f"({body} & ({_ANY} {_quoted(marker)}) & ~({_ANY} {_quoted(marker)} {_MORE}))"


def _quoted(text: str) -> str:
    """A Lark string. Its escapes are JSON's; what is beyond ASCII is escaped too."""
    return json.dumps(text)


def _edges(spec: GrammarSpec) -> Edges:
    match spec.kind:
        case GrammarKind.REGEX | GrammarKind.CHOICE:
            return part_edges.of_regex(regular_tree(spec))
        case GrammarKind.JSON_SCHEMA:
            return part_edges.json_value(spec.whitespace_pattern, is_number=_may_be_number(parse_document(spec.text, spec.param)))
        case GrammarKind.JSON_OBJECT:
            return part_edges.json_value(spec.whitespace_pattern, is_number=False)
        case GrammarKind.LARK:
            return part_edges.of_grammar(lark_alphabet(spec.text))
        case GrammarKind.GBNF:
            return part_edges.of_grammar(gbnf_alphabet(spec.text))
        case GrammarKind.STRUCTURE:
            raise AssertionError("a structure is taken apart")


def _may_be_number(schema: Any) -> bool:
    types = schema.get("type") if isinstance(schema, dict) else None
    return types is None or not {"number", "integer"}.isdisjoint([types] if isinstance(types, str) else types)
