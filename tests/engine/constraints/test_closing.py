"""Constrained answers that end within their `max_tokens`, by models that would never end one."""

import itertools
import json
import re
import threading
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from penstock.engine.constraints.closing import MAX_FAILED, MAX_TRIED, AnswerEnds, Closing, shortest_answer
from penstock.engine.constraints.endings import EndingSearch, EndingTokens
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest, UnsupportedGrammar
from penstock.engine.text.answer import PreambleParams
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from penstock.plugins.reasoning.formats import FORMATS
from penstock.serving.messages import conformance
from tests.fakes import (
    EOS,
    TOKENIZER,
    VOCAB_SIZE,
    NextToken,
    content,
    generate,
    ids,
    make_core,
    make_request,
    preamble,
    reasoning,
    saying,
    tokens,
)

VOCABULARY = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})
TEXTS = {"type": "object", "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "texts": {**TEXTS, "required": ["name", "tags"], "additionalProperties": False},
    "numbers": {"type": "array", "items": {"type": "number"}, "minItems": 2},
    "objects": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"value": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
                "required": ["value"],
            }
        },
        "$ref": "#/$defs/node",
    },
    "rows": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"first": {"type": "string"}, "second": {"enum": ["left", "right"]}, "third": {"type": "boolean"}},
            "required": ["first", "second", "third"],
            "additionalProperties": False,
        },
    },
    "anything": {"type": "object"},
}
MODELS = {"text": "abc", "numbers": "0123456789.", "brackets": '[{,"1a:'}


@cache
def backend(make: Callable[[Vocabulary], GrammarBackend]) -> GrammarBackend:
    return make(VOCABULARY)


@cache
def compiled(
    text: str, kind: GrammarKind = GrammarKind.JSON_SCHEMA, by: Callable[[Vocabulary], GrammarBackend] = LlguidanceBackend
) -> CompiledGrammar:
    return backend(by).compile(GrammarSpec(kind, text))


def of_schema(name: str) -> CompiledGrammar:
    return compiled(json.dumps(SCHEMAS[name]))


def endless(liked: str) -> NextToken:
    """A model that likes these characters, others less, and hardly ever what ends a value."""

    def logits(history: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(str(list(history)).encode()))
        logits_V = torch.randn(VOCAB_SIZE, generator=generator)
        logits_V[ids(liked)] += 20
        logits_V[[*ids('"}]'), EOS]] -= 20
        return logits_V

    return logits


def is_whole(deltas: Sequence[SequenceDelta], max_tokens: int, index: int = 0) -> bool:
    """Whether it ended by itself, in time."""
    assert deltas[-1].error is None
    own = [delta for delta in deltas if delta.index == index]
    return own[-1].finish_reason is FinishReason.STOP and len(tokens(deltas, index)) <= max_tokens


CASES = list(itertools.product(SCHEMAS, MODELS))


@pytest.mark.parametrize(("schema", "model"), CASES)
def test_what_would_never_end_is_whole(schema: str, model: str) -> None:
    # Two lengths for each case, and many among all of them.
    core = make_core(endless(MODELS[model]))
    for length in (44, 59):
        max_tokens = length + CASES.index((schema, model))
        free = generate(core, make_request("free", grammar=of_schema(schema), max_tokens=max_tokens))
        kept = generate(core, make_request("kept", grammar=of_schema(schema), max_tokens=max_tokens, ends_within=True))
        assert is_whole(kept, max_tokens), content(kept)
        jsonschema.validate(json.loads(content(kept)), SCHEMAS[schema])
        if is_whole(free, max_tokens):
            assert (content(kept), kept[-1].is_closed) == (content(free), False)
        else:
            assert kept[-1].is_closed
        core.check_integrity()


@pytest.mark.thorough
def test_answers_to_real_schemas_are_whole() -> None:
    lines = (Path(__file__).parents[2] / "cli" / "real_schemas.jsonl").read_text(encoding="utf-8").splitlines()[::2]
    ways = list(itertools.product(MODELS.values(), (60, 150)))
    num_whole = num_cut = 0
    for place, case in enumerate(map(json.loads, lines)):
        schema = json.dumps(case["schema"])
        try:
            grammar = compiled(schema)
        except UnsupportedGrammar:
            continue
        liked, length = ways[place % len(ways)]
        max_tokens = length + 7 * place % 23
        core = make_core(endless(liked), num_blocks=200, max_model_len=400)
        try:
            deltas = generate(core, make_request(grammar=grammar, max_tokens=max_tokens, ends_within=True))
        except InvalidRequest:  # the shortest answer is longer
            continue
        if deltas[-1].finish_reason is FinishReason.LENGTH:
            num_cut += 1
            continue
        assert is_whole(deltas, max_tokens), (case["name"], content(deltas))
        assert conformance(schema, content(deltas)).valid is not False, (case["name"], content(deltas))
        num_whole += 1
    assert num_whole > 30
    assert num_cut < num_whole / 20  # no ending was found: of patterns that bytes have to be found for


@pytest.mark.parametrize("max_tokens", [120, pytest.param(390, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("schema", ["{}", '{"type": "array", "items": {}}'])
def test_brackets_that_are_open_already_count_at_each_look(schema: str, max_tokens: int) -> None:
    core = make_core(endless("["), num_blocks=200, max_model_len=500)
    deltas = generate(core, make_request(grammar=compiled(schema), max_tokens=max_tokens, ends_within=True))
    assert is_whole(deltas, max_tokens), content(deltas)
    json.loads(content(deltas))


def test_an_answer_with_room_is_not_looked_at() -> None:
    """The bound of this schema is far below what is left, so that no ending is searched for and no draft token left unchecked."""
    text = '{"name":"' + "abc " * 20 + '","tags":["x"]}'
    core, looks = make_core(saying(text), num_blocks=200, max_model_len=400), list[int]()
    kept = make_request(grammar=of_schema("texts"), max_tokens=250, ends_within=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Closing, "prepare", lambda closing, matcher: looks.append(closing.num_left))
        assert content(generate(core, kept)) == text
    assert looks == []


def test_within_a_text_an_ending_is_searched_for_once() -> None:
    """What ends the text ends it after each of its tokens: none is in doubt, and drafts are checked to their ends."""
    grammar = of_schema("texts")
    closing, matcher = Closing(replace(shortest_answer(EndingTokens(VOCABULARY), grammar), missing=None), 180), grammar.matcher()
    searches = []
    for token_id in ids('{"name":"x","tags":["' + 120 * "y"):
        if closing.is_due:
            searches.append(closing.num_left)
            closing.prepare(matcher)
        assert matcher.advance(token_id)
        assert closing.may_end_after(matcher, token_id)
        closing.took(token_id)
    assert len(searches) <= 2, searches


def test_few_endings_are_searched_for_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each search takes up to a tenth of a second, and a model may begin another text at each place."""
    found, find = list[bool](), Closing._find

    def counted(closing: Closing, matcher: GrammarMatcher, limit: int) -> Any:
        ending = find(closing, matcher, limit)
        found.append(ending is not None and len(ending) <= limit)
        return ending

    monkeypatch.setattr(Closing, "_find", counted)
    properties: dict[str, Any] = {f"p{number}": {"type": "array", "items": {"type": "string"}} for number in range(12)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    grammar = compiled(json.dumps(schema))
    max_tokens = shortest_answer(EndingTokens(VOCABULARY), grammar).num_tokens + 3
    ways: list[dict[str, Any]] = [{}, {"repetition_detection": {"max_pattern_size": 2, "min_count": 3}}]
    for way in ways:
        found.clear()
        core = make_core(endless('["b'), num_blocks=200, max_model_len=400)
        deltas = generate(core, make_request(grammar=grammar, max_tokens=max_tokens, ends_within=True, **way))
        assert is_whole(deltas, max_tokens)
        jsonschema.validate(json.loads(content(deltas)), schema)
        assert found.count(False) == MAX_FAILED


@pytest.mark.parametrize("room", [0, 1, 5])
def test_an_answer_that_ends_in_time_is_not_changed(room: int) -> None:
    text = '{"name":"a }]\\" b","tags":["x","","yz"]}'
    core = make_core(saying(text))
    for max_tokens in (len(text) + room, 150):
        deltas = generate(core, make_request(grammar=of_schema("texts"), max_tokens=max_tokens, ends_within=True))
        assert content(deltas) == text
        assert (deltas[-1].finish_reason, deltas[-1].is_closed) == (FinishReason.STOP, False)


@pytest.mark.parametrize(
    ("kind", "text", "by", "pattern"),
    [
        (GrammarKind.REGEX, "[abc]+(-[0-9]{3})?!", LlguidanceBackend, "[abc]+(-[0-9]{3})?!"),
        (GrammarKind.REGEX, "[abc]+(-[0-9]{3})?!", OutlinesCoreBackend, "[abc]+(-[0-9]{3})?!"),
        (GrammarKind.CHOICE, '["abcabcabcabcabcabcabcabcabcabc", "b", "abc"]', OutlinesCoreBackend, "b|abc|(abc){10}"),
        (GrammarKind.LARK, 'start: ("a" | "b")+ end\nend: "." | "c"+ "!"', LlguidanceBackend, r"[ab]+(\.|c+!)"),
        (GrammarKind.GBNF, 'root ::= "a" ("b" | "c")* "0" [1-9]{2}', LlguidanceBackend, "a[bc]*0[1-9]{2}"),
        (GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "string", "maxLength": 30}}', OutlinesCoreBackend, r"(?s)\[.*\]"),
    ],
)
def test_constraints_of_every_kind_end(kind: GrammarKind, text: str, by: Callable[[Vocabulary], GrammarBackend], pattern: str) -> None:
    for max_tokens in (8, 9, 17, 28):
        core = make_core(endless("abc"))
        deltas = generate(core, make_request(grammar=compiled(text, kind, by), max_tokens=max_tokens, ends_within=True))
        assert is_whole(deltas, max_tokens)
        assert re.fullmatch(pattern, content(deltas))


@pytest.mark.parametrize("options", [{"rows_for_weights": 8.0}, {"is_async": True}, {"grace": 0.0}, {"num_slots": 8}, {"num_blocks": 56}])
def test_drafts_overlap_late_masks_and_states_change_nothing(options: dict[str, Any]) -> None:
    assert answers(**options) == plain_answers()


def answers(**options: Any) -> list[str]:
    """Two sampled ones to each of some schemas, in one batch."""
    core = make_core(endless("ab"), **options)
    requests = [
        make_request(name, grammar=of_schema(name), max_tokens=42 + number, ends_within=True, temperature=1.0, seed=number, n=2)
        for number, name in enumerate(("texts", "objects", "rows"))
    ]
    for request in requests:
        core.add(request)
    deltas: dict[str, list[SequenceDelta]] = {}
    while core.has_work:
        for request_id, new in core.step().items():
            deltas.setdefault(request_id, []).extend(new)
        core.check_integrity()
    for request in requests:
        for index in (0, 1):
            assert is_whole(deltas[request.request_id], request.params.max_tokens or 0, index)
    return [content(deltas[request.request_id], index) for request in requests for index in (0, 1)]


@cache
def plain_answers() -> list[str]:
    return answers()


def test_a_limit_below_the_shortest_answer_is_refused() -> None:
    core = make_core(endless("abc"))
    shortest = len('{"name":"","tags":[]}')
    with pytest.raises(InvalidRequest, match=f"takes {shortest}") as refused:
        core.add(make_request(grammar=of_schema("texts"), max_tokens=shortest - 1, ends_within=True))
    assert refused.value.param == "max_tokens"
    deltas = generate(core, make_request(grammar=of_schema("texts"), max_tokens=shortest, ends_within=True))
    assert content(deltas) == '{"name":"","tags":[]}'


@pytest.mark.parametrize("given", [{"bad_words": ("x",)}, {"allowed_token_ids": (1,)}])
def test_what_may_forbid_an_ending_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        make_core().add(make_request(grammar=of_schema("texts"), ends_within=True, **given))
    assert refused.value.param == next(iter(given))


def test_where_no_ending_is_found_an_answer_is_cut() -> None:
    """Which of a thousand texts leads to the end, no mask tells."""
    grammar = compiled("[a-z]*wxyz[a-z]*", GrammarKind.REGEX)
    deltas = generate(make_core(endless("abc")), make_request(grammar=grammar, max_tokens=5, ends_within=True))
    assert (deltas[-1].finish_reason, deltas[-1].is_closed) == (FinishReason.LENGTH, False)


def test_what_precedes_the_answer_leaves_room_for_it() -> None:
    shortest = len('{"name":"","tags":[]}')
    for max_tokens in (shortest + 2, 40, 60):
        core = make_core(endless("abc"))
        request = make_request(
            grammar=of_schema("texts"), max_tokens=max_tokens, ends_within=True, preamble=PreambleParams(1000, tuple(ids("=>")))
        )
        deltas = generate(core, request)
        assert is_whole(deltas, max_tokens)
        assert len(preamble(deltas)) >= max_tokens - shortest - 3
        assert json.loads(content(deltas)).keys() == {"name", "tags"}
        reasoned = make_request(
            grammar=of_schema("texts"), max_tokens=max_tokens, ends_within=True, parser=FORMATS["deepseek_r1"], tail="<think>\n"
        )
        deltas = generate(core, reasoned)
        assert is_whole(deltas, max_tokens)
        assert json.loads(content(deltas)).keys() == {"name", "tags"}
        assert len(reasoning(deltas)) >= max_tokens - shortest - 2


def test_it_takes_hardly_any_steps_more_where_the_answer_ends_in_time() -> None:
    """Drafts are accepted as without it: in free text, where no ending is looked for, and in the answer, where that is seldom."""
    draft, cue = "one two three four five six seven one two three four five six seven", "=>"
    answer = json.dumps({"name": draft, "tags": [draft]}, separators=(",", ":"))

    def next_token(token_ids: Sequence[int]) -> int:
        said = list(token_ids[1:])
        begun = said[len(draft) : len(draft) + len(cue)] == ids(cue)
        text, number = (answer, len(said) - len(draft) - len(cue)) if begun else (draft, len(said))
        return [*ids(text), EOS][min(number, len(ids(text)))]

    def num_steps(**options: Any) -> int:
        core = make_core(next_token, rows_for_weights=8.0, num_blocks=300, max_model_len=600)
        request = make_request(grammar=of_schema("texts"), preamble=PreambleParams(300, tuple(ids(cue))), max_tokens=500, **options)
        assert content(generate(core, request)) == answer
        return core.stats().num_steps

    assert num_steps(ends_within=True) <= num_steps() + len(answer) // 16


def test_pressure_counts_what_is_masked_for_the_end() -> None:
    """Every letter is likely, the full stop is not, and in the end nothing but the full stop is left."""
    grammar = compiled("[abc]+[.]", GrammarKind.REGEX)
    core = make_core(endless("abc"))

    def nats(**fields: Any) -> list[float]:
        deltas = generate(core, make_request(grammar=grammar, max_tokens=12, measures_pressure=True, **fields))
        found = [nats for delta in deltas for _, nats in delta.pressures]
        assert len(found) == len(tokens(deltas)) == 12
        return found

    *others, last = nats(ends_within=True)
    assert others == pytest.approx(nats()[:-1])
    assert last > 15


def test_with_seeds_the_tokens_that_leave_an_end_keep_their_proportions() -> None:
    """`c` and `d` lead too far. A draw that used the number again with which they were drawn would prefer what is beside them."""
    logits_V = torch.full((VOCAB_SIZE,), -100.0)
    logits_V[ids("abcd")] = torch.tensor([0.3, 0.1, 0.4, 0.2]).log()
    grammar = compiled("a|b|cxxx|dxxx", GrammarKind.REGEX)
    core = make_core(lambda history: logits_V)
    counts: Counter[str] = Counter()
    for seed in range(50):
        request = make_request(grammar=grammar, max_tokens=1, ends_within=True, temperature=1.0, seed=8 * seed, n=8)
        deltas = generate(core, request)
        counts.update(content(deltas, index) for index in range(8))
    assert counts.keys() == {"a", "b"}
    assert counts["a"] / counts.total() == pytest.approx(0.75, abs=0.07)


SHORTEST = [
    ({"type": "integer"}, "0"),
    ({"type": "array", "items": {"type": "array", "minItems": 1}, "minItems": 2}, "[[0],[0]]"),
    ({"enum": ["abcd", "abce", "b", "bcd"]}, '"b"'),
    ({"type": "string", "minLength": 5}, '"aaaaa"'),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}, '"AA-000"'),
    (
        {
            "anyOf": [
                {"type": "object", "properties": {"kind": {"const": "long"}, "n": {"type": "integer"}}, "required": ["kind", "n"]},
                {"type": "null"},
            ]
        },
        "null",
    ),
    ({"properties": {"a": {"const": "x"}, "b": {"type": "boolean"}, "c": {}}, "required": ["b"], "type": "object"}, '{"b":true}'),
]


def test_the_loop_tries_few_endings_behind_a_token() -> None:
    """Within a text every ending of hundreds of tokens goes on as far as it goes, and ends nothing."""
    item = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    grammar = compiled(json.dumps({"type": "array", "items": item, "minItems": 200}))
    end = AnswerEnds(lambda: VOCABULARY).of(grammar)
    closing, matcher = Closing(end, end.num_tokens + 60), grammar.matcher()
    closing.prepare(matcher)
    num_taken = 0
    for token_id in ids('["'):
        assert matcher.advance(token_id)
        before = closing._search.num_tried
        if closing.may_end_after(matcher, token_id):
            closing.took(token_id)
            num_taken += 1
        assert closing._search.num_tried - before < 2 * MAX_TRIED
    assert num_taken == 1


def test_a_long_ending_is_kept_once() -> None:
    """Not each of its four thousand ends: the memory would be its square, for every sequence."""
    grammar = compiled('{"type": "array", "items": {"type": "integer"}, "minItems": 1990}')
    end = AnswerEnds(lambda: VOCABULARY).of(grammar)
    assert end.num_tokens == 3981
    tracemalloc.start()
    try:
        Closing(end, 4500)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_wrong_guess_is_searched_for() -> None:
    grammar = Guessed(compiled('{"type": "array", "items": {"type": "integer"}, "minItems": 1}'), '{"type": "string"}')
    ending = shortest_answer(EndingTokens(VOCABULARY), grammar).shortest
    assert ending is not None
    assert TOKENIZER.decode([token_id for token_id in ending if token_id != EOS], skip_special_tokens=True) == "[0]"


def test_answers_to_several_grammars_are_searched_for_at_once_and_to_each_once() -> None:
    """Each search waits until all have begun."""
    together = threading.Barrier(3, timeout=30)
    grammars = [Guessed(compiled('{"type": "boolean"}'), None, together) for _ in range(3)]
    ends = AnswerEnds(lambda: VOCABULARY)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(ends.of, grammars * 2))
    assert found[:3] == found[3:]
    assert [grammar.num_matchers for grammar in grammars] == [1, 1, 1]


@dataclass
class Comparable(CompiledGrammar):
    """A plug-in's grammar that has no hash."""

    grammar: CompiledGrammar
    num_bytes: int = 1

    def matcher(self) -> GrammarMatcher:
        return self.grammar.matcher()


def test_the_end_of_a_grammar_is_kept_as_long_as_the_grammar() -> None:
    ends = AnswerEnds(lambda: VOCABULARY)
    grammars = [Comparable(compiled(schema)) for schema in ('{"type": "boolean"}', '{"const": 1}')]
    assert [ends.of(grammar).num_tokens for grammar in grammars] == [4, 1]
    assert ends.of(grammars[1]) is ends.of(grammars[1])
    assert len(ends._by_grammar) == 2
    del grammars[0]
    assert len(ends._by_grammar) == 1


class Guessed(CompiledGrammar):
    """Another grammar with a schema of its own. Its matchers are made where others are, too."""

    num_bytes = 1

    def __init__(self, grammar: CompiledGrammar, schema: str | None, together: threading.Barrier | None = None) -> None:
        self.schema = schema
        self.num_matchers = 0
        self._grammar, self._together = grammar, together

    def matcher(self) -> GrammarMatcher:
        self.num_matchers += 1
        if self._together is not None:
            self._together.wait()
        return self._grammar.matcher()


@pytest.mark.parametrize(("schema", "expected"), SHORTEST)
def test_the_search_finds_the_shortest_text(schema: Any, expected: str) -> None:
    search = EndingSearch(EndingTokens(VOCABULARY))
    matcher = compiled(json.dumps(schema)).matcher()
    ending = search.find(matcher, 0)
    assert ending is not None
    assert search.ends(matcher, ending)
    text = TOKENIZER.decode([token_id for token_id in ending if token_id != EOS], skip_special_tokens=True)
    jsonschema.validate(json.loads(text), schema)
    assert len(text) == len(expected)
