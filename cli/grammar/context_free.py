"""Lark and GBNF, read independently of any grammar backend, and which texts begin one of theirs (Earley, 1970).

What both dialects share is read: rules, strings, classes of characters, groups, alternatives and repeats; of Lark also regexes, which are
taken as rules of characters, and ranges. Anything else is a `ValueError`: a grammar that is not read here is not audited.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from re import _constants as codes  # type: ignore[attr-defined]
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any, TypeAlias

from penstock.cli.grammar.languages import Language

Symbol: TypeAlias = "str | Chars"  # a rule's name, or one character
Item = tuple[str, int, int, int]  # rule, alternative, dot, the set in which it began
MAX_LENGTH = 300  # characters of a text that is made up
_TOKENS = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\])*")(?P<range>\.\."(?:\\.|[^"\\])*")?"""
    r"""|(?P<regex>/(?:\\.|[^/\\])+/)|(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<name>[A-Za-z_][\w-]*)|(?P<counts>\{[\d,]+\})|(?P<sign>::=|[:|()*+?.])"""
)


@dataclass(frozen=True, slots=True)
class Chars:
    """One character: in the ranges or, where `is_negated`, outside of all."""

    ranges: tuple[tuple[int, int], ...]
    is_negated: bool = False

    def holds(self, character: str) -> bool:
        return any(low <= ord(character) <= high for low, high in self.ranges) != self.is_negated

    def sample(self, numbers: random.Random) -> str:
        if not self.is_negated:
            return chr(numbers.randint(*numbers.choice(self.ranges)))
        return numbers.choice([character for character in "abzAZ09 ,.;:-_é日" if self.holds(character)])


class Grammar(Language):
    """Rules by their names, each a list of alternatives, and those of groups and repeats, which have names that no client writes."""

    def __init__(self, text: str, dialect: str) -> None:
        """Raises `ValueError`."""
        self.rules: dict[str, list[tuple[Symbol, ...]]] = {}
        self._start = {"lark": "start", "gbnf": "root"}[dialect]
        self._dialect = dialect
        self._read(text)
        for alternatives in list(self.rules.values()):
            for symbol in (symbol for alternative in alternatives for symbol in alternative):
                if isinstance(symbol, str) and symbol not in self.rules:
                    raise ValueError(f"no rule {symbol}")
        if self._start not in self.rules:
            raise ValueError(f"no rule {self._start}")
        self._costs = self._measured()
        self._known: dict[str, list[set[Item]]] = {}
        self._nullable = {name for name, cost in self._costs.items() if cost == 0}

    def begins(self, text: str) -> bool:
        return bool(self._sets(text)[-1])

    def holds(self, text: str) -> bool:
        sets = self._sets(text)
        return any(name == self._start and origin == 0 and dot == len(self.rules[name][number]) for name, number, dot, origin in sets[-1])

    def sample(self, numbers: random.Random) -> str:
        """A text of the grammar: by the cheapest alternatives once it is long."""
        parts: list[str] = []
        pending: list[Symbol] = [self._start]
        while pending:
            symbol = pending.pop()
            if isinstance(symbol, Chars):
                parts.append(symbol.sample(numbers))
                continue
            alternatives = self.rules[symbol]
            if len(parts) + len(pending) > MAX_LENGTH // 4:
                alternatives = [min(alternatives, key=self._cost)]
            pending += reversed(numbers.choice(alternatives))
        return "".join(parts)

    def _sets(self, text: str) -> list[set[Item]]:
        """Of Earley's items, one after each character. Those of beginnings are kept."""
        if (known := self._known.get(text)) is not None:
            return known
        if not text:
            sets = [self._closed({(self._start, number, 0, 0) for number in range(len(self.rules[self._start]))}, [], 0)]
        else:
            before = self._sets(text[:-1])
            moved = set()
            for name, number, dot, origin in before[-1]:
                alternative = self.rules[name][number]
                symbol = alternative[dot] if dot < len(alternative) else ""
                if isinstance(symbol, Chars) and symbol.holds(text[-1]):
                    moved.add((name, number, dot + 1, origin))
            sets = [*before, self._closed(moved, before, len(before)) if moved else set()]
        if len(self._known) > 20_000:
            self._known.clear()
        self._known[text] = sets
        return sets

    def _closed(self, items: set[Item], sets: list[set[Item]], place: int) -> set[Item]:
        pending = list(items)
        while pending:
            name, number, dot, origin = pending.pop()
            alternative = self.rules[name][number]
            found: list[Item] = []
            if dot == len(alternative):
                found = [
                    (other, its, at + 1, start)
                    for other, its, at, start in (items if origin == place else sets[origin])
                    if at < len(self.rules[other][its]) and self.rules[other][its][at] == name
                ]
            elif isinstance(symbol := alternative[dot], str):
                found = [(symbol, which, 0, place) for which in range(len(self.rules[symbol]))]
                if symbol in self._nullable:  # (Aycock and Horspool, 2002)
                    found.append((name, number, dot + 1, origin))
            pending += (new := {*found} - items)
            items |= new
        return items

    def _measured(self) -> dict[str, int]:
        """The characters of each rule's shortest text. Raises `ValueError` for a rule without any."""
        costs: dict[str, int] = {}
        is_changed = True
        while is_changed:
            is_changed = False
            for name, alternatives in self.rules.items():
                known = [
                    sum(1 if isinstance(symbol, Chars) else costs[symbol] for symbol in alternative)
                    for alternative in alternatives
                    if all(isinstance(symbol, Chars) or symbol in costs for symbol in alternative)
                ]
                if known and min(known) < costs.get(name, min(known) + 1):
                    costs[name], is_changed = min(known), True
        if missing := self.rules.keys() - costs.keys():
            raise ValueError(f"no text has {min(missing)}")
        return costs

    def _cost(self, alternative: tuple[Symbol, ...]) -> int:
        return sum(1 if isinstance(symbol, Chars) else self._costs[symbol] for symbol in alternative)

    def _rule(self, alternatives: list[tuple[Symbol, ...]]) -> str:
        name = f"({len(self.rules)})"
        self.rules[name] = alternatives
        return name

    # Reading.

    def _read(self, text: str) -> None:
        tokens: list[tuple[str, str]] = []
        place = 0
        while place < len(text):
            found = _TOKENS.match(text, place)
            if found is None or (found.lastgroup == "space" and found[0].startswith("//" if self._dialect == "gbnf" else "#")):
                raise ValueError(f"not read here: {text[place : place + 20]!r}")
            place = found.end()
            kind = "string" if found["string"] else str(found.lastgroup)
            if kind != "space":
                tokens.append((kind, found[0]))
        sign = ":" if self._dialect == "lark" else "::="
        starts = [place for place in range(len(tokens) - 1) if tokens[place][0] == "name" and tokens[place + 1] == ("sign", sign)]
        if not starts or starts[0] != 0:
            raise ValueError("a rule comes first")
        for start, end in zip(starts, [*starts[1:], len(tokens)], strict=True):
            body = tokens[start + 2 : end][::-1]
            alternatives = self._alternatives(body)
            if body:
                raise ValueError(f"not read here: {body[-1][1]!r}")
            self.rules[tokens[start][1]] = alternatives

    def _alternatives(self, tokens: list[tuple[str, str]]) -> list[tuple[Symbol, ...]]:
        alternatives: list[tuple[Symbol, ...]] = []
        items: list[Symbol] = []
        while tokens and tokens[-1] != ("sign", ")"):
            kind, text = tokens.pop()
            if (kind, text) == ("sign", "|"):
                alternatives.append(tuple(items))
                items = []
                continue
            atom = self._atom(kind, text, tokens)
            if tokens and (tokens[-1][0] == "counts" or tokens[-1] in (("sign", "*"), ("sign", "+"), ("sign", "?"))):
                atom = self._repeated(atom, tokens.pop()[1])
            items += atom
        return [*alternatives, tuple(items)]

    def _atom(self, kind: str, text: str, tokens: list[tuple[str, str]]) -> tuple[Symbol, ...]:
        if kind == "name":
            return (text,)
        if kind == "string":
            texts = [json.loads(part) for part in re.findall(r'"(?:\\.|[^"\\])*"', text)]
            if len(texts) == 2:
                return (Chars(((ord(texts[0]), ord(texts[1])),)),)
            return tuple(Chars(((ord(character), ord(character)),)) for character in texts[0])
        if kind == "regex" or (kind == "class" and self._dialect == "gbnf"):
            return self._of_pattern(patterns.parse(text.strip("/") if kind == "regex" else text))
        if (kind, text) == ("sign", "("):
            group = self._rule(self._alternatives(tokens))
            if not tokens or tokens.pop() != ("sign", ")"):
                raise ValueError("a group without an end")
            return (group,)
        if (kind, text) == ("sign", ".") and self._dialect == "gbnf":
            return (Chars((), is_negated=True),)
        raise ValueError(f"not read here: {text!r}")

    def _repeated(self, atom: tuple[Symbol, ...], sign: str) -> tuple[Symbol, ...]:
        low, _, high = sign.strip("{}").partition(",")
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(sign) or (int(low or 0), int(high) if high else None)
        return self._times(atom, least, int(low) if "," not in sign and sign[0] == "{" else most)

    def _times(self, atom: tuple[Symbol, ...], least: int, most: int | None) -> tuple[Symbol, ...]:
        if most is None:
            more = self._rule([()])
            self.rules[more] = [(), (*atom, more)]
            return (*atom * least, more)
        rest: tuple[Symbol, ...] = ()
        for _ in range(most - least):
            rest = (self._rule([(), (*atom, *rest)]),)
        return (*atom * least, *rest)

    def _of_pattern(self, pattern: Any) -> tuple[Symbol, ...]:
        return tuple(symbol for code, value in pattern for symbol in self._of_code(code, value))

    def _of_code(self, code: Any, value: Any) -> Iterator[Symbol]:
        if code in (codes.LITERAL, codes.NOT_LITERAL):
            yield Chars(((value, value),), is_negated=code is codes.NOT_LITERAL)
        elif code is codes.ANY:
            yield Chars(((10, 10),), is_negated=True)
        elif code is codes.IN:
            is_negated = value[0][0] is codes.NEGATE
            yield Chars(tuple(span for one in value[is_negated:] for span in _spans(*one)), is_negated)
        elif code in (codes.MAX_REPEAT, codes.MIN_REPEAT):
            least, most, inner = value
            yield from self._times(self._of_pattern(inner), least, None if most is codes.MAXREPEAT else most)
        elif code is codes.BRANCH:
            yield self._rule([self._of_pattern(branch) for branch in value[1]])
        elif code is codes.SUBPATTERN:
            yield from self._of_pattern(value[3])
        else:
            raise ValueError(f"not read here: {str(code).lower()} in a regex")


_CATEGORIES = {
    codes.CATEGORY_DIGIT: ((48, 57), (0x663, 0x665)),
    codes.CATEGORY_WORD: ((48, 57), (65, 90), (95, 95), (97, 122), (0xE9, 0xEA), (0x65E5, 0x65E6)),
    codes.CATEGORY_SPACE: ((32, 32), (9, 10), (0xA0, 0xA0)),
    codes.CATEGORY_NOT_DIGIT: ((97, 122), (32, 32)),
    codes.CATEGORY_NOT_WORD: ((32, 47), (58, 64)),
    codes.CATEGORY_NOT_SPACE: ((48, 122),),
}


class _Samples(Grammar):
    """Of a regex, anchors and look-around passed over: what comes out has yet to be matched."""

    def __init__(self, pattern: str) -> None:
        self.rules = {}
        self._start = "start"
        self.rules["start"] = [self._of_pattern(patterns.parse(pattern))]
        self._costs = self._measured()

    def _of_code(self, code: Any, value: Any) -> Iterator[Symbol]:
        if code is codes.IN:
            is_negated = value[0][0] is codes.NEGATE
            spans = (_CATEGORIES[what] if one is codes.CATEGORY else _spans(one, what) for one, what in value[is_negated:])
            yield Chars(tuple(span for some in spans for span in some), is_negated)
        elif code not in (codes.AT, codes.ASSERT, codes.ASSERT_NOT):
            yield from super()._of_code(code, value)


def samples_of(pattern: str, count: int, numbers: random.Random) -> list[str]:
    """Texts that `re` matches as a whole with the pattern, at most `count` different ones. Raises `ValueError`, as `Grammar`."""
    samples, whole = _Samples(pattern), re.compile(pattern)
    drawn = (samples.sample(numbers) for _ in range(20 * count))
    return list(dict.fromkeys(text for text in drawn if whole.fullmatch(text) and "\0" not in text))[:count]


def _spans(code: Any, value: Any) -> Iterator[tuple[int, int]]:
    if code is codes.LITERAL:
        yield value, value
    elif code is codes.RANGE:
        yield value
    else:
        raise ValueError(f"not read here: {str(code).lower()} in a class")
