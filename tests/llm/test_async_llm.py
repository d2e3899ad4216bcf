"""`AsyncLLM`: outputs as they grow, and what ends with their reader."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    AsyncLLM,
    EngineUnavailable,
    GenerationFailed,
    InvalidRequest,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    per_sequence,
)
from tests.llm.model_directory import SETTINGS
from tests.llm.said import saying

Scenario = Callable[[AsyncLLM], Awaitable[None]]


@pytest.fixture(scope="module")
def run(model_dir: Path) -> Callable[[Scenario], None]:
    """Runs a scenario with a model of its own, which must be at rest in the end."""

    def broken() -> Any:
        def process(token_ids: list[int], logits: Any) -> Any:
            raise RuntimeError("no")

        return process

    def run(scenario: Scenario) -> None:
        async def whole() -> None:
            processors = {"say": per_sequence(saying(model_dir)), "broken": per_sequence(broken)}
            async with AsyncLLM(model_dir, logits_processors=processors, reasoning_parser="deepseek_r1", **SETTINGS) as llm:
                await scenario(llm)
                engine = llm._model.generating.engine
                assert engine.stats().num_running == engine.stats().num_waiting == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(whole())

    return run


async def collect(llm: AsyncLLM, params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in llm.generate("hello", params)]


def test_outputs_grow_or_hold_what_is_new_or_come_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        def params(kind: RequestOutputKind, n: int = 1) -> SamplingParams:
            return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, n=n, output_kind=kind)

        growing = await collect(llm, params(RequestOutputKind.CUMULATIVE))
        pieces = await collect(llm, params(RequestOutputKind.DELTA))
        (final,) = await collect(llm, params(RequestOutputKind.FINAL_ONLY))
        answer = final.outputs[0]
        assert growing[-1].outputs[0] == answer
        lengths = [len(output.outputs[0].token_ids) for output in growing]
        assert lengths == sorted(lengths)
        assert lengths[0] == 1
        assert [token_id for piece in pieces for token_id in piece.outputs[0].token_ids] == answer.token_ids
        assert "".join(piece.outputs[0].text for piece in pieces) == answer.text
        assert [place for piece in pieces for place in piece.outputs[0].logprobs or ()] == answer.logprobs
        assert pieces[-1].outputs[0].cumulative_logprob == pytest.approx(answer.cumulative_logprob)
        assert [output.outputs[0].finished() for output in growing] == [output.finished for output in growing]
        assert [output.finished for output in growing] == [False] * (len(growing) - 1) + [True]
        assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        (both,) = await collect(llm, params(RequestOutputKind.FINAL_ONLY, n=2))
        assert [sequence.token_ids for sequence in both.outputs] == [answer.token_ids] * 2

    run(scenario)


def test_a_conversations_pieces_add_up(run: Callable[[Scenario], None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        say = [{"name": "say", "arguments": {"text": "<think>well</think>done"}}]
        pieces = [
            output.outputs[0]
            async for output in llm.chat(
                [{"role": "user", "content": "hi"}], SamplingParams(logits_processors=say, output_kind=RequestOutputKind.DELTA)
            )
        ]
        assert "".join(piece.reasoning_content or "" for piece in pieces) == "well"
        assert "".join(piece.text for piece in pieces) == "done"
        assert pieces[-1].finish_reason == "stop"

    run(scenario)


def test_a_reader_that_is_cancelled_or_leaves_ends_the_request(run: Callable[[Scenario], None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        begun = asyncio.Event()

        async def listen() -> None:
            async for _ in llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True), "mine"):
                begun.set()

        task = asyncio.create_task(listen())
        await begun.wait()
        with pytest.raises(InvalidRequest, match="in use"):
            await anext(llm.generate("hello", SamplingParams(max_tokens=1), "mine"))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert llm._model.generating.engine.stats().num_running == 0
        outputs = llm.generate("hello", SamplingParams(max_tokens=200, ignore_eos=True))
        await anext(outputs)
        await outputs.aclose()

    run(scenario)


def test_what_fails_is_raised(run: Callable[[Scenario], None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        with pytest.raises(InvalidRequest, match="no tokens"):
            await anext(llm.generate([]))
        with pytest.raises((GenerationFailed, InvalidRequest)):
            await collect(llm, SamplingParams(max_tokens=3, logits_processors=["broken"]))
        await llm.check_health()
        await llm.sleep()
        assert await llm.is_sleeping()
        with pytest.raises(EngineUnavailable, match="wake_up"):
            await anext(llm.generate("x"))
        await llm.wake_up()
        assert await llm.reset_prefix_cache()
        assert (await collect(llm, SamplingParams(max_tokens=1)))[-1].finished
        assert any(metric.name == "penstock:generation_tokens" for metric in llm.get_metrics())
        assert (await llm.get_tokenizer()).encode("a") == [64]

    run(scenario)


def test_it_has_to_be_started(model_dir: Path) -> None:
    llm = AsyncLLM(model_dir, **SETTINGS)
    with pytest.raises(EngineUnavailable, match="not been started"):
        asyncio.run(collect(llm, SamplingParams()))
    with pytest.raises(EngineUnavailable, match="not been started"):
        llm.get_default_sampling_params()


def test_it_is_started_once(model_dir: Path) -> None:
    async def scenario() -> None:
        async with AsyncLLM(model_dir, **SETTINGS) as llm:
            with pytest.raises(EngineUnavailable, match="started already"):
                await llm.start()
            assert (await collect(llm, SamplingParams(max_tokens=1)))[-1].finished
        with pytest.raises(EngineUnavailable, match="closed"):
            await llm.start()

    asyncio.run(scenario())


def test_what_is_no_parameter_or_priority_is_refused_by_name(run: Callable[[Scenario], None]) -> None:
    async def scenario(llm: AsyncLLM) -> None:
        wrong: Any = {"max_tokens": 1}
        with pytest.raises(InvalidRequest, match="`sampling_params` must be SamplingParams, got dict"):
            await anext(llm.generate("a", wrong))
        calls: list[tuple[Any, Any]] = [(llm.generate, "a"), (llm.chat, [{"role": "user", "content": "a"}])]
        for call, prompt in calls:
            high = "high"
            with pytest.raises(InvalidRequest, match="`priority` must be an integer"):
                await anext(call(prompt, SamplingParams(max_tokens=1), priority=high))
        assert (await collect(llm, SamplingParams(max_tokens=1)))[-1].finished

    run(scenario)
