"""From a prompt with image tokens to one with all the placeholders that its images take."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.multimodal.inputs import ImageProcessor, LoadedImage, ProcessedPrompt, PromptImage, runs_of
from penstock.engine.multimodal.vision import BIDIRECTIONAL_FAMILIES, MROPE_FAMILIES, VisionTower

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def expand(
    token_ids: Sequence[int],
    image_token_id: int,
    expansions: Sequence[Sequence[int]],
    param: str | None,
    append: Callable[[list[int], Sequence[int]], None] = list.extend,
) -> tuple[list[int], list[int]]:
    """Replaces each image token by the tokens of its image; returns the prompt and where each image ends in it.

    `append` adds tokens to those before them. Raises `InvalidRequest` where image tokens and images differ in number.
    """
    places = [place for place, token_id in enumerate(token_ids) if token_id == image_token_id]
    if len(places) != len(expansions):
        raise InvalidRequest(f"the prompt has {len(places)} image tokens for {len(expansions)} images", param)
    expanded: list[int] = []
    stops = []
    previous = 0
    for place, expansion in zip(places, expansions, strict=True):
        append(expanded, token_ids[previous:place])
        append(expanded, expansion)
        stops.append(len(expanded))
        previous = place + 1
    append(expanded, token_ids[previous:])
    return expanded, stops


@dataclass(frozen=True)
class BlindImageProcessor(ImageProcessor):
    """Gives each image so many placeholders, which the model reads as any token: it sees nothing of the image."""

    image_token: str
    image_token_id: int
    num_tokens: int

    def prepare(self, token_ids: Sequence[int], images: Sequence[LoadedImage], param: str | None = None) -> ProcessedPrompt:
        expanded, _ = expand(token_ids, self.image_token_id, [[self.image_token_id] * self.num_tokens] * len(images), param)
        return ProcessedPrompt(expanded, ())


class PretrainedImageProcessor(ImageProcessor):
    """The checkpoint's own processor, which is given one image at a time: what it makes of one does not depend on the others.

    Where positions have three parts, `merge_size` by `merge_size` patches are one token. `is_bidirectional` says that the tokens of an
    image attend to each other in both directions.
    """

    def __init__(self, processor: Any, placeholder_id: int, merge_size: int | None = None, *, is_bidirectional: bool = False) -> None:
        self.image_token: str = processor.image_token
        self.image_token_id: int = processor.tokenizer.convert_tokens_to_ids(self.image_token)
        self._processor = processor
        self._placeholder_id = placeholder_id
        self._merge_size = merge_size
        self._is_bidirectional = is_bidirectional
        self._line_breaks: dict[int, bool] = {}
        self._lock = threading.Lock()  # a tokenizer cannot be used in two threads at once

    def prepare(self, token_ids: Sequence[int], images: Sequence[LoadedImage], param: str | None = None) -> ProcessedPrompt:
        num_tokens = list(token_ids).count(self.image_token_id)
        if num_tokens != len(images):  # before any of them is processed
            expand(token_ids, self.image_token_id, [()] * len(images), param)
        processed = [self._process(image, param) for image in images]
        expanded, stops = expand(token_ids, self.image_token_id, [ids for ids, _ in processed], param, self._append)
        embeds = []
        for image, stop, (ids, pixels) in zip(images, stops, processed, strict=True):
            positions = [stop - len(ids) + place for place, token_id in enumerate(ids) if token_id == self._placeholder_id]
            spans = runs_of(positions) if self._is_bidirectional else ()
            embeds.append(PromptImage(positions, image.digest, pixels, self._grid(pixels), spans))
        return ProcessedPrompt(expanded, tuple(embeds))

    def _append(self, tokens: list[int], more: Sequence[int]) -> None:
        """As the tokenizer would read both at once: line breaks at the end of one and at the beginning of the other become one run.

        Gemma 3 has line breaks around images, and a token for each number of them.
        """
        num_leading = next((place for place, token_id in enumerate(more) if not self._is_line_breaks(token_id)), len(more))
        first = len(tokens)
        while num_leading and first and self._is_line_breaks(tokens[first - 1]):
            first -= 1
        if first < len(tokens):
            with self._lock:
                tokenizer = self._processor.tokenizer
                text = tokenizer.decode([*tokens[first:], *more[:num_leading]])
                tokens[first:] = tokenizer.encode(text, add_special_tokens=False)
            more = more[num_leading:]
        tokens += more

    def _is_line_breaks(self, token_id: int) -> bool:
        if token_id not in self._line_breaks:
            with self._lock:
                text = self._processor.tokenizer.decode([token_id])
            self._line_breaks[token_id] = bool(text) and not text.strip("\n")
        return self._line_breaks[token_id]

    def _grid(self, pixels: dict[str, Any]) -> tuple[int, int, int] | None:
        if self._merge_size is None:
            return None
        times, rows, columns = pixels["image_grid_thw"][0].tolist()
        return times, rows // self._merge_size, columns // self._merge_size

    def _process(self, image: LoadedImage, param: str | None) -> tuple[list[int], dict[str, Any]]:
        """The tokens of one image, and the vision tower's inputs."""
        try:
            with self._lock:
                processed = self._processor(
                    text=[self.image_token],
                    images=[image.image.convert("RGB")],
                    text_kwargs={"add_special_tokens": False},
                    return_tensors="pt",
                )
        except (ValueError, ArithmeticError, LookupError) as error:
            raise InvalidRequest(
                f"an image of {image.image.width} x {image.image.height} pixels cannot be processed: {error}", param
            ) from error
        pixels = dict(processed)
        return pixels.pop("input_ids")[0].tolist(), pixels


def without_video(processor_class: Any) -> Any:
    """The class with None for its parts for video, which need packages of their own."""

    def check_argument(self: Any, argument_name: str, argument: Any) -> None:
        if argument is not None:
            processor_class.check_argument_for_proper_class(self, argument_name, argument)

    return type(processor_class.__name__, (processor_class,), {"check_argument_for_proper_class": check_argument})


class PixtralProcessor:
    """What transformers' class of this name does with one image. That needs torchvision.

    Each row of an image's tokens ends with a token of its own, and the last row with another.
    """

    def __init__(
        self,
        image_processor: Any,
        tokenizer: Any,
        *,
        patch_size: int,
        spatial_merge_size: int,
        image_token: str = "[IMG]",
        image_break_token: str = "[IMG_BREAK]",
        image_end_token: str = "[IMG_END]",
    ) -> None:
        self.image_token = image_token
        self.tokenizer = tokenizer
        self._image_processor = image_processor
        self._size = patch_size * spatial_merge_size  # pixels of a token
        self._ids = tokenizer.convert_tokens_to_ids([image_token, image_break_token, image_end_token])

    def __call__(self, *, images: list[Any], **_: Any) -> dict[str, Any]:
        pixels = self._image_processor(images, patch_size=self._size, return_tensors="pt")
        height, width = pixels["image_sizes"][0].tolist()
        image_id, break_id, end_id = self._ids
        ids = ([image_id] * (width // self._size) + [break_id]) * (height // self._size)
        return {**pixels, "input_ids": torch.tensor([[*ids[:-1], end_id]])}

    @classmethod
    def load(cls, image_processor: Any, tokenizer: Any, directory: Path, config: "PretrainedConfig") -> "PixtralProcessor":
        """Of a checkpoint, whose files may leave sizes to the model's config."""
        from transformers import ProcessorMixin

        settings = {"patch_size": config.vision_config.patch_size, "spatial_merge_size": getattr(config, "spatial_merge_size", 1)}
        given, _ = ProcessorMixin.get_processor_dict(directory, local_files_only=True)
        names = ("patch_size", "spatial_merge_size", "image_token", "image_break_token", "image_end_token")
        settings |= {name: given[name] for name in names if given.get(name) is not None}
        return cls(image_processor, tokenizer, **settings)


def load_processor(directory: Path, config: "PretrainedConfig") -> PretrainedImageProcessor:
    """That of a checkpoint. Raises `ConfigurationError` where its files are missing, cannot be read, or name code of their own.

    Only processors that transformers has are known to work. Without the argument, it asks on the terminal whether to run others.
    """
    # Imported here, since it takes a while and only models with images need it.
    from transformers import PROCESSOR_MAPPING, AutoImageProcessor, AutoTokenizer, Idefics3Config

    processor: Any
    try:
        parts = {
            "image_processor": AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                directory, local_files_only=True, backend="pil", trust_remote_code=False
            ),
            "tokenizer": AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False),
        }
        if config.vision_config.model_type == "pixtral":
            processor = PixtralProcessor.load(**parts, directory=directory, config=config)
        else:
            # SmolVLM's own class does the same with images, and asks for a package that spells numbers for videos.
            processor_class: Any = PROCESSOR_MAPPING[Idefics3Config if config.model_type == "smolvlm" else type(config)]
            settings, _ = processor_class.get_processor_dict(directory, local_files_only=True)
            settings = _settings_of_tower(config) | settings
            attributes = [parts.get(name) for name in processor_class.get_attributes()]
            processor = without_video(processor_class).from_args_and_dict(attributes, settings)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ConfigurationError(f"{directory}: its image processor cannot be loaded: {error}") from error
    merge_size = config.vision_config.spatial_merge_size if config.model_type in MROPE_FAMILIES else None
    is_bidirectional = config.model_type in BIDIRECTIONAL_FAMILIES
    return PretrainedImageProcessor(processor, int(config.image_token_id), merge_size, is_bidirectional=is_bidirectional)


def check_processor(processor: PretrainedImageProcessor, directory: Path) -> None:
    """Raises `ConfigurationError` where it cannot process an image, because its files do not say enough."""
    from PIL import Image

    try:
        trial = processor.prepare([processor.image_token_id], [LoadedImage.of(Image.new("RGB", (64, 64)))])
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ImportError) as error:
        raise ConfigurationError(f"{directory}: its image processor does not work: {error}") from error
    if not trial.embeds[0].positions:
        raise ConfigurationError(f"{directory}: its image processor gives an image no tokens of the model's")


def _settings_of_tower(config: "PretrainedConfig") -> dict[str, Any]:
    """What older checkpoints of LLaVA leave to the model's config."""
    strategy = getattr(config, "vision_feature_select_strategy", None)
    if config.model_type not in ("llava", "llava_next") or strategy is None:
        return {}
    tower = config.vision_config
    return {
        "patch_size": tower.patch_size,
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(tower.model_type == "clip_vision_model"),  # its class token
    }


LARGE_IMAGE = 2048  # pixels on each side; most processors make larger ones smaller


def profile_images(processor: PretrainedImageProcessor, vision: VisionTower, device: torch.device) -> int:
    """Computes a large image on the GPU; returns the bytes of activations that it took.

    Raises `ConfigurationError` where it does not fit in the GPU's memory.
    """
    from PIL import Image  # which only models with images need

    image = LoadedImage.of(Image.new("RGB", (LARGE_IMAGE, LARGE_IMAGE)))
    (source,) = processor.prepare([processor.image_token_id], [image]).embeds
    assert isinstance(source, PromptImage)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    try:
        with torch.inference_mode():
            vision.encode({name: tensor.to(device) for name, tensor in source.pixels.items()})
    except torch.OutOfMemoryError as error:
        size = f"{LARGE_IMAGE} x {LARGE_IMAGE}"
        raise ConfigurationError(f"an image of {size} pixels does not fit in the GPU's memory beside the weights") from error
    return torch.cuda.max_memory_allocated(device) - before
