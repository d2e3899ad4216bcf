from typing import Any

import pytest

from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta
from penstock.engine.errors import QueueFull
from penstock.engine.kv_cache import blocks as kv_blocks
from penstock.engine.scheduling.step import Step
from tests.fakes import LETTERS, drive, generate, make_core, make_request, num_calls, runner_of, tokens


def step_of(core: EngineCore) -> tuple[Step, dict[str, list[SequenceDelta]]]:
    """One step with what was scheduled, checked."""
    step = core.schedule()
    assert step is not None
    holders = {block for sequence in step.num_tokens for block in sequence.block_table}
    assert {target for _, target in step.copies} <= holders, "a block is copied for a sequence that is not in the step"
    batch = core.build(step)
    deltas = core.update(step, batch, core.runner.launch(batch).collect())
    core.check_integrity()
    return step, deltas


def scheduled(step: Step) -> dict[str, int]:
    return {sequence.request.request_id: num_tokens for sequence, num_tokens in step.num_tokens.items()}


def prompt_info(deltas: list[SequenceDelta]) -> PromptInfo:
    assert deltas[0].prompt is not None
    return deltas[0].prompt


def long_core(**options: Any) -> EngineCore:
    return make_core(**({"num_blocks": 700, "block_size": 16, "max_model_len": 11_000, "max_num_batched_tokens": 512} | options))


def test_a_long_prompt_is_computed_in_chunks_within_the_budget() -> None:
    core = long_core()
    deltas = generate(core, make_request(prompt=LETTERS[:1] * 1200, max_tokens=2))
    assert runner_of(core).num_tokens_per_step == [512, 512, 176, 1]
    assert len(tokens(deltas)) == 2


def test_a_short_prompt_behind_a_long_one_starts_in_the_same_step() -> None:
    core = long_core()
    core.add(make_request("long", LETTERS[:1] * 10_000, max_tokens=1))
    core.add(make_request("short", "hello", max_tokens=3))
    step, deltas = step_of(core)
    assert scheduled(step) == {"long": 256, "short": 5}
    assert [delta.index for delta in deltas["short"]] == [0]
    assert len(tokens(drive(core)["short"])) == 2


def test_a_short_prompt_that_comes_later_starts_within_a_step_as_well() -> None:
    core = long_core()
    core.add(make_request("long", LETTERS[:1] * 10_000, max_tokens=1))
    step_of(core)
    core.add(make_request("short", "hello", max_tokens=1))
    assert "short" in step_of(core)[1]


def test_decodes_get_a_token_in_every_step_while_prompts_arrive() -> None:
    core = long_core(max_num_seqs=16, max_num_batched_tokens=20)
    for number in range(3):
        core.add(make_request(f"decode {number}", "hi", max_tokens=30, priority=5))
    step_of(core)
    for number in range(10):
        core.add(make_request(f"prompt {number}", LETTERS * 20, max_tokens=1, priority=-5))
        _, deltas = step_of(core)
        assert {f"decode {number}" for number in range(3)} <= deltas.keys()


def test_a_budget_smaller_than_the_number_of_sequences_is_raised_to_it() -> None:
    core = make_core(max_num_seqs=4, max_num_batched_tokens=1)
    for number in range(4):
        core.add(make_request(str(number), max_tokens=5))
    assert len(step_of(core)[1]) == 4
    assert len(step_of(core)[1]) == 4


def test_waiting_requests_are_admitted_by_priority_then_arrival() -> None:
    core = make_core(max_num_seqs=1)
    for name, priority in [("first", 1), ("second", 0), ("third", 1), ("fourth", -3), ("fifth", 0)]:
        core.add(make_request(name, max_tokens=2, priority=priority))
    assert list(drive(core)) == ["fourth", "second", "fifth", "first", "third"]


def test_beyond_its_bound_the_queue_refuses_and_keeps_what_it_has() -> None:
    core = make_core(max_waiting=2)
    core.add(make_request("a", max_tokens=1))
    core.add(make_request("b", max_tokens=1))
    with pytest.raises(QueueFull) as refusal:
        core.add(make_request("c", max_tokens=1, n=3))
    assert refusal.value.retry_after > 0
    core.check_integrity()
    step_of(core)
    core.add(make_request("c", max_tokens=1, n=3))
    assert len(drive(core)["c"]) == 3


def test_forks_that_wait_for_their_prompt_take_places_among_those_that_run() -> None:
    core = long_core(max_num_seqs=4)
    core.add(make_request("one", LETTERS[:1] * 1000, max_tokens=4, n=3))
    core.add(make_request("other", LETTERS[1:2] * 1000, max_tokens=4, n=3))
    while core.has_work:
        step_of(core)
        assert len(core.scheduler.running) <= 4


@pytest.mark.parametrize(("num_prompt", "num_copies"), [(6, 2), (7, 2), (8, 0)])
def test_forks_copy_a_block_only_where_they_write_into_one(num_prompt: int, num_copies: int) -> None:
    core = make_core(block_size=4)
    core.add(make_request(prompt=LETTERS[:num_prompt], max_tokens=6, n=3, temperature=1.0, seed=1))
    step, _ = step_of(core)
    assert step.copies == []
    assert core.scheduler.pool.num_blocks - core.scheduler.pool.num_free == 2
    step, _ = step_of(core)
    assert len(step.copies) == num_copies
    drive(core)


def test_a_fork_gives_way_where_there_is_no_block_to_copy_to() -> None:
    core = make_core(block_size=4, num_blocks=2, max_model_len=8)
    core.add(make_request(prompt=LETTERS[:6], max_tokens=2, n=2))
    step_of(core)
    step, _ = step_of(core)
    assert [sequence.index for sequence in step.num_tokens] == [0]
    assert step.copies == []
    assert core.stats().num_preemptions == 1
    assert [delta.index for delta in drive(core)["r"]] == [1]


def test_a_prompt_takes_blocks_from_a_decode_that_had_its_place_in_the_step_already() -> None:
    core = make_core(block_size=4, num_blocks=10, max_model_len=40, max_num_seqs=2, max_num_batched_tokens=8)
    core.add(make_request("decode", LETTERS[:9], max_tokens=20, priority=1))
    step_of(core)
    step_of(core)
    core.add(make_request("prompt", LETTERS[:1] * 28, max_tokens=1))
    steps = [scheduled(step_of(core)[0]) for _ in range(4)]
    assert steps[:3] == [{"decode": 1, "prompt": 7}] * 3
    assert steps[3] == {"prompt": 7}
    assert core.stats().num_preemptions == 1
    assert core.stats().num_waiting == 1
    assert drive(core)["decode"][-1].finish_reason is FinishReason.LENGTH


def test_a_preempted_fork_takes_its_copies_out_of_the_step() -> None:
    core = make_core(block_size=4, num_blocks=260, max_model_len=1020, max_num_seqs=9, max_num_batched_tokens=300)
    core.add(make_request("long", LETTERS[:1] * 1000, max_tokens=1, priority=-1))
    step_of(core)
    step_of(core)
    core.add(make_request("forks", LETTERS[1:2] * 18, max_tokens=5, n=8, temperature=1.0, seed=1))
    assert scheduled(step_of(core)[0]) == {"long": 150, "forks": 18}
    step, _ = step_of(core)
    assert core.stats().num_preemptions == 2
    assert len(step.copies) == 6
    assert len([delta for delta in drive(core)["forks"] if delta.finish_reason]) == 8


def test_a_preempted_sequence_goes_on_with_the_tokens_it_would_have_had() -> None:
    roomy, tight = make_core(), make_core(num_blocks=10, max_model_len=40)
    said = []
    for core in (roomy, tight):
        for number in range(4):
            core.add(make_request(str(number), LETTERS[number : number + 9], max_tokens=20))
        said.append({name: tokens(deltas) for name, deltas in drive(core).items()})
    assert said[0] == said[1]
    assert roomy.stats().num_preemptions == 0
    assert tight.stats().num_preemptions > 0


@pytest.mark.parametrize(("num_prompt", "num_cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_a_prompt_known_already_computes_its_last_token_and_no_whole_block_before(num_prompt: int, num_cached: int) -> None:
    core = make_core(block_size=4)
    prompt = LETTERS[:num_prompt]
    first = generate(core, make_request(prompt=prompt, max_tokens=3))
    assert prompt_info(first).num_cached_tokens == 0
    again = generate(core, make_request(prompt=prompt, max_tokens=3))
    assert prompt_info(again).num_cached_tokens == num_cached
    assert tokens(again) == tokens(first)
    assert core.stats().num_prefix_cache_hits == num_cached
    assert core.stats().num_prefix_cache_queries == 2 * num_prompt


def test_an_answer_can_be_found_as_the_beginning_of_the_next_prompt() -> None:
    core = make_core(block_size=4)
    said = tokens(generate(core, make_request(prompt=LETTERS[:5], max_tokens=9)))
    follow_up = generate(core, make_request(prompt=[*LETTERS[:5], *said, *LETTERS[:3]], max_tokens=1))
    assert prompt_info(follow_up).num_cached_tokens == 12  # the last token's keys and values were never computed


def test_a_block_that_was_computed_in_part_is_not_found() -> None:
    core = make_core(block_size=4, max_num_seqs=1, max_num_batched_tokens=6)
    core.add(make_request("leaves", LETTERS[:12]))
    step_of(core)
    core.abort("leaves")
    assert prompt_info(generate(core, make_request(prompt=LETTERS[:12], max_tokens=1))).num_cached_tokens == 4


def test_one_salt_never_finds_what_another_has_left() -> None:
    core = make_core(block_size=4)
    for salt, num_cached in [("mine", 0), ("", 0), ("yours", 0), ("mine", 8), ("", 8)]:
        deltas = generate(core, make_request(prompt=LETTERS[:10], max_tokens=1, cache_salt=salt))
        assert prompt_info(deltas).num_cached_tokens == num_cached


def test_without_prefix_caching_nothing_is_found() -> None:
    core = make_core(enable_prefix_caching=False)
    for _ in range(2):
        assert prompt_info(generate(core, make_request(prompt=LETTERS[:10], max_tokens=1))).num_cached_tokens == 0
    assert core.stats().num_prefix_cache_hits == 0
    assert core.stats().num_prefix_cache_queries == 0


def test_a_sequence_that_was_preempted_does_not_count_its_own_blocks_as_found() -> None:
    core = make_core(block_size=4, num_blocks=12, max_model_len=48, max_num_seqs=2, max_num_batched_tokens=8)
    core.add(make_request("decode", LETTERS[:8], max_tokens=24, priority=-1))
    step_of(core)
    core.add(make_request("prompt", LETTERS[:1] * 36, max_tokens=1, priority=1))
    deltas = drive(core)["prompt"]
    assert core.stats().num_preemptions > 0
    assert core.stats().num_prefix_cache_hits == 0
    assert core.stats().num_prefix_cache_queries == 8 + 36
    assert prompt_info(deltas).num_cached_tokens == 0


def test_all_of_a_request_leave_together_while_its_prompt_is_being_computed() -> None:
    core = long_core()
    core.add(make_request("r", LETTERS[:1] * 1000, max_tokens=4, n=3))
    step_of(core)
    assert core.stats().kv_cache_usage > 0
    core.abort("r")
    core.check_integrity()
    assert not core.has_work
    assert core.stats().kv_cache_usage == 0


def test_the_time_in_the_queue_is_told() -> None:
    core = make_core(max_num_seqs=2)
    core.add(make_request("first", max_tokens=4, n=2))
    core.add(make_request("second", max_tokens=1))
    said = drive(core)
    assert 0 <= prompt_info(said["first"]).queue_seconds < prompt_info(said["second"]).queue_seconds
    assert core.stats().num_waiting == 0


def test_integrity_sees_a_sequence_that_is_not_running() -> None:
    core = make_core()
    core.add(make_request())
    core.scheduler.waiting.remove(core.scheduler.waiting.first(1)[0])
    with pytest.raises(AssertionError, match="a sequence is lost"):
        core.check_integrity()


def test_a_prompt_is_hashed_when_it_comes_and_not_in_a_step_for_which_many_may_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    for number in range(5):
        core.add(make_request(str(number), prompt=LETTERS[:9] * 3, max_tokens=1))
    with monkeypatch.context() as step:
        step.setattr(kv_blocks, "hashlib", None)
        step_of(core)
    drive(core)


def test_what_waits_and_what_runs_is_looked_at_once_in_a_step() -> None:
    def num_calls_of_step(count: int) -> int:
        num_seqs = 3 * count
        core = make_core(
            num_blocks=40 * num_seqs, max_num_seqs=num_seqs, max_num_batched_tokens=num_seqs + 400, max_model_len=700, reserves=True
        )
        for number in range(count):
            core.add(make_request(f"running {number}", LETTERS[:2], max_tokens=100, ignore_eos=True))
        for _ in range(3):
            core.step()
        for number in range(count + 1):
            core.add(make_request(f"waiting {number}", [*LETTERS * 38, LETTERS[number % 16]], max_tokens=1))
        core.step()
        calls = num_calls(core.schedule)
        assert (len(core.scheduler.running), len(core.scheduler.waiting)) == (count + 1, count)
        core.runner.shutdown()
        return calls

    once, twice, fourfold = map(num_calls_of_step, (10, 20, 40))
    assert fourfold - twice <= 2.2 * (twice - once), "a product would take four times as many"


def test_waiting_for_a_prompt_under_way_takes_one_look_each_however_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    has = kv_blocks.BlockPool.has

    def count(pool: kv_blocks.BlockPool, block_hash: bytes) -> bool:
        nonlocal looks
        looks += 1
        return has(pool, block_hash)

    monkeypatch.setattr(kv_blocks.BlockPool, "has", count)
    core = make_core(num_blocks=200, max_num_seqs=40, max_num_batched_tokens=64, max_model_len=700)
    num_waiting = 30
    for number in range(1 + num_waiting):
        core.add(make_request(str(number), [*LETTERS * 38, LETTERS[number % 16]], max_tokens=1))
    while core.scheduler.waiting:
        looks = 0
        core.step()
        # The first walks along the blocks that the step before has filled, the others find where it got to.
        assert looks <= 64 // 4 + 2 + 2 * num_waiting
    core.runner.shutdown()
