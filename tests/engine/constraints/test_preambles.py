"""Free text before a constrained answer: where it ends, what follows it, and what copying from it costs."""

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.engine.contracts.parsing import Phase
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.speculation.copies import SequenceCopy
from penstock.engine.speculation.proposers import SequenceNgrams
from penstock.engine.text.answer import PreambleParams
from penstock.plugins.reasoning.formats import FORMATS
from tests.fakes import EOS, beam_request, content, drive, generate, ids, make_core, make_request, preamble, reasoning, tokens
from tests.matchers import Grammar, Spelling

ANSWER = "the brown fox is over there"
CUE = "=>"


def drafting(draft: str, answer: str = ANSWER, prompt: str = "?") -> Any:
    """A model that says a draft, ends, and behind the cue says the answer."""
    start, cue = len(ids(prompt)), ids(CUE)

    def next_token(token_ids: Sequence[int]) -> int:
        said = list(token_ids[start:])
        place = next((place for place in range(len(said)) if said[place : place + len(cue)] == cue), None)
        text, number = (draft, len(said)) if place is None else (answer, len(said) - place - len(cue))
        return [*ids(text), EOS][min(number, len(ids(text)))]

    return next_token


def asking(budget: int = 60, answer: str = ANSWER, forces: bool = False, has_quick_masks: bool = False, **options: Any) -> Request:
    """The grammar allows this answer alone; without `forces` it does not say so, so that every token is sampled."""
    grammar = Grammar(lambda: Spelling(answer, forces=forces), has_quick_masks=has_quick_masks)
    return make_request(grammar=grammar, preamble=PreambleParams(budget, tuple(ids(CUE))), **options)


def ending(deltas: list[SequenceDelta]) -> tuple[FinishReason | None, int, int]:
    return deltas[-1].finish_reason, deltas[-1].num_reasoning_tokens, deltas[-1].num_preamble_tokens


def core_of(draft: str, answer: str = ANSWER, **options: Any) -> EngineCore:
    return make_core(drafting(draft, answer), num_blocks=200, max_model_len=300, **options)


@pytest.mark.parametrize("budget", [0, 1, 5, 60])
def test_free_text_ends_by_itself_or_at_its_budget(budget: int) -> None:
    draft = "a draft"
    deltas = generate(core_of(draft), asking(budget))
    assert (preamble(deltas), content(deltas)) == (draft[:budget], ANSWER)
    assert ending(deltas) == (FinishReason.STOP, 0, len(draft[:budget]) + len(CUE))
    assert tokens(deltas) == [*ids(draft[:budget] + CUE + ANSWER)]


@pytest.mark.parametrize("has_quick_masks", [False, True])
def test_every_part_of_the_answer_says_how_long_the_free_text_was(has_quick_masks: bool) -> None:
    deltas = generate(core_of("a draft"), asking(has_quick_masks=has_quick_masks))
    assert content(deltas) == ANSWER
    assert {delta.num_preamble_tokens for delta in deltas if content([delta])} == {len(ids("a draft" + CUE))}


def test_a_character_that_the_budget_cuts_is_no_part_of_the_answer() -> None:
    deltas = generate(core_of("né"), asking(2))
    assert (preamble(deltas), content(deltas)) == ("n\ufffd", ANSWER)


@pytest.mark.parametrize(("max_tokens", "is_answered"), [(5, False), (9, False), (10, True), (40, True)])
def test_a_cue_without_room_for_the_answer_is_not_begun(max_tokens: int, is_answered: bool) -> None:
    deltas = generate(core_of("a draft"), asking(max_tokens=max_tokens))
    assert bool(content(deltas)) == is_answered
    assert CUE not in content(deltas) + preamble(deltas)
    assert preamble(deltas) == "a draft"[: max_tokens if max_tokens < 7 else 7]
    assert ending(deltas)[0] is (FinishReason.STOP if max_tokens == 40 else FinishReason.LENGTH)


@pytest.mark.parametrize("budget", [0, 3])
def test_free_text_keeps_to_its_budget_where_its_cue_has_no_room(budget: int) -> None:
    deltas = generate(core_of("a draft"), asking(budget, max_tokens=budget + len(CUE)))
    assert (preamble(deltas), content(deltas)) == ("a draft"[:budget], "")
    assert ending(deltas) == (FinishReason.LENGTH, 0, budget)
    assert len(tokens(deltas)) == budget


def test_reasoning_comes_first_and_has_a_budget_of_its_own() -> None:
    core = core_of("<think>because</think>a draft")
    request = asking(4, parser=FORMATS["qwen3"], thinking_token_budget=4)
    deltas = generate(core, request)
    assert (reasoning(deltas), content(deltas)) == ("bec", ANSWER)  # the marker counts
    assert preamble(deltas) == "use"  # and the marker that the model writes again
    assert ending(deltas)[2] == 4 + len(CUE)


def test_what_ends_an_answer_ends_no_free_text() -> None:
    """Neither stop strings nor what a stop id of the request is named by: this one ends the free text."""
    deltas = generate(core_of("stop here? no"), asking(stop=["stop", "over"], stop_token_ids=ids("?")))
    assert (preamble(deltas), content(deltas)) == ("stop here", "the brown fox is ")
    assert deltas[-1].stop_reason == "over"


def test_tokens_of_the_cue_are_certain_and_all_of_free_text_are_told_apart() -> None:
    deltas = generate(core_of("ab"), asking(logprobs=0))
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.token_id for entry in entries][: 2 + len(CUE)] == ids("ab" + CUE)
    assert [entry.is_preamble for entry in entries] == [True] * (2 + len(CUE)) + [False] * (len(entries) - 2 - len(CUE))
    assert [entry.logprob for entry in entries[2 : 2 + len(CUE)]] == [0.0] * len(CUE)


def test_copying_takes_few_steps() -> None:
    draft = f"I think that {ANSWER}, or not"
    steps = {}
    for name, rows in (("none", None), ("ngram", 12.0)):
        core = core_of(draft, rows_for_weights=rows)
        deltas = generate(core, asking())
        assert (preamble(deltas), content(deltas)) == (draft, ANSWER)
        steps[name] = core.stats().num_steps
    assert steps["none"] == len(draft) + 1 + len(ANSWER) + 1 - 1  # the grammar ends by itself
    assert steps["ngram"] < steps["none"] - len(ANSWER) * 2 / 3
    assert core.stats().num_accepted_tokens > len(ANSWER) * 2 / 3


def test_a_copy_begins_at_a_single_token_and_goes_on_where_it_was() -> None:
    told = [1, 2, 3, 4, 5, 2, 6]
    token_ids = [9, *told, 8, 8]
    proposer = SequenceCopy(token_ids, told, SequenceNgrams(token_ids, 1))
    assert proposer.read()
    for token_id, draft in ((2, [3, 4, 5]), (3, [4, 5, 2]), (7, None), (2, [6]), (4, [5, 2, 6])):
        token_ids.append(token_id)
        assert proposer.read()
        assert (proposer.propose(3) if proposer.has_guess else None) == draft


def test_preempted_free_text_is_computed_again_and_the_same() -> None:
    def run(num_blocks: int) -> tuple[list[list[int]], int]:
        core = make_core(drafting("a draft of some length"), num_blocks=num_blocks, max_model_len=64, enable_prefix_caching=False)
        for number in range(4):
            core.add(asking(request_id=str(number), n=2))
        answers = drive(core)
        return [tokens(deltas, index) for deltas in answers.values() for index in range(2)], core.stats().num_preemptions

    roomy, tight = run(200), run(20)
    assert tight[1] > 0 == roomy[1]
    assert tight[0] == roomy[0]


def test_the_answers_of_a_request_share_its_prompt_and_differ_in_free_text() -> None:
    core = core_of("unused")
    request = asking(6, n=3, temperature=1.0, seed=5, prompt="?" * 40)
    deltas = generate(core, request)
    assert all(content(deltas, index) == ANSWER for index in range(3))
    assert core.stats().num_prompt_tokens == 40


def test_without_a_grammar_or_with_beams_it_is_refused() -> None:
    core = core_of("unused")
    with pytest.raises(InvalidRequest):
        core.add(make_request(preamble=PreambleParams(3, (1,))))
    request = beam_request("b", "?", BeamSearchParams(beam_width=2, max_tokens=4), grammar=Grammar(lambda: Spelling("ab")))
    request.preamble = PreambleParams(3, (1,))
    with pytest.raises(InvalidRequest):
        core.add(request)


def test_an_answer_knows_in_which_part_it_is() -> None:
    answer = asking().make_answer()
    phases = [answer.phase]
    answer.begin_preamble()
    phases.append(answer.phase)
    answer.end_preamble(ids(CUE), ids("?" + CUE))
    phases.append(answer.phase)
    assert phases == [Phase.CONTENT, Phase.PREAMBLE, Phase.CONTENT]
