"""A tiny model that is trained to name the colours of an image: each request gets the text of its own images."""

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from penstock.engine.model.loader import LoadedModel
from penstock.engine.multimodal.inputs import LoadedImage, ProcessedPrompt
from penstock.engine.multimodal.processor import PretrainedImageProcessor
from penstock.engine.text.tokenizer import Tokenizer
from tests.engines import core_over, loaded_multimodal, run
from tests.tiny_multimodal import byte_backend, placeholder_id, tiny_multimodal_model, tiny_processor
from tests.trained_models import train

pytestmark = pytest.mark.thorough  # it is trained for ten seconds

COLOURS = {"r": (230, 20, 20), "g": (20, 200, 20), "b": (20, 20, 230), "y": (230, 220, 20), "w": (240, 240, 240), "k": (10, 10, 10)}
PROMPT = "<image>="
BATCH_SIZE = 16
NEARLY_GREEDY: dict[str, Any] = {"n": 3, "temperature": 0.3, "seed": 0}
GREEDY: dict[str, Any] = {}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7, "enable_prefix_caching": False},
    "cached": {},
    "preemption": {"num_blocks": 8, "max_num_batched_tokens": 30, "max_num_seqs": 8},
}


def quarters(colours: str) -> Image.Image:
    """16 by 16 pixels, a quarter of each colour: two above, two below."""
    pixels = torch.tensor([COLOURS[colour] for colour in colours], dtype=torch.uint8).view(2, 2, 3)
    return Image.fromarray(pixels.repeat_interleave(8, 0).repeat_interleave(8, 1).numpy())


@dataclass(frozen=True)
class Subject:
    """The model in the engine's hands, with images' colours, the prompts about them, and what transformers says of each."""

    loaded: LoadedModel
    colours: list[str]
    prompts: list[ProcessedPrompt]
    texts: list[str]


@functools.cache
def subject() -> Subject:
    model, processor = tiny_multimodal_model("llava"), tiny_processor("llava")
    encode = processor.tokenizer.encode

    def batch(chance: random.Random) -> tuple[Tensor, Tensor]:
        colours = ["".join(chance.choices(list(COLOURS), k=4)) for _ in range(BATCH_SIZE)]
        inputs = processor(
            text=[PROMPT + answer for answer in colours], images=[[quarters(answer)] for answer in colours], return_tensors="pt"
        )
        logits_BTV = model(**inputs).logits[:, -5:-1]
        return logits_BTV, inputs["input_ids"][:, -4:]

    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    train(model.train().parameters(), batch, 3e-3)
    torch.nn.Module.eval(model.requires_grad_(False))
    chance = random.Random("held out")
    colours = ["".join(chance.choices(list(COLOURS), k=4)) for _ in range(8)]
    own = PretrainedImageProcessor(processor, placeholder_id("llava"), None, is_bidirectional=False)
    generate: Any = model.generate
    prompts, texts = [], []
    for answer in colours:
        inputs = processor(text=[PROMPT], images=[[quarters(answer)]], return_tensors="pt")
        output = generate(**inputs, do_sample=False, max_new_tokens=4)
        texts.append(processor.tokenizer.decode(output[0, inputs["input_ids"].shape[1] :]))
        prompts.append(own.prepare(encode(PROMPT), [LoadedImage.of(quarters(answer))]))
    return Subject(loaded_multimodal(model, 64), colours, prompts, texts)


def test_transformers_names_the_colours() -> None:
    assert subject().texts == subject().colours


@pytest.mark.parametrize("settings", [pytest.param(settings, id=name) for name, settings in SETTINGS.items()])
def test_every_request_is_answered_by_its_own_image(settings: dict[str, Any]) -> None:
    model, tokenizer = subject(), Tokenizer(byte_backend(), {}, {})
    core = core_over(model.loaded, tokenizer, **{"block_size": 8, "num_blocks": 200} | settings)
    try:
        for params in (GREEDY, NEARLY_GREEDY):
            runs = run(core, model.prompts, stagger=1, max_tokens=4, **params)
            said = [tokenizer.decode(result.token_ids) for result in runs]
            assert said == [text for text in model.texts for _ in range(params.get("n", 1))]
        stats = core.stats()
        core.runner.embedder.cache.check_integrity()
    finally:
        core.runner.shutdown()
    assert (stats.num_preemptions > 0) == ("num_blocks" in settings)
    assert stats.num_prefix_cache_hits > 0 or settings
