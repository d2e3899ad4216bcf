"""A tree as Outlines' terms, and those as the pattern that its engine compiles.

Importing Outlines takes most of a second, so it is imported on the first use.
"""

from typing import TYPE_CHECKING

from penstock.plugins.grammars.regex.charset import CharSet, of
from penstock.plugins.grammars.regex.regular import Chars, Either, Literal, Node, Repeat, Sequence

if TYPE_CHECKING:
    from outlines.types.dsl import Term


class UnwritableText(Exception):
    """Text that is asked for holds NUL or a lone surrogate."""


def to_pattern(node: Node) -> str:
    """The regex, in the syntax of Rust's `regex`. Every set is spelled out in ranges, so that it means there what it means here."""
    from outlines.types.dsl import to_regex

    return to_regex(_term(node))


def _term(node: Node) -> "Term":
    from outlines.types import dsl

    match node:
        case Literal(text):
            if any(not of(character) for character in text):
                raise UnwritableText("NUL and lone surrogates cannot be generated")
            return dsl.String(text)
        case Chars(chars):
            return dsl.Regex(_class(chars))
        case Sequence(items):
            return dsl.Sequence([_term(item) for item in items])
        case Either(items):
            return dsl.Alternatives([_term(item) for item in items])
        case Repeat(item, 0, None):
            return dsl.KleeneStar(_term(item))
        case Repeat(item, 0, 1):
            return dsl.Optional(_term(item))
        case Repeat(item, minimum, None):
            return dsl.QuantifyMinimum(_term(item), minimum)
        case Repeat(item, minimum, maximum) if maximum is not None:
            return dsl.QuantifyBetween(_term(item), minimum, maximum)
    raise AssertionError("anchors are resolved before a pattern is written")


def _class(chars: CharSet) -> str:
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in chars) + "]"
