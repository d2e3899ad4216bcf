"""What comes back for a text, or a pair of texts, that was turned into numbers. Names and shapes are vLLM's."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PoolingOutput:
    """`data` is float32 on the CPU: [D] of an embedding, [T, D] or [T, L] over tokens, [L] class probabilities, [1] score."""

    data: Tensor

    @property
    def embedding(self) -> list[float]:
        """The vector as a list. Raises `ValueError` where there is one for each token."""
        if self.data.ndim != 1:
            raise ValueError(f"there is no one vector: `data` has the shape {list(self.data.shape)}")
        numbers: list[float] = self.data.tolist()
        return numbers


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={self.hidden_size})"


@dataclass(slots=True)
class ClassificationOutput:
    """`probs` are in the order of the labels' numbers; `label` is the name of the most probable one, None where the model gives none."""

    probs: list[float]
    label: str | None = None

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    score: float


@dataclass(slots=True, kw_only=True)
class _RequestOutput:
    """`prompt_token_ids` are what the model read; of a pair, those of both texts."""

    request_id: str
    prompt_token_ids: list[int]
    finished: bool = True
    num_cached_tokens: int = 0

    def __repr__(self) -> str:
        shown = f"request_id={self.request_id!r}, outputs={getattr(self, 'outputs', None)!r}"
        return f"{type(self).__name__}({shown}, prompt_token_ids=<{len(self.prompt_token_ids)} tokens>, finished={self.finished})"


@dataclass(slots=True, kw_only=True, repr=False)
class PoolingRequestOutput(_RequestOutput):
    outputs: PoolingOutput


@dataclass(slots=True, kw_only=True, repr=False)
class EmbeddingRequestOutput(_RequestOutput):
    outputs: EmbeddingOutput


@dataclass(slots=True, kw_only=True, repr=False)
class ClassificationRequestOutput(_RequestOutput):
    outputs: ClassificationOutput


@dataclass(slots=True, kw_only=True, repr=False)
class ScoringRequestOutput(_RequestOutput):
    outputs: ScoringOutput
