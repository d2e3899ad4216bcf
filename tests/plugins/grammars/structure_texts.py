"""What a structure allows, read off its definition: every way to read a text is tried."""

import json
import re
from collections.abc import Sequence as Pieces

import jsonschema  # type: ignore[import-untyped]
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import SpecialText
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.plugins.markers import split_symbols

ADDED = frozenset({"<t>", "<e>"})
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


def schema(document: object, whitespace_pattern: str | None = "") -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(document), "schema", whitespace_pattern=whitespace_pattern)


def regex(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern, "regex")


def choice(*texts: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.CHOICE, json.dumps(texts), "choice")


def allows(structure: Structure, symbols: Pieces[str], added_tokens: frozenset[str]) -> bool:
    """`symbols` are single characters and whole added tokens."""
    return len(symbols) in ends(structure, symbols, 0, added_tokens)


def ends(structure: Structure, symbols: Pieces[str], start: int, added: frozenset[str]) -> set[int]:
    """Where a part may end that begins at `start`."""
    match structure:
        case Literal(text):
            return _spelled(list(text), symbols, start)
        case Marker(text):
            return _spelled(split_symbols(text, added), symbols, start)
        case FreeText(without):
            stops = set(range(start, len(symbols) + 1))
            return {
                stop for stop in stops if _is_text(symbols[start:stop]) and not any(_holds(symbols[start:stop], m, added) for m in without)
            }
        case TextUntil(marker, without):
            found = split_symbols(marker, added)
            texts = ends(FreeText(without), symbols, start, added)
            stops = {stop for text in texts for stop in _spelled(found, symbols, text)}
            return {
                stop
                for stop in stops
                if not _holds(symbols[start : stop - 1], marker, added) and not any(_holds(symbols[start:stop], m, added) for m in without)
            }
        case Value(spec):
            stops = set(range(start, len(symbols) + 1))
            return {stop for stop in stops if _is_text(symbols[start:stop]) and _fits(spec, "".join(symbols[start:stop]))}
        case Sequence(parts):
            reached = {start}
            for part in parts:
                reached = {stop for place in reached for stop in ends(part, symbols, place, added)}
            return reached
        case Either(parts):
            return {stop for part in parts for stop in ends(part, symbols, start, added)}
        case Repeat(part, minimum, maximum):
            return _repeated(part, minimum, maximum, symbols, start, added)


def _repeated(part: Structure, minimum: int, maximum: int | None, symbols: Pieces[str], start: int, added: frozenset[str]) -> set[int]:
    reached, result, times = {start}, set(), 0
    most = maximum if maximum is not None else minimum + len(symbols) + 1
    while reached and times <= most:
        if times >= minimum:
            result |= reached
        reached = {stop for place in reached for stop in ends(part, symbols, place, added)}
        times += 1
    return result


def _spelled(wanted: list[str], symbols: Pieces[str], start: int) -> set[int]:
    found = list(symbols[start : start + len(wanted)])
    same = found == wanted and [*map(_is_token, found)] == [*map(_is_token, wanted)]
    return {start + len(wanted)} if same else set()


def _is_token(symbol: str) -> bool:
    return isinstance(symbol, SpecialText)


def _is_text(symbols: Pieces[str]) -> bool:
    return not any(map(_is_token, symbols))


def _holds(symbols: Pieces[str], marker: str, added: frozenset[str]) -> bool:
    wanted = split_symbols(marker, added)
    return any(_spelled(wanted, symbols, start) for start in range(len(symbols) - len(wanted) + 1))


def _fits(spec: GrammarSpec, text: str) -> bool:
    if spec.kind is GrammarKind.REGEX:
        return re.fullmatch(spec.text, text, re.DOTALL) is not None
    if spec.kind is GrammarKind.CHOICE:
        return text in json.loads(spec.text)
    try:
        document = json.loads(text)
        jsonschema.validate(document, json.loads(spec.text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return text == json.dumps(document, separators=(",", ":"))  # compact, and numbers in their shortest form


VALUES = (
    schema({"type": "integer", "minimum": -20, "maximum": 20}),
    schema(OBJECT),
    schema({"enum": ["a", "<t>"]}),
    regex("a+"),
    regex("[ab]{1,2}"),
    regex("(a|ab)?1*"),
    choice("a", "ab", "b1"),
)
markers = st.sampled_from(["<t>", "<e>", "a<t>", "<t>b"])
leaves: st.SearchStrategy[Structure] = st.one_of(
    st.sampled_from(["", "a", "ab", "b", "1", "<t", "{"]).map(Literal),
    markers.map(Marker),
    st.sampled_from([(), ("<t>",), ("<e>", "<t>")]).map(FreeText),
    st.sampled_from([TextUntil("<t>"), TextUntil("<e>"), TextUntil("<t>", ("<e>",)), TextUntil("a<t>"), TextUntil("<t>b")]),
    st.sampled_from(VALUES).map(Value),
)
structures: st.SearchStrategy[Structure] = st.recursive(
    leaves,
    lambda parts: st.one_of(
        st.lists(parts, max_size=4).map(tuple).map(Sequence),
        st.lists(parts, min_size=1, max_size=3).map(tuple).map(Either),
        st.tuples(parts, st.sampled_from([(0, None), (1, None), (0, 1), (2, 2), (0, 0), (1, 3)])).map(
            lambda pair: Repeat(pair[0], *pair[1])
        ),
    ),
    max_leaves=6,
)
TEXT_PARTS = ("a", "b", "1", "-", "0", "{", "}", '{"a":1}', "{}", '"a"', '"<t>"', "<t>", "<e>", "<t", ">", "ab", "é")
texts = st.lists(st.sampled_from(TEXT_PARTS), max_size=6).map("".join)


@st.composite
def texts_of(draw: st.DrawFn, structure: Structure) -> str:
    """Something that the structure allows, or nearly."""
    match structure:
        case Literal(text) | Marker(text):
            return text
        case FreeText():
            return draw(texts)
        case TextUntil(marker, _):
            return draw(texts) + marker
        case Value(spec):
            samples = {"a+": ("a", "aaa"), "[ab]{1,2}": ("a", "ba"), "(a|ab)?1*": ("", "ab11", "a1")}
            return draw(st.sampled_from(samples.get(spec.text) or ("a", "ab", "b1", "12", "-3", "{}", '{"a":5}', '"<t>"')))
        case Sequence(parts):
            return "".join([draw(texts_of(part)) for part in parts])
        case Either(parts):
            return draw(texts_of(draw(st.sampled_from(parts))))
        case Repeat(part, minimum, maximum):
            times = draw(st.integers(minimum, minimum + 2 if maximum is None else maximum))
            return "".join([draw(texts_of(part)) for _ in range(times)])
