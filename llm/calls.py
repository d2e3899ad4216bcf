"""Which calls serve which model."""

from penstock.engine.pooling.model import PoolingModel
from penstock.engine.pooling.params import PoolingTask

GENERATION_CALLS = ("generate", "chat", "beam_search")
CALLS: dict[PoolingTask, tuple[str, ...]] = {
    "embed": ("embed", "score", "encode"),
    "token_embed": ("encode",),
    "score": ("score", "encode"),
    "classify": ("classify", "encode"),
    "token_classify": ("encode",),
}


def pooling_calls(model: PoolingModel) -> list[str]:
    """Those for this model, each once."""
    return list(dict.fromkeys(call for task, calls in CALLS.items() if task in model.tasks for call in calls))
