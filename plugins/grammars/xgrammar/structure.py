"""Structures as rules: markers, free text and values, in the order in which they may come."""

from collections.abc import Callable

from penstock.engine import structure
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.events import SpecialText
from penstock.engine.grammar import GrammarSpec, Vocabulary
from penstock.engine.structure import FreeText, Marker, Structure, TextUntil, Value
from penstock.plugins.automaton import split_symbols
from penstock.plugins.grammars.regex.tree import (
    ANYTHING,
    EMPTY,
    Chars,
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
from penstock.plugins.markers import join_pieces

MAX_MARKER = 64


class StructureRules:
    """The rules of one structure. `translate_value` gives the tree of a `Value`; `tokens` are the added tokens that rules stand for."""

    def __init__(self, vocabulary: Vocabulary, param: str, translate_value: Callable[[GrammarSpec], Node]) -> None:
        self.rules: dict[str, Node] = {}
        self.tokens: dict[str, int] = {}
        self._added_token_ids = vocabulary.added_token_ids
        self._added_tokens = frozenset(vocabulary.added_token_ids)
        self._stop_token_ids = vocabulary.stop_token_ids
        self._param = param
        self._translate_value = translate_value

    def node(self, part: Structure) -> Node:
        """Raises `UnsupportedGrammar` where a marker is too long or a stop token, and what `translate_value` raises."""
        match part:
            case structure.Literal(text):
                return Literal(text)
            case Marker(text):
                return self._marker(text)
            case FreeText(without):
                return self._text([marker for marker in without if not self._has_token(marker)], is_until=False)
            case TextUntil(marker) if self._has_token(marker):
                return Sequence((ANYTHING, self._marker(marker)))
            case TextUntil(marker):
                return self._text([marker], is_until=True)
            case Value(spec):
                return self._translate_value(spec)
            case structure.Sequence(parts):
                return Sequence(tuple(self.node(inner) for inner in parts))
            case structure.Either(parts):
                return either(*(self.node(inner) for inner in parts))
            case structure.Repeat(inner, minimum, maximum):
                return Repeat(self.node(inner), minimum, maximum)

    def _has_token(self, marker: str) -> bool:
        return any(isinstance(symbol, SpecialText) for symbol in split_symbols(marker, self._added_tokens))

    def _marker(self, text: str) -> Node:
        """The added tokens in it as such, and what is left as text."""
        symbols = join_pieces(split_symbols(text, self._added_tokens))
        nodes = [self._token(symbol) if isinstance(symbol, SpecialText) else Literal(symbol) for symbol in symbols]
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _token(self, text: str) -> Node:
        token_id = self._added_token_ids[text]
        if token_id in self._stop_token_ids:
            raise UnsupportedGrammar("xgrammar allows a stop token only at the end, not as a marker", self._param)
        name = f"token_{token_id}"
        self.tokens[name] = token_id
        return Reference(name)

    def _text(self, markers: list[str], *, is_until: bool) -> Node:
        """Text before the first of the markers, or with it: one rule for each beginning of a marker that the text may end with.

        The automaton of Aho and Corasick, "Efficient string matching" (1975).
        """
        if not markers:
            return ANYTHING
        if any(not 0 < len(marker) <= MAX_MARKER for marker in markers):
            raise UnsupportedGrammar(f"a marker in free text must have 1 to {MAX_MARKER} characters", self._param)
        beginnings = sorted({marker[:length] for marker in markers for length in range(len(marker))})
        names = {beginning: f"text_{len(self.rules) + i}" for i, beginning in enumerate(beginnings)}
        characters = sorted(set("".join(markers)))
        others = Chars(complement(of("".join(characters))))
        for beginning, name in names.items():
            branches: list[Node] = [] if is_until else [EMPTY]
            branches.append(Sequence((others, Reference(names[""]))))
            for character in characters:
                text = beginning + character
                if any(text.endswith(marker) for marker in markers):
                    if is_until:
                        branches.append(Literal(character))
                    continue
                longest = next(text[start:] for start in range(len(text) + 1) if text[start:] in names)
                branches.append(Sequence((Literal(character), Reference(names[longest]))))
            self.rules[name] = Either(tuple(branches))
        return Reference(names[""])
