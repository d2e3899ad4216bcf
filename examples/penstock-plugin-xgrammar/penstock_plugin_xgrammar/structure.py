"""Structures as rules: markers, free text and values, in the order in which they may come."""

import re
from collections.abc import Callable

from penstock import GrammarSpec, UnsupportedGrammar, Vocabulary, structure
from penstock.grammars import ANYTHING, EMPTY, Chars, Either, Literal, Node, Reference, Repeat, Sequence, complement, either, of

MAX_MARKER = 64


class StructureRules:
    """The rules of one structure. `translate_value` gives the tree of a `Value`; `tokens` are the added tokens that rules stand for."""

    def __init__(self, vocabulary: Vocabulary, param: str, translate_value: Callable[[GrammarSpec], Node]) -> None:
        self.rules: dict[str, Node] = {}
        self.tokens: dict[str, int] = {}
        self._added_token_ids = vocabulary.added_token_ids
        self._stop_token_ids = vocabulary.stop_token_ids
        self._param = param
        self._translate_value = translate_value

    def node(self, part: structure.Structure) -> Node:
        """Raises `UnsupportedGrammar` where a marker is too long or a stop token, and what `translate_value` raises."""
        match part:
            case structure.Literal(text):
                return Literal(text)
            case structure.Marker(text):
                return self._marker(text)
            case structure.FreeText(without):
                return self._text(without)
            case structure.TextUntil(marker, without) if self._has_token(marker):
                return Sequence((self._text(without), self._marker(marker)))
            case structure.TextUntil(marker, without):
                return self._text(without, marker)
            case structure.Value(spec):
                return self._translate_value(spec)
            case structure.Sequence(parts):
                return Sequence(tuple(self.node(inner) for inner in parts))
            case structure.Either(parts):
                return either(*(self.node(inner) for inner in parts))
            case structure.Repeat(inner, minimum, maximum):
                return Repeat(self.node(inner), minimum, maximum)

    def _has_token(self, marker: str) -> bool:
        return any(piece in self._added_token_ids for piece in self._pieces(marker))

    def _marker(self, text: str) -> Node:
        """The added tokens in it as such, and what is left as text."""
        nodes = [self._token(piece) if piece in self._added_token_ids else Literal(piece) for piece in self._pieces(text)]
        return nodes[0] if len(nodes) == 1 else Sequence(tuple(nodes))

    def _pieces(self, marker: str) -> list[str]:
        """The added tokens in a marker, the longer ones first, and the text between them."""
        tokens = sorted((token for token in self._added_token_ids if token and token in marker), key=len, reverse=True)
        if not tokens:
            return [marker]
        return [piece for piece in re.split(f"({'|'.join(map(re.escape, tokens))})", marker) if piece]

    def _token(self, text: str) -> Node:
        token_id = self._added_token_ids[text]
        if token_id in self._stop_token_ids:
            raise UnsupportedGrammar("xgrammar allows a stop token only at the end, not as a marker", self._param)
        name = f"token_{token_id}"
        self.tokens[name] = token_id
        return Reference(name)

    def _text(self, without: tuple[str, ...], until: str | None = None) -> Node:
        """Text without these markers, up to and including the first `until`: a rule for each beginning of a marker that it may end with.

        The automaton of Aho and Corasick, "Efficient string matching" (1975).
        """
        bans = [marker for marker in without if not self._has_token(marker)]
        markers = bans if until is None else [*bans, until]
        if not markers:
            return ANYTHING
        if any(not 0 < len(marker) <= MAX_MARKER for marker in markers):
            raise UnsupportedGrammar(f"a marker in free text must have 1 to {MAX_MARKER} characters", self._param)
        beginnings = sorted({marker[:length] for marker in markers for length in range(len(marker))})
        names = {beginning: f"text_{len(self.rules) + i}" for i, beginning in enumerate(beginnings)}
        characters = sorted(set("".join(markers)))
        others = Chars(complement(of("".join(characters))))
        for beginning, name in names.items():
            branches: list[Node] = [EMPTY] if until is None else []
            branches.append(Sequence((others, Reference(names[""]))))
            for character in characters:
                text = beginning + character
                if any(text.endswith(ban) for ban in bans):
                    continue
                if until is not None and text.endswith(until):
                    branches.append(Literal(character))
                    continue
                longest = next(text[start:] for start in range(len(text) + 1) if text[start:] in names)
                branches.append(Sequence((Literal(character), Reference(names[longest]))))
            self.rules[name] = Either(tuple(branches))
        return Reference(names[""])
