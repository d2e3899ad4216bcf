import random
from functools import cache

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import CompiledGrammar, GrammarKind, GrammarSpec, Vocabulary
from penstock.engine.contracts.parsing import CallableTool
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.markers import split_symbols
from penstock.plugins.tools.json_formats import HERMES
from penstock.testing.decoding import accepts, byte_vocabulary, random_answer, split_pieces
from tests.plugins.grammars.structure_texts import ADDED, OBJECT, allows, choice, regex, schema, structures, texts, texts_of

NO_TOKENS: tuple[str, ...] = ()
START, END = "<tool_call>", "</tool_call>"
TOKENS = (START, END)
VOCABULARIES = pytest.mark.parametrize("added", [NO_TOKENS, TOKENS], ids=["text", "tokens"])
UNICODE = "<｜tool▁calls▁begin｜>"

TOOLS = [
    CallableTool(
        "f", schema({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False})
    ),
    CallableTool("fo", schema({"type": "object", "properties": {"y": {"type": "string"}}, "additionalProperties": False})),
    CallableTool('q"字', schema({"type": "object", "additionalProperties": False, "properties": {}})),
]
CALL = f'{START}\n{{"name": "f", "arguments": {{"x":1}}}}\n{END}'
QUOTING = f'{START}\n{{"name": "fo", "arguments": {{"y":"a"}}}}\n{END}'
ESCAPED = f'{START}\n{{"name": "q\\"字", "arguments": {{}}}}\n{END}'
NO_CALLS = [
    f'{START}\n{{"name": "g", "arguments": {{}}}}\n{END}',
    f'{START}\n{{"name": "f", "arguments": {{"y":"a"}}}}\n{END}',
    f'{START}\n{{"name": "f", "arguments": {{"x":1}}}}\n',
    f'{START}\n{{"name": "f", "arguments":  {{"x":1}}}}\n{END}',
    f'{START}\n{{"name": "f", "arguments": {{"x":1}} }}\n{END}',
    START,
]


@cache
def backend(added: tuple[str, ...]) -> tuple[Vocabulary, LlguidanceBackend]:
    vocabulary = byte_vocabulary(added, [START[:5], START[5:], '{"x', "\n{", '":', "}}"])
    return vocabulary, LlguidanceBackend(vocabulary)


def compiled(structure: Structure, added: tuple[str, ...] = ()) -> CompiledGrammar:
    return backend(added)[1].compile(GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=structure))


def allowed(structure: Structure, text: str, added: tuple[str, ...] = ()) -> bool:
    vocabulary = backend(added)[0]
    return accepts(compiled(structure, added).matcher(), vocabulary, split_pieces(text, vocabulary))


def calls(*, is_single: bool = False) -> Structure:
    return HERMES.calls(TOOLS, is_single=is_single)


REQUIRED = Sequence((Marker(START), calls()))
AUTO = Sequence((Repeat(Sequence((TextUntil(START), calls()))), FreeText((START,))))
BESIDE_JSON = Either((Value(schema(OBJECT)), REQUIRED))
ONE_AT_MOST = Either((FreeText((START,)), Sequence((TextUntil(START), calls(is_single=True)))))


@VOCABULARIES
@pytest.mark.parametrize("text", [CALL, QUOTING, ESCAPED, f"{CALL}\n{QUOTING}\n{CALL}"])
def test_calls_are_allowed_wherever_they_may_stand(text: str, added: tuple[str, ...]) -> None:
    assert allowed(REQUIRED, text, added)
    assert allowed(BESIDE_JSON, text, added)
    assert allowed(AUTO, text, added)
    assert allowed(AUTO, f"Hi {text} and {text}.", added)
    is_one = text.count(START) == 1
    assert allowed(ONE_AT_MOST, text, added) == is_one
    assert allowed(ONE_AT_MOST, f"Hi {text}", added) == is_one


@VOCABULARIES
def test_calls_alone_allow_no_text_around_them(added: tuple[str, ...]) -> None:
    for text in ("", "Hi", f"Hi {CALL}", f"{CALL}.", f"{CALL}{CALL}", f"{CALL}\n", f"{CALL}\nHi"):
        assert not allowed(REQUIRED, text, added), text


@VOCABULARIES
@pytest.mark.parametrize("text", NO_CALLS)
def test_what_opens_a_call_has_to_be_one(text: str, added: tuple[str, ...]) -> None:
    for structure in (REQUIRED, AUTO, BESIDE_JSON, ONE_AT_MOST):
        assert not allowed(structure, text, added)
    assert not allowed(AUTO, f"Hi {text}", added)
    assert not allowed(AUTO, f"{CALL}{text}", added)


@VOCABULARIES
def test_text_without_calls_may_end_anywhere(added: tuple[str, ...]) -> None:
    for text in ("", "Hi", " ", START[:-1], f"{END[1:]}{START[:4]}", "字\n\0"):
        assert allowed(AUTO, text, added)
        assert allowed(ONE_AT_MOST, text, added)


@VOCABULARIES
def test_one_at_most_means_that_nothing_follows_a_call(added: tuple[str, ...]) -> None:
    for text in (f"{CALL}\n{CALL}", f"{CALL}.", f"Hi {CALL} {CALL}"):
        assert not allowed(ONE_AT_MOST, text, added)


@VOCABULARIES
def test_a_constraint_beside_calls_is_one_or_the_other(added: tuple[str, ...]) -> None:
    assert allowed(BESIDE_JSON, '{"a":1}', added)
    for text in ("", "Hi", '{"a":"b"}', '{"a":1}' + CALL, CALL + '{"a":1}'):
        assert not allowed(BESIDE_JSON, text, added)


def test_an_opening_that_is_only_quoted_is_text_where_it_is_a_token() -> None:
    vocabulary, _ = backend(TOKENS)
    for structure in (AUTO, ONE_AT_MOST):
        assert accepts(compiled(structure, TOKENS).matcher(), vocabulary, [f"Write {START} and {END}"])
    assert not accepts(compiled(REQUIRED, TOKENS).matcher(), vocabulary, [CALL])


@VOCABULARIES
@pytest.mark.parametrize("structure", [REQUIRED, AUTO, BESIDE_JSON, ONE_AT_MOST])
def test_any_walk_comes_to_an_end_and_is_accepted_again(structure: Structure, added: tuple[str, ...]) -> None:
    vocabulary, _ = backend(added)
    grammar = compiled(structure, added)
    rng = random.Random(1)
    for _ in range(5):
        pieces = random_answer(grammar.matcher(), vocabulary, rng)
        assert accepts(grammar.matcher(), vocabulary, pieces)


def test_other_added_tokens_are_no_text() -> None:
    added = ("<x>", START)
    vocabulary, _ = backend(added)
    grammar = compiled(Sequence((TextUntil(START), FreeText())), added)
    assert accepts(grammar.matcher(), vocabulary, split_pieces(f"a{START}b", vocabulary))
    for text in (f"a<x>{START}b", f"a{START}<x>", f"a{START}b{START}"):
        assert not accepts(grammar.matcher(), vocabulary, split_pieces(text, vocabulary))


@settings(max_examples=70, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(structures, st.sampled_from([(), tuple(sorted(ADDED))]), st.data())
def test_a_structure_allows_what_its_definition_says(structure: Structure, added: tuple[str, ...], data: st.DataObject) -> None:
    try:
        grammar = compiled(structure, added)
    except UnsupportedGrammar:
        assume(False)
    vocabulary = backend(added)[0]
    for text in (data.draw(texts_of(structure)), data.draw(texts_of(structure)), data.draw(texts)):
        symbols = split_symbols(text, frozenset(added))
        assume(len(symbols) <= 25)  # every way to read it is tried
        expected = allows(structure, symbols, frozenset(added))
        assert accepts(grammar.matcher(), vocabulary, split_pieces(text, vocabulary)) == expected, text


@pytest.mark.parametrize(
    "structure",
    [
        Sequence((Value(regex("[0-9]+")), Value(schema({"type": "integer"})))),
        Sequence((Value(schema({"type": "number"})), Literal("5"))),
        Sequence((Value(schema({})), Literal(".5"))),
        Sequence((FreeText(), Value(schema(OBJECT)))),
        Sequence((Value(GrammarSpec(GrammarKind.LARK, 'start: "a"+')), Literal("a"))),
        Either((Value(schema(OBJECT)), Sequence((Literal('{"a"'), Value(schema(OBJECT)))))),
        Either((Value(schema(OBJECT)), Value(schema(OBJECT, None)))),
        Either((Sequence((Value(regex("a+")), Value(schema(OBJECT)))), Sequence((Value(regex("a*b")), Value(schema(OBJECT)))))),
    ],
)
def test_parts_that_cannot_be_told_apart_are_refused(structure: Structure) -> None:
    with pytest.raises(UnsupportedGrammar, match="cannot be told apart"):
        compiled(structure)


@pytest.mark.parametrize(
    ("structure", "text"),
    [
        (Sequence((Value(regex("[0-9]+")), Literal("5"), Value(regex("[0-9]*")))), "155"),
        (Sequence((Value(regex("a*")), FreeText(), Value(choice("a", "ab")))), "aab"),
        (Sequence((Value(schema(OBJECT)), FreeText())), '{"a":1}{}'),
        (Sequence((Value(schema({"type": "integer"})), Literal("px"))), "12px"),
        (Sequence((TextUntil("<a>"), TextUntil("<a>"), Literal(""))), "<a>b<a>"),
        (Sequence(()), ""),
        (Either((Literal(""), Sequence(()))), ""),
        (Repeat(Literal("a"), 0, 0), ""),
        (Repeat(Repeat(Value(schema(OBJECT)), 2, 2)), "{}{}{}{}"),
        (Sequence((Literal('"\\/\n\x7f\u2028😀'), Marker(UNICODE), Value(schema({"type": "null"})))), f'"\\/\n\x7f\u2028😀{UNICODE}null'),
        (Value(GrammarSpec(GrammarKind.STRUCTURE, "", structure=Literal("a"))), "a"),
        (
            Sequence(
                (Value(GrammarSpec(GrammarKind.LARK, 'start: "a"+')), Value(GrammarSpec(GrammarKind.STRUCTURE, "", structure=Sequence(()))))
            ),
            "aa",
        ),
    ],
)
def test_these_are_told_apart(structure: Structure, text: str) -> None:
    assert allowed(structure, text)
    assert not allowed(structure, f"{text}!") or isinstance(structure, Sequence)


def test_text_up_to_one_of_several_markers_takes_the_first_that_comes() -> None:
    arms = [Sequence((TextUntil(f"<{name}>", (f"<{other}>",)), Value(schema(OBJECT)), Literal(name))) for name, other in ("ab", "ba")]
    structure = Sequence((Repeat(Either(tuple(arms))), FreeText(("<a>", "<b>"))))
    assert allowed(structure, "x<a>{}ay<b>{}bz")
    for text in ("x<a>{}b", "x<b>y<a>{}a", "<a>"):
        assert not allowed(structure, text)


def test_a_marker_with_more_than_its_token_is_read_as_parsers_read_it() -> None:
    structure = Sequence((TextUntil(f"\n{START}["), Literal("x")))
    vocabulary, _ = backend(TOKENS)
    assert allowed(structure, f"a\n\n{START}[x", TOKENS)
    assert not allowed(structure, f"a{START}[x", TOKENS)
    assert not accepts(compiled(structure, TOKENS).matcher(), vocabulary, [f"a\n{START}[x"])


def test_a_thousand_alternatives_are_all_there() -> None:
    structure = Either(tuple(Sequence((Literal(f"<{number}>"), Value(schema({"const": number})))) for number in range(1000)))
    grammar = compiled(structure)
    vocabulary, _ = backend(())
    for number in (0, 9, 255, 256, 999):
        assert accepts(grammar.matcher(), vocabulary, [f"<{number}>{number}"])
        assert not accepts(grammar.matcher(), vocabulary, [f"<{number}>{number + 1}"])


@pytest.mark.parametrize(
    ("kind", "source"), [(GrammarKind.LARK, 'start: "a"+ | "(" start ")"'), (GrammarKind.GBNF, 'root ::= [a]+ | "(" root ")"')]
)
def test_a_grammar_inside_a_tag_ends_where_the_tag_does(kind: GrammarKind, source: str) -> None:
    tag = Sequence((TextUntil("<g>"), Value(GrammarSpec(kind, source)), Literal("</g>")))
    structure = Sequence((Repeat(tag), FreeText(("<g>",))))
    assert allowed(structure, "x<g>((aa))</g>y<g>a</g><")
    for text in ("x<g>((aa)</g>", "<g>a", "<g></g>", "<g>a</g><g>"):
        assert not allowed(structure, text)


def test_errors_in_a_value_keep_its_path() -> None:
    bad = GrammarSpec(
        GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {"type": "strange"}}}', "tools[1].function.parameters"
    )
    with pytest.raises(UnsupportedGrammar) as caught:
        compiled(Sequence((Literal("a"), Value(schema(OBJECT)), Value(bad))))
    assert (caught.value.param or "").startswith("tools[1].function.parameters.properties.a")


def test_warnings_come_from_all_values() -> None:
    document = {"type": "object", "not": {"patternProperties": {"b": False}}}
    lenient = [GrammarSpec(GrammarKind.JSON_SCHEMA, schema(document).text, f"tools[{number}]", is_lenient=True) for number in range(2)]
    warnings = compiled(Sequence(tuple(map(Value, lenient)))).warnings
    assert [warning for warning in warnings if "tools[0]" in warning]
    assert [warning for warning in warnings if "tools[1]" in warning]
