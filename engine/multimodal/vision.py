"""The vision tower of a multimodal model, apart from its language model, which is served as any other."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from penstock.engine.multimodal import mrope

# Those of which prompts with images are compared with transformers, token by token. The others are refused.
FAMILIES = ("idefics3", "llava", *mrope.FAMILIES, "smolvlm")


@dataclass(frozen=True, slots=True)
class VisionTower:
    """What makes vectors of images. `config` is that of the whole model."""

    model: PreTrainedModel
    config: PretrainedConfig

    def encode(self, pixels: dict[str, Tensor]) -> Tensor:
        """The vectors [N, H] of one image, in the order of its placeholders."""
        model: Any = self.model
        taken = inspect.signature(model.get_image_features).parameters
        features = model.get_image_features(**{name: tensor for name, tensor in pixels.items() if name in taken}).pooler_output
        return features if isinstance(features, Tensor) else torch.cat(list(features))


def take_apart(whole: PreTrainedModel) -> tuple[PreTrainedModel, VisionTower]:
    """The language model of a multimodal one as the class that serves text alone, and the rest. Both have the weights of `whole`."""
    base: Any = getattr(whole, whole.base_model_prefix)
    decoder: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder.config)]
    with torch.device("meta"):
        language_model = model_class(decoder.config)
    setattr(language_model, language_model.base_model_prefix, decoder)
    language_model.set_output_embeddings(whole.get_output_embeddings())
    language_model.generation_config = whole.generation_config
    for name, module in base.named_children():
        if module is decoder:
            setattr(base, name, nn.Module())
    return language_model, VisionTower(base, whole.config)
