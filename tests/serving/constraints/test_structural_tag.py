import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarBackend, GrammarKind, GrammarSpec
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import InvalidRequest
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from penstock.serving.constraints.schemas import JsonReading
from penstock.serving.constraints.structural_tag import TagReader
from tests.api.scripted import byte_tokenizer

X = {"type": "regex", "pattern": "x+"}
ONE = {"type": "json_schema", "json_schema": {"const": 1}}
ANY = {"type": "any_text"}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def ended(content: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": [content, {"type": "const_string", "value": ";"}]}


TAGS = [tag("<a>", X, ";"), tag("<ab", ONE, "</ab>")]
OTHER = tag("[b]", X, "]")
FORMATS: list[dict[str, Any]] = [
    {"type": "const_string", "value": "<a>x;"},
    {"type": "sequence", "elements": [{"type": "const_string", "value": "<"}, X, {"type": "optional", "content": ONE}]},
    {"type": "or", "elements": [X, ONE, tag("<a>", ANY, ";")]},
    {"type": "sequence", "elements": [X, {"type": "any_text", "excludes": ["<a>"]}]},
    {"type": "star", "content": tag("<a>", X, [";", "]"])},
    {"type": "plus", "content": {"type": "const_string", "value": "x;"}},
    {"type": "repeat", "min": 1, "max": 2, "content": {"type": "const_string", "value": "x"}},
    {"type": "repeat", "min": 2, "max": -1, "content": {"type": "const_string", "value": "x"}},
    tag("<a>", {"type": "any_text", "excludes": ["1"]}, [";", "]"]),
    *(
        {"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS, "at_least_one": at_least_one, "stop_after_first": stop_after_first}
        for at_least_one, stop_after_first in itertools.product((False, True), repeat=2)
    ),
    {"type": "triggered_tags", "triggers": ["<a", "["], "tags": [*TAGS, OTHER], "excludes": ["xx"]},
    tag("x", {"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS}, "]"),
    tag("x", {"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS, "stop_after_first": True}, "]"),
    {"type": "tags_with_separator", "tags": TAGS, "separator": "x"},
    {"type": "tags_with_separator", "tags": TAGS, "separator": "x", "at_least_one": True},
    {"type": "tags_with_separator", "tags": TAGS, "separator": "x", "stop_after_first": True},
    {"type": "dispatch", "rules": [["<a>", ended(X)], ["[", ended(ONE)]], "loop": True},
    {"type": "dispatch", "rules": [["<a>", X], ["[", ONE]], "loop": False, "excludes": [";"]},
]
PIECES = ["<a>", "<ab", "</ab>", "[b]", "[", "]", ";", "x", "1", "<", "<a>x;", "<ab1</ab>", "[b]x]"]


def read(source: Any) -> GrammarSpec:
    return TagReader().read(source, "structural_tag")


def structure_of(written: dict[str, Any]) -> Structure:
    structure = read({"type": "structural_tag", "format": written}).structure
    assert structure is not None
    return structure


def pattern_of(structure: Structure) -> str:
    """What the parts of a structure mean, as one regex. The only schema here is that of the number 1."""
    match structure:
        case Literal(text) | Marker(text):
            return re.escape(text)
        case FreeText(without):
            return free(without)
        case TextUntil(marker, without):
            return free((marker, *without)) + re.escape(marker)
        case Value(spec):
            return f"(?:{spec.text if spec.kind is GrammarKind.REGEX else '1'})"
        case Sequence(parts):
            return "".join(map(pattern_of, parts))
        case Either(parts):
            return f"(?:{'|'.join(map(pattern_of, parts))})"
        case Repeat(part, minimum, maximum):
            return f"(?:{pattern_of(part)}){{{minimum},{'' if maximum is None else maximum}}}"


def free(without: tuple[str, ...]) -> str:
    return f"(?:(?!{'|'.join(map(re.escape, without))})[^~])*" if without else "[^~]*"


def texts(count: int) -> Iterator[str]:
    yield from ("<xx", "xx", "x;", "x]", "x1]", "x<a>x;]", "x<ab1</ab>]", "x<ab1</ab>1]")
    rng = random.Random(7)
    for _ in range(count):
        yield "".join(rng.choices(PIECES, k=rng.choice((0, 1, 1, 2, 2, 3, 4, 5, 6))))


@pytest.mark.parametrize("written", FORMATS, ids=lambda written: str(written["type"]))
def test_a_tag_allows_what_xgrammar_takes_it_for(written: dict[str, Any]) -> None:
    from xgrammar import Grammar
    from xgrammar.testing import _is_grammar_accept_string

    reference = Grammar.from_structural_tag({"type": "structural_tag", "format": written})
    ours = re.compile(pattern_of(structure_of(written)))
    verdicts = [(text, ours.fullmatch(text) is not None) for text in dict.fromkeys(texts(300))]
    assert [(text, _is_grammar_accept_string(reference, text)) for text, _ in verdicts] == verdicts
    assert {verdict for _, verdict in verdicts} == {False, True}


@pytest.fixture(scope="module")
def llguidance() -> tuple[GrammarBackend, Tokenizer, int]:
    """The backend over a byte tokenizer, and the token that ends an answer."""
    tokenizer = byte_tokenizer()
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    vocabulary = tokenizer.vocabulary(tokenizer.vocab_size, [end])
    return Plugins.start([]).grammar_backends["llguidance"](vocabulary), tokenizer, end


@pytest.mark.parametrize("written", FORMATS, ids=lambda written: str(written["type"]))
def test_a_backend_takes_a_tag_for_the_same(written: dict[str, Any], llguidance: Any) -> None:
    backend, tokenizer, end = llguidance
    grammar = backend.compile(read({"format": written}))
    ours = re.compile(pattern_of(structure_of(written)))
    for text in dict.fromkeys(texts(100)):
        matcher = grammar.matcher()
        token_ids = [*tokenizer.encode(text, add_special_tokens=False), end]
        assert all(map(matcher.advance, token_ids)) == (ours.fullmatch(text) is not None), text


def test_the_older_form_means_triggered_tags_with_json() -> None:
    older = {"structures": [{"begin": "<f=a>", "schema": {"const": 1}, "end": "</f>"}], "triggers": ["<f="]}
    newer = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("<f=a>", ONE, "</f>")]}
    written = read(older)
    assert written.kind is GrammarKind.STRUCTURE
    assert pattern_of(written.structure or Literal("")) == pattern_of(structure_of(newer))
    assert read(json.dumps(older | {"type": "structural_tag"})) == written


def test_what_is_constrained_knows_its_path_and_whitespace() -> None:
    written = {"type": "sequence", "elements": [X, tag("<a>", ONE, ";"), {"type": "grammar", "grammar": 'root ::= "a"'}]}
    structure = TagReader(JsonReading("")).read({"format": written}, "response_format").structure
    assert isinstance(structure, Sequence)
    specs = [part.spec for part in structure.parts if isinstance(part, Value)]
    at = "response_format.format.elements"
    assert specs == [
        GrammarSpec(GrammarKind.REGEX, "x+", f"{at}[0].pattern"),
        GrammarSpec(GrammarKind.JSON_SCHEMA, '{"const": 1}', f"{at}[1].content.json_schema", ""),
        GrammarSpec(GrammarKind.GBNF, 'root ::= "a"', f"{at}[2].grammar"),
    ]


def nested(depth: int) -> dict[str, Any]:
    return X if depth == 0 else {"type": "optional", "content": nested(depth - 1)}


@pytest.mark.parametrize(
    ("written", "path"),
    [
        ({"type": "sequence", "elements": [ANY, X]}, "elements[0]"),
        ({"type": "star", "content": ANY}, "content"),
        ({"type": "sequence", "elements": []}, "elements"),
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "type"),
        ({"type": "or", "elements": [X, {"type": "token", "token": 3}]}, "elements[1].type"),
        ({"type": "const_string"}, "value"),
        ({"type": "const_string", "value": 3}, "value"),
        ({"type": "const_string", "value": "a", "values": []}, "values"),
        (ONE | {"style": "qwen_xml"}, "style"),
        (ONE | {"any_order": True}, "any_order"),
        (ONE | {"max_whitespace_cnt": 0}, "max_whitespace_cnt"),
        (ONE | {"excludes": ["a"]}, "excludes"),
        (ANY | {"max_chars": 5}, "max_chars"),
        (ANY | {"excludes": ["a", ""]}, "excludes[1]"),
        (ANY | {"excludes": ["a", "ab"]}, ""),
        (tag("<", ANY, ""), "end"),
        (tag("<", ANY, ["a", "ba"]), "content"),
        (tag("<", ANY, []), "end"),
        ({"type": "repeat", "min": 3, "max": 2, "content": X}, "max"),
        ({"type": "repeat", "min": 0, "max": 10**9, "content": X}, "max"),
        ({"type": "triggered_tags", "triggers": ["<b"], "tags": TAGS}, "tags[0].begin"),
        ({"type": "triggered_tags", "triggers": ["<a", "<"], "tags": TAGS}, "tags[0].begin"),
        ({"type": "triggered_tags", "triggers": ["<a", "["], "tags": TAGS}, "triggers[1]"),
        ({"type": "triggered_tags", "triggers": [""], "tags": TAGS}, "triggers[0]"),
        ({"type": "triggered_tags", "triggers": ["<a"], "tags": TAGS, "excludes": ["<"]}, ""),
        ({"type": "dispatch", "rules": [["", X]]}, "rules[0][0]"),
        ({"type": "dispatch", "rules": [[f"<{number}>", X] for number in range(65)]}, ""),
        ({"type": "dispatch", "rules": [["<", ANY]]}, "rules[0][1]"),
        (nested(33), "content" + ".content" * 32),
        (nested(150), "content" + ".content" * 32),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_path(written: dict[str, Any], path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        structure_of(written)
    assert caught.value.param == f"structural_tag.format{'.' if path else ''}{path}"


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("{", ""),
        ("[" * 100_000, ""),
        ("[]", ""),
        ({}, ""),
        ({"type": "json"}, ".type"),
        ({"format": X, "triggers": ["<"]}, ""),
        ({"triggers": ["<"]}, ".structures"),
        ({"structures": [{"begin": "<", "end": ">", "schema": [1]}], "triggers": ["<"]}, ".structures[0].schema"),
        ({"structures": [{"begin": "<", "end": ">", "schema": '{"a": 1, "a": 2}'}], "triggers": ["<"]}, ".structures[0].schema"),
        ({"structures": [{"begin": "<"}], "triggers": ["<"]}, ".structures[0].end"),
    ],
)
def test_what_is_no_tag_is_refused_with_its_path(source: Any, path: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(source)
    assert caught.value.param == f"structural_tag{path}"


def test_a_tag_nested_deeper_than_python_goes_is_refused() -> None:
    written: dict[str, Any] = X
    for _ in range(5000):
        written = {"type": "optional", "content": written}
    with pytest.raises(InvalidRequest, match="deep"):
        read({"format": written})
