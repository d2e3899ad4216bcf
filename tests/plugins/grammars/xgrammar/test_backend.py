import importlib.util
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

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarBackend, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.request import Request
from penstock.engine.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, TextUntil, Value
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from penstock.plugins.grammars.xgrammar.backend import XgrammarBackend
from penstock.plugins.grammars.xgrammar.matcher import XgrammarGrammar
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE, content, drive, generate, make_core, make_request, runner_of, tokens
from tests.plugins.grammars.grammar_walks import SPECIAL, STOPS, VOCABULARY, accepts, allowed, check_forks, patterns, subjects

MARKED = Vocabulary(
    VOCABULARY.token_bytes, VOCABULARY.size, VOCABULARY.stop_token_ids, "with a marker", added_token_ids={"<call>": SPECIAL[0]}
)
FAKE = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})


@pytest.fixture(scope="module")
def backend() -> Iterator[XgrammarBackend]:
    backend = XgrammarBackend(MARKED)
    yield backend
    backend.compiler.close()


def compiled(backend: XgrammarBackend, kind: GrammarKind, text: str, **options: Any) -> XgrammarGrammar:
    return backend.compile(GrammarSpec(kind, text, "guided", **options))


def schema_grammar(backend: XgrammarBackend, schema: Any, **options: Any) -> XgrammarGrammar:
    return compiled(backend, GrammarKind.JSON_SCHEMA, json.dumps(schema), **options)


def takes(grammar: XgrammarGrammar, text: str) -> bool:
    return accepts(grammar, text, random.Random(0))


def refusal(backend: XgrammarBackend, kind: GrammarKind, text: str) -> UnsupportedGrammar:
    with pytest.raises(UnsupportedGrammar) as caught:
        compiled(backend, kind, text)
    assert len(caught.value.message) < 300
    return caught.value


def test_a_regex_accepts_exactly_what_fullmatch_does(backend: XgrammarBackend) -> None:
    @settings(max_examples=80)
    @given(patterns, st.lists(subjects, min_size=1, max_size=8))
    def check(pattern: str, texts: list[str]) -> None:
        grammar = compiled(backend, GrammarKind.REGEX, pattern)
        for text in texts:
            assert takes(grammar, text) == bool(re.fullmatch(pattern, text)), (pattern, text)

    check()


def test_special_tokens_and_the_text_of_a_stop_token_never_match(backend: XgrammarBackend) -> None:
    matcher = schema_grammar(backend, {"type": "string"}).matcher()
    for byte in '"a字<end'.encode():
        assert matcher.advance(byte)
        assert not allowed(matcher) & {*SPECIAL, *STOPS}
        assert not any(matcher.advance(token_id) for token_id in (*SPECIAL, *STOPS, VOCABULARY.size, -1))


def test_nothing_is_allowed_after_a_stop_token_until_it_is_taken_back(backend: XgrammarBackend) -> None:
    matcher = compiled(backend, GrammarKind.REGEX, "a+").matcher()
    assert not matcher.advance(max(STOPS))
    assert matcher.advance(ord("a"))
    before = allowed(matcher)
    assert before > STOPS
    assert not matcher.finished
    assert matcher.advance(max(STOPS))
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
        assert matcher.advance(rng.choice(sorted(masks[-1] - STOPS or masks[-1])))
        if allowed(matcher) <= STOPS:
            break
    while masks:
        num_tokens = min(rng.randint(1, 7), len(masks))
        matcher.rollback(num_tokens)
        assert allowed(matcher) == masks[-num_tokens]
        del masks[-num_tokens:]


def test_a_fork_goes_on_by_itself(backend: XgrammarBackend) -> None:
    check_forks(compiled(backend, GrammarKind.JSON_OBJECT, "").matcher())


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
    call = Sequence((Marker("<call>"), Value(GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "integer"}')), Marker("</call>")))
    spec = GrammarSpec(GrammarKind.STRUCTURE, "", structure=Repeat(call, 1, 2))
    matcher = backend.compile(spec).matcher()
    assert allowed(matcher) == {SPECIAL[0]}
    for token_id in (SPECIAL[0], *b"12</call>"):
        assert matcher.advance(token_id)
    assert allowed(matcher) == {SPECIAL[0], *STOPS}
    assert not matcher.advance(ord("<"))


def test_a_marker_with_more_than_its_token_is_text_and_the_token(backend: XgrammarBackend) -> None:
    matcher = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=Marker("a<call>b"))).matcher()
    for token_id in (ord("a"), SPECIAL[0], ord("b")):
        assert allowed(matcher) == {token_id}
        assert matcher.advance(token_id)
    until = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=TextUntil("a<call>"))).matcher()
    assert all(until.advance(token_id) for token_id in (*b"a<call>", *b"ba", SPECIAL[0]))
    assert allowed(until) == set(STOPS)


def test_free_text_ends_before_a_marker_and_text_until_with_the_first(backend: XgrammarBackend) -> None:
    free, until = (
        backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=part))
        for part in (FreeText(("aab", "ba", "<call>")), TextUntil("aab"))
    )

    @settings(max_examples=60)
    @given(st.text("aab ", max_size=9))
    def check(text: str) -> None:
        assert takes(free, text) == ("aab" not in text and "ba" not in text)
        assert takes(until, text) == ("aab" in text and text.find("aab") == len(text) - 3)

    check()
    either = Either((Literal("x"), TextUntil("<call>")))
    matcher = backend.compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=either)).matcher()
    assert SPECIAL[0] in allowed(matcher)
    for token_id in (*b"a <call>", SPECIAL[0]):
        assert matcher.advance(token_id)
    assert matcher.finished


class Here:
    """Compiles in this process, over the vocabulary of the fake model."""

    def compile(self, ebnf: str) -> Any:
        import xgrammar

        tokens = [token or b"" for token in FAKE.token_bytes]
        info = xgrammar.TokenizerInfo(tokens, vocab_size=FAKE.size, stop_token_ids=[EOS])
        return xgrammar.GrammarCompiler(info, max_threads=1).compile_grammar(xgrammar.Grammar.from_ebnf(ebnf))


def test_three_backends_share_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each fills its own rows of the one mask, and no row says anything else than alone."""
    backends: list[GrammarBackend] = [XgrammarBackend(FAKE), LlguidanceBackend(FAKE), OutlinesCoreBackend(FAKE)]
    monkeypatch.setattr(backends[0], "compiler", Here())
    schema = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"enum": ["字", [1, {"a": null}], 22]}')
    regex = GrammarSpec(GrammarKind.REGEX, "(ab|c){2,5}é?")
    grammars = [each.compile(spec) for spec in (schema, regex) for each in backends]

    def request(number: int) -> Request:
        grammar = grammars[number % 7] if number % 7 < 6 else None
        return make_request(str(number), "?" * (1 + number % 3), grammar=grammar, temperature=1.5, seed=number, max_tokens=60)

    together, alone = make_core(num_blocks=500, max_num_seqs=32), make_core()
    for number in range(28):
        together.add(request(number))
    said = drive(together)
    for number in range(28):
        assert tokens(said[str(number)]) == tokens(generate(alone, request(number)))
    of_schema, of_regex = ({content(said[str(number)]) for number in range(28) if number % 7 in kind} for kind in ((0, 1, 2), (3, 4, 5)))
    assert {text.replace(" ", "") for text in of_schema} <= {'"字"', '[1,{"a":null}]', "22"}
    assert all(re.fullmatch("(ab|c){2,5}é?", text) for text in of_regex)
    assert len(of_regex) > 1
    for core in (together, alone):
        runner_of(core).shutdown()


def test_without_the_library_a_request_is_told_what_to_install(backend: XgrammarBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "pip install 'penstock[xgrammar]'" in refusal(backend, GrammarKind.CHOICE, '["a"]').message


def test_the_plugin_loads_without_the_library() -> None:
    program = (
        "import sys; sys.modules['xgrammar'] = None;"
        "import penstock.plugins.grammars.xgrammar.backend as plugin;"
        "plugin.register_grammar_backends(lambda name, factory: print(name, factory.__name__));"
        "print(sorted({'torch', 'tvm_ffi', 'transformers'} & sys.modules.keys()))"
    )
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == ["xgrammar XgrammarBackend", "[]"]
