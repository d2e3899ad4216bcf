"""Language models whose rotary positions have three parts (`RopePositions`), which transformers has in multimodal models alone."""

from importlib import import_module
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel

from penstock.engine.multimodal.vision import MROPE_FAMILIES


class MropeForCausalLM(PreTrainedModel, GenerationMixin):
    """With the head that writes text. `position_ids` are [1, T] where all parts are alike, else [3, 1, T]."""

    decoder_class: ClassVar[type[PreTrainedModel]]
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.decoder_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """They come from the multimodal model."""

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool = False,
        logits_to_keep: Tensor | int = 0,
        **kwargs: Any,
    ) -> SimpleNamespace:
        output = self.model(input_ids=input_ids, position_ids=position_ids, inputs_embeds=inputs_embeds, use_cache=use_cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return SimpleNamespace(logits=self.lm_head(output.last_hidden_state[:, kept]))


def register(config: PretrainedConfig) -> None:
    """Makes the language model of one of `MROPE_FAMILIES` known to transformers as one that generates text."""
    name = MROPE_FAMILIES.get(config.model_type)
    if name is None:
        return
    module = import_module(f"transformers.models.{config.model_type}.modeling_{config.model_type}")
    text_config = type(config.get_text_config())
    members = {"config_class": text_config, "decoder_class": getattr(module, name)}
    AutoModelForCausalLM.register(text_config, type(f"{name}ForCausalLM", (MropeForCausalLM,), members), exist_ok=True)
