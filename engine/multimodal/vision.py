"""The vision tower of a multimodal model, apart from its language model, which is served as any other."""

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

# Those with rotary positions of three parts: by the type of the whole model, the class of its language model.
MROPE_FAMILIES = {"qwen2_5_vl": "Qwen2_5_VLTextModel", "qwen2_vl": "Qwen2VLTextModel", "qwen3_vl": "Qwen3VLTextModel"}
# Those of which prompts with images are compared with transformers, token by token.
FAMILIES = ("gemma3", "idefics3", "internvl", "llava", "llava_next", "mistral3", *MROPE_FAMILIES, "smolvlm")
# Those in which the tokens of an image attend to each other in both directions.
BIDIRECTIONAL_FAMILIES = ("gemma3",)


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


def take_apart(whole: "PreTrainedModel") -> "tuple[PreTrainedModel, VisionTower | None]":
    """The language model of a multimodal one as the class that serves text alone, and the rest where the whole has a vision tower.

    Both have the weights of `whole`.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    base: Any = getattr(whole, whole.base_model_prefix)
    decoder: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder.config)]
    with torch.device("meta"):
        language_model = model_class(decoder.config)
    setattr(language_model, language_model.base_model_prefix, decoder)
    language_model.set_output_embeddings(whole.get_output_embeddings())  # type: ignore[no-untyped-call]
    language_model.generation_config = whole.generation_config
    if not takes_images(whole.config):
        return language_model, None
    for name, module in base.named_children():
        if module is decoder:
            setattr(base, name, nn.Module())
    if whole.config.model_type == "mistral3":  # which drops the first dimension of what it projects, also where that is one token
        base.multi_modal_projector.register_forward_hook(lambda module, inputs, output_NH: output_NH[None])
    return language_model, VisionTower(base, whole.config)
