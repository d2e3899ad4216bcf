"""What attention does differently from layer to layer, whatever the device."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What varies from layer to layer. `sinks_H` are logits that take part in the softmax's denominator only (gpt-oss)."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None
