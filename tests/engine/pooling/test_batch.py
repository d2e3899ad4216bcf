import asyncio
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from penstock.engine.errors import GenerationFailed, QueueFull
from penstock.engine.pooling.encoder import EncoderInput
from penstock.engine.pooling.engine import MAX_OPEN, EncodedText, PoolingEngine, PoolingOutput, pool_all
from penstock.engine.pooling.model import PoolingParams


@dataclass
class Places:
    """An engine with so many places, that answers an input with its own token ids after a moment. `num_taken` are another client's."""

    num_places: int = 10**6
    num_taken: int = 0
    failing: int | None = None
    num_open: int = 0
    most_open: int = 0
    num_cancelled: int = 0
    params: list[PoolingParams] = field(default_factory=list)

    async def pool(self, prompt_token_ids: list[int], params: PoolingParams, **options: Any) -> PoolingOutput:
        if self.num_open + self.num_taken >= self.num_places:
            raise QueueFull("full")
        self.params.append(params)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for _ in range(1 + prompt_token_ids[0] % 3):
                await asyncio.sleep(0)
            if prompt_token_ids[0] == self.failing:
                raise GenerationFailed("failed")
            if self.failing is not None:
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_open -= 1
        return PoolingOutput(torch.tensor(prompt_token_ids), prompt_token_ids)


def inputs(count: int) -> list[EncodedText]:
    return [EncodedText(EncoderInput([number])) for number in range(count)]


def pooled(engine: Places, texts: list[EncodedText], params: Any = None) -> list[int]:
    outputs = asyncio.run(pool_all(cast(PoolingEngine, engine), texts, params or PoolingParams()))
    return [output.prompt_token_ids[0] for output in outputs]


@pytest.mark.parametrize("count", [0, 1, 7, 3 * MAX_OPEN])
def test_outputs_are_in_the_order_of_the_inputs(count: int) -> None:
    engine = Places()
    assert pooled(engine, inputs(count)) == list(range(count))
    assert engine.most_open == min(count, MAX_OPEN)


@pytest.mark.parametrize("num_places", [1, 2, 5])
def test_a_batch_goes_through_as_few_places_as_there_are(num_places: int) -> None:
    engine = Places(num_places)
    assert pooled(engine, inputs(50)) == list(range(50))
    assert engine.most_open == num_places


def test_a_queue_that_is_full_of_others_is_refused() -> None:
    with pytest.raises(QueueFull):
        pooled(Places(num_places=4, num_taken=4), inputs(3))


def test_the_first_failure_ends_the_others() -> None:
    engine = Places(failing=5)
    with pytest.raises(GenerationFailed):
        pooled(engine, inputs(20))
    assert engine.num_cancelled == 19
    assert engine.num_open == 0


def test_cancelling_ends_all_of_them() -> None:
    engine = Places(failing=-1)

    async def run() -> None:
        task = asyncio.create_task(pool_all(cast(PoolingEngine, engine), inputs(9), PoolingParams()))
        while engine.num_open < 9:  # noqa: ASYNC110 - the engine knows no events
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert engine.num_cancelled == 9


def test_each_input_has_its_own_parameters_and_instruction() -> None:
    engine = Places()
    texts = [EncodedText(EncoderInput([0]), num_instruction_tokens=3), EncodedText(EncoderInput([1]))]
    pooled(engine, texts, [PoolingParams(dimensions=1), PoolingParams(dimensions=2)])
    assert engine.params == [PoolingParams(dimensions=1, num_instruction_tokens=3), PoolingParams(dimensions=2)]
