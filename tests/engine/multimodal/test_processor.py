"""Prompts with images: each image token becomes the placeholders of its image."""

import pytest
from PIL import Image

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import LoadedImage
from penstock.engine.multimodal.processor import BlindImageProcessor, expand


def loaded_image(color: str, size: tuple[int, int] = (8, 8)) -> LoadedImage:
    return LoadedImage.of(Image.new("RGB", size, color))


def test_images_are_told_apart_by_what_they_show() -> None:
    assert loaded_image("red").digest == loaded_image("red").digest
    others = [loaded_image("blue"), loaded_image("red", (4, 16)), LoadedImage.of(Image.new("L", (8, 8)))]
    assert len({image.digest for image in (loaded_image("red"), *others)}) == 4


def test_each_image_token_is_replaced_by_the_tokens_of_its_image() -> None:
    assert expand([1, 9, 2, 9, 9], 9, [[7, 9, 9], [9], [8, 9]], None) == ([1, 7, 9, 9, 2, 9, 8, 9], [1, 5, 6])
    assert expand([1, 2], 9, [], None) == ([1, 2], [])


@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_as_many_image_tokens_as_images_are_needed(num_images: int) -> None:
    processor = BlindImageProcessor("<image>", 9, 4)
    with pytest.raises(InvalidRequest, match=f"2 image tokens for {num_images} images") as caught:
        processor.prepare([9, 1, 9], [loaded_image("red")] * num_images, "messages")
    assert caught.value.param == "messages"
