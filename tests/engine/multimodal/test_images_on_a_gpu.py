"""Prompts with images on a fake GPU: they run in no graph, and say what they say on the CPU."""

import asyncio
from pathlib import Path

import pytest
import torch

from penstock.engine.build import core_over_blocks
from penstock.engine.config import EngineConfig
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.loop import Engine
from penstock.engine.model.loader import load_model
from penstock.engine.multimodal.processor import load_processor, profile_images
from penstock.engine.multimodal.vision import VisionTower
from penstock.engine.request import Request
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.multimodal.test_image_equivalence import NUM_NEW_TOKENS, subject
from tests.engines import loaded_multimodal
from tests.fakes import make_request, tokens
from tests.gpu.fake_cuda import DEVICE, fake_cuda
from tests.tiny_multimodal import byte_backend, tiny_multimodal_model, write_multimodal_model

pytestmark = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has a CUDA of its own")


def serve(core: EngineCore, requests: list[Request]) -> list[list[int]]:
    """The tokens of each, from the engine as the server runs it: a step is scheduled while the one before is in flight."""

    async def run() -> list[list[int]]:
        engine = Engine(core)
        await engine.start()

        async def one(request: Request) -> list[int]:
            return tokens([delta async for delta in engine.generate(request)])

        said = await asyncio.gather(*map(one, requests))
        await engine.stop()
        return said

    return asyncio.run(run())


def test_the_memory_that_an_image_takes_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_multimodal_model(tmp_path, "qwen2_5_vl")
    with fake_cuda() as cuda:
        loaded = load_model(directory, dtype="float32", device="cuda")
        assert loaded.vision is not None
        cuda.peak_memory = 2**20
        processor = load_processor(directory, loaded.vision.config)
        assert profile_images(processor, loaded.vision, loaded.device) == 2**20

        def fail(*_: object) -> None:
            raise torch.OutOfMemoryError

        monkeypatch.setattr(VisionTower, "encode", fail)
        with pytest.raises(ConfigurationError, match="2048 x 2048 pixels does not fit"):
            profile_images(processor, loaded.vision, loaded.device)


@pytest.mark.parametrize("family", ["llava", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma3", "qwen3_5"))])
def test_images_are_seen_and_decodes_run_in_graphs(family: str) -> None:
    model = subject(family)
    with fake_cuda() as cuda:
        loaded = loaded_multimodal(torch.nn.Module.to(tiny_multimodal_model(family, model.seed), DEVICE))
        config = EngineConfig(max_num_seqs=2, max_num_batched_tokens=32, num_threads=1, speculation="none")
        num_slots = 6 if loaded.recurrent_layers else 0
        core = core_over_blocks(loaded, Tokenizer(byte_backend(), {}, {}), config, num_blocks=64, num_slots=num_slots)
        core.runner.capture_graphs()
        requests = [
            make_request(str(number), prompt.token_ids, embeds=prompt.embeds, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
            for number, prompt in enumerate(model.prompts)
        ]
        said = serve(core, requests)
        assert 0 < cuda.num_replays < core.stats().num_steps
    assert said == [expected.token_ids for expected in model.references]
