"""How JSON answers go on, as their schema and the free text before them say, and what is proposed of it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.speculation import copies
from penstock.engine.speculation.completions import (
    MAX_COPIED_TOKENS,
    MAX_PROPOSED_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    AnswerCompletion,
    Completion,
    SequenceCompletion,
    dates,
    proposer_of_copies,
)
from penstock.engine.speculation.copies import DraftReader, SequenceCopy, place_after
from penstock.engine.speculation.proposers import SequenceDraft, SequenceNgrams, draft_of
from penstock.engine.text.answer import PreambleParams
from tests.engine.constraints.test_preambles import CUE, core_of
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
        (closed(label={"enum": ["good", "bad"]}), "Hm.", f'{{"label": "{GAP}"}}'),
        (closed(id=INTEGER, label={"enum": ["good", "bad"]}), "id: 5, not so good", '{"id": 5, "label": "good"}'),
        ({"$ref": "#/$defs/a", "$defs": {"a": closed(city=STRING)}}, "city: Oslo", '{"city": "Oslo"}'),
        ({"type": "object", "properties": {"a": INTEGER, "b": INTEGER}, "required": ["a"]}, "a = 1", '{"a": 1}'),
    ],
)
def test_values_are_found_by_their_names(schema: dict[str, Any], draft: str, expected: str) -> None:
    """Up to the first that is not found; and behind that, once the answer has it, whichever separators it has."""
    for separators in (None, (",", ":")):
        written = json.dumps(json.loads(expected.replace(GAP, "0")), separators=separators, ensure_ascii=False)
        before, _, after = expected.partition(GAP)
        assert AnswerCompletion(json.dumps(schema), draft).after("").text == before
        head = written[: len(written) - len(after)] if separators is None else written
        assert written.startswith(head + AnswerCompletion(json.dumps(schema), draft).after(head).text)


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
def test_any_schema_draft_and_beginning_are_read(schema: Any, draft: str) -> None:
    completion = AnswerCompletion(json.dumps(schema), draft)
    whole = completion.after("").text
    for place in range(len(whole) + 1):
        assert completion.after(whole[:place]).text == whole[place:]
    for place in range(len(draft)):
        assert isinstance(completion.after(draft[place:]).text, str)


DRAFT = "Ann Lee ordered on 3 May 2026 from Utrecht: 12 lamps, express."
QUESTION = "The code is K-7731."
MIXED = closed(
    city=STRING,
    amount=INTEGER,
    when={"type": "string", "format": "date"},
    code=STRING,
    speed={"enum": ["slow", "express", "extra"]},
    gift={"type": "boolean"},
)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ('{"city": "', ""),
        ('{"city": "Utr', 'echt", "amount": '),
        ('{"city":"Utr', 'echt","amount":'),
        ('{"city": "Utrecht", "amount": 1', '2, "when": "'),
        ('{"city": "", "amount": 7, "when": "2', '026-05-03", "code": "'),
        ('{"city": "", "amount": 7, "when": "", "code": "K-', '7731", "speed": "express", "gift": '),
        ('{"city": "", "amount": 7, "when": "", "code": "", "speed": "ex', 'press", "gift": '),
        ('{"city": "", "amount": 7, "when": "", "code": "", "speed": "s', 'low", "gift": '),
        ('{"city": "", "amount": 7, "when": "", "code": "", "speed": "slow", "gift": t', "rue}"),
        ('{"city": "", "amount": 7, "when": "", "code": "", "speed": "slow", "gift": true', "}"),
        ('{"am', 'ount": '),
        ('{"city": "", "amount": 7, "when": "1999', "-0"),
        ('{"city": "", "amount": 7, "when": "19', ""),
        ('{"city": "", "amount": 7, "when": "1999-12-24', '", "code": "'),
        ('{"city": "x","amount": 7, "when": "2', '026-05-03", "code": "'),
        ('{"city": "x" ,', ' "amount": '),
        ('{"city"] ', ""),
        ("}", ""),
        ("{{}", ""),
    ],
)
def test_what_has_been_written_tells_what_follows(answer: str, expected: str) -> None:
    assert AnswerCompletion(json.dumps(MIXED), DRAFT, QUESTION).after(answer).text == expected


@pytest.mark.parametrize(
    ("begun", "expected"), [("", ""), ("2", "02"), ("20", "2"), ("202", ""), ("2031", "-0"), ("2031-", "0"), ("2031-1", "")]
)
def test_a_date_of_which_nothing_is_known_is_a_usual_one(begun: str, expected: str) -> None:
    schema = json.dumps(closed(when={"type": "string", "format": "date"}))
    assert AnswerCompletion(schema, "some day", "").after(f'{{"when": "{begun}').text == expected


def test_another_function_than_the_draft_s_has_its_own_arguments() -> None:
    completion = AnswerCompletion(json.dumps(CALL), "look('Monday')")
    assert completion.after('{"name": "cal').text == '.book", "arguments": {"day": "'
    behind = completion.after('{"name": "cal.book", "arguments": {"day": "Friday"').text
    assert behind == ', "minutes": '


def test_dates_are_read_in_several_forms() -> None:
    text = "2026-01-02, 3 February 2026, March 4th, 2026, the 5th of Apr 2026, 6 Foo 2026"
    assert list(dates(text)) == ["2026-01-02", "2026-02-03", "2026-03-04", "2026-04-05"]


class Letters:
    """A tokenizer whose tokens are characters."""

    @staticmethod
    def encode(text: str) -> list[int]:
        return list(map(ord, text))

    @staticmethod
    def decode(token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def completing(schema: dict[str, Any], draft: str) -> tuple[list[int], SequenceCompletion]:
    token_ids = [90, 91]
    other = SequenceNgrams(token_ids, 2)
    return token_ids, SequenceCompletion(token_ids, AnswerCompletion(json.dumps(schema), draft), Letters.encode, Letters.decode, other)


def proposed(proposer: SequenceCompletion, number: int = 99) -> str:
    assert proposer.read()
    return Letters.decode(proposer.propose(number)) if proposer.has_guess else ""


def test_an_answer_is_completed_anew_where_it_is_another() -> None:
    token_ids, proposer = completing(closed(city=STRING, size=INTEGER), "city: Oslo\nsize: 3")
    assert proposed(proposer) == '{"city": "Oslo", "size": 3}'
    token_ids += Letters.encode('{"city": "')
    assert proposed(proposer, 4) == "Oslo"
    token_ids += Letters.encode("B")
    assert proposed(proposer) == ""
    token_ids += Letters.encode('asel"')
    assert proposed(proposer) == ', "size": 3}'
    assert not proposer.is_predicted


def test_a_long_answer_is_proposed_part_by_part() -> None:
    names = [f"name number {number}" for number in range(100)]
    token_ids, proposer = completing(closed(names={"type": "array", "items": STRING}), f"names: {names}")
    written, expected = "", json.dumps({"names": names})
    while written != expected:
        part = proposed(proposer, len(expected))
        assert 0 < len(part) <= MAX_PROPOSED_CHARACTERS
        token_ids += Letters.encode(part)
        written += part
        assert expected.startswith(written)


def test_a_lone_surrogate_of_a_draft_is_not_proposed() -> None:
    """No tokenizer encodes it. A draft may have it as an escape, and a list is read as Python's syntax."""
    schema = closed(names={"type": "array", "items": STRING})
    completion = AnswerCompletion(json.dumps(schema), 'names: ["Ann", "\\ud800"]')
    assert completion.after("") == completion.after('{"names": ["Ann"') == Completion()
    assert AnswerCompletion(json.dumps(closed(a={"const": "\ud800"})), "").after('{"') == Completion()


def test_what_is_searched_for_a_completion_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop waits for it."""
    num_calls = 0

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(copies, "place_after", counted(place_after))
    monkeypatch.setattr(DraftReader, "target", counted(DraftReader.target))
    many = {"type": "object", "properties": {f"p{number}": STRING for number in range(1500)}}
    levels = {f"l{level}": {"anyOf": [{"$ref": f"#/$defs/l{level + 1}"}] * 20} for level in range(3)}
    wide = {"$ref": "#/$defs/l0", "$defs": {**levels, "l3": closed(a=STRING)}}
    for schema, answer in ((many, '{"p0": "x'), (wide, '{"a": "x')):
        completion = AnswerCompletion(json.dumps(schema), "no names " * 200)
        for place in range(len(answer) + 1):
            num_calls = 0
            completion.after(answer[:place])
            assert num_calls < (3000 if schema is wide else 100)
    listed = closed(a={"enum": [f"v{number}" for number in range(3000)]})
    assert AnswerCompletion(json.dumps(listed), "").after('{"a": "v29') == Completion()


def test_a_schema_too_long_to_be_read_is_not_completed() -> None:
    def proposer(length: int) -> type[object]:
        schema = json.dumps(closed(a={"const": "x" * length}))
        other = SequenceNgrams([1], 1)
        return type(proposer_of_copies([1], [2], schema, encode=ids, decode=str, other=other, num_prompt_tokens=1))

    assert proposer(9) is SequenceCompletion
    assert proposer(MAX_SCHEMA_CHARACTERS) is SequenceCopy


def test_of_a_long_draft_the_end_is_read() -> None:
    read: list[int] = []

    def decode(token_ids: list[int]) -> str:
        read.append(len(token_ids))
        return Letters.decode(token_ids)

    other, schema = SequenceNgrams([1], 1), json.dumps(closed(city=STRING))
    draft = [*Letters.encode("x" * 2 * MAX_COPIED_TOKENS), *Letters.encode("\ncity: Oslo")]
    proposer = proposer_of_copies([1], draft, schema, encode=Letters.encode, decode=decode, other=other, num_prompt_tokens=1)
    assert max(read) == MAX_COPIED_TOKENS
    assert proposer.read()
    assert Letters.decode(proposer.propose(99)) == '{"city": "Oslo"}'


def test_guesses_have_an_accuracy_of_their_own() -> None:
    token_ids, proposer = completing(closed(city=STRING, size=INTEGER), "From Oslo.")
    proposed(proposer)
    sure = proposer.accuracy
    token_ids += Letters.encode('{"city": "O')
    assert proposed(proposer) == 'slo", "size": '
    assert proposer.accuracy < sure
    assert proposer.accuracy_after(1) > sure
    token_ids += Letters.encode("x")
    proposed(proposer)
    token_ids += Letters.encode('", "size": 3, "city": "O')
    assert proposed(proposer) == 'slo"}'


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


def test_the_proposer_behind_it_is_told_of_the_end_and_takes_a_draft_model_s_tokens() -> None:
    told: list[int] = []

    class Told(SequenceNgrams):
        def end(self, num_known_tokens: int) -> None:
            told.append(num_known_tokens)

    completion = AnswerCompletion(json.dumps(closed(city=STRING)), "")
    SequenceCompletion([1], completion, Letters.encode, Letters.decode, Told([1], 1)).end(7)
    assert told == [7]
    draft = SequenceDraft([1])
    assert draft_of(SequenceCompletion([1], completion, Letters.encode, Letters.decode, draft)) is draft


def test_a_text_that_repeats_itself_is_not_proposed_from_the_draft() -> None:
    token_ids = [7]
    proposer = SequenceCopy(token_ids, [1, 2, 9, 9, 9, 3, 9, 9], SequenceNgrams(token_ids, 1))
    for _ in range(12):
        for token_id in (1, 2, 3, 4):
            token_ids.append(token_id)
            assert proposer.read()
    assert proposer.has_guess
    assert proposer.propose(4) == [1, 2, 3, 4]
    assert proposer.accuracy > 0.9
