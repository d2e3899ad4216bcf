"""Reads a regex and says exactly where it goes beyond regular languages; and trees without anchors and look-around: what a pattern matches
as a whole, or anywhere in a text.

The syntax is Python's `re`, less what is not regular (back-references, atomic groups), word boundaries and inline flags; what
a pattern matches is what `re.fullmatch` says. Nothing is passed on unread: engines differ in what `\\w`, `{` or `[[` mean.
"""

from dataclasses import dataclass

from penstock.plugins.grammars.regex import tree as charset
from penstock.plugins.grammars.regex.automaton import OversizedAutomaton, intersection
from penstock.plugins.grammars.regex.tree import (
    ANYTHING,
    ASCII_DIGIT,
    ASCII_WORD,
    EMPTY,
    Anchor,
    Chars,
    CharSet,
    Either,
    Look,
    Node,
    Repeat,
    Sequence,
    complement,
    of,
    union,
)

MAX_LENGTH = 4096
MAX_DEPTH = 40
MAX_REPEAT = 100_000
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_REFUSED_GROUPS = {
    "(?P=": "a back-reference",
    "(?>": "an atomic group",
    "(?#": "a comment",
    "(?(": "a conditional group",
}
_LOOKS = {"(?=": (True, True), "(?!": (True, False), "(?<=": (False, True), "(?<!": (False, False)}  # whether ahead, and wanted
_REFUSED_ESCAPES = {
    "b": "a word boundary",
    "B": "a word boundary",
    "p": "a Unicode property",
    "P": "a Unicode property",
    "N": "a named character",
}


class RegexError(Exception):
    """The pattern cannot be used. `position` counts characters from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"{message} at position {position}")
        self.position = position


@dataclass(frozen=True, slots=True)
class Dialect:
    """What the shorthands mean."""

    dot: CharSet
    digit: CharSet
    word: CharSet
    space: CharSet
    has_line_end: bool = False  # whether `$` matches before a line feed that ends the text, too


def python_dialect() -> Dialect:
    """`re` on `str`: Unicode. Building the tables takes a quarter of a second once, so it is not done at import."""
    return Dialect(complement(of("\n")), charset.unicode_digit(), charset.unicode_word(), charset.unicode_space(), has_line_end=True)


def ecma_dialect() -> Dialect:
    """ECMA-262, which JSON Schema's `pattern` refers to: `\\d` and `\\w` are ASCII."""
    space = union(charset.unicode_space(), of("\ufeff"))
    return Dialect(complement(of("\n\r\u2028\u2029")), ASCII_DIGIT, ASCII_WORD, space)


def parse(pattern: str, dialect: Dialect) -> Node:
    """The pattern's tree, anchors and look-around included. Raises `RegexError`."""
    if len(pattern) > MAX_LENGTH:
        raise RegexError(f"a pattern longer than {MAX_LENGTH} characters is refused", MAX_LENGTH)
    parser = _Parser(pattern, dialect)
    node = parser.alternatives(0)
    if parser.position < len(pattern):
        raise RegexError("unbalanced parenthesis", parser.position)
    return node


class _Parser:
    """Recursive descent; `position` is the next character's."""

    def __init__(self, pattern: str, dialect: Dialect) -> None:
        self.pattern = pattern
        self.dialect = dialect
        self.position = 0
        self.num_looks = 0  # that the position is in

    @property
    def next(self) -> str:
        """The next character, or "" at the end."""
        return self.pattern[self.position : self.position + 1]

    def accept(self, text: str) -> bool:
        if not self.pattern.startswith(text, self.position):
            return False
        self.position += len(text)
        return True

    def alternatives(self, depth: int) -> Node:
        if depth > MAX_DEPTH:
            raise RegexError(f"groups nested deeper than {MAX_DEPTH}", self.position)
        branches = [self.sequence(depth)]
        while self.accept("|"):
            branches.append(self.sequence(depth))
        return branches[0] if len(branches) == 1 else Either(tuple(branches))

    def sequence(self, depth: int) -> Node:
        items: list[Node] = []
        while self.next not in ("", "|", ")"):
            start = self.position
            atom = self.atom(depth)
            repeated = self.quantified(atom)
            if isinstance(atom, Anchor | Look) and repeated is not atom:
                raise RegexError("a repeated anchor or look-around", start)
            items.append(repeated)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def atom(self, depth: int) -> Node:
        start = self.position
        character = self.next
        if character == "(":
            return self.group(depth)
        if character == "[":
            return Chars(self.char_class())
        if character == "\\":
            return self.escape()
        if character in ("*", "+", "?"):
            raise RegexError("nothing to repeat", start)
        self.position += 1
        if character == ".":
            return Chars(self.dialect.dot)
        if character == "$" and self.num_looks and self.dialect.has_line_end:
            return Sequence((Repeat(Chars(of("\n")), 0, 1), Anchor(False, start)))
        if character in ("^", "$"):
            return Anchor(character == "^", start)
        return Chars(self.single(ord(character), start))

    def group(self, depth: int) -> Node:
        start = self.position
        for opening, (is_ahead, is_wanted) in _LOOKS.items():
            if self.accept(opening):
                self.num_looks += 1
                item = self.closed(depth, start)
                self.num_looks -= 1
                return Look(item, is_ahead, is_wanted, start)
        for opening, name in _REFUSED_GROUPS.items():
            if self.pattern.startswith(opening, start):
                raise RegexError(f"{name} ({opening}...) is not a regular expression: refused", start)
        self.position += 1
        if self.accept("?P<") or self.accept("?<"):
            end = self.pattern.find(">", self.position)
            if end < 0 or not self.pattern[self.position : end].isidentifier():
                raise RegexError("bad group name", self.position)
            self.position = end + 1
        elif self.next == "?" and not self.accept("?:"):
            raise RegexError("inline flags or an unknown group: refused", start)
        return self.closed(depth, start)

    def closed(self, depth: int, start: int) -> Node:
        node = self.alternatives(depth + 1)
        if not self.accept(")"):
            raise RegexError("missing ), unterminated group", start)
        return node

    def quantified(self, atom: Node) -> Node:
        start = self.position
        bounds = self.bounds()
        if bounds is None:
            return atom
        if self.accept("+"):
            raise RegexError("a possessive quantifier is refused", start)
        self.accept("?")  # lazy or greedy: the same language
        if self.next in ("*", "+", "?") or self.repeat_braces() is not None:
            raise RegexError("multiple repeat", self.position)
        return Repeat(atom, *bounds)

    def bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.accept(sign):
                return bounds
        braces = self.repeat_braces()
        if braces is None:
            return None
        lowest, highest, end = braces
        if highest is not None and highest < lowest:
            raise RegexError("min repeat greater than max repeat", self.position)
        if max(lowest, highest or 0) > MAX_REPEAT:
            raise RegexError(f"more than {MAX_REPEAT} repeats", self.position)
        self.position = end
        return lowest, highest

    def repeat_braces(self) -> tuple[int, int | None, int] | None:
        """Bounds and end of `{m}`, `{m,}`, `{,n}` or `{m,n}` here; a brace that is none of these is a character, as in `re`."""
        end = self.pattern.find("}", self.position)
        if self.next != "{" or end < 0:
            return None
        low, comma, high = self.pattern[self.position + 1 : end].partition(",")
        if not all(part == "" or (part.isascii() and part.isdigit()) for part in (low, high)) or (low == "" and comma == ""):
            return None
        if max(len(low), len(high)) > 9:
            raise RegexError(f"more than {MAX_REPEAT} repeats", self.position)
        lowest = int(low or 0)
        return lowest, (int(high) if high else None) if comma else lowest, end + 1

    def escape(self) -> Node:
        start = self.position
        if self.accept("\\A"):
            return Anchor(True, start)
        if self.accept("\\Z") or self.accept("\\z"):
            return Anchor(False, start)
        return Chars(self.escaped_set())

    def escaped_set(self) -> CharSet:
        """The characters that a backslash sequence outside a class stands for."""
        start = self.position
        chars = self.escaped()
        return self.single(chars, start) if isinstance(chars, int) else chars

    def escaped(self) -> CharSet | int:
        """What a backslash sequence here stands for, inside or outside a class: one code point, or a set."""
        start = self.position
        self.position += 1
        character = self.next
        self.position += 1
        if character == "":
            raise RegexError("bad escape (end of pattern)", start)
        shorthands = {"d": self.dialect.digit, "w": self.dialect.word, "s": self.dialect.space}
        if character.lower() in shorthands:
            chars = shorthands[character.lower()]
            return chars if character.islower() else complement(chars)
        if character in _CONTROLS:
            return ord(_CONTROLS[character])
        if character in _HEX_DIGITS:
            return self.hexadecimal(_HEX_DIGITS[character], start)
        if character in _REFUSED_ESCAPES:
            raise RegexError(f"{_REFUSED_ESCAPES[character]} (\\{character}) is refused", start)
        if character in "123456789":
            raise RegexError(f"a back-reference (\\{character}) is not a regular expression: refused", start)
        if character.isascii() and character.isalnum():
            raise RegexError(f"bad escape \\{character}", start)
        return ord(character)

    def hexadecimal(self, num_digits: int, start: int) -> int:
        digits = self.pattern[self.position : self.position + num_digits]
        if len(digits) < num_digits or any(digit not in "0123456789abcdefABCDEF" for digit in digits):
            raise RegexError("incomplete hexadecimal escape", start)
        self.position += num_digits
        point = int(digits, 16)
        if point > 0x10FFFF:
            raise RegexError("no such character", start)
        return point

    def single(self, point: int, start: int) -> CharSet:
        chars = charset.charset((point, point))
        if not chars:
            raise RegexError("NUL and lone surrogates cannot be generated: refused", start)
        return chars

    def char_class(self) -> CharSet:
        start = self.position
        self.position += 1
        is_negated = self.accept("^")
        items: list[CharSet] = []
        while not items or self.next != "]":
            if self.next == "":
                raise RegexError("unterminated character set", start)
            items.append(self.class_item())
        self.position += 1
        chars = union(*items)
        return complement(chars) if is_negated else chars

    def class_item(self) -> CharSet:
        """A character, range or shorthand. NUL and surrogates may be named here: mostly to be left out, and they are in no set anyway."""
        start = self.position
        low = self.class_character()
        after_dash = self.pattern[self.position + 1 : self.position + 2]
        if self.next != "-" or after_dash in ("]", ""):
            return charset.charset((low, low)) if isinstance(low, int) else low
        self.position += 1
        high = self.class_character()
        if not isinstance(low, int) or not isinstance(high, int) or high < low:
            raise RegexError(f"bad character range {self.pattern[start : self.position]}", start)
        return charset.charset((low, high))

    def class_character(self) -> CharSet | int:
        if self.next == "\\":
            if self.pattern.startswith("\\b", self.position):
                self.position += 2
                return ord("\b")
            return self.escaped()
        self.position += 1
        return ord(self.pattern[self.position - 1])


_START, _END = Anchor(is_start=True, position=0), Anchor(is_start=False, position=0)


class MisplacedAnchor(Exception):
    """`^` or `$` where more text is allowed before or after it, or look-around where the text that it sees is repeated or grouped.

    The message says which, without `position`, its place in the pattern.
    """

    def __init__(self, anchor: Anchor | Look, reason: str = "") -> None:
        if isinstance(anchor, Look):
            name = "look-ahead" if anchor.is_ahead else "look-behind"
            super().__init__(f"{name} is refused {reason or 'within groups and repeats, and behind anywhere but at the end'}")
        else:
            super().__init__(f"{'^' if anchor.is_start else '$'} is refused where more text may lie beyond it")
        self.position = anchor.position


def full_match(node: Node) -> Node:
    """The tree without its anchors, to be matched as a whole. Raises `MisplacedAnchor`."""
    if not _has_look(node):
        return _strip(node, at_start=True, at_end=True)
    if isinstance(node, Either):
        return Either(tuple(full_match(item) for item in node.items))
    return search(Sequence((_START, *_items(node), _END)))


def search(node: Node) -> Node:
    """A tree whose full matches are the texts in which `node` is found somewhere, as JSON Schema's `pattern` means it.

    Anchors count only at the ends of the whole pattern's alternatives, look-around only outside of groups, and behind only at the end.
    Raises `MisplacedAnchor` for others.
    """
    if isinstance(node, Either):
        return Either(tuple(search(item) for item in node.items))
    items = _items(node)
    if len(items) == 1 and isinstance(items[0], Either | Sequence):
        return search(items[0])
    places = [place for place, item in enumerate(items) if isinstance(item, Look)]
    if places:
        # A look-behind sees what precedes a look-ahead, too: it comes first.
        return _seen(items, next((place for place in places if not _is_ahead(items[place])), places[0]))
    is_anchored_start = bool(items) and isinstance(items[0], Anchor) and items[0].is_start
    is_anchored_end = bool(items) and isinstance(items[-1], Anchor) and not items[-1].is_start
    inner = _strip(Sequence(items), at_start=is_anchored_start, at_end=is_anchored_end)
    return Sequence((*(() if is_anchored_start else (ANYTHING,)), inner, *(() if is_anchored_end else (ANYTHING,))))


def _is_ahead(node: Node) -> bool:
    return isinstance(node, Look) and node.is_ahead


def _items(node: Node) -> tuple[Node, ...]:
    return tuple(part for item in node.items for part in _items(item)) if isinstance(node, Sequence) else (node,)


def _alternatives(node: Node) -> tuple[Node, ...]:
    return node.items if isinstance(node, Either) else (node,)


def _is_start(items: tuple[Node, ...]) -> bool:
    return bool(items) and all(isinstance(item, Anchor) and item.is_start for item in items)


def _behind_within(node: Node) -> Anchor | Look | None:
    """What asks for the text before it."""
    match node:
        case Anchor() if node.is_start:
            return node
        case Look() if not node.is_ahead:
            return node
        case Sequence(items) | Either(items):
            return next((found for item in items if (found := _behind_within(item)) is not None), None)
        case Repeat(item) | Look(item):
            return _behind_within(item)
    return None


def _seen(items: tuple[Node, ...], place: int) -> Node:
    """A sequence with look-around. What a look-ahead sees is all that follows it, what a look-behind at the end sees all before it."""
    look = items[place]
    assert isinstance(look, Look)
    before, after = items[:place], items[place + 1 :]
    if look.is_ahead:
        for item in (*after, look.item) if not _is_start(before) else ():
            if (anchor := _behind_within(item)) is not None:
                raise MisplacedAnchor(anchor)
        head = search(Sequence((*before, _END))) if before else ANYTHING
        seen = Either(tuple(Sequence((_START, *_items(item))) for item in _alternatives(look.item)))
        return Sequence((head, _both(look, search(Sequence((_START, *after))), search(seen))))
    if not after or not all(isinstance(item, Anchor) and not item.is_start for item in after):
        raise MisplacedAnchor(look)
    whole = search(Sequence((*before, _END)))
    seen = Either(tuple(Sequence((*_items(item), _END)) for item in _alternatives(look.item)))
    return _both(look, whole, search(seen))


def _both(look: Look, text: Node, seen: Node) -> Node:
    try:
        both = intersection([(text, True), (seen, look.is_wanted)])
    except OversizedAutomaton:
        raise MisplacedAnchor(look, "where it makes a pattern too large") from None
    if both == Either(()):
        raise MisplacedAnchor(look, "that no text satisfies")
    return both


def _has_look(node: Node) -> bool:
    match node:
        case Look():
            return True
        case Sequence(items) | Either(items):
            return any(map(_has_look, items))
        case Repeat(item):
            return _has_look(item)
    return False


def _strip(node: Node, *, at_start: bool, at_end: bool) -> Node:
    match node:
        case Look():
            raise MisplacedAnchor(node)
        case Anchor():
            if not (at_start if node.is_start else at_end):
                raise MisplacedAnchor(node)
            return EMPTY
        case Either(items):
            return Either(tuple(_strip(item, at_start=at_start, at_end=at_end) for item in items))
        case Repeat(item, minimum, maximum):
            is_single = maximum == 1
            return Repeat(_strip(item, at_start=at_start and is_single, at_end=at_end and is_single), minimum, maximum)
        case Sequence(items):
            widths = [not isinstance(item, Anchor) for item in items]
            return Sequence(
                tuple(
                    _strip(item, at_start=at_start and not any(widths[:i]), at_end=at_end and not any(widths[i + 1 :]))
                    for i, item in enumerate(items)
                )
            )
    return node
