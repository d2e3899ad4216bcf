import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from penstock.engine.config import EngineConfig
from penstock.engine.errors import EngineUnavailable, GenerationFailed, InvalidRequest, QueueFull
from penstock.engine.pooling.encoder import EncoderBatch, EncoderInput, Forward
from penstock.engine.pooling.engine import PoolingEngine, PoolingQueue
from penstock.engine.pooling.loader import build_pooling_engine, load_pooling_model
from penstock.engine.pooling.model import PoolingModel, PoolingParams
from penstock.engine.text.tokenizer import Tokenizer
from tests.fakes import byte_tokenizer
from tests.tiny_encoders import save_encoder, tiny_encoder

T = TypeVar("T")

TEXTS = ["Paris", "The cat sat on the mat.", "It rains in Paris, and the cat is not amused by that at all.", "The dog sat on the mat."]
POISON = 66
EMBED = PoolingParams(task="embed")


@dataclass(slots=True)
class Gate:
    """Stands before a model: computes nothing while it is shut, fails over batches with the poison in them, and writes down each batch."""

    forward: Forward
    is_open: threading.Event = field(default_factory=threading.Event)
    is_reached: threading.Event = field(default_factory=threading.Event)
    batches: list[list[int]] = field(default_factory=list)

    def __call__(self, batch: EncoderBatch) -> Tensor:
        self.batches.append(batch.input_ids_1T[0].tolist())
        self.is_reached.set()
        assert self.is_open.wait(60)
        if POISON in self.batches[-1]:
            raise StopIteration("poison")  # which asyncio's own futures cannot carry
        return self.forward(batch)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.is_reached.wait, 60)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> PoolingModel:
    return load_pooling_model(save_encoder(tiny_encoder("bert"), tmp_path_factory.mktemp("tiny")), EngineConfig(device="cpu"))


def serve(
    model: PoolingModel,
    use: Callable[[PoolingEngine, Gate], Awaitable[T]],
    *,
    budget: int = 64,
    max_waiting: int = 100,
    is_open: bool = True,
) -> T:
    """Runs `use` beside an engine over the model behind a gate."""
    gate = Gate(model.forward)
    if is_open:
        gate.is_open.set()

    async def run() -> T:
        behind = dataclasses.replace(model, forward=gate)
        engine = PoolingEngine(behind, byte_tokenizer(), PoolingQueue(budget, max_waiting), num_threads=1)
        await engine.start()
        try:
            return await use(engine, gate)
        finally:
            gate.is_open.set()
            await engine.stop(60)

    return asyncio.run(run())


def alone(model: PoolingModel, token_ids: list[int]) -> Tensor:
    return model.compute([model.check(EncoderInput(token_ids), EMBED)])[0]


def test_what_waits_is_computed_together_within_the_budget(tiny: PoolingModel) -> None:
    prompts = [[10 + number] * 10 for number in range(9)]

    async def use(engine: PoolingEngine, gate: Gate) -> list[Tensor]:
        first = asyncio.create_task(engine.pool([5], EMBED))
        await gate.reached()
        others = [asyncio.create_task(engine.pool(prompt, EMBED)) for prompt in prompts]
        await asyncio.sleep(0)
        assert engine.stats().num_running == 1
        assert engine.stats().num_waiting == 9
        gate.is_open.set()
        await first
        answers = [(await task).data for task in others]
        assert [len(batch) for batch in gate.batches] == [1, 60, 30]
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_inputs, stats.num_prompt_tokens, stats.num_steps) == (0, 0, 10, 91, 3)
        return answers

    for answer, prompt in zip(serve(tiny, use, is_open=False), prompts, strict=True):
        torch.testing.assert_close(answer, alone(tiny, prompt), atol=1e-5, rtol=0)


def test_lower_priorities_go_first_and_then_the_earlier(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> list[list[int]]:
        tasks = [asyncio.create_task(engine.pool([5], EMBED))]
        await gate.reached()
        tasks += [asyncio.create_task(engine.pool([10 + n] * 4, EMBED, priority=p)) for n, p in enumerate((1, 0, 1, -1))]
        await asyncio.sleep(0)
        gate.is_open.set()
        await asyncio.gather(*tasks)
        return gate.batches[1:]

    assert serve(tiny, use, budget=4, is_open=False) == [[13] * 4, [11] * 4, [10] * 4, [12] * 4]


def test_a_text_longer_than_the_budget_runs_alone(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> list[int]:
        await asyncio.gather(*(engine.pool([9] * length, EMBED) for length in (3, 30, 3)))
        return [len(batch) for batch in gate.batches]

    assert serve(tiny, use, budget=8) == [3, 30, 3]


def test_a_call_that_is_cancelled_is_never_computed(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        running = asyncio.create_task(engine.pool([5], EMBED))
        await gate.reached()
        waiting = asyncio.create_task(engine.pool([7], EMBED))
        other = asyncio.create_task(engine.pool([8], EMBED))
        await asyncio.sleep(0)
        for task in (running, waiting):
            task.cancel()
        gate.is_open.set()
        await other
        assert gate.batches == [[5], [8]]
        assert engine.stats().num_waiting == 0
        assert engine.is_healthy

    serve(tiny, use, is_open=False)


def test_one_bad_text_harms_no_other(tiny: PoolingModel, caplog: pytest.LogCaptureFixture) -> None:
    prompts = [[10], [POISON], [11, 12], [13]]

    async def use(engine: PoolingEngine, _: Gate) -> list[object]:
        answers = await asyncio.gather(*(engine.pool(prompt, EMBED) for prompt in prompts), return_exceptions=True)
        assert engine.is_healthy
        return list(answers)

    good, bad, *others = serve(tiny, use)
    assert isinstance(bad, GenerationFailed)
    assert not any(isinstance(answer, BaseException) for answer in (good, *others))
    assert "StopIteration" in caplog.text


def test_an_engine_that_fails_again_and_again_is_not_healthy(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, _: Gate) -> list[bool]:
        health = []
        for prompts in ([[POISON]] * 4, [[POISON]], [[POISON]], [[POISON], [5]]):
            await asyncio.gather(*(engine.pool(prompt, EMBED) for prompt in prompts), return_exceptions=True)
            health.append(engine.is_healthy)
        return health

    assert serve(tiny, use) == [True, True, False, True]


def test_the_queue_is_bounded_and_cancelled_texts_do_not_count(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        tasks = [asyncio.create_task(engine.pool([5], EMBED))]
        await gate.reached()
        tasks += [asyncio.create_task(engine.pool([6], EMBED)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await engine.pool([7], EMBED)
        tasks.pop().cancel()
        await asyncio.sleep(0)
        tasks.append(asyncio.create_task(engine.pool([8], EMBED)))
        await asyncio.sleep(0)
        gate.is_open.set()
        await asyncio.gather(*tasks)

    serve(tiny, use, max_waiting=3, is_open=False)


def test_what_cannot_be_computed_is_refused_at_once(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        with pytest.raises(InvalidRequest, match="is empty"):
            await engine.pool([], EMBED)
        assert gate.batches == []

    serve(tiny, use)


def test_stopping_lets_texts_finish_within_the_time_and_refuses_the_others(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        running = asyncio.create_task(engine.pool([5], EMBED))
        await gate.reached()
        waiting = asyncio.create_task(engine.pool([6], EMBED))
        await asyncio.sleep(0)
        threading.Timer(0.05, gate.is_open.set).start()
        await engine.stop(60)
        assert len((await running).data) == len((await waiting).data) == 32
        assert not engine.is_accepting
        assert not engine.is_healthy
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await engine.pool([7], EMBED)

    serve(tiny, use, is_open=False)


def test_stopping_at_once_leaves_no_caller_waiting(tiny: PoolingModel) -> None:
    async def use(engine: PoolingEngine, gate: Gate) -> None:
        tasks = [asyncio.create_task(engine.pool([5], EMBED))]
        await gate.reached()
        tasks.append(asyncio.create_task(engine.pool([6], EMBED)))
        await asyncio.sleep(0)
        threading.Timer(0.05, gate.is_open.set).start()
        await engine.stop(0)
        assert all(isinstance(answer, EngineUnavailable) for answer in await asyncio.gather(*tasks, return_exceptions=True))

    serve(tiny, use, is_open=False)


def test_an_engine_that_was_not_started_says_so(tiny: PoolingModel) -> None:
    async def run() -> None:
        engine = PoolingEngine(tiny, byte_tokenizer(), PoolingQueue(8, 8), num_threads=1)
        with pytest.raises(EngineUnavailable, match="not running"):
            await engine.pool([5], EMBED)
        await engine.stop()

    asyncio.run(run())


def test_the_packaged_model_embeds_as_in_transformers(minilm_dir: Path) -> None:
    reference: PreTrainedModel = AutoModel.from_pretrained(minilm_dir).eval()

    async def run() -> list[tuple[list[int], Tensor]]:
        engine = build_pooling_engine(minilm_dir, Tokenizer.load(minilm_dir), EngineConfig(device="cpu"))
        await engine.start()
        try:
            prompts = [engine.encode(text).tokens.token_ids for text in TEXTS]
            return [(o.prompt_token_ids, o.data) for o in await asyncio.gather(*(engine.pool(prompt, EMBED) for prompt in prompts))]
        finally:
            await engine.stop(10)

    for token_ids, embedding in asyncio.run(run()):
        with torch.no_grad():
            mean: Tensor = reference(input_ids=torch.tensor([token_ids])).last_hidden_state[0].mean(0)
        torch.testing.assert_close(embedding, mean / mean.norm(), atol=1e-5, rtol=0)
