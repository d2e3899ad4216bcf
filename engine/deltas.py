"""The engine's output, step by step. A whole answer is the fold of its deltas."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.engine.contracts.parsing import Event

if TYPE_CHECKING:
    from torch import Tensor


class FinishReason(StrEnum):
    STOP = "stop"  # a stop token or stop string, or a grammar's end
    LENGTH = "length"  # max_tokens or the context's end
    TIMED_OUT = "timed_out"  # the request's deadline passed
    ABORT = "abort"  # by an operator, or the shutdown; also for metrics, of a request that its client has left
    ERROR = "error"


class ClientFault(str):
    """Why a sequence ended with an error where the request itself is the reason, such as a constraint that leaves no token, or was aborted
    by an operator, so that clients do not try it again.
    """

    __slots__ = ()


class GrammarFault(ClientFault):
    """A constraint that its backend could compile, and then not follow."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's log probability from the raw logits (before penalties, bias, masks and temperature).

    `rank` counts from 1. `top` are the most probable (token id, logprob) pairs, best first; it need not hold the token itself.
    `is_reasoning` says that the token counts as one of the answer's reasoning, `is_preamble` as one of the free text before it.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
    is_reasoning: bool = False
    is_preamble: bool = False


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """What is known of the prompt once it has been computed. `logprobs[0]` is None: the first token has no probability.

    `queue_seconds` is how long the sequence waited before it was first scheduled, and `prefill_seconds` the time from then to its first
    token. `outputs` are the named model outputs of the prompt where they were asked for: one row per token, on the CPU, from the token at
    `first_output_token` on. Those before it were reused from the prefix cache.
    """

    num_tokens: int
    num_cached_tokens: int
    logprobs: tuple[TokenLogprobs | None, ...] | None = None
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    outputs: dict[str, "Tensor"] = field(default_factory=dict)
    first_output_token: int = 0


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    """What one beam has said so far, and the sum of its tokens' log probabilities."""

    token_ids: list[int]
    cumulative_logprob: float


@dataclass(frozen=True, slots=True)
class ExactDraws:
    """How an answer came that was to be sampled exactly: with which draw, and why, if it was sampled under masks or is missing."""

    num_draws: int
    fallback: str | None = None


@dataclass(slots=True)
class SequenceDelta:
    """What one step added to one sequence. `index` is the choice's number. The last delta has `finish_reason`.

    `events` may lag behind `token_ids`: text that could yet become a marker, a stop string or a character is held back.
    `prompt` comes with the first delta. `outputs` are the named model outputs that were asked for, a row for each of `token_ids`: what the
    model had computed when it said the token. `num_reasoning_tokens` and `num_preamble_tokens` are counts so far. `num_predicted` counts
    the draft tokens of this step that are from the request's prediction, and `num_predicted_right` those of them that were accepted. An
    `error` is a `ClientFault` where the request itself is the reason.

    `pressures` are there where they were asked for: of each token under a grammar, how many of the `events` came before it, and
    -log(the probability of all tokens that its mask left) in nats, from the raw logits.

    `is_closed` comes with the last one where the answer was to end within its `max_tokens`: whether tokens were masked for that.

    Exact sampling gives one delta for each answer, all of it, with `exact`.

    Beam search gives, at index 0, the `beams` of each step, best first; none of their tokens is certain yet. At its end there is one delta
    for each of the answers, best first, that holds all of its tokens and events, their `cumulative_logprob` and the answer's `beam_score`.
    Where fewer answers were found than were asked for, the last ones are empty and have a score of minus infinity.

    The last delta of a request whose prompt is exported has its `transfer_state`.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    prompt: PromptInfo | None = None
    num_reasoning_tokens: int = 0
    num_preamble_tokens: int = 0
    num_predicted: int = 0
    num_predicted_right: int = 0
    pressures: list[tuple[int, float]] = field(default_factory=list)
    is_closed: bool | None = None
    error: str | None = None
    outputs: dict[str, "Tensor"] = field(default_factory=dict)
    beams: list[BeamCandidate] | None = None
    cumulative_logprob: float | None = None
    beam_score: float | None = None
    exact: ExactDraws | None = None
    transfer_state: bytes | None = None
