"""Beam search in the engine, against `transformers` and over everything that can happen to it in a batch."""

import math
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteriaList

from penstock.engine.core import EngineCore
from penstock.engine.deltas import SequenceDelta
from penstock.engine.sampling.params import BeamSearchParams, EarlyStopping
from tests.engines import core_over, loaded_model
from tests.fakes import EOS, LETTERS, TOKENIZER, VOCAB_SIZE, beam_request, content, drive, make_request
from tests.matchers import Grammar, Matcher
from tests.tiny_models import tiny_model

Answer = tuple[list[int], float]

PROMPTS = [[5, 17, 42, 99, 3], [200, 7, 7, 31], [88, 120, 11, 64, 250, 19, 33, 2, 90, 41, 75], [13]]


def undecided_model() -> PreTrainedModel:
    """One that finds many tokens likely."""
    model = tiny_model("llama", vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        model.get_parameter("lm_head.weight").mul_(0.25)
    return model


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return undecided_model()


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return core_over(loaded_model(undecided_model()), block_size=4)


def answers_of(deltas: list[SequenceDelta]) -> list[Answer]:
    """What was returned, best first; nothing comes between or after."""
    last = [delta for delta in deltas if delta.finish_reason is not None]
    assert deltas[-len(last) :] == last
    assert [delta.index for delta in last] == list(range(len(last)))
    assert all(delta.error is None for delta in last)
    assert all(delta.beams and delta.index == 0 for delta in deltas[: -len(last)])
    return [(delta.token_ids, delta.beam_score or 0.0) for delta in last]


def expected(model: PreTrainedModel, prompt: list[int], beam: BeamSearchParams, **rules: Any) -> list[Answer]:
    """By `transformers`, without the padding behind answers."""
    eos = list(beam.stop_token_ids) or None
    if beam.beam_width > 1:
        rules |= {"length_penalty": beam.length_penalty, "early_stopping": beam.early_stopping}
    result: Any = model.generate(  # type: ignore[operator]
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        num_beams=beam.beam_width,
        num_return_sequences=beam.n or beam.beam_width,
        max_new_tokens=beam.max_tokens,
        eos_token_id=eos,
        pad_token_id=0,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
        **rules,
    )
    answers = []
    for row, token_ids in enumerate(result.sequences[:, len(prompt) :].tolist()):
        ends = [place + 1 for place, token_id in enumerate(token_ids) if token_id in (eos or ())]
        score = float("nan") if beam.beam_width == 1 else float(result.sequences_scores[row])
        answers.append((token_ids[: ends[0]] if ends else token_ids, score))
    return answers


def assert_same(ours: list[Answer], theirs: list[Answer]) -> None:
    assert [token_ids for token_ids, _ in ours] == [token_ids for token_ids, _ in theirs]
    for (_, score), (_, their_score) in zip(ours, theirs, strict=True):
        assert math.isnan(their_score) or score == pytest.approx(their_score, rel=1e-6, abs=1e-5)


@pytest.fixture(scope="module")
def stop_ids(reference: PreTrainedModel) -> list[int]:
    """Tokens that come up soon."""
    said = [token_ids for prompt in PROMPTS for token_ids, _ in expected(reference, prompt, BeamSearchParams(3, 10))]
    return sorted({token_ids[place] for token_ids in said for place in (2, 5)})[:6]


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
def test_sequences_and_scores_are_those_of_transformers(
    core: EngineCore, reference: PreTrainedModel, stop_ids: list[int], early_stopping: EarlyStopping
) -> None:
    """All widths at once, beside sampled answers, with several length penalties and with ends in reach."""
    penalties = {False: (1.0, 0.0, -1.0, 2.0, 1.0), True: (1.0, 2.0, 0.0, 1.0, -0.5), "never": (1.0, 0.5, 2.0, -1.0, 1.0)}
    beams = [
        BeamSearchParams(width, 10, True, length_penalty=penalty, early_stopping=early_stopping, stop_token_ids=stop_ids)
        for width, penalty in enumerate(penalties[early_stopping], start=1)
    ]
    prompts = [PROMPTS[beam.beam_width % len(PROMPTS)] for beam in beams]
    for beam, prompt in zip(beams, prompts, strict=True):
        core.add(beam_request(f"beams {beam.beam_width}", prompt, beam))
        core.add(make_request(f"sampled {beam.beam_width}", prompt, max_tokens=8, temperature=1.0, seed=beam.beam_width))
    said = drive(core)
    theirs = [expected(reference, prompt, beam) for beam, prompt in zip(beams, prompts, strict=True)]
    for beam, answers in zip(beams, theirs, strict=True):
        assert_same(answers_of(said[f"beams {beam.beam_width}"]), answers)
        assert said[f"sampled {beam.beam_width}"][-1].finish_reason is not None
    lengths = {len(token_ids) for answers in theirs for token_ids, _ in answers}
    assert len(lengths) > 2, "no ends are in reach"


def test_rules_about_tokens_apply_to_log_probabilities_as_in_transformers(core: EngineCore, reference: PreTrainedModel) -> None:
    beam = BeamSearchParams(3, 8, ignore_eos=True)
    plain = expected(reference, PROMPTS[0], beam)
    bad = plain[0][0][1]
    core.add(beam_request("r", PROMPTS[0], beam, repetition_penalty=1.5, logit_bias={bad: -100.0, plain[0][0][0]: 2.0}))
    rules = {"repetition_penalty": 1.5, "sequence_bias": [[[bad], -100.0], [[plain[0][0][0]], 2.0]]}
    theirs = expected(reference, PROMPTS[0], beam, **rules)
    assert theirs != plain
    assert_same(answers_of(drive(core)["r"]), theirs)


def test_an_answer_has_its_least_number_of_tokens(core: EngineCore, reference: PreTrainedModel, stop_ids: list[int]) -> None:
    beam = BeamSearchParams(3, 8, True, min_tokens=5, stop_token_ids=stop_ids, n=2)
    core.add(beam_request("r", PROMPTS[1], beam))
    theirs = expected(reference, PROMPTS[1], beam, min_new_tokens=5)
    assert_same(answers_of(drive(core)["r"]), theirs)
    assert min(len(token_ids) for token_ids, _ in theirs) >= 5


def test_stop_strings_end_answers_and_are_cut_off(core: EngineCore, reference: PreTrainedModel) -> None:
    plain = expected(reference, PROMPTS[0], BeamSearchParams(4, 10))
    stop = TOKENIZER.decode(plain[0][0][3:5]), TOKENIZER.decode(plain[1][0][2:4])
    assert all(stop)

    def has_stopped(input_ids: torch.Tensor, scores: Any) -> torch.Tensor:
        texts = [TOKENIZER.decode(row) for row in input_ids[:, len(PROMPTS[0]) :].tolist()]
        return torch.tensor([any(string in text for string in stop) for text in texts])

    beam = BeamSearchParams(4, 10, ignore_eos=True, stop=stop)
    core.add(beam_request("r", PROMPTS[0], beam))
    deltas = drive(core)["r"]
    theirs = expected(reference, PROMPTS[0], beam, stopping_criteria=StoppingCriteriaList([has_stopped]))
    answers = answers_of(deltas)
    for place, (token_ids, score) in enumerate(theirs):  # behind what ended sooner there is padding
        assert token_ids[: len(answers[place][0])] == answers[place][0]
        assert set(token_ids[len(answers[place][0]) :]) <= {-1}
        assert answers[place][1] == pytest.approx(score, rel=1e-6, abs=1e-5)
    ended = [delta for delta in deltas if delta.stop_reason is not None]
    assert ended
    for delta in ended:
        assert TOKENIZER.decode(delta.token_ids) == content([delta], delta.index) + str(delta.stop_reason)


class Alternating(Matcher):
    """Letters of the first half and of the second by turns, and an end after four of them at the earliest."""

    def allowed(self, path: list[int]) -> list[int]:
        half = len(LETTERS) // 2
        letters = LETTERS[:half] if len(path) % 2 else LETTERS[half:]
        return [*letters, EOS] if len(path) >= 4 else letters


def test_a_grammar_s_masks_apply_to_log_probabilities_as_in_transformers(core: EngineCore, reference: PreTrainedModel) -> None:
    prompt = PROMPTS[2]

    def allowed(_: int, input_ids: torch.Tensor) -> list[int]:
        return Alternating().allowed(input_ids[len(prompt) :].tolist())

    beam = BeamSearchParams(4, 9, stop_token_ids=[EOS])
    core.add(beam_request("r", prompt, beam, grammar=Grammar(Alternating)))
    core.add(beam_request("free", prompt, beam))
    said = drive(core)
    assert_same(answers_of(said["r"]), expected(reference, prompt, beam, prefix_allowed_tokens_fn=allowed))
    assert_same(answers_of(said["free"]), expected(reference, prompt, beam))
