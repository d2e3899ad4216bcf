"""An executor's responses, and the engine's deltas folded into them."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from penstock.engine.deltas import BeamCandidate, PromptInfo, SequenceDelta
from penstock.engine.deltas import FinishReason as EngineReason
from penstock.engine.errors import GenerationFailed
from penstock.engine.text.streaming import StopSequences
from penstock.llm.executor.requests import ContextPhaseParams, Request


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingMetrics:
    """Moments in `time.monotonic()`. None is what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheMetrics:
    """Blocks of the KV cache that the sequence's tokens take up, and which of the prompt's were there already."""

    num_total_allocated_blocks: int
    num_new_allocated_blocks: int
    num_reused_blocks: int
    num_missed_blocks: int

    @property
    def kv_cache_hit_rate(self) -> float:
        """Share of the prompt's blocks that were reused."""
        num_looked_up = self.num_reused_blocks + self.num_missed_blocks
        return self.num_reused_blocks / num_looked_up if num_looked_up else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPerfMetrics:
    """Of one sequence, up to the response that has them. `first_iter`, `iter` and `last_iter` number the engine's steps."""

    timing_metrics: TimingMetrics
    kv_cache_metrics: KvCacheMetrics
    first_iter: int | None = None
    iter: int | None = None
    last_iter: int | None = None


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
    output: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What one response adds to one sequence, or the whole of it where nothing is streamed.

    The lists have one entry for each beam, which is one entry where the beam width is 1. `log_probs` are of the generated tokens in
    `output_token_ids`, `cum_log_probs` their sum over all generated so far: by the raw logits, and for beams by what the search went by.
    `generation_logits` are [beams, tokens, V]; `context_logits` [tokens, V] come with a sequence's first response, and begin with the
    prompt's token `first_context_token`: those before it were reused from the prefix cache, and have no logits.

    `is_final` is True of the request's last response alone, `is_sequence_final` of a sequence's last. `decoding_iter` counts the steps.
    `context_phase_params` come with the last response to a request of the type `CONTEXT_ONLY`.
    """

    is_final: bool
    is_sequence_final: bool
    sequence_index: int
    output_token_ids: list[list[int]]
    finish_reasons: list[FinishReason]
    cum_log_probs: list[float] | None = None
    log_probs: list[list[float]] | None = None
    context_logits: Tensor | None = None
    generation_logits: Tensor | None = None
    additional_outputs: list[AdditionalOutput] = field(default_factory=list)
    first_context_token: int = 0
    decoding_iter: int = 0
    request_perf_metrics: RequestPerfMetrics | None = None
    context_phase_params: ContextPhaseParams | None = None


@dataclass(frozen=True, slots=True)
class Response:
    """A result, or the error in its place. A response with an error is its request's last."""

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


REASONS = {
    EngineReason.LENGTH: FinishReason.LENGTH,
    EngineReason.TIMED_OUT: FinishReason.TIMED_OUT,
    EngineReason.ABORT: FinishReason.CANCELLED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldSettings:
    """What a fold has to know beside the request: the ids that end it, the words of ids that do, and what metrics are made of.

    `num_sequences` counts those that the engine ends, beams included.
    """

    num_sequences: int
    stop_token_ids: frozenset[int]
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    arrival_time: float = field(default_factory=time.monotonic)
    block_size: int = 16
    num_steps: Callable[[], int] = lambda: 0


@dataclass(slots=True)
class SequenceState:
    """One sequence, or one beam, as far as it has come. `num_shown` of its tokens are in responses; their model outputs may be gone."""

    stops: StopSequences | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rows: dict[str, list[Tensor]] = field(default_factory=dict)
    num_rows_dropped: int = 0
    num_shown: int = 0
    num_cut: int = 0
    num_deltas: int = 0
    prompt: PromptInfo | None = None
    is_prompt_shown: bool = False
    reason: FinishReason = FinishReason.NOT_FINISHED
    cumulative_logprob: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    first_iter: int | None = None
    last_iter: int | None = None

    @property
    def num_certain(self) -> int:
        """Of its tokens, those that are part of the output whatever comes next."""
        if self.reason is not FinishReason.NOT_FINISHED:
            return len(self.token_ids) - self.num_cut
        return len(self.token_ids) - (0 if self.stops is None else self.stops.num_pending)

    def add(self, delta: SequenceDelta, stop_token_ids: frozenset[int]) -> None:
        self.num_deltas += 1
        if self.stops is not None:
            for token_id in delta.token_ids:
                if self.stops.match is None:
                    self.stops.append(token_id)
        self.token_ids += delta.token_ids
        self.logprobs += [entry.logprob for entry in delta.logprobs]
        for name, rows in delta.outputs.items():
            self.rows.setdefault(name, []).extend(rows.unbind(0))
        self.prompt = delta.prompt or self.prompt
        if delta.cumulative_logprob is not None:
            self.cumulative_logprob = delta.cumulative_logprob
        if delta.finish_reason is not None:
            self.end(delta.finish_reason, delta.stop_reason, stop_token_ids)

    def end(self, reason: EngineReason, stop_reason: int | str | None, stop_token_ids: frozenset[int]) -> None:
        """Says why it ended, and leaves out of the output what ended it."""
        if reason is not EngineReason.STOP:
            self.reason = REASONS[reason]
        elif isinstance(stop_reason, str):
            self.reason = FinishReason.STOP_WORDS
            self.num_cut = 0 if self.stops is None else len(self.stops.match or ())
        else:
            self.reason = FinishReason.END_ID
            self.num_cut = int(bool(self.token_ids) and self.token_ids[-1] in stop_token_ids)

    def rows_of(self, name: str, start: int, stop: int) -> list[Tensor]:
        """Model outputs of these of its tokens."""
        return self.rows.get(name, [])[start - self.num_rows_dropped : stop - self.num_rows_dropped]

    def drop_rows(self, stop: int) -> None:
        for name in self.rows:
            del self.rows[name][: stop - self.num_rows_dropped]
        self.num_rows_dropped = stop


class ResponseFold:
    """All responses of one request. The last of them is final, and nothing may be fed after it."""

    def __init__(self, request_id: int, request: Request, settings: FoldSettings) -> None:
        self._id = request_id
        self._request = request
        self._settings = settings
        self._is_beam_search = request.sampling_config.beam_width > 1
        # Beams are chosen anew at each step, so that nothing is new about any of them.
        self._gives_all = not request.streaming or request.return_all_generated_tokens or self._is_beam_search
        min_tokens = request.sampling_config.min_tokens or 0
        stops = StopSequences(settings.stop_sequences, min_tokens) if settings.stop_sequences else None
        self._states = [SequenceState(None if stops is None else stops.copy()) for _ in range(settings.num_sequences)]
        self._num_unfinished = settings.num_sequences
        self._num_steps = 0
        self._beams: list[BeamCandidate] = []  # as they were last, which is all there is of them where the search is cut short
        self._transfer_state: bytes | None = None
        self.is_over = False
        self.queued_time = settings.arrival_time
        """When it came to the engine: later than it arrived where a grammar had to be compiled."""

    @property
    def arrival_time(self) -> float:
        return self._settings.arrival_time

    def feed(self, delta: SequenceDelta) -> list[Response]:
        """What there is to say of it, if anything. An error in one sequence ends the request."""
        assert not self.is_over, "the request has had its final response"
        if delta.error is not None or delta.finish_reason is EngineReason.ERROR:
            return [self.error(delta.error or "the request failed")]
        if delta.beams is not None:
            return self._show_beams(delta)
        state = self._states[delta.index]
        self._transfer_state = delta.transfer_state
        self._count(state, delta)
        state.add(delta, self._settings.stop_token_ids)
        is_finished = delta.finish_reason is not None
        self._num_unfinished -= is_finished
        if self._is_beam_search:
            return [] if self._num_unfinished else [self._respond(0, self._states, is_sequence_final=True)]
        if is_finished or (self._request.streaming and state.num_certain > state.num_shown):
            return [self._respond(delta.index, [state], is_sequence_final=is_finished)]
        return []

    def end(self, reason: EngineReason) -> list[Response]:
        """Ends every sequence that has not ended, where it is."""
        responses = []
        for index, state in enumerate(self._states):
            if state.reason is FinishReason.NOT_FINISHED:
                delta = SequenceDelta(index, finish_reason=reason)
                if index < len(self._beams):
                    delta.token_ids, delta.cumulative_logprob = self._beams[index].token_ids, self._beams[index].cumulative_logprob
                responses += self.feed(delta)
        return responses

    def error(self, message: str) -> Response:
        """Ends the request as a whole."""
        self.is_over = True
        return Response(self._id, message, self._request.client_id)

    def _show_beams(self, delta: SequenceDelta) -> list[Response]:
        self._num_steps += 1
        self._beams = delta.beams or []
        first = self._states[0]
        first.prompt = delta.prompt or first.prompt
        self._count(first, delta)
        if not self._request.streaming or not self._beams:
            return []
        shown = []
        for beam in self._beams[: self._settings.num_sequences]:
            state = SequenceState(token_ids=list(beam.token_ids), cumulative_logprob=beam.cumulative_logprob)
            state.prompt, state.num_deltas = first.prompt, self._num_steps
            state.is_prompt_shown, first.is_prompt_shown = first.is_prompt_shown, True
            shown.append(state)
        return [self._respond(0, shown, is_sequence_final=False)]

    def _count(self, state: SequenceState, delta: SequenceDelta) -> None:
        """Notes when tokens came. Only requests that ask for metrics get them."""
        if self._request.output_config.return_perf_metrics and (delta.token_ids or delta.beams):
            now, step = time.monotonic(), self._settings.num_steps()
            state.last_token_time, state.last_iter = now, step
            if state.first_token_time is None:
                state.first_token_time, state.first_iter = now, step

    def _respond(self, index: int, states: list[SequenceState], *, is_sequence_final: bool) -> Response:
        config, first = self._request.output_config, states[0]
        self.is_over = is_final = is_sequence_final and not self._num_unfinished
        ranges = [(0 if self._gives_all else state.num_shown, state.num_certain) for state in states]
        with_input = not self._request.streaming and not config.exclude_input_from_output
        prefix = list(self._request.input_token_ids) if with_input else []
        result = Result(
            is_final=is_final,
            is_sequence_final=is_sequence_final,
            sequence_index=index,
            output_token_ids=[prefix + state.token_ids[start:stop] for state, (start, stop) in zip(states, ranges, strict=True)],
            finish_reasons=[state.reason for state in states],
            cum_log_probs=self._sums(states),
            log_probs=self._logprobs(states, ranges),
            context_logits=self._context(first, "logits") if config.return_context_logits else None,
            generation_logits=_stacked("logits", states, ranges) if config.return_generation_logits else None,
            additional_outputs=list(self._additional(states, ranges)),
            first_context_token=0 if first.prompt is None else first.prompt.first_output_token,
            decoding_iter=self._num_steps if self._is_beam_search else first.num_deltas,
            request_perf_metrics=self._metrics(first, is_sequence_final) if config.return_perf_metrics else None,
            context_phase_params=self._context_phase() if is_final else None,
        )
        first.is_prompt_shown = True
        for state, (_, stop) in zip(states, ranges, strict=True):
            state.num_shown = stop
            if not self._gives_all:
                state.drop_rows(stop)
        return Response(self._id, result, self._request.client_id)

    def _sums(self, states: list[SequenceState]) -> list[float] | None:
        if not self._request.output_config.return_log_probs:
            return None
        return [
            sum(state.logprobs[: state.num_certain]) if state.cumulative_logprob is None else state.cumulative_logprob for state in states
        ]

    def _logprobs(self, states: list[SequenceState], ranges: list[tuple[int, int]]) -> list[list[float]] | None:
        if not self._request.output_config.return_log_probs or self._is_beam_search:
            return None  # a beam's are known by their sum
        return [state.logprobs[start:stop] for state, (start, stop) in zip(states, ranges, strict=True)]

    def _context_phase(self) -> ContextPhaseParams | None:
        """What the generation phase is to be given. A sequence without a token leaves nothing to it."""
        first = [state.token_ids[0] for state in self._states if state.token_ids]
        if self._transfer_state is None or len(first) < len(self._states):
            return None
        return ContextPhaseParams(first, self._id, self._transfer_state)

    def _context(self, state: SequenceState, name: str) -> Tensor | None:
        """Model outputs of the prompt, once."""
        return None if state.is_prompt_shown or state.prompt is None else state.prompt.outputs.get(name)

    def _additional(self, states: list[SequenceState], ranges: list[tuple[int, int]]) -> Iterable[AdditionalOutput]:
        for wanted in self._request.output_config.additional_model_outputs or ():
            context = self._context(states[0], wanted.name) if wanted.gather_context else None
            if context is not None:
                yield AdditionalOutput(f"context_{wanted.name}", context)
            yield AdditionalOutput(wanted.name, _stacked(wanted.name, states, ranges))

    def _metrics(self, state: SequenceState, is_final: bool) -> RequestPerfMetrics:
        arrival, prompt, size = self._settings.arrival_time, state.prompt, self._settings.block_size
        num_prompt_tokens = len(self._request.input_token_ids)
        num_blocks = -(-(num_prompt_tokens + len(state.token_ids)) // size)
        num_reused = 0 if prompt is None else prompt.num_cached_tokens // size
        return RequestPerfMetrics(
            timing_metrics=TimingMetrics(
                arrival_time=arrival,
                first_scheduled_time=None if prompt is None else self.queued_time + prompt.queue_seconds,
                first_token_time=state.first_token_time,
                last_token_time=state.last_token_time if is_final else None,
            ),
            kv_cache_metrics=KvCacheMetrics(
                num_total_allocated_blocks=num_blocks,
                num_new_allocated_blocks=num_blocks - num_reused,
                num_reused_blocks=num_reused,
                num_missed_blocks=-(-num_prompt_tokens // size) - num_reused,
            ),
            first_iter=state.first_iter,
            iter=state.last_iter,
            last_iter=state.last_iter if is_final else None,
        )


def _stacked(name: str, states: list[SequenceState], ranges: list[tuple[int, int]]) -> Tensor:
    """Model outputs [beams, tokens, ...]; where a beam has fewer tokens than another, the rest is zeros."""
    rows = [state.rows_of(name, start, stop) for state, (start, stop) in zip(states, ranges, strict=True)]
    first = next((row for beam in rows for row in beam), torch.empty(0))
    stacked = first.new_zeros((len(rows), max(map(len, rows)), *first.shape))
    for beam, target in zip(rows, stacked, strict=True):
        for place, row in enumerate(beam):
            target[place] = row
    return stacked
