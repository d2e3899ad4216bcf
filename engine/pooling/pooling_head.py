"""What a classifier computes from the vectors of its encoder: the model's own head, given only the tokens that it reads."""

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions


class _GivenStates(nn.Module):
    """Stands where the encoder stood in a classifier, and answers with token vectors that have been computed already."""

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.pooler: nn.Module | None = getattr(encoder, "pooler", None)
        self.pooler_activation: nn.Module | None = getattr(encoder, "pooler_activation", None)  # Albert's own is outside of its pooler
        self.states_BLD = torch.empty(0)

    def forward(self, *_: Any, **__: Any) -> BaseModelOutputWithPoolingAndCrossAttentions:
        return BaseModelOutputWithPoolingAndCrossAttentions(last_hidden_state=self.states_BLD, pooler_output=self._pooled())

    def _pooled(self) -> Tensor | None:
        if self.pooler is None:
            return None
        pooled: Tensor
        if self.pooler_activation is not None:
            pooled = self.pooler_activation(self.pooler(self.states_BLD[:, 0]))
        else:
            pooled = self.pooler(self.states_BLD)
        return pooled


@dataclass(frozen=True, slots=True)
class Head:
    """A classifier without its encoder."""

    classifier: PreTrainedModel
    given: _GivenStates

    @classmethod
    def detach(cls, classifier: PreTrainedModel) -> "tuple[PreTrainedModel, Head]":
        """Takes a classifier apart into its encoder and its head. The classifier itself is changed."""
        encoder: Any = classifier.base_model
        given = _GivenStates(encoder)
        setattr(classifier, classifier.base_model_prefix, given)
        return encoder, cls(classifier, given)

    def __call__(self, states_BLD: Tensor) -> Tensor:
        """Logits, float32: of B texts where the class has one output for each, [B, labels], else of every token, [B, L, labels]."""
        if states_BLD.shape[0] > 1 and self.classifier.config.get_text_config().pad_token_id is None:
            return torch.cat([self(states_BLD[row : row + 1]) for row in range(len(states_BLD))])  # some classes refuse more then
        self.given.states_BLD = states_BLD
        shape, device = states_BLD.shape[:2], states_BLD.device
        options: dict[str, Any] = {}
        if "attention_mask" in inspect.signature(self.classifier.forward).parameters:
            options["attention_mask"] = torch.ones(shape, dtype=torch.long, device=device)
        try:
            output = self.classifier(input_ids=torch.ones(shape, dtype=torch.long, device=device), **options)
        finally:
            self.given.states_BLD = torch.empty(0)
        logits: Tensor = output.logits
        return logits.float()
