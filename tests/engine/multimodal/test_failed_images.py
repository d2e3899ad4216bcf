"""An image that the vision tower fails with ends the requests that have it, and nothing else."""

import asyncio
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.core import IMAGE_FAILED, EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.loop import Engine
from penstock.engine.multimodal.inputs import PromptImage
from penstock.engine.multimodal.vision import VisionTower
from penstock.engine.request import Request
from tests.engine.multimodal.test_image_equivalence import NUM_NEW_TOKENS, Subject, engine, subject
from tests.engines import core_over, loaded_model
from tests.fakes import drive, make_request, tokens
from tests.tiny_models import tiny_model

BROKEN = 3  # the prompt whose image breaks the tower; the next but one has the image as well
AFFECTED = (3, 5)


@pytest.fixture(params=["llava", "qwen3_5"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Subject:
    model = subject(request.param)
    (image,) = model.prompts[BROKEN].embeds
    assert isinstance(image, PromptImage)
    encode, bad = VisionTower.encode, image.pixels["pixel_values"]

    def failing(self: VisionTower, pixels: dict[str, Tensor]) -> Tensor:
        if torch.equal(pixels["pixel_values"], bad):
            raise RuntimeError("a defect")
        return encode(self, pixels)

    monkeypatch.setattr(VisionTower, "encode", failing)
    return model


def requests_of(model: Subject, **params: Any) -> list[Request]:
    return [
        make_request(str(number), prompt.token_ids, embeds=prompt.embeds, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, **params)
        for number, prompt in enumerate(model.prompts)
    ]


def assert_only_the_affected_failed(said: list[list[SequenceDelta]], model: Subject) -> None:
    for number, deltas in enumerate(said):
        if number in AFFECTED:
            assert [(delta.finish_reason, delta.error) for delta in deltas] == [(FinishReason.ERROR, IMAGE_FAILED)]
        else:
            assert tokens(deltas) == model.references[number].token_ids


@pytest.mark.parametrize("budget", [256, 30])
def test_other_requests_of_the_step_go_on(broken: Subject, budget: int) -> None:
    with engine(broken, max_num_batched_tokens=budget) as core:
        for request in requests_of(broken):
            core.add(request)
        said = drive(core)  # which checks that all blocks are free at the end
    assert_only_the_affected_failed([said[str(number)] for number in range(len(broken.prompts))], broken)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_clients_of_a_running_engine_get_an_error_or_their_answer(broken: Subject, is_ahead: bool) -> None:
    async def serve(core: EngineCore) -> list[list[SequenceDelta]]:
        running = Engine(core)
        await running.start()

        async def one(request: Request) -> list[SequenceDelta]:
            return [delta async for delta in running.generate(request)]

        said = await asyncio.gather(*map(one, requests_of(broken)))
        assert running.is_healthy
        running.check_integrity()
        assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
        await running.stop()
        return said

    with engine(broken, async_scheduling=is_ahead) as core:
        assert_only_the_affected_failed(asyncio.run(serve(core)), broken)


def test_all_answers_of_a_failed_request_end(broken: Subject) -> None:
    with engine(broken) as core:
        core.add(requests_of(broken, n=3, temperature=1.0)[BROKEN])
        (deltas,) = drive(core).values()
    assert sorted((delta.index, delta.finish_reason) for delta in deltas) == [(index, FinishReason.ERROR) for index in range(3)]


def test_a_model_without_a_vision_tower_refuses_images() -> None:
    core = core_over(loaded_model(tiny_model("llama")))
    with pytest.raises(InvalidRequest, match="takes no images"):
        core.add(make_request("image", [1], embeds=[PromptImage([0], b"", {})]))
    core.runner.shutdown()
