"""An executor in event loops: waiting, streaming, leaving early."""

import asyncio
import threading

import pytest

from penstock.engine.errors import InvalidRequest
from penstock.llm.executor import Executor
from penstock.llm.executor.responses import FinishReason
from tests.fakes import make_core, runner_of
from tests.llm.executors import ask, context_over, output, whole


def test_responses_can_be_awaited_for_one_several_or_any() -> None:
    async def scenario() -> None:
        async with Executor(context=context_over(make_core())) as executor:
            first, second, third = executor.enqueue_requests([ask("a"), ask("b"), ask("c")])
            assert [response.request_id for response in await executor.responses(second)] == [second]
            both = await executor.responses([third, first])
            assert [[response.request_id for response in responses] for responses in both] == [[third], [first]]
            assert await executor.responses(second) == []
            with pytest.raises(InvalidRequest):
                await executor.responses(9)
            fourth = executor.enqueue_request(ask("d"))
            assert [response.request_id for response in await executor.responses()] == [fourth]
        assert await executor.responses() == []

    asyncio.run(scenario())


def test_requests_are_streamed_beside_each_other() -> None:
    async def scenario() -> None:
        async with Executor(context=context_over(make_core())) as executor:

            async def stream(prompt: str) -> list[int]:
                return output([response async for response in executor.stream(ask(prompt, 10, streaming=True))])

            streamed = await asyncio.gather(*(stream(f"prompt {number}") for number in range(5)))
            for number, tokens in enumerate(streamed):
                [response] = [response async for response in executor.stream(executor.enqueue_request(ask(f"prompt {number}", 10)))]
                assert response.result.output_token_ids == [tokens]

    asyncio.run(scenario())


def test_leaving_a_stream_cancels_its_request() -> None:
    async def scenario() -> None:
        core = make_core()
        async with Executor(context=context_over(core)) as executor:
            stream = executor.stream(ask("hello", 190, streaming=True))
            first = await anext(stream)
            await stream.aclose()
            rest = await asyncio.to_thread(whole, executor, first.request_id)
            assert rest[-1].result.finish_reasons == [FinishReason.CANCELLED]
        core.check_integrity()

    asyncio.run(scenario())


def test_a_cancelled_reader_has_taken_nothing() -> None:
    async def scenario() -> None:
        core = make_core()
        runner_of(core).gate = gate = threading.Event()
        async with Executor(context=context_over(core)) as executor:
            request_id = executor.enqueue_request(ask())
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await executor.responses([request_id, request_id])
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await executor.responses()
            gate.set()
            assert len(await executor.responses(request_id)) == 1

    asyncio.run(scenario())


def test_two_loops_and_a_thread_wait_for_the_same_executor() -> None:
    with Executor(context=context_over(make_core())) as executor:
        request_ids = executor.enqueue_requests([ask(str(number)) for number in range(3)])
        got: list[int] = []

        def in_a_loop(request_id: int) -> None:
            async def wait() -> None:
                got.extend(response.request_id for response in await executor.responses(request_id))

            asyncio.run(wait())

        threads = [threading.Thread(target=in_a_loop, args=(request_id,)) for request_id in request_ids[:2]]
        for thread in threads:
            thread.start()
        got += [response.request_id for response in executor.await_responses(request_ids[2])]
        for thread in threads:
            thread.join(60)
        assert sorted(got) == request_ids


def test_an_error_in_the_block_cancels_what_runs() -> None:
    core = make_core()

    async def scenario() -> Executor:
        executor = Executor(context=context_over(core))
        with pytest.raises(ZeroDivisionError):
            async with executor:
                raise_after(executor)
        return executor

    def raise_after(executor: Executor) -> None:
        executor.enqueue_request(ask("hello", 190))
        raise ZeroDivisionError

    [response] = asyncio.run(scenario()).await_responses()
    assert response.result.finish_reasons == [FinishReason.CANCELLED]
