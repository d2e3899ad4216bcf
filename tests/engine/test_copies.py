"""Answers that are predicted from the free text before them, and what is proposed of them."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.speculation.copies import SequenceRewrite, predicted_answers
from penstock.engine.speculation.proposers import SequenceNgrams
from penstock.engine.text.answer import PreambleParams
from tests.engine.test_preambles import CUE, core_of
from tests.fakes import content, generate, ids, make_request, preamble
from tests.matchers import Grammar, Spelling

GAP = "…"
STRING: dict[str, Any] = {"type": "string"}
INTEGER: dict[str, Any] = {"type": "integer"}


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


ORDER = closed(customer=STRING, unit_price={"type": "number"}, paid={"type": "boolean"})
CALL = {
    "anyOf": [
        closed(name={"const": "look"}, arguments=closed(day=STRING)),
        closed(name={"const": "cal.book"}, arguments=closed(day=STRING, minutes=INTEGER, guests={"type": "array", "items": STRING})),
    ]
}


@pytest.mark.parametrize(
    ("schema", "draft", "expected"),
    [
        (
            ORDER,
            "- **Customer**: Ann Lee.\n- Unit price: 1,250.5 euros\n- paid: True",
            '{"customer": "Ann Lee", "unit_price": 1250.5, "paid": true}',
        ),
        (ORDER, '```json\n{"paid": false, "customer": "A, B"}\n```', f'{{"customer": "A, B", "unit_price": {GAP}, "paid": false}}'),
        (
            CALL,
            "cal.book(day=2026-01-02, minutes=30, guests=['Ann', \"Bob\"])",
            '{"name": "cal.book", "arguments": {"day": "2026-01-02", "minutes": 30, "guests": ["Ann", "Bob"]}}',
        ),
        (
            CALL,
            'cal.book("Monday (first)", 30)',
            f'{{"name": "cal.book", "arguments": {{"day": "Monday (first)", "minutes": 30, "guests": {GAP}}}}}',
        ),
        (CALL, "I look.", f'{{"name": "look", "arguments": {{"day": "{GAP}"}}}}'),
        (closed(answer=INTEGER), "3 boxes of 4 and 2 more: \\boxed{14}", '{"answer": 14}'),
        (closed(label={"enum": ["good", "bad"]}), "Not bad.\nLabel: Good", '{"label": "good"}'),
        (closed(label={"enum": ["good", "bad"]}), "Hm.", f'{{"label": {GAP}}}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": closed(city=STRING)}}, "city: Oslo", '{"city": "Oslo"}'),
        ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a"]}, "a = 1", '{"a": 1}'),
    ],
)
def test_values_are_found_by_their_names(schema: dict[str, Any], draft: str, expected: str) -> None:
    spaced, compact = predicted_answers(json.dumps(schema), draft)
    assert GAP.join(spaced) == expected
    assert GAP.join(compact) == expected.replace(", ", ",").replace(": ", ":") or ", B" in draft


@settings(max_examples=150, deadline=None)
@given(
    st.recursive(
        st.sampled_from([STRING, INTEGER, True, {}, {"enum": []}, {"const": None}, {"type": ["null", "array"]}, {"type": "other"}]),
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("ab"), inner).map(lambda found: closed(**found)),
            st.lists(inner, max_size=2).map(lambda options: {"anyOf": options}),
            inner.map(lambda found: {"$ref": "#/$defs/a", "$defs": {"a": found}}),
        ),
        max_leaves=6,
    ),
    st.text(alphabet="ab:=[]()\"'{},1 \n", max_size=30),
)
def test_any_schema_and_draft_give_json_or_nothing(schema: Any, draft: str) -> None:
    for pieces in predicted_answers(json.dumps(schema), draft):
        assert all(pieces)
        if len(pieces) == 1:
            json.loads(pieces[0])


def rewrite(*spellings: list[list[int]]) -> tuple[list[int], SequenceRewrite]:
    token_ids = [90, 91]
    proposer = SequenceRewrite(token_ids, list(spellings), SequenceNgrams(token_ids, 2))
    assert proposer.read()
    return token_ids, proposer


def proposed(proposer: SequenceRewrite, number: int = 9) -> list[int]:
    assert proposer.read()
    return proposer.propose(number) if proposer.has_guess else []


def test_what_spellings_have_in_common_is_proposed_until_the_answer_shows_which_it_is() -> None:
    token_ids, proposer = rewrite([[1, 2, 3, 4]], [[1, 2, 5, 6]])
    assert proposed(proposer) == [1, 2]
    token_ids += [1, 2]
    assert proposed(proposer) == []
    token_ids.append(5)
    assert proposed(proposer) == [6]


def test_nothing_is_proposed_across_an_unknown_value() -> None:
    token_ids, proposer = rewrite([[1, 2], [3, 4, 5]])
    assert proposed(proposer) == [1, 2]
    token_ids += [1, 2, 70]
    assert proposed(proposer) == []
    token_ids += [3, 4]
    assert proposed(proposer) == [5]


def test_an_answer_that_diverges_is_found_again_behind_the_difference() -> None:
    token_ids, proposer = rewrite([[1, 2, 3, 4, 5, 6]], [[1, 7]])
    token_ids += [1, 2, 80]
    assert proposed(proposer) == []
    token_ids += [3, 4]
    assert proposed(proposer, 1) == [5]


def test_a_predicted_answer_takes_few_steps_whatever_its_keys() -> None:
    draft, answer = "city: Oslo", '{"city":"Oslo"}'
    steps = {}
    for schema in (None, json.dumps(closed(city=STRING))):
        core = core_of(draft, answer, rows_for_weights=40.0)
        grammar = Grammar(lambda: Spelling(answer, forces=False))
        deltas = generate(core, make_request(grammar=grammar, preamble=PreambleParams(60, tuple(ids(CUE)), schema)))
        assert (preamble(deltas), content(deltas)) == (draft, answer)
        steps[schema] = core.stats().num_steps - len(draft)
    without, predicted = steps.values()
    assert predicted < without / 2
