"""What a request asks of a model that turns text into numbers."""

from dataclasses import dataclass
from typing import Literal

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """`task` None is the model's own first one. `dimensions` cuts embeddings to their first so many numbers, `normalize` to length 1.

    `normalize` None is as the model's files say. `num_instruction_tokens` are the tokens at the start that are an instruction rather than
    the text; models whose files say `include_prompt: false` leave them out of the pooled vector.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    num_instruction_tokens: int = 0
