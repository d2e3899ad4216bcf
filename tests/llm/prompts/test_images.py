"""Images in `LLM`: what a model says of them is what transformers makes of the same prompt."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from penstock import LLM, LoRARequest, SamplingParams
from penstock.engine.errors import InvalidRequest
from penstock.llm.preparing import TextPrompt
from tests.llm.model_directory import SETTINGS
from tests.tiny_adapters import adapted_model, quiet, write_adapter
from tests.tiny_multimodal import FAMILIES, LIKE_OTHERS, picture, tiny_multimodal_model, tiny_processor, write_multimodal_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


THROUGH_LLM = (*LIKE_OTHERS, "gemma3", "llava")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[pytest.mark.thorough] * (name not in THROUGH_LLM)) for name in FAMILIES])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def llm(family: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with LLM(write_multimodal_model(tmp_path_factory.mktemp(family), family), **SETTINGS) as running:
        yield running


def by_transformers(family: str, text: str, images: list[Image.Image], adapter: Path | None = None) -> list[int]:
    inputs = tiny_processor(family)(text=[text], images=images or None, return_tensors="pt")
    model: Any = tiny_multimodal_model(family)
    if adapter is not None:
        model = adapted_model(model, adapter)
    with torch.inference_mode(), quiet():
        token_ids = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    said: list[int] = token_ids[inputs["input_ids"].shape[1] :].tolist()
    return said


def test_images_are_seen_as_transformers_sees_them(llm: LLM, family: str) -> None:
    prompts: list[tuple[str, list[Image.Image]]] = [
        ("What is <image>?", [picture(0)]),
        ("What is <image>?", [picture(1)]),
        ("From <image> to <image>.", [picture(2, 16, 40), picture(0)]),
        ("No image.", []),
    ]
    outputs = llm.generate([TextPrompt(prompt=text, multi_modal_data={"image": images}) for text, images in prompts], GREEDY)
    assert [output.outputs[0].token_ids for output in outputs] == [by_transformers(family, *prompt) for prompt in prompts]
    assert outputs[0].outputs[0].token_ids != outputs[1].outputs[0].token_ids


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"image": [picture(0), picture(1)]}, "1 image tokens for 2 images"),
        ({"image": "cat.png"}, r"must be an image of Pillow's or a list of them"),
        ({"audio": b""}, "must be a dict with the key 'image'"),
    ],
)
def test_what_is_no_image_for_the_prompt_is_refused(llm: LLM, data: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        llm.generate({"prompt": "What is <image>?", "multi_modal_data": data}, GREEDY)


def test_blocks_on_disk_are_found_for_equal_images_alone(tmp_path: Path) -> None:
    model = write_multimodal_model(tmp_path / "model", "llava")
    text = "A prompt of more than a block: <image> and what is it?"  # the image begins in the second block
    said = []
    for image in (picture(0), picture(0), picture(1)):
        with LLM(model, **SETTINGS, kv_cache_dir=str(tmp_path / "kv")) as llm:
            (output,) = llm.generate({"prompt": text, "multi_modal_data": {"image": image}}, GREEDY)
        assert output.outputs[0].token_ids == by_transformers("llava", text, [image])
        said.append(output.num_cached_tokens)
    assert said == [0, 48, 16]


def test_an_adapter_of_the_whole_model_is_read_beside_its_directory(tmp_path: Path) -> None:
    text, image = "What is <image>?", picture(0)
    settings: dict[str, Any] = {
        "target_modules": ["q_proj", "o_proj", "down_proj"],
        "exclude_modules": r".*(vision_tower|multi_modal_projector).*",
    }
    adapter = write_adapter(tiny_multimodal_model("llava"), tmp_path / "adapter", **settings)
    with LLM(write_multimodal_model(tmp_path / "model", "llava"), **SETTINGS, enable_lora=True) as llm:
        prompt = TextPrompt(prompt=text, multi_modal_data={"image": image})
        (output,) = llm.generate([prompt], GREEDY, lora_request=LoRARequest("a", 1, str(adapter)))
    assert output.outputs[0].token_ids == by_transformers("llava", text, [image], adapter) != by_transformers("llava", text, [image])
