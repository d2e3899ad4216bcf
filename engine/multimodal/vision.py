"""The vision tower of a multimodal model, apart from its language model, which is served as any other; and vectors in place of token
embeddings, in the thread that runs the model, which remembers the features of images.
"""

import inspect
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import EmbeddedRows, PromptEmbeds, PromptImage
from penstock.engine.system.memory import index_on, is_device_lost, to_device

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Those with rotary positions of three parts.
MROPE_FAMILIES = ("glm4v", "glm4v_moe", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe")
# Those of which prompts with images are compared with transformers, token by token.
FAMILIES = ("gemma3", "idefics3", "internvl", "llava", "llava_next", "llava_onevision", "mistral3", *MROPE_FAMILIES, "smolvlm")
# Those in which the tokens of an image attend to each other in both directions.
BIDIRECTIONAL_FAMILIES = ("gemma3",)


# In the names of a config's parts.
MEDIA = ("vision", "image", "video", "audio", "speech")


def is_multimodal(config: "PretrainedConfig") -> bool:
    """Whether the model has a part for images or sound. Other configs may have parts as well: for attention, for experts."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    has_medium = any(medium in part for part in config.sub_configs for medium in MEDIA)
    return has_medium or (bool(config.sub_configs) and config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def takes_images(config: "PretrainedConfig") -> bool:
    """Whether images of a model are served."""
    return config.model_type in FAMILIES


@dataclass(frozen=True, slots=True)
class VisionTower:
    """What makes vectors of images. `config` is that of the whole model."""

    model: "PreTrainedModel"
    config: "PretrainedConfig"

    @property
    def span_size(self) -> int:
        """How many tokens attend to each other in both directions; 0 where attention is causal."""
        return int(self.config.mm_tokens_per_image) if self.config.model_type in BIDIRECTIONAL_FAMILIES else 0

    @property
    def beyond_vectors(self) -> str:
        """What the language model asks of an image beside its vectors; empty if nothing."""
        if self.config.model_type in MROPE_FAMILIES:
            return "rotary positions in three parts"
        return "attention in both directions" if self.span_size else ""

    def encode(self, pixels: dict[str, Tensor]) -> Tensor:
        """The vectors [N, H] of one image, in the order of its placeholders.

        They are [N, (1 + L) * H] where the first L layers of the language model add others to their outputs (DeepStack, arXiv:2406.04334).
        """
        model: Any = self.model
        taken = inspect.signature(model.get_image_features).parameters
        output = model.get_image_features(**{name: tensor for name, tensor in pixels.items() if name in taken})
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        # Each is a tensor for each tile, or one of all.
        return torch.cat([torch.cat([tile.flatten(0, -2) for tile in tiles]) for tiles in features], dim=-1)


def take_apart(whole: "PreTrainedModel", *, language_model_only: bool = False) -> "tuple[PreTrainedModel, VisionTower | None]":
    """The language model of a multimodal one as the class that serves text alone, and the rest where images are served.

    Both have the weights of `whole`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    decoder: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder.config)]
    with torch.device("meta"):
        language_model = model_class(decoder.config)
    setattr(language_model, language_model.base_model_prefix, decoder)
    language_model.set_output_embeddings(whole.get_output_embeddings())  # type: ignore[no-untyped-call]
    language_model.generation_config = whole.generation_config
    if language_model_only:
        return language_model, None
    base: Any = getattr(whole, whole.base_model_prefix)
    for name, module in base.named_children():
        if module is decoder:
            setattr(base, name, nn.Module())
    if whole.config.model_type == "mistral3":  # which drops the first dimension of what it projects, also where that is one token
        base.multi_modal_projector.register_forward_hook(lambda module, inputs, output_NH: output_NH[None])
    return language_model, VisionTower(base, whole.config)


if TYPE_CHECKING:
    from transformers import PreTrainedModel

ENCODER_CACHE_BYTES = 2**28


class ImageFailed(Exception):
    """The vision tower failed with the image of this digest. Nothing of the step has been computed."""

    def __init__(self, digest: bytes) -> None:
        super().__init__("the vision tower failed")
        self.digest = digest


class EncoderCache:
    """Vectors of images by digest. Those that were used last stay, as long as all of them together have at most `max_bytes`."""

    def __init__(self, max_bytes: int = ENCODER_CACHE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = 0

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._vectors

    def find(self, digest: bytes) -> Tensor | None:
        if digest in self._vectors:
            self._vectors.move_to_end(digest)
        return self._vectors.get(digest)

    def keep(self, digest: bytes, vectors_NH: Tensor) -> None:
        """Of an image that is not there."""
        assert digest not in self._vectors
        self._vectors[digest] = vectors_NH
        self.num_bytes += vectors_NH.nbytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._vectors.popitem(last=False)
            self.num_bytes -= oldest.nbytes

    def check_integrity(self) -> None:
        assert self.num_bytes == sum(vectors.nbytes for vectors in self._vectors.values()) <= self._max_bytes


class PromptEmbedder:
    """The inputs of a model for steps in which some rows have vectors. `vision` is None where the model takes no images."""

    def __init__(self, model: "PreTrainedModel", vision: VisionTower | None, device: torch.device) -> None:
        self._model: Any = model
        self._vision = vision
        self._device = device
        self.hidden_size = int(model.config.get_text_config(decoder=True).hidden_size)
        self.cache = EncoderCache()

    def check(self, embeds: Iterable[PromptEmbeds | PromptImage]) -> None:
        """Raises `InvalidRequest` for what cannot be put in the place of tokens of this model's prompts."""
        for source in embeds:
            if isinstance(source, PromptImage) and self._vision is None:
                raise InvalidRequest("this model takes no images")
            if isinstance(source, PromptEmbeds) and source.vectors_NH.shape != (len(source.positions), self.hidden_size):
                wanted = f"[{len(source.positions)}, {self.hidden_size}]"
                raise InvalidRequest(f"embeddings of shape {list(source.vectors_NH.shape)}, and this model takes {wanted}")

    def embed(self, input_ids_1T: Tensor, embeds: list[EmbeddedRows]) -> dict[str, Any]:
        """The model's inputs in place of the ids: their embeddings [1, T, H], with vectors in the rows of `embeds`.

        Where layers add vectors of their own to rows, these come too, as transformers' models take them.
        """
        # Embeddings may be views of what the model's layers write to in place.
        x_1TH: Tensor = self._model.get_input_embeddings()(input_ids_1T).clone()
        deep_rows: list[int] = []
        deep_vectors: list[Tensor] = []
        for embedded in embeds:
            vectors = self._vectors(embedded.source)[embedded.first : embedded.first + len(embedded.rows)].to(x_1TH.dtype)
            vectors_NH, deep = vectors[:, : self.hidden_size], vectors[:, self.hidden_size :]
            x_1TH[0].index_copy_(0, index_on(self._device, embedded.rows), vectors_NH)
            if deep.shape[1]:
                deep_rows += embedded.rows
                deep_vectors.append(deep)
        inputs: dict[str, Any] = {"inputs_embeds": x_1TH}
        if deep_rows:
            assert deep_rows == sorted(deep_rows), "the rows are those of a mask, in their order"
            is_visual_T = torch.zeros(x_1TH.shape[1], dtype=torch.bool, device=self._device)
            inputs["visual_pos_masks"] = is_visual_T.index_fill_(0, index_on(self._device, deep_rows), True)[None]
            inputs["deepstack_visual_embeds"] = torch.split(torch.cat(deep_vectors), self.hidden_size, dim=1)
        return inputs

    def _vectors(self, source: PromptEmbeds | PromptImage) -> Tensor:
        if isinstance(source, PromptEmbeds):
            return to_device(source.vectors_NH, self._device)
        vectors_NH = self.cache.find(source.digest)
        if vectors_NH is None:
            vectors_NH = self._encode(source)
            self.cache.keep(source.digest, vectors_NH)
        return vectors_NH

    def _encode(self, source: PromptImage) -> Tensor:
        assert self._vision is not None
        try:
            vectors_NH = self._vision.encode({name: to_device(tensor, self._device) for name, tensor in source.pixels.items()})
            if len(vectors_NH) != len(source.positions):
                raise ValueError(f"the vision tower gives {len(vectors_NH)} vectors for {len(source.positions)} tokens of an image")
        except Exception as error:  # whatever the tower raises: it concerns this image alone, unless the device is lost
            if is_device_lost(error):
                raise
            raise ImageFailed(source.digest) from error
        return vectors_NH
