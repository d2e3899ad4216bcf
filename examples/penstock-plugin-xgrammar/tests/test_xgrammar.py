import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from penstock_plugin_xgrammar import XgrammarBackend
from penstock_plugin_xgrammar.matcher import XgrammarGrammar

from penstock import GrammarKind, GrammarMatcher, GrammarSpec, UnsupportedGrammar, structure
from penstock.testing import accepts, allowed_tokens, byte_vocabulary

CALL = "<call>"
MERGES = ("ab", "abc", "aa", '"a', '":', '": "', '"}', "{\n", "    ", "12", "true", "字", "é", "12\n", "a\0")
VOCABULARY = byte_vocabulary([CALL], MERGES)
CALL_ID = VOCABULARY.added_token_ids[CALL]
(STOP,) = VOCABULARY.stop_token_ids
TEXTS = [(token_id, text) for token_id, text in enumerate(VOCABULARY.token_bytes) if text]
atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\d", r"\w", r"\s", "é", "字", '"', r"\."])
patterns = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(lambda pair: f"({pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def backend() -> Iterator[XgrammarBackend]:
    backend = XgrammarBackend(VOCABULARY)
    yield backend
    backend.compiler.close()


def compiled(backend: XgrammarBackend, kind: GrammarKind, text: str, **options: Any) -> XgrammarGrammar:
    return backend.compile(GrammarSpec(kind, text, "guided", **options))


def schema_grammar(backend: XgrammarBackend, schema: Any, **options: Any) -> XgrammarGrammar:
    return compiled(backend, GrammarKind.JSON_SCHEMA, json.dumps(schema), **options)


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(allowed_tokens(matcher, VOCABULARY))


def takes(grammar: XgrammarGrammar, text: str) -> bool:
    """Whether a text may be a whole answer, byte by byte and in merged tokens alike."""
    matcher = grammar.matcher()
    is_taken = all(map(matcher.advance, merged_tokens(text))) and STOP in allowed(matcher)
    assert accepts(grammar.matcher(), VOCABULARY, [text]) == is_taken
    return is_taken


def merged_tokens(text: str) -> Iterator[int]:
    """One of the many tokenizations of a text."""
    rng = random.Random(0)
    rest = text.encode()
    while rest:
        token_id, token = rng.choice([(token_id, token) for token_id, token in TEXTS if rest.startswith(token)])
        yield token_id
        rest = rest[len(token) :]


def refusal(backend: XgrammarBackend, kind: GrammarKind, text: str) -> UnsupportedGrammar:
    with pytest.raises(UnsupportedGrammar) as caught:
        compiled(backend, kind, text)
    assert len(caught.value.message) < 300
    return caught.value


def test_a_regex_accepts_exactly_what_fullmatch_does(backend: XgrammarBackend) -> None:
    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(patterns, st.lists(st.text('aaabb1字é". \n', max_size=8), min_size=1, max_size=8))
    def check(pattern: str, texts: list[str]) -> None:
        grammar = compiled(backend, GrammarKind.REGEX, pattern)
        for text in texts:
            assert takes(grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)

    check()


def test_special_tokens_and_the_text_of_a_stop_token_never_match(backend: XgrammarBackend) -> None:
    matcher = schema_grammar(backend, {"type": "string"}).matcher()
    for byte in '"a字<end'.encode():
        assert matcher.advance(byte)
        assert not allowed(matcher) & {CALL_ID, STOP}
        assert not any(matcher.advance(token_id) for token_id in (CALL_ID, STOP, VOCABULARY.size, -1))


def test_nothing_is_allowed_after_a_stop_token_until_it_is_rolled_back(backend: XgrammarBackend) -> None:
    matcher = compiled(backend, GrammarKind.REGEX, "a+").matcher()
    assert not matcher.advance(STOP)
    assert matcher.advance(ord("a"))
    before = allowed(matcher)
    assert before > {STOP}
    assert not matcher.finished
    assert matcher.advance(STOP)
    assert matcher.finished
    assert allowed(matcher) == set()
    assert not matcher.advance(ord("a"))
    matcher.rollback(1)
    assert allowed(matcher) == before
    assert not matcher.advance(ord("x"))
    assert allowed(matcher) == before


def test_rollback_restores_every_mask(backend: XgrammarBackend) -> None:
    rng = random.Random(1)
    matcher = compiled(backend, GrammarKind.JSON_OBJECT, "").matcher()
    masks = []
    for _ in range(60):
        masks.append(allowed(matcher))
        assert matcher.advance(rng.choice(sorted(masks[-1] - {STOP} or masks[-1])))
        if allowed(matcher) <= {STOP}:
            break
    while masks:
        num_tokens = min(rng.randint(1, 7), len(masks))
        matcher.rollback(num_tokens)
        assert allowed(matcher) == masks[-num_tokens]
        del masks[-num_tokens:]


def test_a_fork_goes_on_by_itself(backend: XgrammarBackend) -> None:
    matcher = compiled(backend, GrammarKind.REGEX, "a(b|c)d").matcher()
    assert matcher.advance(ord("a"))
    fork = matcher.fork()
    assert fork.advance(ord("b"))
    assert allowed(fork) == {ord("d")}
    assert matcher.advance(ord("c"))
    fork.rollback(2)
    assert allowed(fork) == {ord("a")} | {token_id for token_id, text in TEXTS if text == b"ab"}
    assert allowed(matcher) == {ord("d")}


def test_forced_tokens_are_what_the_mask_leaves_and_change_nothing(backend: XgrammarBackend) -> None:
    matcher = compiled(backend, GrammarKind.REGEX, "xyz(a|b)").matcher()
    assert matcher.forced_tokens() == [ord("x"), ord("y"), ord("z")]
    assert allowed(matcher) == {ord("x")}
    for token_id in matcher.forced_tokens():
        assert matcher.advance(token_id)
    assert matcher.forced_tokens() == []
    assert matcher.advance(ord("a"))
    assert matcher.finished
    assert matcher.forced_tokens() == []


def test_white_space_is_bounded_by_default_and_the_clients_own_is_honoured(backend: XgrammarBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}
    grammar = schema_grammar(backend, schema)
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', json.dumps({"a": [1, 2]}, indent=4)):
        assert takes(grammar, text)
    for text in ('{"a":  [1,2]}', '{\n\n"a":[1]}', "{\n" + " " * 41 + '"a":[1]}', '{"a" :[1]}', '{"a":[1\n,2]}', '{\n \t"a":[1]}'):
        assert not takes(grammar, text)
    compact = schema_grammar(backend, schema, whitespace_pattern="")
    assert takes(compact, '{"a":[1,2]}')
    assert not takes(compact, '{"a": [1,2]}')
    assert takes(schema_grammar(backend, schema, whitespace_pattern=" {0,2}"), '{  "a"  :[1, 2]}')


TREE = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[a-c]+$"}, "children": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["name"],
    "additionalProperties": {"type": "integer", "minimum": 3},
}


@pytest.mark.parametrize(
    ("schema", "accepted", "refused"),
    [
        (TREE, ['{"name":"ab","children":[{"name":"c"}],"x":3}', '{"name":"a","nam":7,"names":8}'], ['{"name":"d"}', '{"name":"a","x":2}']),
        (TREE, [], ['{"name":"a","name":3}', '{"name":"a","children":3}', '{"children":[],"name":"a"}', '{"x":3}']),
        ({"properties": {"a": {}}, "type": "object"}, ["{}", '{"a":[null,{"b":1.5}]}'], ['{"b":1}', '{"a":}']),
        ({"properties": {"a": True}, "required": ["b"], "type": "object"}, ['{"b":1}', '{"a":0,"b":[]}'], ['{"a":1}', '{"b":1,"c":1}']),
        ({"prefixItems": [{"type": "null"}, {"const": 1}], "type": "array"}, ["[]", "[null]", '[null,1,"x"]'], ["[1]", "[null,2]"]),
        ({"prefixItems": [{"type": "null"}], "items": False, "minItems": 1, "type": "array"}, ["[null]"], ["[]", "[null,null]"]),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
            ["[true,true]"],
            ["[true]", "[true" + ",true" * 3 + "]"],
        ),
        ({"oneOf": [{"type": "string", "maxLength": 1}, {"type": "integer"}]}, ['"é"', "12"], ['"ab"', "1.5"]),
        ({"enum": ["北京", {"a": [1]}]}, ['"北京"', '{"a":[1]}'], ['"北"', '{"a":1}']),
        ({"type": "object", "patternProperties": {}, "maxProperties": 2}, [], []),
    ],
)
def test_a_schema_takes_its_instances_and_no_others(backend: XgrammarBackend, schema: Any, accepted: list[str], refused: list[str]) -> None:
    if not accepted and not refused:
        assert refusal(backend, GrammarKind.JSON_SCHEMA, json.dumps(schema)).param == "guided.patternProperties"
        return
    grammar = schema_grammar(backend, schema)
    assert [text for text in accepted if not takes(grammar, text)] == []
    assert [text for text in refused if takes(grammar, text)] == []


@pytest.mark.parametrize(
    ("keywords", "path"),
    [
        ({"type": "number", "multipleOf": 2}, "multipleOf"),
        ({"type": "number", "minimum": 0.5}, "minimum"),
        ({"type": "string", "pattern": "(?=a)b"}, "pattern"),
        ({"type": "string", "pattern": "(x{1000}){1000}"}, "pattern"),
        ({"type": "string", "pattern": "a", "maxLength": 3}, "maxLength"),
        ({"type": "string", "format": "email"}, "format"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "patternProperties": {"a": {}}}, "patternProperties"),
        ({"type": "object", "propertyNames": {"maxLength": 2}}, "propertyNames"),
        ({"type": "object", "minProperties": 1}, "minProperties"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "if": {}}, "if"),
        ({"not": {"type": "null"}, "type": "string"}, "not"),
        ({"anyOf": [{"type": "null"}], "type": "object"}, "type"),
        ({"oneOf": [{"type": "string"}, {"maxLength": 2}]}, "oneOf"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_path_and_left_out_where_lenient(
    backend: XgrammarBackend, keywords: dict[str, Any], path: str
) -> None:
    schema = {"type": "object", "properties": {"v": keywords}, "required": ["v"]}
    assert refusal(backend, GrammarKind.JSON_SCHEMA, json.dumps(schema)).param == f"guided.properties.v.{path}"
    grammar = schema_grammar(backend, schema, is_lenient=True)
    assert len(grammar.warnings) == 1
    assert "guided.properties.v." in grammar.warnings[0]


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        (GrammarKind.REGEX, "a(?=b)", "position 1"),
        (GrammarKind.CHOICE, "[]", "non-empty"),
        (GrammarKind.LARK, 'start: "a"', "Lark"),
        (GrammarKind.GBNF, 'root ::= "a" | b', "line 1, column 16"),
        (GrammarKind.GBNF, 'root ::= "Token(1)" [(=]\n  Token(277)', "line 2, column 3"),
        (GrammarKind.GBNF, 'root ::= "a" (="b")', "look-ahead"),
        (GrammarKind.JSON_SCHEMA, json.dumps({"properties": {f"p{i}": {} for i in range(1501)}}), "1500 properties"),
        (GrammarKind.JSON_SCHEMA, '{"$ref": "#"}', "never ends"),
        (GrammarKind.JSON_SCHEMA, '{"properties": {"a": {"$ref": "#"}}, "required": ["a"]}', "never ends"),
    ],
)
def test_a_refusal_says_where(backend: XgrammarBackend, kind: GrammarKind, text: str, said: str) -> None:
    assert said in refusal(backend, kind, text).message


def test_a_grammar_of_the_clients_own_recurs(backend: XgrammarBackend) -> None:
    grammar = compiled(backend, GrammarKind.GBNF, 'root ::= "(" root ")" | [a-c]? # nested')
    assert takes(grammar, "((b))")
    assert takes(grammar, "")
    assert not takes(grammar, "((b)")


def test_a_structure_is_its_parts_in_order_and_its_markers_are_tokens(backend: XgrammarBackend) -> None:
    call = structure.Sequence(
        (
            structure.Marker("<call>"),
            structure.Value(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')),
            structure.Marker("</call>"),
        )
    )
    spec = GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure.Repeat(call, 1, 2))
    matcher = backend.compile(spec).matcher()
    assert allowed(matcher) == {CALL_ID}
    for token_id in (CALL_ID, *b"12</call>"):
        assert matcher.advance(token_id)
    assert allowed(matcher) == {CALL_ID, STOP}
    assert not matcher.advance(ord("<"))


def test_a_marker_with_more_than_its_token_is_text_and_the_token(backend: XgrammarBackend) -> None:
    matcher = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure.Marker("a<call>b"))).matcher()
    for token_id in (ord("a"), CALL_ID, ord("b")):
        assert allowed(matcher) == {token_id}
        assert matcher.advance(token_id)
    until = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure.TextUntil("a<call>"))).matcher()
    assert all(until.advance(token_id) for token_id in (*b"a<call>", *b"ba", CALL_ID))
    assert allowed(until) == {STOP}


def test_free_text_ends_before_a_marker_and_text_until_with_the_first(backend: XgrammarBackend) -> None:
    free, until = (
        backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=part))
        for part in (structure.FreeText(("aab", "ba", "<call>")), structure.TextUntil("aab"))
    )

    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(st.text("aab ", max_size=9))
    def check(text: str) -> None:
        assert takes(free, text) == ("aab" not in text and "ba" not in text)
        assert takes(until, text) == ("aab" in text and text.find("aab") == len(text) - 3)

    check()
    either = structure.Either((structure.Literal("x"), structure.TextUntil("<call>")))
    matcher = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=either)).matcher()
    assert CALL_ID in allowed(matcher)
    for token_id in (*b"a <call>", CALL_ID):
        assert matcher.advance(token_id)
    assert matcher.finished


def test_text_until_a_marker_holds_no_other(backend: XgrammarBackend) -> None:
    plain, token, ended = (
        backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=part))
        for part in (
            structure.TextUntil("aab", without=("ba",)),
            structure.TextUntil(CALL, without=("ba",)),
            structure.TextUntil("ba", without=("aab", CALL)),
        )
    )

    @settings(derandomize=True, deadline=None, max_examples=30)
    @given(st.text("aab ", max_size=9))
    def check(text: str) -> None:
        assert takes(plain, text) == (text.find("aab") == len(text) - 3 >= 0 and "ba" not in text)
        assert takes(ended, text) == (text.find("ba") == len(text) - 2 >= 0 and "aab" not in text)
        matcher = token.matcher()
        assert all(map(matcher.advance, (*text.encode(), CALL_ID))) == ("ba" not in text)

    check()


def test_the_plugin_loads_without_torch() -> None:
    program = (
        "import sys, penstock_plugin_xgrammar as plugin;"
        "plugin.register_grammar_backends(lambda name, factory: print(name, factory.__name__));"
        "print(sorted({'torch', 'tvm_ffi', 'transformers', 'xgrammar'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["xgrammar XgrammarBackend", "[]"]
