"""Regexes and choices as trees."""

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.json_document import parse_document
from penstock.plugins.grammars.regex.regex_syntax import RegexError, parse, python_dialect
from penstock.plugins.grammars.regex.regular import Literal, MisplacedAnchor, Node, either, full_match


def regex(pattern: str, param: str) -> Node:
    """What `re.fullmatch` accepts. Raises `UnsupportedGrammar` with the position."""
    try:
        return full_match(parse(pattern, python_dialect()))
    except RegexError as error:
        raise UnsupportedGrammar(f"regex: {error}", param) from error
    except MisplacedAnchor as anchor:
        message = f"regex: {anchor} is refused where text may stand beyond it, at position {anchor.position}"
        raise UnsupportedGrammar(message, param) from anchor


def choice(text: str, param: str) -> Node:
    """One of the strings in a JSON array. Raises `UnsupportedGrammar`."""
    choices = parse_document(text, param)
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise UnsupportedGrammar("a choice must be a non-empty array of strings", param)
    return either(*(Literal(choice) for choice in dict.fromkeys(choices)))
