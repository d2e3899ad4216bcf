"""Positions of three parts (time, row and column: multimodal rotary positions), and the language models that have them.

Qwen2-VL (arXiv:2409.12191): the three parts of a text token are all its position. Those of an image's tokens are places in its grid,
counted from where it begins, and the text after it goes on behind the largest of them.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationMixin, PretrainedConfig, PreTrainedModel

from penstock.engine.multimodal.inputs import PromptImage, RopePositions

FAMILIES = ("qwen2_5_vl", "qwen2_vl")


def rope_positions(num_tokens: int, images: Sequence[PromptImage], merge_size: int) -> RopePositions:
    """Those of a prompt of so many tokens. `merge_size` by `merge_size` patches of an image's grid are one token."""
    parts: list[tuple[int, int, int]] = []
    position = 0

    def add_text(stop: int) -> None:
        nonlocal position
        num_text = stop - len(parts)
        parts.extend((number, number, number) for number in range(position, position + num_text))
        position += num_text

    for image in images:
        add_text(image.positions[0])
        times, rows, columns = image.pixels["image_grid_thw"][0].tolist()
        rows, columns = rows // merge_size, columns // merge_size
        parts.extend(
            (position + time, position + row, position + column)
            for time in range(times)
            for row in range(rows)
            for column in range(columns)
        )
        position += max(rows, columns)
    add_text(num_tokens)
    return RopePositions(parts, position - num_tokens)


class MropeForCausalLM(PreTrainedModel, GenerationMixin):
    """A language model that transformers has as a part of multimodal ones alone. `position_ids` are [1, T] for text, else [3, 1, T]."""

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
    """Makes the language model of one of `FAMILIES` known to transformers as one that generates text."""
    if config.model_type not in FAMILIES:
        return
    decoder_class: type[PreTrainedModel]
    if config.model_type == "qwen2_vl":
        from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLTextModel

        decoder_class = Qwen2VLTextModel
    else:
        from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

        decoder_class = Qwen2_5_VLTextModel
    text_config = type(config.get_text_config())
    members = {"config_class": text_config, "decoder_class": decoder_class}
    AutoModelForCausalLM.register(text_config, type(f"{decoder_class.__name__}ForCausalLM", (MropeForCausalLM,), members), exist_ok=True)
