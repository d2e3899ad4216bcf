"""What a request lets stand between the tokens of JSON, as a pattern of JSON's own white space."""

from penstock.engine.errors import InvalidRequest
from penstock.plugins.grammars.regex.charset import CharSet, intersect, of
from penstock.plugins.grammars.regex.regex_syntax import Dialect, RegexError, parse
from penstock.plugins.grammars.regex.regular import Chars, Either, Literal, MisplacedAnchor, Node, Repeat, Sequence, full_match

MAX_WHITESPACE_PATTERN = 1000
SPELLED = {" ": " ", "\t": r"\t", "\n": r"\n", "\r": r"\r"}
WHITESPACE = of("".join(SPELLED))
# Shorthands mean what they can mean here: Python's `\s` has characters with which a document is no JSON.
DIALECT = Dialect(dot=WHITESPACE, digit=of("0"), word=of("a"), space=WHITESPACE)


def whitespace_regex(pattern: str, param: str) -> str:
    """The pattern with its sets spelled out; a shorthand for white space is JSON's white space.

    Raises `InvalidRequest` for one that cannot be read, and for one that lets anything else stand there: the answer would not be JSON.
    Here, since a backend would say that the mistake is in the JSON that the pattern is for.
    """
    if len(pattern) > MAX_WHITESPACE_PATTERN:
        raise InvalidRequest(f"`{param}` may have {MAX_WHITESPACE_PATTERN} characters", param)
    try:
        return _written(full_match(parse(pattern, DIALECT)))
    except RegexError as error:
        raise InvalidRequest(f"`{param}`: {error}", param) from None
    except MisplacedAnchor as anchor:
        message = f"`{param}`: {anchor} is refused where text may stand beyond it, at position {anchor.position}"
        raise InvalidRequest(message, param) from None
    except _NotWhitespace:
        message = f"`{param}` lets more stand between the tokens of JSON than spaces, tabs, line feeds and carriage returns"
        raise InvalidRequest(message, param) from None


class _NotWhitespace(Exception):
    pass


def _written(node: Node) -> str:
    match node:
        case Literal(text):
            return "".join(_class(of(character)) for character in text)
        case Chars(chars):
            return _class(chars)
        case Sequence(items):
            return "".join(map(_written, items))
        case Either(items):
            return f"(?:{'|'.join(map(_written, items))})"
        case Repeat(item, minimum, maximum):
            return f"(?:{_written(item)}){{{minimum},{'' if maximum is None else maximum}}}"
    raise AssertionError("anchors are resolved before a pattern is written")


def _class(chars: CharSet) -> str:
    if not chars or intersect(chars, WHITESPACE) != chars:
        raise _NotWhitespace
    return "[" + "".join(spelled for character, spelled in SPELLED.items() if intersect(of(character), chars)) + "]"
