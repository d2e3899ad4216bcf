"""Beams in batches: whatever else runs, is pushed out, comes late or fails, they are the same and lose no block."""

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.contracts.parsing import Turn
from penstock.engine.core import EngineCore
from penstock.engine.deltas import ClientFault, FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.output import ResultProcessor
from penstock.engine.sampling.params import BeamSearchParams
from penstock.plugins.reasoning.formats import FORMATS
from tests.fakes import (
    END_THINK,
    EOS,
    LETTERS,
    TOKENIZER,
    beam_request,
    content,
    drive,
    generate,
    make_core,
    make_request,
    reasoning,
    runner_of,
    tokens,
    undecided,
)
from tests.matchers import Grammar, Spelling, Walk

deepseek_r1 = FORMATS["deepseek_r1"]
qwen3 = FORMATS["qwen3"]

Answers = list[tuple[list[int], float | None]]


def answers(deltas: Sequence[SequenceDelta]) -> Answers:
    return [(delta.token_ids, delta.beam_score) for delta in deltas if delta.finish_reason is not None]


def alone(prompt: str, beam: BeamSearchParams, **rules: Any) -> Answers:
    return answers(generate(make_core(undecided), beam_request("r", prompt, beam, **rules)))


def assert_equal(ours: Answers, others: Answers) -> None:
    assert [token_ids for token_ids, _ in ours] == [token_ids for token_ids, _ in others]
    assert [score for _, score in ours] == pytest.approx([score for _, score in others])


LETTER_PROMPT = "abcdef"
PROMPTS = ["a prompt of some length", "a prompt of some other length", "b"]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [21, 24, 200])
def test_beams_that_are_preempted_come_back_as_they_were(num_blocks: int, enable_prefix_caching: bool) -> None:
    core = make_core(
        undecided, num_blocks=num_blocks, max_model_len=80, max_num_batched_tokens=16, enable_prefix_caching=enable_prefix_caching
    )
    beams = [BeamSearchParams(width, 12, ignore_eos=width != 3) for width in (4, 2, 3)]
    for number, (prompt, beam) in enumerate(zip(PROMPTS, beams, strict=True)):
        core.add(make_request(f"text {number}", prompt, max_tokens=20, n=2, temperature=1.0, seed=number))
        core.add(beam_request(f"beams {number}", prompt, beam))
    said: dict[str, list[SequenceDelta]] = {}
    num_pushed_out = 0
    while core.has_work:
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(deltas)
        core.check_integrity()
        num_pushed_out += any(sequence.forks and sequence.search for sequence in core.scheduler.waiting)
    for number, (prompt, beam) in enumerate(zip(PROMPTS, beams, strict=True)):
        assert_equal(answers(said[f"beams {number}"]), alone(prompt, beam))
        text = make_request("r", prompt, max_tokens=20, n=2, temperature=1.0, seed=number)
        by_itself = generate(make_core(undecided), text)
        assert [tokens(said[f"text {number}"], index) for index in range(2)] == [tokens(by_itself, index) for index in range(2)]
    assert (num_pushed_out > 0) == (num_blocks < 200)


def test_a_beam_copies_a_block_only_where_another_goes_on_from_it_too() -> None:
    core = make_core(undecided, block_size=4)
    core.add(beam_request("r", LETTER_PROMPT, BeamSearchParams(3, 2, ignore_eos=True)))
    copies = []
    while core.has_work:
        step = core.schedule()
        assert step is not None
        batch = core.build(step)
        copies.append(len(step.copies))
        core.update(step, batch, core.runner.launch(batch).collect())
        core.check_integrity()
    assert copies == [0, 2]  # of the three that go on from the prompt, the last may write where it is


def test_the_prompt_is_computed_once_and_each_step_takes_one_row_for_each_beam() -> None:
    core = make_core(undecided)
    deltas = generate(core, beam_request("r", "a prompt", BeamSearchParams(3, 5, ignore_eos=True)))
    assert runner_of(core).num_tokens_per_step == [8, 3, 3, 3, 3]
    assert [len(delta.beams or ()) for delta in deltas] == [3, 3, 3, 3, 0, 0, 0]
    for number, delta in enumerate(deltas[:4], start=1):
        assert delta.beams is not None
        assert {len(beam.token_ids) for beam in delta.beams} == {number}
        totals = [beam.cumulative_logprob for beam in delta.beams]
        assert totals == sorted(totals, reverse=True)
    assert deltas[0].prompt is not None
    assert deltas[0].prompt.num_tokens == 8
    assert [delta.prompt is None for delta in deltas[1:]] == [True] * 4 + [False] * 2
    assert all(delta.cumulative_logprob == pytest.approx((delta.beam_score or 0.0) * 5) for delta in deltas[4:])


def test_as_many_answers_are_returned_as_are_asked_for() -> None:
    beam = BeamSearchParams(4, 8)
    assert_equal(alone("?", replace(beam, n=2)), alone("?", beam)[:2])


def test_places_are_kept_for_beams_that_do_not_run_yet() -> None:
    core = make_core(undecided, max_num_seqs=5)
    core.add(beam_request("r", "a prompt", BeamSearchParams(4, 6, ignore_eos=True)))
    core.add(make_request("one", "x", max_tokens=10, ignore_eos=True))
    core.add(make_request("other", "y", max_tokens=2, ignore_eos=True))
    core.step()
    assert [sequence.request.request_id for sequence in core.scheduler.waiting] == ["other"]
    while core.has_work:
        core.step()
        core.check_integrity()
        assert len(core.scheduler.running) <= 5


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_frees_everything_at_any_time(num_steps: int) -> None:
    core = make_core(undecided, num_blocks=50, max_num_batched_tokens=16)
    core.add(make_request("other", "x", max_tokens=8))
    core.add(beam_request("r", "a prompt of some length", BeamSearchParams(4, 10, ignore_eos=True)))
    for _ in range(num_steps):
        core.step()
    step = core.schedule()
    assert step is not None
    batch = core.build(step)
    output = core.runner.launch(batch).collect()
    core.abort("r")
    core.check_integrity()
    core.update(step, batch, output)
    assert "r" not in drive(core)


def test_a_step_that_fails_ends_every_answer_of_a_search() -> None:
    core = make_core(undecided)
    core.add(beam_request("r", "?", BeamSearchParams(3, 10, n=2)))
    core.step()
    step = core.schedule()
    assert step is not None
    core.build(step)
    deltas = core.fail(step, "it failed")["r"]
    assert [(delta.index, delta.finish_reason, delta.error) for delta in deltas] == [
        (index, FinishReason.ERROR, "it failed") for index in (0, 1)
    ]
    drive(core)


def test_a_search_that_has_ended_with_a_step_that_could_not_be_taken_in_is_not_advanced_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise AssertionError("a defect")

    core = make_core(undecided)
    core.add(beam_request("r", "?", BeamSearchParams(3, 10)))
    core.add(make_request("other", "x", max_tokens=8, priority=1))
    core.step()
    step = core.schedule()
    assert step is not None
    batch = core.build(step)
    output = core.runner.launch(batch).collect()
    with monkeypatch.context() as defect:
        defect.setattr(ResultProcessor, "take_plain", broken)
        with pytest.raises(AssertionError, match="a defect"):
            core.update(step, batch, output)
    assert set(core.fail(step, "it failed")) == {"r", "other"}
    core.add(make_request("next", "x", max_tokens=2))
    assert set(drive(core)) == {"next"}


def test_beams_that_wait_for_a_late_one_leave_no_mask_behind_when_that_is_aborted() -> None:
    release = threading.Event()

    class Slow(Walk):
        def fill_bitmask(self, row: Tensor) -> None:
            if len(self.path) == 2:
                assert release.wait(timeout=60)
            super().fill_bitmask(row)

    core = make_core(undecided, grace=0.05)
    core.add(beam_request("r", "?", BeamSearchParams(3, 20), grammar=Grammar(lambda: Slow(5, length=8))))
    while not core.scheduler.running or not all(sequence.waits_for_mask for sequence in core.scheduler.running):
        core.step()
    sequences = list(core.scheduler.running)
    core.scheduler._preempt(sequences[0])
    assert any(sequence.mask is not None for sequence in core.scheduler.waiting.first(1)[0].forks)
    core.abort("r")
    assert not any(sequence.mask is not None for sequence in sequences)
    core.check_integrity()
    release.set()


def test_at_its_deadline_a_search_gives_the_best_it_has() -> None:
    core = make_core(undecided)
    core.add(replace(beam_request("r", "?", BeamSearchParams(3, 50, ignore_eos=True)), deadline=time.monotonic() + 0.2))
    [delta] = core.step()["r"]
    for _ in range(3):
        [delta] = core.step()["r"]
    assert delta.beams is not None
    best = [beam.token_ids for beam in delta.beams]
    time.sleep(0.25)
    last = core.step()["r"]
    assert [(item.token_ids, item.finish_reason) for item in last] == [(token_ids, FinishReason.TIMED_OUT) for token_ids in best]
    drive(core)


@pytest.mark.parametrize("seed", [2, 3, 5, 8])
def test_every_answer_is_one_that_the_grammar_allows_and_the_best_are_found(seed: int) -> None:
    """A search that is wider than the grammar has texts finds all of them, with their scores."""
    walk = Walk(seed, length=4)

    def texts(path: list[int], total: float) -> list[tuple[list[int], float]]:
        logprobs = undecided([*prompt, *path]).log_softmax(-1)
        found = []
        for token_id in walk.allowed(path):
            if walk.allowed(path) == [EOS]:
                found.append((path, total))
            elif token_id == EOS:
                found.append(([*path, EOS], total + float(logprobs[EOS])))
            else:
                found += texts([*path, token_id], total + float(logprobs[token_id]))
        return found

    request = beam_request("r", "?", BeamSearchParams(60, 20), grammar=Grammar(lambda: Walk(seed, length=4)))
    prompt = request.prompt_token_ids
    everything = sorted(((total / len(path), path) for path, total in texts([], 0.0)), reverse=True)
    core = make_core(undecided, num_blocks=600, max_num_seqs=64)
    core.add(make_request("free", "?", max_tokens=9))
    core.add(request)
    found = answers(drive(core)["r"])
    assert 4 < len(everything) <= 60
    expected: Answers = [(path, score) for score, path in everything]
    expected += [([], float("-inf"))] * (60 - len(expected))
    assert_equal(found, expected)


class Unhurried(Walk):
    """Its first mask is there once `release` is set."""

    def __init__(self, release: threading.Event) -> None:
        super().__init__(5, length=8)
        self.release = release

    def fill_bitmask(self, row: Tensor) -> None:
        if not self.path:
            assert self.release.wait(timeout=60)
        super().fill_bitmask(row)


def test_a_late_mask_delays_its_search_alone() -> None:
    release = threading.Event()
    core = make_core(undecided, grace=0.0)
    core.add(beam_request("r", "?", BeamSearchParams(3, 20), grammar=Grammar(lambda: Unhurried(release))))
    core.add(make_request("other", "x", max_tokens=5, ignore_eos=True))
    said: list[SequenceDelta] = []
    while len(said) < 5:
        deltas = core.step()
        core.check_integrity()
        assert "r" not in deltas
        said += deltas["other"]
    release.set()
    assert_equal(answers(drive(core)["r"]), alone("?", BeamSearchParams(3, 20), grammar=Grammar(lambda: Walk(5, length=8))))


def thinking(history: Sequence[int]) -> Tensor:
    """Ends its reasoning soon, or would end its answer in it."""
    logits_V = undecided(history).clone()
    if END_THINK not in history:
        logits_V[END_THINK] += 6
        logits_V[EOS] += 3
    return logits_V


class Open(Walk):
    """One that can be forked."""

    def fork(self) -> "Open":
        other = Open(self.seed, length=self.length)
        other.path = list(self.path)
        return other


@pytest.mark.parametrize("kind", [Walk, Open])
@pytest.mark.parametrize("num_blocks", [40, 200])
def test_reasoning_comes_before_a_constraint_and_ends_before_the_answer_does(kind: type[Walk], num_blocks: int) -> None:
    core = make_core(thinking, num_blocks=num_blocks, max_model_len=100)
    grammar = Grammar(lambda: kind(5, length=5))
    core.add(make_request("text", "x", max_tokens=30, n=3, temperature=1.0, seed=1))
    core.add(beam_request("r", "?", BeamSearchParams(4, 20), grammar=grammar, parser=deepseek_r1, tail="<think>\n"))
    deltas = [delta for delta in drive(core)["r"] if delta.finish_reason is not None]
    assert all(delta.error is None for delta in deltas)
    closed = [delta for delta in deltas if END_THINK in delta.token_ids]
    assert closed
    for delta in closed:
        place = delta.token_ids.index(END_THINK)
        assert EOS not in delta.token_ids[:place]
        assert reasoning([delta], delta.index) == TOKENIZER.decode(delta.token_ids[:place])
        walk = Walk(5, length=5)
        assert all(walk.advance(token_id) for token_id in delta.token_ids[place + 1 :])
        assert delta.finish_reason is FinishReason.LENGTH or walk.allowed(walk.path) == [EOS] or delta.token_ids[-1] == EOS
        assert content([delta], delta.index) == TOKENIZER.decode([token for token in walk.path if token != EOS])
    assert any(content([delta], delta.index) for delta in closed)


class Failing(Walk):
    """Fails after some tokens."""

    def advance(self, token_id: int) -> bool:
        if len(self.path) == 2:
            raise RuntimeError("no more")
        return super().advance(token_id)


def test_a_grammar_that_fails_ends_its_search_alone() -> None:
    core = make_core(undecided)
    core.add(beam_request("r", "?", BeamSearchParams(3, 20), grammar=Grammar(lambda: Failing(1))))
    core.add(make_request("other", "x", max_tokens=5, ignore_eos=True))
    said = drive(core)
    assert {delta.error for delta in said["r"][-3:]} == {"reading a beam raised RuntimeError: no more"}
    assert len(tokens(said["other"])) == 5


def test_a_grammar_that_leaves_nothing_of_what_is_allowed_is_the_client_s_mistake() -> None:
    request = beam_request("r", "?", BeamSearchParams(2, 9), grammar=Grammar(lambda: Spelling("abc")), allowed_token_ids=(LETTERS[0],))
    deltas = generate(make_core(undecided), request)
    assert all(isinstance(delta.error, ClientFault) and delta.finish_reason is FinishReason.ERROR for delta in deltas[-2:])


def test_a_grammar_with_one_text_gives_one_answer_and_empty_ones() -> None:
    deltas = generate(make_core(undecided), beam_request("r", "?", BeamSearchParams(3, 9), grammar=Grammar(lambda: Spelling("abc"))))
    assert [content(deltas, index) for index in range(3)] == ["abc", "", ""]
    assert [delta.beam_score == float("-inf") for delta in deltas[-3:]] == [False, True, True]
    assert {delta.finish_reason for delta in deltas[-3:]} == {FinishReason.STOP}


def test_every_beam_has_logits_processors_that_saw_its_own_tokens() -> None:
    class Remembering:
        """Forbids the token that it saw last, and checks that it has seen all."""

        def __init__(self) -> None:
            self.seen = 0

        def __call__(self, token_ids: list[int], logits: Tensor) -> Tensor:
            self.seen += 1
            assert len(token_ids) == self.seen, "it has seen another beam's tokens"
            logits[token_ids[-1]] = -torch.inf
            return logits

    beam = BeamSearchParams(4, 8, ignore_eos=True)
    found = alone("?", beam, logits_processors=[Remembering])
    assert all(one != other for token_ids, _ in found for one, other in itertools.pairwise(token_ids))
    assert any(one == other for token_ids, _ in alone("?", beam) for one, other in itertools.pairwise(token_ids))


def uncopyable(turn: Turn) -> Any:
    parser: Any = qwen3(turn)
    parser.lines = (line for line in "no copies")
    return parser


@pytest.mark.parametrize("parser", [None, qwen3, uncopyable])
def test_stop_strings_and_stop_sequences_end_a_beam(parser: Any) -> None:
    beam = BeamSearchParams(3, 12, ignore_eos=True, length_penalty=0.0)  # what ends soon is best
    [first, *_] = alone("?", beam)
    pair = next(list(pair) for pair in itertools.pairwise(first[0][1:]) if EOS not in pair)
    stop = TOKENIZER.decode(pair)
    by_text = generate(make_core(undecided), beam_request("r", "?", replace(beam, stop=stop), parser=parser))
    by_ids = generate(make_core(undecided), replace(beam_request("r", "?", beam), stop_sequences=(tuple(pair),)))
    assert_equal(answers(by_text), answers(by_ids))
    ended = [delta for delta in by_text if delta.stop_reason == stop]
    assert ended
    for delta in ended:
        assert delta.token_ids[-2:] == pair
        assert stop not in content([delta], delta.index)
    kept = generate(make_core(undecided), beam_request("r", "?", replace(beam, stop=stop, include_stop_str_in_output=True)))
    assert [content([delta], delta.index)[-2:] for delta in kept if delta.stop_reason == stop] == [stop] * len(ended)


def test_a_stop_token_that_the_request_names_is_the_reason_and_shown_where_asked_for() -> None:
    beam = BeamSearchParams(2, 12, ignore_eos=True, stop_token_ids=LETTERS[:4])
    shown = generate(make_core(undecided), beam_request("r", "?", replace(beam, include_stop_str_in_output=True)))
    hidden = generate(make_core(undecided), beam_request("r", "?", beam))
    for one, other in zip(shown[-2:], hidden[-2:], strict=True):
        assert one.stop_reason == one.token_ids[-1]
        assert content([one], one.index) == content([other], other.index) + TOKENIZER.decode(one.token_ids[-1:])


@pytest.mark.parametrize(
    ("beam", "rules", "name"),
    [
        (BeamSearchParams(9, 4), {}, "beam_width"),
        (BeamSearchParams(8, 100), {}, "beam_width"),
        (BeamSearchParams(2, 4), {"top_p": 0.5}, "top_p"),
        (BeamSearchParams(2, 4), {"top_k": 3}, "top_k"),
        (BeamSearchParams(2, 4), {"min_p": 0.5}, "min_p"),
        (BeamSearchParams(2, 4), {"logprobs": 1}, "logprobs"),
        (BeamSearchParams(2, 4), {"thinking_token_budget": 1}, "thinking_token_budget"),
    ],
)
def test_what_beam_search_cannot_do_is_refused_by_name(beam: BeamSearchParams, rules: dict[str, Any], name: str) -> None:
    core = make_core(undecided)
    with pytest.raises(InvalidRequest) as refusal:
        core.add(beam_request("r", "?", beam, **rules))
    assert refusal.value.param == name
    assert not core.has_work


def test_more_answers_than_beams_and_no_tokens_at_all_are_refused() -> None:
    core: EngineCore = make_core(undecided)
    request = beam_request("r", "?", BeamSearchParams(2, 4))
    for name, value in {"n": 3, "max_tokens": 0}.items():
        with pytest.raises(InvalidRequest) as refusal:
            core.add(replace(request, params=replace(request.params, **{name: value})))  # type: ignore[arg-type]
        assert refusal.value.param == name
