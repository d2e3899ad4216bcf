import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from penstock.engine.constraints import queue as grammar_queue
from penstock.engine.constraints.queue import GrammarQueue
from penstock.engine.errors import GenerationFailed, QueueFull
from penstock.engine.system.process import SWITCH_SECONDS


class Work:
    """Jobs that wait for a word, and the order in which they were begun."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def job(self, name: str, *, is_held: bool = False) -> Callable[[], str]:
        gate = self.gates[name] = threading.Event()
        if not is_held:
            gate.set()

        def run() -> str:
            self.begun.append(name)
            assert gate.wait(10)
            return name

        return run


def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "SLOW_SECONDS", 100)
    work = Work()

    async def run() -> None:
        queue = GrammarQueue()
        jobs = [queue.submit(work.job("a0", is_held=True), "a")]
        jobs += [queue.submit(work.job(f"a{i}"), "a") for i in range(1, 5)]
        jobs += [queue.submit(work.job(f"b{i}"), "b") for i in range(2)]
        work.gates["a0"].set()
        assert [await job.done for job in jobs] == ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]
        queue.check_integrity()
        queue.close()

    asyncio.run(run())
    assert work.begun == ["a0", "a1", "b0", "a2", "b1", "a3", "a4"]


def test_what_is_slow_steps_aside_for_the_quick_until_too_many_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "SLOW_SECONDS", 0.01)
    work = Work()

    async def run() -> None:
        queue = GrammarQueue()
        held = [queue.submit(work.job(f"held{i}", is_held=True), f"client{i}") for i in range(grammar_queue.MAX_RUNNING - 1)]
        assert await queue.submit(work.job("quick"), "a").done == "quick"
        assert not any(job.done.done() for job in held)
        held.append(queue.submit(work.job("last", is_held=True), "a"))
        waiting = queue.submit(work.job("waiting"), "b")
        await asyncio.sleep(0.05)
        assert not waiting.is_started
        for gate in work.gates.values():
            gate.set()
        await asyncio.gather(waiting.done, *(job.done for job in held))
        queue.check_integrity()
        queue.close()

    asyncio.run(run())


def test_one_clients_slow_jobs_leave_room_for_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "SLOW_SECONDS", 0.01)
    work = Work()

    async def run() -> None:
        queue = GrammarQueue()
        held = [queue.submit(work.job(f"a{i}", is_held=True), "a") for i in range(grammar_queue.MAX_RUNNING)]
        assert await queue.submit(work.job("b"), "b").done == "b"
        assert sum(job.is_started for job in held) == grammar_queue.MAX_RUNNING_OF_CLIENT
        for gate in work.gates.values():
            gate.set()
        await asyncio.gather(*(job.done for job in held))
        queue.check_integrity()
        queue.close()

    asyncio.run(run())


def test_a_client_that_floods_is_turned_away_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "SLOW_SECONDS", 100)
    monkeypatch.setattr(grammar_queue, "MAX_PENDING_OF_CLIENT", 2)
    monkeypatch.setattr(grammar_queue, "MAX_PENDING", 4)
    work = Work()

    async def run() -> None:
        queue = GrammarQueue()
        jobs = [queue.submit(work.job(name, is_held=name == "a1"), "a") for name in ("a1", "a2")]
        with pytest.raises(QueueFull, match="of this client"):
            queue.submit(work.job("a3"), "a")
        jobs += [queue.submit(work.job(name), name) for name in ("b", "c")]
        with pytest.raises(QueueFull, match="too many constraints are"):
            queue.submit(work.job("d"), "d")
        assert queue.cancel(jobs[2])
        assert not queue.cancel(jobs[0])
        jobs[2] = queue.submit(work.job("d"), "d")
        work.gates["a1"].set()
        await asyncio.gather(*(job.done for job in jobs))
        queue.check_integrity()
        queue.close()

    asyncio.run(run())
    assert "b" not in work.begun


def test_an_error_is_passed_on_and_a_panic_becomes_one() -> None:
    class Panic(BaseException):
        pass

    def failing(error: BaseException) -> Callable[[], Any]:
        def run() -> Any:
            raise error

        return run

    async def run() -> None:
        queue = GrammarQueue()
        with pytest.raises(ZeroDivisionError):
            await queue.submit(failing(ZeroDivisionError()), None).done
        with pytest.raises(GenerationFailed, match="Panic"):
            await queue.submit(failing(Panic()), None).done
        queue.check_integrity()
        queue.close()

    asyncio.run(run())


def own_niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_threads_of_the_queue_step_back_and_the_slow_ones_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "SLOW_SECONDS", 0.01)
    before = own_niceness()
    gate = threading.Event()

    def slow() -> int:
        assert gate.wait(10)
        return own_niceness()

    async def run() -> list[int]:
        queue = GrammarQueue()
        job = queue.submit(slow, None)
        others = [await queue.submit(own_niceness, None).done for _ in range(2)]
        gate.set()
        return [*others, await job.done, await queue.submit(own_niceness, None).done]

    is_linux = sys.platform == "linux"
    quick = max(before, grammar_queue.NICENESS) if is_linux else before
    lowest = grammar_queue.SLOW_NICENESS if is_linux else before
    assert asyncio.run(run()) == [quick, quick, lowest, quick]
    assert own_niceness() == before


def test_threads_hand_the_lock_on_sooner_while_a_job_runs_and_only_then() -> None:
    before = sys.getswitchinterval()

    async def run() -> list[float]:
        queue = GrammarQueue()
        jobs = [queue.submit(sys.getswitchinterval, client) for client in ("a", "a", "b")]
        return [await job.done for job in jobs]

    assert asyncio.run(run()) == pytest.approx([SWITCH_SECONDS] * 3)
    assert sys.getswitchinterval() == before
