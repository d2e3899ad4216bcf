"""The characters that a client's grammar can write: what is none of them ends it for certain."""

import json
import re

from penstock.plugins.grammars.regex import regular
from penstock.plugins.grammars.regex.charset import ANY, CharSet, of, union
from penstock.plugins.grammars.regex.regex_syntax import RegexError, parse, python_dialect

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)
    |(?P<string>"(?:\\.|[^"\\\n])*"i?)
    |(?P<pattern>/(?:\\.|[^/\\\n])+/[a-z]*)
    |(?P<set>\[(?:\\.|[^\]\\\n])*\])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_REACHING_FURTHER = frozenset('%.~/"[')  # directives, ranges, negation, and what the pattern above did not read


def gbnf_alphabet(source: str) -> CharSet:
    return _alphabet(source, has_sets=True)


def lark_alphabet(source: str) -> CharSet:
    """Brackets hold what is optional there, so a grammar that has them is not looked into."""
    return _alphabet(source, has_sets=False)


def _alphabet(source: str, *, has_sets: bool) -> CharSet:
    """More than there are where that is not plain to see, up to all."""
    chars: CharSet = ()
    for token in _TOKEN.finditer(source):
        match token.lastgroup, token[0]:
            case "string", text:
                chars = union(chars, _of_string(text))
            case "pattern", text if not has_sets:
                chars = union(chars, _of_pattern(text[1:-1]) if text.endswith("/") else ANY)
            case "set", text if has_sets:
                chars = union(chars, _of_pattern(text))
            case "comment", _:
                pass
            case _, text:
                if token.lastgroup != "other" or text in _REACHING_FURTHER:
                    return ANY
    return chars


def _of_string(quoted: str) -> CharSet:
    try:
        text = json.loads(quoted.removesuffix("i"))
    except ValueError:
        return ANY
    return of(text + text.upper() + text.lower() if quoted.endswith("i") else text)


def _of_pattern(pattern: str) -> CharSet:
    try:
        return _of_node(parse(pattern, python_dialect()))
    except RegexError:
        return ANY


def _of_node(node: regular.Node) -> CharSet:
    match node:
        case regular.Literal(text):
            return of(text)
        case regular.Chars(chars):
            return chars
        case regular.Sequence(items) | regular.Either(items):
            return union(*map(_of_node, items))
        case regular.Repeat(item, _, _):
            return _of_node(item)
        case _:
            return ()  # anchors
