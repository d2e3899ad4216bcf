"""The objects that the library's calls return, metrics included."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric as Family
from torch import Tensor

from penstock.engine.deltas import ExactDraws
from penstock.serving.constraints.pressure import Pressure
from penstock.serving.messages import ToolCall


class Logprob(NamedTuple):
    """Of one token at one place, from the raw logits. `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # of one place: the token itself, and the likeliest ones that were asked for


@dataclass(slots=True)
class RequestMetrics:
    """Seconds since the epoch, or lengths of time in seconds; None before there is a first token.

    `time_in_queue` is how long the request waited before it was first scheduled.
    """

    arrival_time: float
    time_in_queue: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_generation_tokens: int = 0

    @property
    def first_scheduled_time(self) -> float | None:
        return None if self.time_in_queue is None else self.arrival_time + self.time_in_queue

    @property
    def first_token_latency(self) -> float | None:
        """Until the first token, the waiting included."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def mean_time_per_token(self) -> float | None:
        """From the first token to the last, over those after the first, of all sequences together."""
        if self.first_token_time is None or self.last_token_time is None or self.num_generation_tokens < 2:
            return None
        return (self.last_token_time - self.first_token_time) / (self.num_generation_tokens - 1)


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers.

    `text` is the generated text; in a conversation whose format is known, without `reasoning_content` and `tool_calls`, which are separate.
    A call's `function` has `name` and `arguments`, the text of a JSON object. `logprobs` hold one entry per token, and `cumulative_logprob`
    is their tokens' sum; None unless requested. `finish_reason` is None while the answer is running, else `stop`, `length`,
    `tool_calls`, or `error` if it failed, with the message in `error`. `stop_reason` is the stop string, or the id of the stop token, that
    ended it. `preamble` is the free text before a constrained answer, if requested; its tokens are among `token_ids` in any case.
    `pressure` is the constraint's, in nats, if requested, once the answer has ended. `closed`: whether masks ended the answer early; set
    only with `within_max_tokens`.
    `additional_outputs` have one row per token. `beam_score` is the score by which the answers of a beam search are ordered, and `exact`
    reports the draws of an answer that was sampled exactly.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)
    additional_outputs: dict[str, Tensor] = field(default_factory=dict)
    error: str | None = None
    beam_score: float | None = None
    exact: ExactDraws | None = None
    preamble: str | None = None
    pressure: Pressure | None = None
    closed: bool | None = None

    def finished(self) -> bool:
        """A method, as vLLM's is."""
        return self.finish_reason is not None

    def __repr__(self) -> str:
        shown = [f"index={self.index}", f"text={self.text!r}", f"token_ids={self.token_ids}"]
        shown += [f"{name}={value!r}" for name in ("preamble", "reasoning_content", "tool_calls") if (value := getattr(self, name))]
        if self.cumulative_logprob is not None:
            shown.append(f"cumulative_logprob={self.cumulative_logprob:.4f}")
        if self.logprobs is not None:
            shown.append(f"logprobs=<of {len(self.logprobs)} tokens>")
        shown += [f"{name}=<{list(rows.shape)}>" for name, rows in self.additional_outputs.items()]
        shown += [f"finish_reason={self.finish_reason!r}", f"stop_reason={self.stop_reason!r}"]
        return f"CompletionOutput({', '.join(shown)}{'' if self.error is None else f', error={self.error!r}'})"


@dataclass(slots=True)
class RequestOutput:
    """The answers to one prompt. `prompt` is its text, if it was one, or a conversation as rendered by the template.

    `prompt_logprobs` have one entry per token, the first of them None. `prompt_outputs` are the additional outputs of the prompt, if
    requested, from the token at `first_prompt_output` on: earlier tokens were reused from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    num_cached_tokens: int | None = None
    prompt_outputs: dict[str, Tensor] = field(default_factory=dict)
    first_prompt_output: int = 0

    def __repr__(self) -> str:
        shown = [f"request_id={self.request_id!r}", f"prompt={self.prompt!r}", f"prompt_token_ids=<{len(self.prompt_token_ids)} tokens>"]
        if self.prompt_logprobs is not None:
            shown.append(f"prompt_logprobs=<of {len(self.prompt_logprobs)} tokens>")
        shown += [f"outputs={self.outputs!r}", f"finished={self.finished}", f"num_cached_tokens={self.num_cached_tokens}"]
        return f"RequestOutput({', '.join(shown)})"


@dataclass(slots=True)
class BeamSearchSequence:
    """One answer of a beam search. `tokens` and `text` begin with the prompt, as vLLM's do; `cum_logprob` is the sum over the answer.

    `score`, by which the answers are ordered, is that sum under the length penalty.
    """

    tokens: list[int]
    text: str
    cum_logprob: float
    score: float
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The answers to one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class PoolingOutput:
    """`data` is float32 on the CPU: [D] of an embedding, [T, D] or [T, L] over tokens, [L] class probabilities, [1] score."""

    data: Tensor

    @property
    def embedding(self) -> list[float]:
        """The vector as a list. Raises `ValueError` if there is one for each token."""
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
    """`probs` are in the order of the labels' numbers; `label` is the name of the most probable one, None if the model has no names."""

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


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels` distinguish the series of one name."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """Only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """Of this moment."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """`buckets` count values up to each bound, by the bound as text; `+Inf` counts all."""

    count: int
    sum: float
    buckets: dict[str, int]


def metric_values(registry: CollectorRegistry) -> list[Metric]:
    """All there are, in the registry's order."""
    return [metric for family in registry.collect() for metric in _of_family(family)]


def _of_family(family: Family) -> Iterator[Metric]:
    if family.type == "histogram":
        yield from _histograms(family)
        return
    kind = Counter if family.type == "counter" else Gauge
    for sample in family.samples:
        if not sample.name.endswith("_created"):
            yield kind(family.name, dict(sample.labels), sample.value)


def _histograms(family: Family) -> Iterator[Histogram]:
    found: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        before = found.get(key, Histogram(family.name, labels, 0, 0.0, {}))
        match sample.name.removeprefix(family.name):
            case "_bucket":
                buckets = before.buckets | {sample.labels["le"]: int(sample.value)}
                found[key] = Histogram(family.name, labels, before.count, before.sum, buckets)
            case "_count":
                found[key] = Histogram(family.name, labels, int(sample.value), before.sum, before.buckets)
            case "_sum":
                found[key] = Histogram(family.name, labels, before.count, sample.value, before.buckets)
    yield from found.values()
