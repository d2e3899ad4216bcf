import asyncio
from collections.abc import AsyncGenerator
from functools import partial

import pytest
from msgspec import Struct

from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import GenerationFailed
from penstock.serving.context import Workers
from penstock.serving.endpoints.answers import MAX_OPEN, AnswerFold, FirstDelta, merge


class Source:
    """Streams of numbered deltas that tell how they ended."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.num_open = 0
        self.most_open = 0

    async def stream(self, name: str, count: int, error: Exception | None = None, n: int = 1) -> AsyncGenerator[SequenceDelta, None]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield SequenceDelta(number % n, token_ids=[number])
            if error is not None:
                raise error
        finally:
            self.num_open -= 1
            self.closed.append(name)


def test_merged_streams_keep_their_order_and_are_numbered_through() -> None:
    async def run() -> None:
        source = Source()
        streams = [partial(source.stream, str(position), 4 + position, n=2) for position in range(3)]
        deltas = [delta async for delta in merge(streams, 2)]
        assert len(deltas) == 4 + 5 + 6
        for index in range(6):
            numbers = [delta.token_ids[0] for delta in deltas if delta.index == index]
            assert numbers == sorted(numbers)
            assert numbers[0] == index % 2
        assert sorted(source.closed) == ["0", "1", "2"]

    asyncio.run(run())


def test_a_long_list_is_never_open_as_a_whole() -> None:
    async def run() -> None:
        source = Source()
        num_streams = 3 * MAX_OPEN
        deltas = [delta async for delta in merge([partial(source.stream, str(position), 20) for position in range(num_streams)], 1)]
        assert sorted(delta.index for delta in deltas) == sorted([*range(num_streams)] * 20)
        assert len(source.closed) == num_streams
        assert source.most_open == MAX_OPEN

    asyncio.run(run())


def test_the_first_error_ends_all_streams() -> None:
    async def run() -> None:
        source = Source()
        bad = partial(source.stream, "bad", 2, GenerationFailed("no"))
        streams = [partial(source.stream, "good", 10_000), bad, partial(source.stream, "other", 10_000)]
        with pytest.raises(GenerationFailed):
            _ = [delta async for delta in merge(streams, 1)]
        assert sorted(source.closed) == ["bad", "good", "other"]

    asyncio.run(run())


def test_closing_a_merged_stream_closes_all_of_them() -> None:
    async def run() -> None:
        source = Source()
        merged = merge([partial(source.stream, "a", 100), partial(source.stream, "b", 100)], 1)
        await anext(merged)
        await merged.aclose()
        assert sorted(source.closed) == ["a", "b"]

    asyncio.run(run())


def test_an_error_before_the_first_delta_is_raised_while_waiting() -> None:
    async def run() -> None:
        source = Source()
        first = FirstDelta(source.stream("bad", 0, GenerationFailed("no")))
        with pytest.raises(GenerationFailed):
            await first.wait(None)
        await first.close()
        assert source.closed == ["bad"]

    asyncio.run(run())


class Indices(AnswerFold):
    """Writes of each delta its index."""

    def num_logprobs(self, delta: SequenceDelta) -> int:
        return 0

    def events(self, delta: SequenceDelta) -> bytes:
        return str(delta.index).encode()

    def add(self, delta: SequenceDelta) -> None:
        raise AssertionError("this is for streams")

    def body(self) -> Struct:
        raise AssertionError("this is for streams")


def test_a_first_delta_that_does_not_come_in_time_is_not_lost() -> None:
    async def run() -> None:
        gate = asyncio.Event()

        async def slow() -> AsyncGenerator[SequenceDelta, None]:
            await gate.wait()
            yield SequenceDelta(0)
            yield SequenceDelta(1)

        first = FirstDelta(slow())
        await first.wait(0.001)
        gate.set()
        with Workers() as workers:
            assert [events async for events in first.events(Indices(), workers)] == [b"", b"0", b"1", b""]
        await first.close()

    asyncio.run(run())


def test_closing_before_the_first_delta_closes_the_stream() -> None:
    async def run() -> None:
        source = Source()

        async def stuck() -> AsyncGenerator[SequenceDelta, None]:
            try:
                await asyncio.Event().wait()
                yield SequenceDelta(0)
            finally:
                source.closed.append("stuck")

        first = FirstDelta(stuck())
        await first.wait(0.001)
        await first.close()
        assert source.closed == ["stuck"]

    asyncio.run(run())
