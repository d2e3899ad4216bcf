"""Parameters of a pooling request."""

from dataclasses import dataclass
from numbers import Integral
from typing import Literal, get_args

from penstock.engine.errors import InvalidRequest

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """`task` None is the model's own first one. `dimensions` cuts embeddings to their first so many numbers, `normalize` to length 1.

    `normalize` None is as the model's files say. `num_instruction_tokens` are the tokens at the start that are an instruction rather than
    the text; models whose files say `include_prompt: false` leave them out of the pooled vector.

    Raises `InvalidRequest` with `param` set to the field's name. What a model makes of them is for `PoolingModel.check`.
    """

    task: PoolingTask | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    num_instruction_tokens: int = 0

    def __post_init__(self) -> None:
        def require(condition: bool, name: str, rule: str) -> None:
            if not condition:
                raise InvalidRequest(f"`{name}` must be {rule}, got {getattr(self, name)!r:.100}", name)

        require(self.task is None or self.task in get_args(PoolingTask), "task", f"one of {', '.join(get_args(PoolingTask))}")
        is_integer = isinstance(self.dimensions, Integral) and not isinstance(self.dimensions, bool)
        require(self.dimensions is None or is_integer, "dimensions", "an integer")
        require(isinstance(self.normalize, bool | None), "normalize", "True or False")
