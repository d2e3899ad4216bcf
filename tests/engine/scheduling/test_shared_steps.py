"""Requests that come together share a prompt's beginning within the very step that computes it."""

import pytest

from penstock.engine.core import EngineCore
from tests.fakes import drive, generate, make_core, make_request, runner_of, tokens

PROMPT = "a beginning of 40 letters, shared by all"


def num_cached(core: EngineCore) -> int:
    return core.scheduler.num_prefix_hits


def test_a_beginning_is_computed_once_for_requests_that_come_together() -> None:
    alone = tokens(generate(make_core(), make_request("alone", PROMPT + "!", max_tokens=6)))
    core = make_core(max_num_batched_tokens=100)
    for name in ("first", "second", "third"):
        core.add(make_request(name, PROMPT + "!", max_tokens=6))
    core.step()
    assert runner_of(core).num_tokens_per_step == [41 + 1 + 1]
    said = drive(core)
    assert all(tokens(said[name]) == alone[1:] for name in said)


def test_blocks_that_a_failed_step_was_to_compute_are_not_found() -> None:
    core = make_core()
    core.add(make_request("lost", PROMPT))
    step = core.schedule()
    assert step is not None
    core.fail(step, "it broke")
    core.check_integrity()
    generate(core, make_request("next", PROMPT, max_tokens=3))
    assert num_cached(core) == 0


@pytest.mark.parametrize("num_blocks", [12, 13, 14, 16, 20])
def test_a_sequence_preempted_in_the_step_it_was_to_be_in_promises_nothing(num_blocks: int) -> None:
    names = ["one", "two", "three", "four"]
    alone = {name: tokens(generate(make_core(), make_request(name, name * 5, max_tokens=20))) for name in names}
    core = make_core(num_blocks=num_blocks, max_model_len=48, max_num_batched_tokens=12)
    for name in names:
        core.add(make_request(name, name * 5, max_tokens=20))
    said = drive(core)
    assert core.scheduler.num_preemptions > 0
    assert {name: tokens(said[name]) for name in names} == alone


@pytest.mark.parametrize("max_num_batched_tokens", [8, 16, 24, 40, 100])
def test_a_beginning_is_computed_once_however_small_the_steps_are(max_num_batched_tokens: int) -> None:
    core = make_core(max_num_batched_tokens=max_num_batched_tokens)
    names = ["first", "second", "third"]
    for name in names:
        core.add(make_request(name, f"{PROMPT}{name}", max_tokens=3))
    said = drive(core)
    num_rest = sum(len(name) for name in names)
    assert num_cached(core) == 2 * len(PROMPT)
    assert sum(runner_of(core).num_tokens_per_step) == len(PROMPT) + num_rest + 3 * (3 - 1)
    for name in names:
        alone = generate(make_core(), make_request(name, f"{PROMPT}{name}", max_tokens=3))
        assert tokens(said[name]) == tokens(alone)
