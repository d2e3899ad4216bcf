"""Constraints made of parts, as one grammar for llguidance.

Its lexer takes the longest match among the lexemes that may stand at a place, and never reconsiders. Regular parts that stand side by side
are therefore one lexeme, in which every way to read them is kept; markers that are added tokens are symbols that no lexeme can hold.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from penstock.engine.events import SpecialText
from penstock.engine.grammar import GrammarSpec, Vocabulary
from penstock.engine.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.plugins.automaton import split_symbols
from penstock.plugins.markers import join_pieces

_ANY = "/(?s:.*)/"
_MORE = "/(?s:.+)/"
_NOTHING = '""'


@dataclass(frozen=True, slots=True)
class Leaf:
    """A constraint as part of a larger grammar: the body of a Lark terminal where it is regular, else a grammar of its own.

    `grammar` is an entry of llguidance's `grammars`, without a name.
    """

    terminal: str | None = None
    grammar: Mapping[str, Any] | None = None


def to_grammars(structure: Structure, vocabulary: Vocabulary, to_leaf: Callable[[GrammarSpec], Leaf]) -> list[dict[str, Any]]:
    """llguidance's `grammars` for a structure, the first being the one to start with.

    `to_leaf` translates what a `Value` holds. Raises what that raises, and `UnsupportedGrammar` where a value is followed by what could as
    well belong to it.
    """
    return _Translation(vocabulary, to_leaf).run(structure)


@dataclass(frozen=True, slots=True)
class _Special:
    """One added token."""

    token_id: int


@dataclass(frozen=True, slots=True)
class _Terminal:
    """A regular part: the body of a Lark terminal."""

    body: str


@dataclass(frozen=True, slots=True)
class _Rule:
    """Any other part: an expression over terminals and rules, in parentheses where it needs them."""

    body: str


_Part = _Special | _Terminal | _Rule


class _Translation:
    def __init__(self, vocabulary: Vocabulary, to_leaf: Callable[[GrammarSpec], Leaf]) -> None:
        self._token_ids = vocabulary.added_token_ids
        self._added_tokens = frozenset(vocabulary.added_token_ids)
        self._to_leaf = to_leaf
        self._lines: list[str] = []
        self._names: dict[str, str] = {}  # of terminals, by their bodies
        self._grammars: list[dict[str, Any]] = []
        self._leaves: dict[int, _Part] = {}  # by the spec's identity: one that comes up several times is one grammar

    def run(self, structure: Structure) -> list[dict[str, Any]]:
        start = self._expression(self._parts(structure))
        lark = "\n".join([f"start: {start}", *self._lines, ""])
        return [{"lark_grammar": lark}, *self._grammars]

    def _parts(self, structure: Structure) -> list[_Part]:
        """What stands one after the other."""
        match structure:
            case Literal(text):
                return [_Terminal(_quoted(text))] if text else []
            case Marker(text):
                return list(self._marker(text))
            case FreeText(without):
                return [_Terminal(self._text(without))]
            case TextUntil(marker, without):
                return self._text_until(marker, without)
            case Value(spec):
                return self._parts(spec.structure) if spec.structure is not None else [self._value(spec)]
            case Sequence(items):
                return [part for item in items for part in self._parts(item)]
            case Either(items):
                return self._either([self._parts(item) for item in items])
            case Repeat(item, minimum, maximum):
                return self._repeat(self._parts(item), minimum, maximum)

    def _marker(self, text: str) -> Iterable[_Part]:
        """As `MarkerBuffer` looks for it: the added tokens in it as such, and what is left as text."""
        for symbol in join_pieces(split_symbols(text, self._added_tokens)):
            yield _Special(self._token_ids[symbol]) if isinstance(symbol, SpecialText) else _Terminal(_quoted(symbol))

    def _is_text(self, marker: str) -> bool:
        return self._added_tokens.isdisjoint(split_symbols(marker, self._added_tokens))

    def _text(self, without: Iterable[str]) -> str:
        """A marker with an added token in it cannot come up in text."""
        bans = [f"~({_ANY} {_quoted(marker)} {_ANY})" for marker in without if self._is_text(marker)]
        return f"({' & '.join([_ANY, *bans])})" if bans else _ANY

    def _text_until(self, marker: str, without: tuple[str, ...]) -> list[_Part]:
        if not self._is_text(marker):
            return [_Terminal(self._text(without)), *self._marker(marker)]
        quoted = _quoted(marker)
        bans = [f"~({_ANY} {quoted} {_MORE})", *([self._text(without)] if without else [])]
        return [_Terminal(f"(({_ANY} {quoted}) & {' & '.join(bans)})")]

    def _value(self, spec: GrammarSpec) -> _Part:
        part = self._leaves.get(id(spec))
        if part is None:
            leaf = self._to_leaf(spec)
            if leaf.terminal is not None:
                part = _Terminal(f"({leaf.terminal})")
            else:
                assert leaf.grammar is not None
                name = f"value_{len(self._grammars)}"
                self._grammars.append({"name": name, **leaf.grammar})
                part = _Rule(f"@{name}")
            self._leaves[id(spec)] = part
        return part

    def _either(self, arms: list[list[_Part]]) -> list[_Part]:
        assert arms, "a choice has at least one part"
        if all(isinstance(part, _Terminal) for arm in arms for part in arm):
            return [_Terminal(f"({' | '.join(_concatenated(arm) for arm in arms)})")]
        return [self._rule(" | ".join(self._expression(arm) for arm in arms))]

    def _repeat(self, parts: list[_Part], minimum: int, maximum: int | None) -> list[_Part]:
        if maximum == 0 or not parts:
            return []
        times = f"{{{minimum},{'' if maximum is None else maximum}}}" if (minimum, maximum) != (0, None) else "*"
        if all(isinstance(part, _Terminal) for part in parts):
            return [_Terminal(f"({_concatenated(parts)}){times}")]
        return [self._rule(self._rule(self._expression(parts)).body + times)]

    def _rule(self, body: str) -> _Rule:
        # Rules with names of their own keep the parentheses from nesting.
        name = f"part_{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return _Rule(name)

    def _expression(self, parts: list[_Part]) -> str:
        words: list[str] = []
        for is_terminal, run in groupby(parts, key=lambda part: isinstance(part, _Terminal)):
            if is_terminal:
                words.append(self._terminal(_concatenated(run)))
            else:
                words += [f"<[{part.token_id}]>" if isinstance(part, _Special) else part.body for part in run]
        return " ".join(words) or _NOTHING

    def _terminal(self, body: str) -> str:
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = f"TEXT_{len(self._names)}"
            self._lines.append(f"{name}: {body}")
        return name


def _concatenated(parts: Iterable[_Part]) -> str:
    return " ".join(part.body for part in parts if isinstance(part, _Terminal)) or _NOTHING


def _quoted(text: str) -> str:
    """A Lark string. Its escapes are JSON's; what is beyond ASCII is escaped too."""
    return json.dumps(text)
