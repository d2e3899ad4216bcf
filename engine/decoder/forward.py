"""One pass over the model."""

from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.attention.metadata import AttentionMetadata


def compute_logits(
    model: PreTrainedModel, input_ids_1T: Tensor, positions_1T: Tensor, attention: AttentionMetadata, kept: Tensor | None
) -> Tensor:
    """The logits [K, V] of the flat rows `kept`, or of all rows where that is None."""
    output = model(
        input_ids=input_ids_1T,
        position_ids=positions_1T,
        use_cache=False,
        logits_to_keep=0 if kept is None else kept,
        attention_metadata=attention,
    )
    logits_KV: Tensor = output.logits[0]
    return logits_KV
