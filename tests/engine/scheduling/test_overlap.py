"""Steps that are scheduled while the one before them is in flight: answers do not show it."""

import itertools
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.batch import Batch, placeholder
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.kv_cache.blocks import max_blocks_held
from penstock.engine.request import BACKGROUND, Request
from penstock.engine.runner import StepHandle
from penstock.engine.scheduling.step import Step
from penstock.engine.text.answer import PreambleParams
from penstock.plugins.reasoning.formats import FORMATS
from tests.fakes import (
    EOS,
    LETTERS,
    content,
    drive,
    generate,
    ids,
    letter_after,
    letter_like_before,
    make_core,
    make_request,
    runner_of,
    saying,
    tokens,
    undecided,
)
from tests.matchers import Grammar, Walk

deepseek_r1 = FORMATS["deepseek_r1"]

MAX_MODEL_LEN = 40


def letter_or_end(token_ids: Sequence[int]) -> int:
    return EOS if zlib.crc32(str(token_ids[-9:]).encode()) % 15 == 0 else letter_like_before(token_ids)


@dataclass
class Plan:
    """A request as arguments of `make_request`, and its outcome."""

    begins_at: int
    leaves_at: int | None
    options: dict[str, Any]
    deltas: list[SequenceDelta] = field(default_factory=list)

    def make(self, name: str) -> Any:
        options = dict(self.options)
        seed, forces, is_quick = options.pop("walk", None), options.pop("forces", True), options.pop("is_quick", False)
        if seed is not None:
            options["grammar"] = Grammar(lambda: Walk(seed, forces=forces), has_quick_masks=is_quick)
        return make_request(name, **options)

    @property
    def n(self) -> int:
        return int(self.options["n"])

    def has_ended(self, index: int, now: int) -> bool:
        """Whether an answer needs no more steps at this time: it was told to have finished, or its request was aborted."""
        is_aborted = self.leaves_at is not None and self.begins_at <= self.leaves_at <= now
        return is_aborted or any(delta.index == index and delta.finish_reason is not None for delta in self.deltas)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    options: dict[str, Any] = {
        "prompt": (LETTERS[:2] * 20)[: draw(st.integers(1, 22))],
        "n": draw(st.sampled_from([1, 1, 1, 3])),
        "max_tokens": draw(st.sampled_from([0, 1, 2, 9, 17, 17, 17])),
        "priority": draw(st.sampled_from([-1, 0, 1, BACKGROUND])),
    }
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "seeded": {"temperature": 1.5, "seed": draw(st.integers(0, 3))},
        "stop string": {"stop": ("".join(draw(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=2))),)},
        "stop id": {"stop_token_ids": tuple(LETTERS[2:4]), "min_tokens": min(3, options["max_tokens"])},
        "scored": {"logprobs": 2, "prompt_logprobs": 1},
        "penalised": {"presence_penalty": 1.5},
        "bad words": {"bad_words": ("a", "bc")},
        "constrained": {"walk": draw(st.integers(0, 30)), "forces": draw(st.booleans()), "is_quick": draw(st.booleans())},
        "constrained after reasoning": {
            "walk": draw(st.integers(0, 30)),
            "parser": deepseek_r1,
            "thinking_token_budget": draw(st.integers(1, 9)),
        },
        "constrained after free text": {
            "walk": draw(st.integers(0, 30)),
            "preamble": PreambleParams(draw(st.integers(0, 9)), tuple(LETTERS[: draw(st.integers(1, 3))])),
            "measures_pressure": draw(st.booleans()),
        },
        "budgeted": {"parser": deepseek_r1, "thinking_token_budget": draw(st.integers(1, 5))},
    }
    options |= kinds[draw(st.sampled_from(list(kinds)))]
    return Plan(draw(st.integers(0, 15)), draw(st.one_of(st.none(), st.none(), st.integers(0, 25))), options)


def run(core: EngineCore, plan: list[Plan], fails_at: int | None = None) -> set[str]:
    """Runs requests as the engine does, one step ahead, and returns the names of those that the failed step was computing."""
    lost: set[str] = set()
    num_launched = 0

    def interrupt(now: int) -> None:
        for number, one in enumerate(plan):
            if one.begins_at == now:
                core.add(one.make(str(number)))
            if one.leaves_at == now:
                core.abort(str(number))
        core.check_integrity()

    def launch(step: Step | None) -> tuple[Step, Batch, StepHandle] | None:
        nonlocal num_launched
        if step is None:
            return None
        batch = core.build(step)
        num_launched += 1
        if num_launched == fails_at:
            return step, batch, StepHandle(core.runner.thread.submit(fail_once, core, batch))
        return step, batch, core.runner.launch(batch)

    flight: tuple[Step, Batch, StepHandle] | None = None
    for now in range(0, 1000, 2):
        interrupt(now)
        flight = flight or launch(core.schedule())
        if flight is None:
            waits_for_mask = core.has_work  # by a mask that has taken long, and is filled apart
            interrupt(now + 1)
            if waits_for_mask:
                core.masks.wait()
            elif now > 40:
                return lost
            continue
        step, batch, handle = flight
        follower = launch(core.schedule_ahead(step, batch))
        interrupt(now + 1)
        try:
            news = core.update(step, batch, handle.collect())
        except OSError:
            in_step = ((sequence.request.request_id, sequence.index) for sequence in step.num_tokens)
            lost = {name for name, index in in_step if not plan[int(name)].has_ended(index, now + 1)}
            news = core.fail(step, "it broke")
            if follower is not None:
                core.cancel_step(follower[0])
                follower = None
        for name, deltas in news.items():
            plan[int(name)].deltas += deltas
        core.check_integrity()
        flight = follower
    raise AssertionError("it never ends")


def fail_once(core: EngineCore, batch: Batch) -> Any:
    """A step that writes what it is to write, and then fails."""
    core.runner.run(batch)
    runner_of(core).pending.clear()
    raise OSError("the device is lost")


def alone(one: Plan) -> list[SequenceDelta]:
    core = make_core(letter_or_end, max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=1000)
    core.add(one.make("alone"))
    deltas = drive(core)["alone"]
    core.runner.shutdown()
    return deltas


@given(
    plan=st.lists(plans(), min_size=1, max_size=6),
    block_size=st.integers(1, 5),
    num_spare_blocks=st.integers(0, 30),
    max_num_batched_tokens=st.sampled_from([3, 9, 200]),
    enable_prefix_caching=st.booleans(),
    samples_first=st.booleans(),
    rows_for_weights=st.sampled_from([None, 20.0]),
    fails_at=st.one_of(st.none(), st.integers(1, 20)),
    windows=st.sampled_from([(None,), (None,), (None, 2), (None, 7, 3)]),
)
@settings(max_examples=25)
def test_every_answer_is_the_one_that_is_given_alone_and_a_failed_step_ends_its_own_requests(
    plan: list[Plan],
    block_size: int,
    num_spare_blocks: int,
    max_num_batched_tokens: int,
    enable_prefix_caching: bool,
    samples_first: bool,
    rows_for_weights: float | None,
    fails_at: int | None,
    windows: tuple[int | None, ...],
) -> None:
    core = make_core(
        letter_or_end,
        block_size=block_size,
        num_blocks=max_blocks_held(windows, MAX_MODEL_LEN, max(5, max_num_batched_tokens), block_size) + num_spare_blocks,
        max_num_seqs=5,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=enable_prefix_caching,
        rows_for_weights=rows_for_weights,
        is_async=True,
        windows=windows,
    )
    core.masks.samples_first = samples_first
    lost = run(core, plan, fails_at)
    core.runner.shutdown()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    for number, one in enumerate(plan):
        expected = alone(one)
        for index in range(one.n):
            ours, theirs = ([delta for delta in deltas if delta.index == index] for deltas in (one.deltas, expected))
            is_cut_off = one.leaves_at is not None or str(number) in lost
            if is_cut_off and not (ours and ours[-1].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)):
                assert tokens(ours) == [] or tokens(ours, index) == tokens(theirs, index)[: len(tokens(ours, index))]
                assert not ours or ours[-1].finish_reason is (FinishReason.ERROR if str(number) in lost else None)
                continue
            assert tokens(ours, index) == tokens(theirs, index)
            assert content(ours, index) == content(theirs, index)
            assert [entry for delta in ours for entry in delta.logprobs] == [entry for delta in theirs for entry in delta.logprobs]
            assert (ours[-1].finish_reason, ours[-1].stop_reason) == (theirs[-1].finish_reason, theirs[-1].stop_reason)


def decoding(core: EngineCore, **options: Any) -> tuple[Step, Batch]:
    """A request in its third step, which is under way."""
    core.add(make_request(**({"max_tokens": 20} | options)))
    for _ in range(2):
        core.step()
    step = core.schedule()
    assert step is not None
    return step, core.build(step)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "seed": 1, "top_p": 0.5, "logit_bias": {5: 1.0}, "allowed_token_ids": tuple(LETTERS)},
        {"logprobs": 3, "min_tokens": 9, "stop": ("never",), "n": 3, "temperature": 1.0},
        {"parser": deepseek_r1},
        {"parser": deepseek_r1, "thinking_token_budget": 9},
        {"grammar": Grammar(lambda: Walk(1))},
    ],
)
def test_requests_that_do_not_need_the_sampled_token_are_scheduled_ahead(options: dict[str, Any]) -> None:
    core = make_core(is_async=True)
    step, batch = decoding(core, **options)
    follower = core.schedule_ahead(step, batch)
    assert follower is not None
    next_batch = core.build(follower)
    assert follower.num_tokens == dict.fromkeys(step.num_tokens, 1)
    assert next_batch.num_pending == len(follower.num_tokens)
    placeholders = [token_id for token_id in next_batch.inputs.input_ids_1T[0].tolist() if token_id < 0]
    assert placeholders == [placeholder(row) for row in range(next_batch.num_pending)]


@pytest.mark.parametrize(
    "options",
    [
        {"logits_processors": [lambda: lambda token_ids, logits: logits]},
        {"max_tokens": 3},
    ],
)
def test_requests_that_need_the_sampled_token_or_end_with_it_wait(options: dict[str, Any]) -> None:
    core = make_core(is_async=True)
    step, batch = decoding(core, **options)
    assert core.schedule_ahead(step, batch) is None
    core.update(step, batch, core.runner.launch(batch).collect())
    core.check_integrity()


def test_nothing_is_scheduled_ahead_or_drafted_for_a_request_aborted_in_flight() -> None:
    core = make_core(letter_like_before, rows_for_weights=20.0, is_async=True)
    step, batch = decoding(core)
    core.abort(next(iter(step.num_tokens)).request.request_id)
    assert core.schedule_ahead(step, batch) is None
    core.update(step, batch, core.runner.launch(batch).collect())
    core.check_integrity()


def test_no_step_is_scheduled_ahead_without_the_option() -> None:
    core = make_core()
    assert core.schedule_ahead(*decoding(core)) is None


def steps(core: EngineCore, said: list[SequenceDelta]) -> Iterator[tuple[Step, Step | None]]:
    """Each step with the one that was put together behind it, until nothing is left to do."""
    ahead: tuple[Step, Batch] | None = None
    while core.has_work:
        step = core.schedule() if ahead is None else ahead[0]
        assert step is not None
        batch = core.build(step) if ahead is None else ahead[1]
        handle = core.runner.launch(batch)
        follower = core.schedule_ahead(step, batch)
        yield step, follower
        ahead = None if follower is None else (follower, core.build(follower))
        for deltas in core.update(step, batch, handle.collect()).values():
            said += deltas
        core.check_integrity()


def follow(core: EngineCore, requests: list[Request]) -> tuple[dict[str, list[SequenceDelta]], int]:
    """What the requests say, each step launched before the one before it is processed, and the number of such steps."""
    said: dict[str, list[SequenceDelta]] = {}
    for request in requests:
        core.add(request)
    num_ahead = 0
    step = core.schedule()
    batch = None if step is None else core.build(step)
    handle = None if batch is None else core.runner.launch(batch)
    while step is not None and batch is not None and handle is not None:
        follower = core.schedule_ahead(step, batch)
        num_ahead += follower is not None
        ahead = None if follower is None else core.build(follower)
        ahead_handle = None if ahead is None else core.runner.launch(ahead)
        for name, deltas in core.update(step, batch, handle.collect()).items():
            said.setdefault(name, []).extend(deltas)
        core.check_integrity()
        step = follower or core.schedule()
        batch = ahead or (None if step is None else core.build(step))
        handle = ahead_handle or (None if batch is None else core.runner.launch(batch))
    runner_of(core).shutdown()
    return said, num_ahead


@pytest.mark.parametrize(
    "options",
    [
        {"grammar": Grammar(lambda: Walk(3, forces=False))},
        {"grammar": Grammar(lambda: Walk(3, forces=True))},
        {"grammar": Grammar(lambda: Walk(3, forces=False), has_quick_masks=True)},
        {"grammar": Grammar(lambda: Walk(3)), "parser": deepseek_r1, "thinking_token_budget": 4, "min_tokens": 2},
        {"parser": deepseek_r1, "thinking_token_budget": 4},
        {"prompt_logprobs": 1, "logprobs": 1},
    ],
    ids=["grammar", "forced tokens", "quick grammar", "grammar after reasoning", "thinking budget", "prompt logprobs"],
)
def test_rules_that_depend_on_the_pending_token_stop_no_other_sequence(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.constraints.masks.SLOW", 60.0)  # on a busy machine, a mask would be filled apart

    def requests() -> list[Request]:
        ruled = make_request("ruled", LETTERS[:3], max_tokens=25, temperature=1.0, seed=3, **options)
        return [ruled, make_request("other", LETTERS[3:9], max_tokens=25, ignore_eos=True)]

    core = make_core(undecided, is_async=True)
    core.masks.samples_first = False
    said, num_ahead = follow(core, requests())
    expected = {request.request_id: generate(make_core(undecided), request) for request in requests()}
    assert {name: tokens(deltas) for name, deltas in said.items()} == {name: tokens(deltas) for name, deltas in expected.items()}
    assert num_ahead >= 24, "a step is always launched before the one before it has ended"


def test_the_forward_pass_waits_for_no_mask() -> None:
    core = make_core(is_async=True)
    step, batch = decoding(core, grammar=Grammar(lambda: Walk(3, forces=False)))
    handle = core.runner.launch(batch)
    follower = core.schedule_ahead(step, batch)
    assert follower is not None
    ahead = core.build(follower)
    forward, has_run = runner_of(core)._forward, threading.Event()

    def run_forward(batch: Batch) -> Any:
        logits = forward(batch)
        has_run.set()
        return logits

    runner_of(core)._forward = run_forward  # type: ignore[method-assign]
    output = handle.collect()
    ahead_handle = core.runner.launch(ahead)
    assert has_run.wait(timeout=60), "before anything is known of the tokens of the step before"
    assert not ahead_handle.future.done()
    core.update(step, batch, output)
    assert ahead_handle.collect().rows == [0]
    runner_of(core).shutdown()


@pytest.mark.parametrize("fails", [True, False])
def test_a_step_ahead_does_not_wait_for_masks_where_the_one_before_fails_or_the_engine_stops(fails: bool) -> None:
    core = make_core(is_async=True)
    step, batch = decoding(core, grammar=Grammar(lambda: Walk(3, forces=False)))
    handle = core.runner.launch(batch)
    follower = core.schedule_ahead(step, batch)
    assert follower is not None
    ahead = core.runner.launch(core.build(follower))
    handle.collect()
    if fails:
        core.fail(step, "it broke")
        core.cancel_step(follower)
        core.check_integrity()
    else:
        core.masks.close()
    assert ahead.collect().rows == []
    runner_of(core).shutdown()


def test_the_masks_of_a_step_have_rows_for_those_that_are_constrained_alone() -> None:
    core = make_core(undecided, is_async=True)
    for number in range(3):
        core.add(make_request(str(number), max_tokens=20, ignore_eos=True))
    _, batch = decoding(core, grammar=Grammar(lambda: Walk(3, forces=False)))
    assert batch.masks is not None
    assert (batch.masks.num_rows, len(batch.masks.bitmask_CW)) == (4, 2)
    core.masks.close()


def test_a_sequence_whose_grammar_is_slow_is_not_in_a_step_ahead_and_the_others_are() -> None:
    core = make_core(is_async=True)
    core.add(make_request("other", max_tokens=20, ignore_eos=True))
    step, batch = decoding(core, grammar=Grammar(lambda: Walk(3, forces=False)))
    slow = next(sequence for sequence in step.num_tokens if sequence.constraint is not None)
    assert slow.constraint is not None
    slow.constraint.num_masks_apart = 3
    follower = core.schedule_ahead(step, batch)
    assert follower is not None
    assert [sequence.request.request_id for sequence in follower.num_tokens] == ["other"]
    core.update(step, batch, core.runner.launch(batch).collect())
    runner_of(core).shutdown()


def test_a_constrained_request_need_not_wait_until_the_others_have_ended() -> None:
    core = make_core(is_async=True, max_num_seqs=2)
    core.add(make_request("long", max_tokens=60))
    num_ahead = 0
    for number, (_, follower) in enumerate(steps(core, [])):
        num_ahead += follower is not None
        if number == 5:
            assert num_ahead == 6
            core.add(make_request("constrained", grammar=Grammar(lambda: Walk(1)), max_tokens=4))
        if number == 7:
            assert len(core.scheduler.running) == 2
    assert num_ahead > 40


def test_a_likely_draft_is_worth_waiting_for() -> None:
    core = make_core(saying("abcabcabcabcabcabc"), rows_for_weights=20.0, is_async=True)
    core.add(make_request(max_tokens=15))
    said: list[SequenceDelta] = []
    followers = [follower for _, follower in steps(core, said)]
    assert content(said) == "abcabcabcabcabc"
    assert any(follower is not None for follower in followers)
    assert core.stats().num_accepted_tokens > 0


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3},
        {"frequency_penalty": 2.0},
        {"bad_sequences": ((LETTERS[0],), *itertools.product(LETTERS[:6], LETTERS[:9]), tuple(LETTERS[7:10]))},
        {"logprobs": 2, "repetition_penalty": 1.5},
    ],
    ids=["penalties", "frequency", "bad sequences", "logprobs"],
)
def test_rules_about_tokens_so_far_hold_for_steps_that_are_scheduled_ahead(options: dict[str, Any]) -> None:
    def request(number: int) -> Request:
        drawn: dict[str, Any] = {"temperature": 1.0, "seed": number} if number % 2 else {}
        return make_request(str(number), LETTERS[number : number + 4], max_tokens=25, ignore_eos=True, **drawn, **options)

    core = make_core(undecided, is_async=True)
    expected = [generate(make_core(undecided), request(number)) for number in range(4)]
    said: dict[str, list[SequenceDelta]] = {}
    for number in range(4):
        core.add(request(number))
    step = core.schedule()
    assert step is not None
    batch, num_ahead = core.build(step), 0
    while True:
        handle = core.runner.launch(batch)
        follower = core.schedule_ahead(step, batch)
        next_batch = None if follower is None else core.build(follower)
        num_ahead += follower is not None
        for name, deltas in core.update(step, batch, handle.collect()).items():
            said.setdefault(name, []).extend(deltas)
        step = follower or core.schedule()
        if step is None:
            break
        batch = next_batch or core.build(step)
    runner_of(core).shutdown()
    assert num_ahead > 20
    assert [tokens(said[str(number)]) for number in range(4)] == [tokens(deltas) for deltas in expected]


def test_a_step_is_scheduled_ahead_where_all_places_are_taken_however_much_the_text_repeats_itself() -> None:
    core = make_core(letter_like_before, num_blocks=400, max_num_seqs=32, rows_for_weights=64.0, is_async=True)
    for number in range(32):
        core.add(make_request(str(number), LETTERS[:3] * 4, max_tokens=20, ignore_eos=True))
    followers = [follower is not None for _, follower in steps(core, [])]
    assert sum(followers) >= len(followers) - 3
    assert core.stats().num_draft_tokens == 0


def test_drafts_that_are_not_worth_the_wait_do_not_keep_the_next_step_from_being_scheduled_ahead() -> None:
    core = make_core(letter_like_before, num_blocks=400, max_num_seqs=64, rows_for_weights=8.0, is_async=True)
    for number in range(24):
        core.add(make_request(str(number), LETTERS[number % 5 : number % 5 + 3] * 4, max_tokens=30, ignore_eos=True))
    followers = [follower is not None for _, follower in steps(core, [])]
    assert sum(followers) > 0.7 * len(followers)


def test_where_the_next_step_has_to_wait_anyway_there_are_drafts() -> None:
    core = make_core(letter_like_before, num_blocks=400, max_num_seqs=64, rows_for_weights=64.0, is_async=True)
    core.scheduler.speculation.host_share = 1.0  # type: ignore[union-attr]
    core.add(make_request("processed", logits_processors=[lambda: lambda token_ids, logits: logits], max_tokens=40))
    for number in range(3):
        core.add(make_request(str(number), LETTERS[:3] * 4, max_tokens=30, ignore_eos=True))
    assert None in [follower for _, follower in steps(core, [])]
    assert core.stats().num_draft_tokens > 0


@pytest.mark.parametrize("options", [{}, {"grammar": Grammar(lambda: Walk(1))}])
def test_new_requests_are_admitted_although_others_are_scheduled_ahead(options: dict[str, Any]) -> None:
    core = make_core(is_async=True)
    core.add(make_request("long", max_tokens=40))
    for number, (_, follower) in enumerate(steps(core, [])):
        if number == 5:
            core.add(make_request("newcomer", max_tokens=5, **options))
            core.add(make_request("behind it", max_tokens=5))
        if number == 20:
            assert (core.stats().num_waiting, core.stats().num_running) == (0, 1)
            assert follower is not None


def test_what_a_seed_gives_does_not_depend_on_a_step_that_came_to_nothing() -> None:
    def seeded() -> Request:
        return make_request("seeded", temperature=2.0, seed=5, max_tokens=6, ignore_eos=True)

    core = make_core(undecided, is_async=True)
    step, _ = decoding(core)
    core.add(seeded())
    batch = core.build(step)
    follower = core.schedule_ahead(step, batch)
    assert follower is not None
    assert len(follower.num_tokens) == 2
    for under_way in (batch, core.build(follower)):
        core.runner.launch(under_way).collect()
    core.fail(step, "what it brought cannot be taken in")
    core.cancel_step(follower)
    assert tokens(drive(core)["seeded"]) == tokens(generate(make_core(undecided), seeded()))
    runner_of(core).shutdown()


def test_where_a_sequence_would_be_preempted_the_next_step_waits() -> None:
    core = make_core(block_size=4, num_blocks=6, max_model_len=24, is_async=True, enable_prefix_caching=False)
    for name in "ab":
        core.add(make_request(name, prompt=LETTERS[:10], max_tokens=14))
    followers = []
    for _, follower in steps(core, []):
        followers.append(follower)
        assert core.stats().num_preemptions == 0 or len(core.scheduler.running) == 1
        if core.stats().num_preemptions:
            break
    # Both come to their last block in the same step, where there is none left: it waits until the one before it is over.
    assert [follower is not None for follower in followers[:3]] == [True, True, False]
    assert core.stats().num_preemptions == 1


def test_a_block_that_was_full_before_its_last_token_was_known_is_found_by_others() -> None:
    core = make_core(letter_after, block_size=4, is_async=True)
    plan = [Plan(0, None, {"prompt": "?", "max_tokens": 12, "n": 1})]
    run(core, plan)
    text = ids("?") + tokens(plan[0].deltas)
    plan = [Plan(0, None, {"prompt": text, "max_tokens": 1, "n": 1})]
    run(core, plan)
    assert plan[0].deltas[0].prompt is not None
    assert plan[0].deltas[0].prompt.num_cached_tokens == 12
