"""A tree as a regex that llguidance compiles, and as a terminal of a Lark grammar; regexes and choices as trees."""

import json
import math
import re
from itertools import groupby

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import parse_document
from penstock.plugins.grammars.regex.syntax import MisplacedAnchor, RegexError, full_match, parse, python_dialect
from penstock.plugins.grammars.regex.tree import (
    Chars,
    CharSet,
    Either,
    Literal,
    Node,
    Repeat,
    Sequence,
    either,
)

# Repeats within repeats cost llguidance seconds for one mask: `(x{1000}){1000}` is a million places.
MAX_PLACES = 200_000
MAX_RANGES = 200_000  # of characters, written out: a microsecond and some hundred bytes each
_CLASSES = re.compile(r"\\.|\[((?:\\.|[^\]\\])*)\]", re.DOTALL)
_SET_OPERATORS = re.compile(r"(?<!\\)\[|&&|--|~~")  # characters in the classes of JSON Schema's regexes, operators in Rust's
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
_COUNTS = re.compile(r"(\d{1,9}),?\}")
_UNWRITABLE = re.compile("[\0\ud800-\udfff]")


class UnwritableRegex(Exception):
    """The tree asks for a character that cannot be generated. The message says so."""


class OversizedRegex(UnwritableRegex):
    """The tree asks for too much."""


def has_operators(pattern: str) -> bool:
    """Whether a regex of JSON Schema has a class that would mean something else there."""
    return any(_SET_OPERATORS.search(found[1] or "") for found in _CLASSES.finditer(pattern))


def has_look_around(pattern: str) -> bool:
    return _LOOK_AROUND.search(pattern) is not None


def may_be_large(pattern: str) -> bool:
    """Whether its counts together come to more than `MAX_PLACES`."""
    return math.prod(max(int(count), 1) for count in _COUNTS.findall(pattern)) > MAX_PLACES


def check_size(node: Node) -> None:
    """Raises `OversizedRegex` for more than `MAX_PLACES` for a character, all repeats written out, and for more than `MAX_RANGES`."""
    if num_ranges(node) > MAX_RANGES:
        raise OversizedRegex(f"sets of characters that come to more than {MAX_RANGES} ranges")
    if _num_places(node) > MAX_PLACES:
        raise OversizedRegex(f"repeats within repeats come to more than {MAX_PLACES} characters")


def _num_places(node: Node) -> int:
    match node:
        case Literal(text):
            return len(text)
        case Sequence(items) | Either(items):
            return sum(map(_num_places, items))
        case Repeat(item, minimum, maximum):
            return _num_places(item) * max(minimum if maximum is None else maximum, 1)
    return 1


def num_ranges(node: Node) -> int:
    """Of characters, in all sets of the pattern."""
    match node:
        case Chars(chars):
            return len(chars)
        case Sequence(items):
            return sum(num_ranges(item) for item, _ in groupby(items))
        case Either(items):
            return sum(map(num_ranges, items))
        case Repeat(item):
            return num_ranges(item)
    return 0


def to_terminal(node: Node) -> str:
    """The tree as a terminal. The lexer takes the longest text that it matches: what follows may not go on where it could."""
    texts = node.items if isinstance(node, Either) else (node,)
    if all(isinstance(text, Literal) for text in texts):
        return "(" + " | ".join(quoted(text.text) for text in texts if isinstance(text, Literal)) + ")"  # read faster than a regex
    check_size(node)
    pattern = to_pattern(node)
    return f"/{pattern}/" if pattern else quoted("")


def quoted(text: str) -> str:
    """A Lark string, whose escapes are JSON's. Raises `UnwritableRegex`."""
    _check(text)
    return json.dumps(text).replace("\x7f", "\\u007f")


def to_pattern(node: Node) -> str:
    """The syntax of Rust's `regex`, without slashes. Every set is spelled out in ranges, so that it means there what it means here."""
    match node:
        case Literal(text):
            _check(text)
            return "".join(map(_character, text))
        case Chars(chars):
            return _class(chars)
        case Sequence(items):
            return "".join(_times(item, sum(1 for _ in run)) for item, run in groupby(items))
        case Either(()):
            raise UnwritableRegex("no text matches it")
        case Either(items):
            return "|".join(map(to_pattern, items))
        case Repeat(item, minimum, maximum):
            return f"(?:{to_pattern(item)}){{{minimum},{'' if maximum is None else maximum}}}"
    raise AssertionError("anchors are resolved before a pattern is written")


def _times(item: Node, number: int) -> str:
    pattern = to_pattern(item)
    return pattern if number == 1 and not isinstance(item, Either) else f"(?:{pattern})" + (f"{{{number}}}" if number > 1 else "")


def _check(text: str) -> None:
    if _UNWRITABLE.search(text):
        raise UnwritableRegex("NUL and lone surrogates cannot be generated")


def _class(chars: CharSet) -> str:
    if not chars:
        raise UnwritableRegex("a set of characters that holds none that can be generated")
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in chars) + "]"


def _character(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"


def regex(pattern: str, param: str) -> Node:
    """What `re.fullmatch` accepts. Raises `UnsupportedGrammar` with the position."""
    try:
        return full_match(parse(pattern, python_dialect()))
    except RegexError as error:
        raise UnsupportedGrammar(f"regex: {error}", param) from error
    except MisplacedAnchor as anchor:
        message = f"regex: {anchor}, at position {anchor.position}"
        raise UnsupportedGrammar(message, param) from anchor


def choice(text: str, param: str) -> Node:
    """One of the strings in a JSON array. Raises `UnsupportedGrammar`."""
    choices = parse_document(text, param)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise UnsupportedGrammar("a choice must be a non-empty array of strings", param)
    return either(*(Literal(choice) for choice in dict.fromkeys(choices)))
