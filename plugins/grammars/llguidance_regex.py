"""A tree as a regex that llguidance compiles, and as a terminal of a Lark grammar."""

from penstock.plugins.grammars.charset import CharSet, of
from penstock.plugins.grammars.regular import Chars, Either, Literal, Node, Repeat, Sequence


class UnwritableRegex(Exception):
    """The tree asks for a character that cannot be generated. The message says so."""


def to_terminal(node: Node) -> str:
    """The tree as a terminal. The lexer takes the longest text that it matches: what follows may not go on where it could."""
    pattern = to_pattern(node)
    return f"/{pattern}/" if pattern else '""'


def to_pattern(node: Node) -> str:
    """The syntax of Rust's `regex`, without slashes. Every set is spelled out in ranges, so that it means there what it means here."""
    match node:
        case Literal(text):
            if any(not of(character) for character in text):
                raise UnwritableRegex("NUL and lone surrogates cannot be generated")
            return "".join(map(_character, text))
        case Chars(chars):
            return _class(chars)
        case Sequence(items):
            return "".join(f"(?:{to_pattern(item)})" if isinstance(item, Either) else to_pattern(item) for item in items)
        case Either(items):
            return "|".join(map(to_pattern, items))
        case Repeat(item, minimum, maximum):
            return f"(?:{to_pattern(item)}){{{minimum},{'' if maximum is None else maximum}}}"
    raise AssertionError("anchors are resolved before a pattern is written")


def _class(chars: CharSet) -> str:
    if not chars:
        raise UnwritableRegex("a set of characters that holds none that can be generated")
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in chars) + "]"


def _character(character: str) -> str:
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
