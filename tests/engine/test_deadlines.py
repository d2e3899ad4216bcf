import asyncio
import threading
import time
from dataclasses import replace

import pytest

from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.loop import Engine
from penstock.engine.request import Deadlines, Request
from tests.fakes import content, drive, generate, letter_after, make_core, make_request, runner_of, tokens


class Clock:
    """Stands still until it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def with_deadline(request: Request, deadline: float) -> Request:
    return replace(request, deadline=deadline)


def reasons(deltas: list[SequenceDelta]) -> list[FinishReason]:
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


def test_a_running_request_ends_at_its_deadline_with_what_it_has_said_and_others_go_on(clock: Clock) -> None:
    core = make_core(letter_after)
    core.add(with_deadline(make_request("late", "ab", max_tokens=50, n=2, ignore_eos=True), clock.now + 5))
    core.add(make_request("other", "cd", max_tokens=12))
    early: list[SequenceDelta] = []
    for _ in range(6):
        early += core.step().get("late", [])
    clock.now += 6
    said = drive(core)
    assert reasons(said["late"]) == [FinishReason.TIMED_OUT] * 2
    assert tokens(early, 0)
    assert (
        tokens(early, 0)
        == tokens(generate(make_core(letter_after), make_request("alone", "ab", max_tokens=50)), 0)[: len(tokens(early, 0))]
    )
    assert reasons(said["other"]) == [FinishReason.LENGTH]


def test_text_that_was_held_back_is_given_at_the_deadline(clock: Clock) -> None:
    core = make_core(letter_after)
    core.add(with_deadline(make_request(prompt="ab", max_tokens=50, stop=("abcdefghijklmnop" * 4,)), clock.now + 5))
    deltas: list[SequenceDelta] = []
    for _ in range(6):
        deltas += core.step()["r"]
    clock.now += 6
    deltas += drive(core)["r"]
    assert len(content(deltas)) == len(tokens(deltas)) == 6


def test_a_request_that_still_waits_ends_too_and_its_sequences_leave_nothing_behind(clock: Clock) -> None:
    core = make_core(letter_after, max_num_seqs=2)
    core.add(make_request("first", "ab", max_tokens=20, n=2))
    core.add(with_deadline(make_request("waits", "cd", max_tokens=20, n=2), clock.now + 1))
    core.step()
    clock.now += 2
    expired = core.step()["waits"]
    assert [(delta.index, delta.finish_reason, delta.token_ids) for delta in expired] == [
        (0, FinishReason.TIMED_OUT, []),
        (1, FinishReason.TIMED_OUT, []),
    ]
    assert not core.scheduler.waiting
    assert "waits" not in drive(core)


def test_a_request_that_ends_in_time_or_is_aborted_is_forgotten(clock: Clock) -> None:
    core = make_core(letter_after)
    core.add(with_deadline(make_request("done", max_tokens=2), clock.now + 5))
    core.add(with_deadline(make_request("gone", max_tokens=20), clock.now + 5))
    core.step()
    core.abort("gone")
    drive(core)
    core.add(make_request("done", max_tokens=3))
    core.add(make_request("gone", max_tokens=3))
    clock.now += 6
    assert [reasons(deltas) for deltas in drive(core).values()] == [[FinishReason.LENGTH]] * 2


def test_a_deadline_that_passes_during_a_step_leaves_that_step_to_the_others(clock: Clock) -> None:
    core = make_core(letter_after)
    core.add(with_deadline(make_request("late", "ab", max_tokens=20), clock.now + 5))
    core.add(make_request("other", "cd", max_tokens=3))
    step = core.schedule()
    assert step is not None
    batch = core.build(step)
    handle = core.runner.launch(batch)
    clock.now += 6
    assert reasons(core.expire()["late"]) == [FinishReason.TIMED_OUT]
    assert set(core.update(step, batch, handle.collect())) == {"other"}
    drive(core)


def test_the_engine_says_so_once_and_other_clients_go_on() -> None:
    core = make_core(letter_after)

    async def collect(engine: Engine, request: Request) -> list[SequenceDelta]:
        return [delta async for delta in engine.generate(request)]

    async def main() -> tuple[list[SequenceDelta], list[SequenceDelta]]:
        gate = runner_of(core).gate = threading.Event()
        engine = Engine(core)
        await engine.start()
        late = with_deadline(make_request("late", "ab", max_tokens=90, ignore_eos=True), time.monotonic() + 0.05)
        both = asyncio.gather(collect(engine, late), collect(engine, make_request("other", "cd", max_tokens=5)))
        await asyncio.sleep(0.1)
        gate.set()
        deltas = await both
        await engine.stop()
        return deltas

    late, other = asyncio.run(main())
    assert reasons(late) == [FinishReason.TIMED_OUT]
    assert late[-1].finish_reason is FinishReason.TIMED_OUT
    assert reasons(other) == [FinishReason.LENGTH]


def test_waiting_for_something_else_ends_when_the_next_deadline_does(clock: Clock) -> None:
    known = Deadlines()
    assert known.seconds_left(1.0) == 1.0
    known.add("a", clock.now + 0.25)
    known.add("b", None)
    assert known.seconds_left(1.0) == pytest.approx(0.25)
    clock.now += 1
    assert known.seconds_left(1.0) == 0.0
    assert known.take_expired() == ["a"]
    assert known.take_expired() == []
