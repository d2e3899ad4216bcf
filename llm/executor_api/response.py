"""What an executor says of its requests. Names and meanings are those of TensorRT-LLM's `Response` and `Result`."""

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from penstock.engine.errors import GenerationFailed
from penstock.llm.executor_api.metrics import RequestPerfMetrics

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(Enum):
    """Why a sequence ended. What ended it, an end token or a stop word of token ids, is not part of the output."""

    NOT_FINISHED = 0
    END_ID = 1  # or a grammar's end
    STOP_WORDS = 2
    LENGTH = 3  # max_tokens or the context's end
    TIMED_OUT = 4
    CANCELLED = 5


@dataclass(frozen=True, slots=True)
class AdditionalOutput:
    """A named output of the model: [beams, tokens, ...] of the generated tokens, or [tokens, ...] of the prompt's, named `context_...`."""

    name: str
    output: "Tensor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one response adds to one sequence, or the whole of it where nothing is streamed.

    The lists have one entry for each beam, which is one entry where the beam width is 1. `log_probs` are of the generated tokens in
    `output_token_ids`, `cum_log_probs` their sum over all generated so far: by the raw logits, and for beams by what the search went by.
    `generation_logits` are [beams, tokens, V]; `context_logits` [tokens, V] come with a sequence's first response, and begin with the
    prompt's token `first_context_token`: those before it were reused from the prefix cache, and have no logits.

    `is_final` is True of the request's last response alone, `is_sequence_final` of a sequence's last. `decoding_iter` counts the steps.
    """

    is_final: bool
    is_sequence_final: bool
    sequence_index: int
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: "Tensor | None" = None
    generation_logits: "Tensor | None" = None
    additional_outputs: list[AdditionalOutput] = field(default_factory=list)
    first_context_token: int = 0
    decoding_iter: int = 0
    request_perf_metrics: RequestPerfMetrics | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A result, or why there is none. A response with an error is its request's last."""

    request_id: int
    outcome: Result | str
    client_id: int | str | None = None

    def has_error(self) -> bool:
        return isinstance(self.outcome, str)

    @property
    def error_msg(self) -> str | None:
        return self.outcome if isinstance(self.outcome, str) else None

    @property
    def result(self) -> Result:
        """Raises `GenerationFailed` where there is an error."""
        if isinstance(self.outcome, str):
            raise GenerationFailed(self.outcome)
        return self.outcome

    @property
    def is_final(self) -> bool:
        """Whether the request has no more responses."""
        return isinstance(self.outcome, str) or self.outcome.is_final
