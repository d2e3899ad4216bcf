"""A loop in a thread of its own."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator

import pytest

from penstock.engine.errors import EngineUnavailable, InvalidRequest
from penstock.llm.model import LoopThread


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    thread = LoopThread()
    yield thread
    thread.close()


async def doubled(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def test_it_gives_a_coroutines_result(loop: LoopThread) -> None:
    assert loop.run(doubled(21)) == 42
    assert loop.submit(doubled(4)).result() == 8


def test_it_raises_what_the_coroutine_raises(loop: LoopThread) -> None:
    async def refuse() -> None:
        raise InvalidRequest("no", "prompt")

    with pytest.raises(InvalidRequest, match="no"):
        loop.run(refuse())


def test_it_works_where_a_loop_is_running_already(loop: LoopThread) -> None:
    async def notebook_cell() -> int:
        return loop.run(doubled(3))

    assert asyncio.run(notebook_cell()) == 6


def test_many_threads_may_call_at_once(loop: LoopThread) -> None:
    results: list[int] = []
    threads = [threading.Thread(target=lambda number=number: results.append(loop.run(doubled(number)))) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(results) == list(range(0, 16, 2))


def test_it_iterates_and_closes_what_is_left_early(loop: LoopThread) -> None:
    ended: list[bool] = []

    async def count() -> AsyncGenerator[int, None]:
        try:
            for number in range(100):
                yield number
        finally:
            ended.append(True)

    assert list(zip(range(3), loop.iterate(count()), strict=False)) == [(0, 0), (1, 1), (2, 2)]
    assert ended == [True]


def test_closing_cancels_what_runs_and_refuses_what_comes(loop: LoopThread) -> None:
    cancelled = threading.Event()
    begun = threading.Event()

    async def wait_for_ever() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    future = loop.submit(wait_for_ever())
    begun.wait()
    loop.close()
    loop.close()
    assert cancelled.is_set()
    assert future.cancelled()
    assert loop.is_closed
    with pytest.raises(EngineUnavailable, match="closed"):
        loop.run(doubled(1))


def test_a_caller_that_waits_while_it_is_closed_is_told_so(loop: LoopThread) -> None:
    begun = threading.Event()
    errors: list[Exception] = []

    async def wait_for_ever() -> None:
        begun.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop.run(wait_for_ever())
        except EngineUnavailable as error:
            errors.append(error)

    caller = threading.Thread(target=call)
    caller.start()
    begun.wait()
    loop.close()
    caller.join()
    assert len(errors) == 1


def test_one_without_references_ends_its_thread() -> None:
    held = LoopThread("forgotten")
    held.run(doubled(1))
    del held
    assert not [thread for thread in threading.enumerate() if thread.name == "forgotten"]
