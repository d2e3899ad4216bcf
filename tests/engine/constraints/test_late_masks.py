"""A grammar that takes its time holds up its own sequence and no other."""

import asyncio
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from penstock.engine import loop
from penstock.engine.constraints import masks
from penstock.engine.constraints.masks import TOO_SLOW, MaskJob, MaskState, MaskThread, StepMasks, allocate_bitmask
from penstock.engine.constraints.state import ConstraintState
from penstock.engine.core import EngineCore
from penstock.engine.deltas import ClientFault, FinishReason, SequenceDelta
from penstock.engine.loop import Engine
from tests.fakes import EOS, VOCAB_SIZE, content, drive, generate, make_core, make_request, runner_of, saying, tokens
from tests.matchers import Blocked, Grammar, Walk


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """Set at the end whatever happens, so that no thread waits on."""
    event = threading.Event()
    yield event
    event.set()


def alone(seed: int, **options: Any) -> list[SequenceDelta]:
    return generate(make_core(), make_request(grammar=Grammar(lambda: Walk(seed)), **options))


def step_until(core: EngineCore, said: dict[str, list[SequenceDelta]], request_ids: set[str]) -> None:
    """Steps until these requests have ended."""
    while not all(said.get(request_id) and said[request_id][-1].finish_reason for request_id in request_ids):
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(deltas)
        core.check_integrity()


@pytest.mark.parametrize(("n", "num_slots"), [(1, 0), (3, 0), (1, 8), (3, 12)])
def test_others_go_on_step_by_step_while_a_mask_is_being_filled(release: threading.Event, n: int, num_slots: int) -> None:
    core = make_core(grace=0.02, num_slots=num_slots)
    core.add(make_request("slow", grammar=Grammar(lambda: Blocked(1, release)), n=n))
    quick = {"free": make_request("free", max_tokens=12), "walk": make_request("walk", grammar=Grammar(lambda: Walk(2)), max_tokens=12)}
    for request in quick.values():
        core.add(request)
    said: dict[str, list[SequenceDelta]] = {}
    step_until(core, said, {"free"})
    assert core.stats().num_steps == 12
    step_until(core, said, {"walk"})
    # Behind each of the slow ones it was taken back once at most.
    assert core.stats().num_steps <= 12 + n
    assert "slow" not in said
    release.set()
    for request_id, deltas in drive(core).items():
        said.setdefault(request_id, []).extend(deltas)
    runner_of(core).shutdown()
    for index in range(n):
        assert tokens(said["slow"], index) == tokens(alone(1))
    assert tokens(said["walk"]) == tokens(alone(2, max_tokens=12))


def test_a_grammar_that_was_late_gets_no_drafts(release: threading.Event) -> None:
    core = make_core(saying("ab" * 40), grace=0.02, rows_for_weights=1000.0)
    core.add(make_request("slow", "ab" * 5, grammar=Grammar(lambda: Blocked(1, release)), max_tokens=masks.NUM_MASKS_APART - 1))
    core.step()
    release.set()
    said = drive(core)["slow"]
    assert core.stats().num_drafts == 0
    assert tokens(said) == tokens(
        generate(
            make_core(saying("ab" * 40)), make_request(prompt="ab" * 5, grammar=Grammar(lambda: Walk(1)), max_tokens=len(tokens(said)))
        )
    )
    runner_of(core).shutdown()


def test_once_late_a_grammar_is_filled_apart_and_no_step_is_cancelled(release: threading.Event) -> None:
    matcher = Blocked(1, release)
    core = make_core(grace=0.02)
    core.add(make_request("slow", grammar=Grammar(lambda: matcher), max_tokens=20))
    said: dict[str, list[SequenceDelta]] = {}
    core.step()
    release.set()
    while "slow" not in said:
        said |= core.step()
    release.clear()
    num_steps = core.stats().num_steps
    quick = {str(number): make_request(str(number), grammar=Grammar(lambda: Walk(9)), max_tokens=6) for number in range(3)}
    for request in quick.values():
        core.add(request)
    step_until(core, said, set(quick))
    num_alone = make_core()
    generate(num_alone, make_request(grammar=Grammar(lambda: Walk(9)), max_tokens=6))
    assert core.stats().num_steps - num_steps == num_alone.stats().num_steps
    release.set()
    said["slow"] += drive(core)["slow"]
    assert tokens(said["slow"]) == tokens(alone(1, max_tokens=20))
    runner_of(core).shutdown()


def test_after_enough_quick_masks_a_grammar_is_waited_for_again(release: threading.Event) -> None:
    matcher = Blocked(5, release, length=80)
    core = make_core(grace=0.02)
    core.add(make_request("slow", grammar=Grammar(lambda: matcher), max_tokens=80))
    core.step()
    sequence = core.scheduler.running[0]
    assert sequence.constraint is not None
    assert sequence.constraint.num_masks_apart == masks.NUM_MASKS_APART
    release.set()
    lows = []
    while core.has_work:
        core.step()
        lows.append(sequence.constraint.num_masks_apart)
    assert min(lows) < masks.NUM_MASKS_APART
    runner_of(core).shutdown()


def test_a_late_sequence_that_is_preempted_goes_on_with_the_mask_it_waited_for(release: threading.Event) -> None:
    core = make_core(num_blocks=10, max_model_len=40, grace=0.02)
    core.add(make_request("slow", "a" * 11, grammar=Grammar(lambda: Blocked(1, release)), max_tokens=20, priority=1))
    core.add(make_request("free", "b" * 11, max_tokens=29))
    said: dict[str, list[SequenceDelta]] = {}
    step_until(core, said, {"free"})
    assert core.stats().num_preemptions > 0
    assert core.stats().num_steps == 29
    release.set()
    assert tokens(drive(core)["slow"]) == tokens(alone(1, prompt="a" * 11, max_tokens=20))
    runner_of(core).shutdown()


def test_a_slow_sequence_can_leave_and_those_behind_it_are_filled(release: threading.Event) -> None:
    core = make_core(grace=0.02)
    stuck = Blocked(1, release)
    core.add(make_request("stuck", grammar=Grammar(lambda: stuck), max_tokens=20))
    core.step()
    release.set()
    while not core.step():
        pass
    release.clear()
    stuck.asked.clear()
    core.step()  # apart by now: the worker for slow grammars is stuck with it
    assert stuck.asked.wait(timeout=60)
    other_release = threading.Event()
    core.add(make_request("other", grammar=Grammar(lambda: Blocked(2, other_release))))
    core.step()
    other_release.set()
    core.abort("stuck")
    core.check_integrity()
    assert tokens(drive(core)["other"]) == tokens(alone(2))
    runner_of(core).shutdown()


def test_a_mask_that_never_comes_ends_its_request_and_holds_up_none_behind_it(
    release: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "TIME_LIMIT", 0.1)
    monkeypatch.setattr(masks, "PATIENCE", 0.02)
    core = make_core(grace=0.01)
    core.add(make_request("stuck", grammar=Grammar(lambda: Blocked(1, release)), n=2))
    core.add(make_request("walk", grammar=Grammar(lambda: Walk(2))))
    said = drive(core)
    runner_of(core).shutdown()
    assert tokens(said["walk"]) == tokens(alone(2))
    for index in range(2):
        last = [delta for delta in said["stuck"] if delta.index == index][-1]
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, TOO_SLOW)
        assert isinstance(last.error, ClientFault)


def test_a_mask_that_no_sequence_waits_for_any_more_allows_nothing(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "TIME_LIMIT", 0.05)
    monkeypatch.setattr(masks, "PATIENCE", 0.02)
    core = make_core(lambda history: EOS, grace=0.01)
    core.add(make_request("slow", grammar=Grammar(lambda: Blocked(1, release, forces=False))))
    core.step()
    while (step := core.schedule()) is None:
        core.masks.wait()
    batch = core.build(step)
    mask = core.scheduler.running[0].mask
    assert mask is not None
    release.set()
    while not mask.has_returned:
        pass
    last = core.update(step, batch, core.runner.launch(batch).collect())["slow"][-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, TOO_SLOW)
    core.check_integrity()
    runner_of(core).shutdown()


def test_a_step_that_fails_leaves_no_mask_behind(release: threading.Event) -> None:
    core = make_core(grace=0.01)
    core.add(make_request("slow", grammar=Grammar(lambda: Blocked(1, release))))
    core.add(make_request("walk", grammar=Grammar(lambda: Walk(2))))
    runner_of(core).failure = ValueError("broken")
    step = core.schedule()
    assert step is not None
    with pytest.raises(ValueError, match="broken"):
        core.runner.launch(core.build(step)).collect()
    deltas = core.fail(step, "failed")
    assert set(deltas) == {"slow", "walk"}
    core.check_integrity()
    runner_of(core).failure = None
    assert tokens(generate(core, make_request("again", grammar=Grammar(lambda: Walk(2))))) == tokens(alone(2))
    runner_of(core).shutdown()


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop turn until something has come about."""
    for _ in itertools.count():
        if condition():
            return
        await asyncio.sleep(0)


def run(core: EngineCore, test: Coroutine[Any, Any, None]) -> None:
    async def within_a_minute() -> None:
        async with asyncio.timeout(60):
            await test

    asyncio.run(within_a_minute())
    core.check_integrity()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks


def test_the_engine_wakes_when_a_late_mask_is_there(release: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PATIENCE", 1000.0)
    core = make_core(grace=0.01)
    matcher = Blocked(1, release)

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        slow = asyncio.create_task(_collect(engine, "slow", matcher))
        await until(lambda: matcher.asked.is_set() and core.stats().num_steps > 0)
        free = [delta async for delta in engine.generate(make_request("free", max_tokens=5))]
        assert len(tokens(free)) == 5
        assert not slow.done()
        release.set()
        assert tokens(await slow) == tokens(alone(1))
        await engine.stop()

    run(core, test())


def test_a_client_may_leave_and_the_engine_stop_while_a_mask_is_being_filled(release: threading.Event) -> None:
    core = make_core(grace=0.01)

    async def test() -> None:
        engine = Engine(core)
        await engine.start()
        for number in range(2):
            matcher = Blocked(number, release)
            task = asyncio.create_task(_collect(engine, str(number), matcher))
            num_steps = core.stats().num_steps
            await until(lambda matcher=matcher, before=num_steps: matcher.asked.is_set() and core.stats().num_steps > before)  # type: ignore[misc]
            if number == 0:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                engine.check_integrity()
        await engine.stop()
        assert (await task)[-1].finish_reason is FinishReason.ABORT

    run(core, test())


async def _collect(engine: Engine, request_id: str, matcher: Walk) -> list[SequenceDelta]:
    return [delta async for delta in engine.generate(make_request(request_id, grammar=Grammar(lambda: matcher)))]


def test_a_successor_takes_over_the_tasks_that_have_not_begun(release: threading.Event) -> None:
    order: list[str] = []
    is_begun, is_over, blocked_is_over = threading.Event(), threading.Event(), threading.Event()

    def blocked() -> None:
        is_begun.set()
        assert release.wait(timeout=60)
        order.append("blocked")
        blocked_is_over.set()

    thread = MaskThread()
    thread.submit(blocked)
    assert is_begun.wait(timeout=60)
    thread.submit(lambda: order.append("next"))
    thread.submit(is_over.set)
    successor = thread.successor()
    assert is_over.wait(timeout=60)
    assert order == ["next"]
    release.set()
    assert blocked_is_over.wait(timeout=60)
    assert order == ["next", "blocked"]
    successor.close()


def queued_job(matcher: Walk) -> MaskJob:
    job = MaskJob(ConstraintState(matcher, None, may_force=True), make_request().make_answer(), allocate_bitmask(1, VOCAB_SIZE))
    job.queue()
    return job


def test_a_cancelled_job_is_run_by_no_thread() -> None:
    jobs = [queued_job(Walk(number, forces=False)) for number in range(3)]
    assert jobs[1].cancel()
    by_row = {range(row, row + 1): job for row, job in enumerate(jobs)}
    masks = StepMasks(3, allocate_bitmask(4, VOCAB_SIZE), {0: 0, 1: 1, 2: 2}, MaskThread(), 60.0, by_row, jobs)
    assert masks.rows_to_sample() == [0, 2]
    assert [job.state for job in jobs] == [MaskState.READY, MaskState.IDLE, MaskState.READY]
    assert not any(job.cancel() for job in jobs)


@pytest.mark.parametrize("is_failed", [False, True])
def test_a_late_job_ends_as_its_thread_finds_unless_it_was_failed(release: threading.Event, is_failed: bool) -> None:
    matcher = Blocked(1, release, forces=False)
    job = queued_job(matcher)
    returned = threading.Event()
    job.on_done = returned.set
    thread = MaskThread()
    thread.submit(job.run)
    assert matcher.asked.wait(timeout=60)
    assert (job.state, job.is_pending) == (MaskState.RUNNING, True)
    assert not job.cancel()
    assert job.mark_late()
    assert (job.state, job.is_pending, job.needs_no_sample) == (MaskState.LATE, True, False)
    assert not is_failed or job.fail()
    release.set()
    assert returned.wait(timeout=60)
    assert not job.fail()
    assert (job.state, job.error) == ((MaskState.FAILED, TOO_SLOW) if is_failed else (MaskState.READY, None))
    thread.close()


def test_a_mask_for_text_that_is_not_constrained_is_not_asked_for() -> None:
    core = make_core(saying("free"))
    core.add(make_request("free"))
    step = core.schedule()
    assert step is not None
    batch = core.build(step)
    assert batch.masks is None
    core.update(step, batch, core.runner.launch(batch).collect())
    assert content(drive(core)["free"]) == "ree"
    runner_of(core).shutdown()
