"""The engine without asyncio: requests in, one step at a time, deltas out. The server, offline use and the tests all drive this."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from penstock.engine.batch import Batch, build_batch
from penstock.engine.errors import InvalidRequest
from penstock.engine.events import Reasoning, Text
from penstock.engine.grammar_gate import GrammarGate
from penstock.engine.mask_fill import TOO_SLOW, MaskFill
from penstock.engine.mask_filler import MaskFiller
from penstock.engine.model_runner import ModelRunner, StepOutput
from penstock.engine.outputs import FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.parsing import Phase
from penstock.engine.request import Request
from penstock.engine.sampler import NO_TOKEN_LEFT, SamplerOutput
from penstock.engine.scheduler import Scheduler, Step
from penstock.engine.sequence import Sequence, Status
from penstock.engine.sequence_factory import SequenceFactory
from penstock.engine.stats import EngineStats
from penstock.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DeltasByRequest = dict[str, list[SequenceDelta]]


@dataclass(slots=True)
class _Counters:
    prompt_tokens: int = 0
    generation_tokens: int = 0
    forced_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class EngineCore:
    """Ties scheduler, model runner and sequences together. Belongs to one thread; only `runner` and `masks` work in others."""

    runner: ModelRunner
    scheduler: Scheduler
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    masks: MaskFiller = field(default_factory=MaskFiller)
    _sequences: dict[str, list[Sequence]] = field(default_factory=dict)
    _num_arrivals: int = 0
    _counters: _Counters = field(default_factory=_Counters)

    def add(self, request: Request) -> None:
        """Queues a request. Raises `InvalidRequest` for one that can never be served and `QueueFull` beyond the queue's bound."""
        self._check(request)
        self._num_arrivals += 1
        factory = SequenceFactory(
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_token_ids,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            device=self.runner.loaded.device,
            speculates=self.scheduler.speculation is not None,
        )
        sequences = factory.make(request, self._num_arrivals)
        self.scheduler.add(sequences[0])
        self._sequences[request.request_id] = sequences

    def abort(self, request_id: str) -> None:
        """Forgets a request and frees its blocks at once; unknown or finished ones are none of its business."""
        for sequence in self._sequences.pop(request_id, []):
            if sequence.status is not Status.FINISHED:
                self._release(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def schedule(self) -> Step | None:
        """What to compute next; None where there is nothing, or all of it waits for late masks.

        Each step must come back, to `update` or to `fail`.
        """
        step = self.scheduler.schedule()
        if not step:
            assert step.num_held_up or not self.has_work, "there is work, and none of it can be done"
            return None
        return step

    def build(self, step: Step) -> Batch:
        """The step as the runner takes it. Its masks begin to be filled."""
        return build_batch(
            step,
            self.masks,
            block_size=self.scheduler.block_size,
            vocab_size=self.vocab_size,
            min_tokens=self.runner.min_tokens,
            device=self.runner.loaded.device,
        )

    def update(self, step: Step, batch: Batch, output: StepOutput) -> DeltasByRequest:
        """Takes in what a step computed. Requests that were aborted meanwhile are passed over; whoever fails, fails alone."""
        self._counters.steps += 1
        self.masks.end()
        for sequence, first_token, logprobs in output.prompt_logprobs:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs[first_token : first_token + len(logprobs)] = logprobs
        for sequence, num_tokens in step.num_tokens.items():
            if sequence.status is Status.RUNNING:
                sequence.num_computed_tokens += num_tokens
                if sequence.forks and sequence.num_uncomputed_tokens == 0:
                    self.scheduler.fork(sequence)
        deltas: DeltasByRequest = {}
        samples = {row: position for position, row in enumerate(output.rows)}
        for row, sampler in enumerate(batch.samplers):
            sequence = sampler.sequence
            if sampler.num_drafted or sequence.status is not Status.RUNNING:
                continue
            delta = SequenceDelta(sequence.index)
            draft = step.drafts.get(sequence, [])
            num_known = len(sequence.token_ids)
            if row in samples:
                rows = [samples[row + place] for place in range(len(draft) + 1) if row + place in samples]
                self._take_samples(sequence, delta, output.samples, rows, draft)
            elif sequence.mask is not None and sequence.mask.needs_no_sample:
                self._take_mask(sequence, delta, sequence.mask)
            else:
                self.scheduler.take_back(sequence)
                continue
            if draft:
                self._settle(sequence, draft, sequence.token_ids[num_known:])
            deltas.setdefault(sequence.request.request_id, []).append(delta)
        return deltas

    def fail(self, step: Step, reason: str) -> DeltasByRequest:
        """A step failed as a whole: every request in it ends with an error, and the others go on."""
        deltas: DeltasByRequest = {}
        self.masks.end()
        self.scheduler.withdraw(step)
        # By its sequences, not by name alone: a request that was aborted meanwhile may have lent its id to another.
        for request_id in {sequence.request.request_id for sequence in step.num_tokens if sequence.status is Status.RUNNING}:
            for sequence in [sequence for sequence in self._sequences[request_id] if sequence.status is not Status.FINISHED]:
                delta = SequenceDelta(sequence.index)
                self._fail(sequence, delta, reason)
                deltas.setdefault(request_id, []).append(delta)
        return deltas

    def step(self) -> DeltasByRequest:
        """One whole step in this thread: schedule, launch, collect, update. Waits where all there is to do waits for late masks."""
        while (step := self.schedule()) is None:
            if not self.has_work:
                return {}
            self.masks.wait()
        batch = self.build(step)
        return self.update(step, batch, self.runner.launch(batch).collect())

    def stats(self) -> EngineStats:
        scheduler, speculation = self.scheduler, self.scheduler.speculation
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=sum(len(sequence.sampling_sequences) for sequence in scheduler.waiting),
            kv_cache_usage=scheduler.pool.usage,
            num_prefix_cache_queries=scheduler.num_prefix_queries,
            num_prefix_cache_hits=scheduler.num_prefix_hits,
            num_prompt_tokens=self._counters.prompt_tokens,
            num_generation_tokens=self._counters.generation_tokens,
            num_forced_tokens=self._counters.forced_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self._counters.steps,
            num_draft_tokens=0 if speculation is None else speculation.num_drafted,
            accepted_lengths=() if speculation is None else tuple(speculation.lengths),
        )

    def check_integrity(self) -> None:
        """Asserts that blocks and sequences are accounted for."""
        self.scheduler.check_integrity()
        live = {sequence for sequences in self._sequences.values() for sequence in sequences if sequence.status is not Status.FINISHED}
        known = {member for sequence in (*self.scheduler.running, *self.scheduler.waiting) for member in sequence.sampling_sequences}
        assert live == known, "a sequence is lost between its request and the scheduler"

    def _check(self, request: Request) -> None:
        num_prompt = len(request.prompt_token_ids)
        if num_prompt == 0:
            raise InvalidRequest("the prompt is empty: it must hold at least one token", "prompt")
        if num_prompt > self.max_model_len or (num_prompt == self.max_model_len and request.params.max_tokens != 0):
            limit = f"prompt and answer together may have {self.max_model_len}"
            raise InvalidRequest(f"the prompt has {num_prompt} tokens, and {limit}", "prompt")
        for token_id in (min(request.prompt_token_ids), max(request.prompt_token_ids)):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidRequest(f"the prompt holds token id {token_id}, outside the vocabulary of {self.vocab_size} tokens", "prompt")
        request.params.check_token_ids(self.vocab_size)
        if request.params.n > self.scheduler.max_num_seqs:
            raise InvalidRequest(f"`n` must be at most {self.scheduler.max_num_seqs}, the number of sequences that run at once", "n")
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")

    def _take_samples(self, sequence: Sequence, delta: SequenceDelta, samples: SamplerOutput, rows: list[int], draft: list[int]) -> None:
        """Takes the next token, and those after it for as long as each was sampled after tokens that have indeed been said.

        A draft is right with the probability that the model gives it, and what is sampled in its place has the others' probabilities:
        the distribution is the same as without it (Leviathan et al., arXiv:2211.17192, where the draft is certain of itself).
        """
        num_known = len(sequence.token_ids)
        is_constrained = sequence.is_constrained
        for num_right, row in enumerate(rows):
            if num_right:
                self.scheduler.keep_computed(sequence, len(sequence.token_ids))
            self._take_sample(sequence, delta, samples, row)
            if sequence.status is not Status.RUNNING or sequence.token_ids[num_known:] != draft[: num_right + 1]:
                break
            if sequence.sampling.block_stop or sequence.is_constrained != is_constrained:
                break  # the rows after this one were sampled by other rules

    def _settle(self, sequence: Sequence, draft: list[int], said: list[int]) -> None:
        """Counts how far the draft was what the sequence said, and keeps what was computed for it."""
        assert self.scheduler.speculation is not None
        pairs = enumerate(zip(said, draft, strict=False))
        num_right = next((place for place, (token_id, drafted) in pairs if token_id != drafted), min(len(said), len(draft)))
        self.scheduler.speculation.count(len(draft), num_right)
        if sequence.status is Status.RUNNING:
            num_known = len(sequence.token_ids) - len(said)
            self.scheduler.keep_computed(sequence, min(num_known + num_right, len(sequence.token_ids) - 1))  # the last one is sampled from

    def _take_sample(self, sequence: Sequence, delta: SequenceDelta, samples: SamplerOutput, row: int) -> None:
        sequence.mask = None
        if row in samples.failures:
            self._fail(sequence, delta, samples.failures[row])
        else:
            self._read_or_fail(sequence, delta, lambda: self._accept(sequence, delta, samples.token_ids[row], samples.logprobs[row]))

    def _take_mask(self, sequence: Sequence, delta: SequenceDelta, mask: MaskFill) -> None:
        if mask.error is not None:
            self._fail(sequence, delta, mask.error)
        else:
            sequence.mask = None
            self._read_or_fail(sequence, delta, lambda: self._accept_mask(sequence, delta, mask))

    def _read_or_fail(self, sequence: Sequence, delta: SequenceDelta, accept: Callable[[], None]) -> None:
        """Has what comes next accepted, unless there was to be nothing but the prompt."""
        try:
            if sequence.num_output_tokens == 0:
                delta.prompt = self._prompt_info(sequence)
            if sequence.max_tokens == 0:
                self._finish(sequence, delta, FinishReason.LENGTH)
            else:
                accept()
        except Exception as error:  # a plug-in's parser or grammar: whatever it raises ends its own sequence
            logger.exception("An answer could not be read")
            self._fail(sequence, delta, f"reading the answer raised {type(error).__name__}: {error}")

    def _accept_mask(self, sequence: Sequence, delta: SequenceDelta, mask: MaskFill) -> None:
        """Ends where only the end can follow, or appends what the grammar leaves no choice in, as if it had been sampled."""
        assert sequence.gate is not None
        if mask.is_finished:
            return self._finish(sequence, delta, FinishReason.STOP)
        for token_id in mask.forced:
            if not sequence.gate.advance(sequence.answer, token_id):
                return self._fail(sequence, delta, "the grammar does not allow the token that it forced")
            self._counters.forced_tokens += 1
            self._append(sequence, token_id, delta)
            if delta.finish_reason is not None:
                return

    def _accept(self, sequence: Sequence, delta: SequenceDelta, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Appends a sampled token, or what the engine puts in its place, and notes in `delta` what came of it."""
        is_stopping = self._ends(sequence, token_id)
        room = sequence.max_tokens - sequence.num_output_tokens
        if sequence.thinking is not None and sequence.thinking.must_close(sequence.answer, is_stopping=is_stopping, room=room):
            for forced in sequence.thinking.end_token_ids:
                if delta.finish_reason is None:
                    certain = TokenLogprobs(forced, 0.0, 1)  # nothing else could have come here
                    self._append(sequence, forced, delta, None if sequence.request.params.logprobs is None else certain)
            sequence.sampling.block_stop = True
            return
        if sequence.gate is not None and not is_stopping and not sequence.gate.advance(sequence.answer, token_id):
            return self._fail(sequence, delta, "the grammar does not allow the token that was sampled")
        if is_stopping:
            delta.token_ids.append(token_id)
            if logprobs is not None:
                delta.logprobs.append(logprobs)
            self._counters.generation_tokens += 1
            named = token_id in sequence.request.params.stop_token_ids
            if named and sequence.request.params.include_stop_str_in_output:
                delta.events += sequence.answer.feed(token_id)
            if sequence.gate is not None and not sequence.gate.is_open(sequence.answer):
                return self._finish(sequence, delta, FinishReason.LENGTH)  # the marker that would have ended the reasoning has no room
            return self._finish(sequence, delta, FinishReason.STOP, token_id if named else None)
        was_reasoning = sequence.answer.phase is Phase.REASONING
        self._append(sequence, token_id, delta, logprobs)
        if was_reasoning and sequence.gate is not None and sequence.answer.phase is Phase.CONTENT and delta.finish_reason is None:
            self._begin_grammar(sequence, sequence.gate, delta)

    def _begin_grammar(self, sequence: Sequence, gate: GrammarGate, delta: SequenceDelta) -> None:
        """Holds to the grammar what followed the end of the reasoning in the same token: a tag that ended it, or text after the marker.

        White space there belongs to the marker, as far as a constrained answer goes, and what the grammar does not begin with to the
        reasoning. The next token is no end.
        """
        rest = sequence.answer.new_content
        if rest.isspace():
            delta.events = [event for event in delta.events if not isinstance(event, Text)]
        elif rest and not gate.advance_rest(self.tokenizer.encode(rest, add_special_tokens=False)):
            if "".join(event.text for event in delta.events if isinstance(event, Text)) != rest:
                # A parser holds it, and would read what follows as a part of it.
                return self._fail(sequence, delta, "the text in the token that ended the reasoning does not fit the grammar")
            delta.events = [Reasoning(event.text) if isinstance(event, Text) else event for event in delta.events]
        if self._is_grammar_finished(sequence):
            self._finish(sequence, delta, FinishReason.STOP)
        elif not gate.has_begun:
            sequence.sampling.block_stop = True

    def _ends(self, sequence: Sequence, token_id: int) -> bool:
        params = sequence.request.params
        if token_id in params.stop_token_ids:
            return True
        return token_id in self.stop_token_ids and (not params.ignore_eos or sequence.sampling.is_constrained)

    def _is_grammar_finished(self, sequence: Sequence) -> bool:
        """Whether nothing can follow, as far as that is quickly said: a slow grammar must not be asked here, on the loop."""
        return sequence.gate is not None and not sequence.num_masks_apart and sequence.gate.is_finished(sequence.answer)

    def _append(self, sequence: Sequence, token_id: int, delta: SequenceDelta, logprobs: TokenLogprobs | None = None) -> None:
        sequence.append(token_id)
        self._counters.generation_tokens += 1
        delta.token_ids.append(token_id)
        num_reasoning_tokens = sequence.answer.num_reasoning_tokens
        events = sequence.answer.feed(token_id)
        delta.events += events if sequence.gate is None else sequence.gate.shown(sequence.answer, events)
        if logprobs is not None:
            is_reasoning = sequence.answer.num_reasoning_tokens > num_reasoning_tokens
            delta.logprobs.append(replace(logprobs, is_reasoning=True) if is_reasoning else logprobs)
        delta.num_reasoning_tokens = sequence.answer.num_reasoning_tokens
        if sequence.answer.stop_match is not None:
            self._finish(sequence, delta, FinishReason.STOP, sequence.answer.stop_match)
        elif self._is_grammar_finished(sequence):
            self._finish(sequence, delta, FinishReason.STOP)
        elif sequence.num_output_tokens >= sequence.max_tokens:
            self._finish(sequence, delta, FinishReason.LENGTH)

    def _finish(self, sequence: Sequence, delta: SequenceDelta, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        delta.events += sequence.answer.finish()
        if reason is FinishReason.LENGTH and sequence.answer.stop_match is not None:
            # What a parser had held back completed a stop string after all.
            reason, stop_reason = FinishReason.STOP, sequence.answer.stop_match
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        delta.num_reasoning_tokens = sequence.answer.num_reasoning_tokens
        self._retire(sequence)

    def _fail(self, sequence: Sequence, delta: SequenceDelta, reason: str) -> None:
        delta.finish_reason = FinishReason.ERROR
        delta.error = reason
        delta.is_client_error = reason in (NO_TOKEN_LEFT, TOO_SLOW)
        delta.num_reasoning_tokens = sequence.answer.num_reasoning_tokens
        self._retire(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.masks.abandon(sequence)
        self.scheduler.finish(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._release(sequence)
        siblings = self._sequences.get(sequence.request.request_id, [])
        if all(sibling.status is Status.FINISHED for sibling in siblings):
            self._sequences.pop(sequence.request.request_id, None)

    def _prompt_info(self, sequence: Sequence) -> PromptInfo:
        if sequence.index == 0:
            self._counters.prompt_tokens += sequence.num_prompt_tokens
        logprobs = sequence.prompt_logprobs
        return PromptInfo(
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens,
            None if logprobs is None else tuple(logprobs),
            sequence.queue_seconds or 0.0,
        )
