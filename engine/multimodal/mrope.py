"""Language models whose rotary positions have three parts (`RopePositions`), which transformers has in multimodal models alone."""

from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    GenerationMixin,
    PretrainedConfig,
    PreTrainedModel,
)

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
    text_config = type(config.get_text_config())
    if config.model_type not in MROPE_FAMILIES or text_config in MODEL_FOR_CAUSAL_LM_MAPPING:
        return
    decoder_class: Any = MODEL_MAPPING[text_config]
    # transformers reads in the source of a class's module whether its experts may be computed in other ways.
    members = {"config_class": text_config, "decoder_class": decoder_class, "__module__": decoder_class.__module__}
    model_class = type(f"{decoder_class.__name__}ForCausalLM", (MropeForCausalLM,), members)
    AutoModelForCausalLM.register(text_config, model_class, exist_ok=True)  # it passes over configs of its own otherwise
