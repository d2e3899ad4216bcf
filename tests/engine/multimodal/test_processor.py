"""Prompts with images: each image token becomes the placeholders of its image."""

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from penstock.engine.build import image_processor
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.multimodal.inputs import LoadedImage, PromptImage, runs_of
from penstock.engine.multimodal.processor import BlindImageProcessor, PretrainedImageProcessor, expand
from penstock.engine.multimodal.vision import take_apart
from tests.tiny_multimodal import (
    IMAGE_TOKEN_ID,
    LINE_BREAKS,
    SOFT_TOKEN,
    picture,
    tiny_multimodal_model,
    tiny_processor,
    write_multimodal_model,
)


def loaded_image(color: str, size: tuple[int, int] = (8, 8)) -> LoadedImage:
    return LoadedImage.of(Image.new("RGB", size, color))


def test_images_are_told_apart_by_what_they_show() -> None:
    assert loaded_image("red").digest == loaded_image("red").digest
    others = [loaded_image("blue"), loaded_image("red", (4, 16)), LoadedImage.of(Image.new("L", (8, 8)))]
    assert len({image.digest for image in (loaded_image("red"), *others)}) == 4


def test_runs_of_positions_are_found() -> None:
    assert runs_of([2, 3, 4, 7, 9, 10]) == ((2, 5), (7, 8), (9, 11))
    assert runs_of([]) == ()


def test_each_image_token_is_replaced_by_the_tokens_of_its_image() -> None:
    assert expand([1, 9, 2, 9, 9], 9, [[7, 9, 9], [9], [8, 9]], None) == ([1, 7, 9, 9, 2, 9, 8, 9], [4, 6, 8])
    assert expand([1, 2], 9, [], None) == ([1, 2], [])


@pytest.mark.parametrize(
    "text", ["<image>", "a\n<image>", "a\n\n<image>\nb", "<image><image>", "\n<image>\n<image>\n\n", "<image>\n\n\n<image>c"]
)
def test_line_breaks_beside_those_of_an_image_are_read_as_one_run(text: str) -> None:
    theirs = tiny_processor("gemma3", LINE_BREAKS)
    soft_token_id = theirs.tokenizer.convert_tokens_to_ids(SOFT_TOKEN)
    images = [picture(number) for number in range(text.count("<image>"))]
    expected = theirs(text=[text], images=images, return_tensors="pt")["input_ids"][0].tolist()
    own = PretrainedImageProcessor(theirs, soft_token_id, is_bidirectional=True)
    prompt = own.prepare(theirs.tokenizer.encode(text), [LoadedImage.of(image) for image in images])
    assert prompt.token_ids == expected
    for source in prompt.embeds:
        assert isinstance(source, PromptImage)
        assert {expected[position] for position in source.positions} == {soft_token_id}
        assert source.spans == ((source.positions[0], source.positions[-1] + 1),)
    assert sum(len(source.positions) for source in prompt.embeds) == expected.count(soft_token_id)


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_as_many_image_tokens_as_images_are_needed(num_images: int) -> None:
    processor = BlindImageProcessor("<image>", 9, 4)
    with pytest.raises(InvalidRequest, match=f"2 image tokens for {num_images} images") as caught:
        processor.prepare([9, 1, 9], [loaded_image("red")] * num_images, "messages")
    assert caught.value.param == "messages"


def test_what_older_checkpoints_of_llava_leave_out_is_the_models(tmp_path: Path) -> None:
    directory = write_multimodal_model(tmp_path, "llava")
    expected = image_processor(directory, EngineConfig())
    path = directory / "processor_config.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for name in ("patch_size", "vision_feature_select_strategy", "num_additional_image_tokens"):
        del content[name]
    path.write_text(json.dumps(content), encoding="utf-8")
    found = image_processor(directory, EngineConfig())
    assert found is not None
    assert expected is not None
    prompts = [processor.prepare([IMAGE_TOKEN_ID], [loaded_image("red", (20, 30))]) for processor in (found, expected)]
    assert prompts[0].token_ids == prompts[1].token_ids


@pytest.mark.parametrize("name", ["preprocessor_config.json", "tokenizer.json"])
def test_a_model_without_the_files_of_its_image_processor_is_refused(tmp_path: Path, name: str) -> None:
    directory = write_multimodal_model(tmp_path, "qwen2_5_vl")
    (directory / name).unlink()
    with pytest.raises(ConfigurationError, match="its image processor cannot be loaded"):
        image_processor(directory, EngineConfig())


def test_a_processor_whose_files_say_too_little_is_refused(tmp_path: Path) -> None:
    directory = write_multimodal_model(tmp_path, "internvl")
    (directory / "processor_config.json").write_text(json.dumps({"image_seq_length": None}), encoding="utf-8")
    with pytest.raises(ConfigurationError, match="its image processor does not work"):
        image_processor(directory, EngineConfig())


def test_an_image_of_one_token_has_one_vector() -> None:
    model = tiny_multimodal_model("mistral3")
    processor, size = tiny_processor("mistral3").image_processor, {"height": 8, "width": 8}
    one, two = (processor([picture(3, 8, 8)] * number, patch_size=size, return_tensors="pt") for number in (1, 2))
    with torch.inference_mode():
        expected = model.model.get_image_features(**two).pooler_output[0]
        _, tower = take_apart(model)
        assert tower is not None
        torch.testing.assert_close(tower.encode(dict(one)), expected)
