"""Finds in a client's GBNF what xgrammar reads as something of its own."""

import re

from penstock import UnsupportedGrammar

_PARTS = re.compile(
    r"""
    "(?:[^"\\\n]|\\.)*" | \[(?:[^\]\\\n]|\\.)*\] | \#[^\n]*     # texts, sets and comments: passed over
    | (?P<macro>\b(?:Token|ExcludeToken|TagDispatch|TokenTagDispatch)\s*\()
    | (?P<ahead>\(\s*=)
    """,
    re.VERBOSE,
)


def check_gbnf(grammar: str, param: str) -> None:
    """Raises `UnsupportedGrammar` for macros about tokens, which let added tokens through, and for look-ahead, which does nothing."""
    for part in _PARTS.finditer(grammar):
        if part.lastgroup is None:
            continue
        line = grammar.count("\n", 0, part.start()) + 1
        column = part.start() - grammar.rfind("\n", 0, part.start())
        name = part.group().rstrip("( \t\r\n") if part.lastgroup == "macro" else "look-ahead"
        raise UnsupportedGrammar(f"{name} is refused in a grammar, at line {line}, column {column}", param)
