"""The engine without asyncio: requests in, one step at a time, deltas out. The server, offline use and the tests all drive this."""

import logging
from collections.abc import Callable
from collections.abc import Sequence as TypingSequence
from dataclasses import dataclass, field, replace

from penstock.engine.adapters.registry import AdapterStats
from penstock.engine.batch import Batch, build_batch, draft_rows, is_predictable
from penstock.engine.beam_search import BeamProcessor, beam_search_of, check_beam_request
from penstock.engine.constraints.closing import AnswerEnds
from penstock.engine.constraints.masks import ConstrainedRows, MaskPool
from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.exact.group import ExactGroup, ExactProcessor, check_exact_request, num_lanes
from penstock.engine.kv_cache.blocks import CacheInfo, hash_prompt
from penstock.engine.kv_cache.events import Publisher
from penstock.engine.kv_cache.persistence import PersistenceStats
from penstock.engine.kv_cache.transfer import BlockTransfer, ReceivedBlocks
from penstock.engine.multimodal.inputs import PromptEmbeds, PromptImage
from penstock.engine.multimodal.vision import ImageFailed
from penstock.engine.output import ResultProcessor
from penstock.engine.request import Deadlines, Request
from penstock.engine.runner import ModelRunner, StepOutput
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.step import STEP_BOUNDS, DraftCounts, Step, StepObserver, StepSize
from penstock.engine.sequence import Sequence, Status
from penstock.engine.sequence_factory import SequenceFactory, check_closing_request
from penstock.engine.system.process import Histogram
from penstock.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

IMAGE_FAILED = "the vision tower failed with an image of this request; the error has been logged"


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The first three are of this moment, the others have counted since the start. Tokens are tokens, `kv_cache_usage` is from 0 to 1.

    `step_tokens` are the tokens that each step has computed, draft tokens included. `drafts` are by what made them.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_forced_tokens: int
    num_preemptions: int
    step_tokens: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    drafts: dict[str, DraftCounts] = field(default_factory=dict)
    persistence: PersistenceStats | None = None
    adapters: AdapterStats | None = None
    cache: CacheInfo | None = None

    @property
    def num_steps(self) -> int:
        return self.step_tokens.num_values

    @property
    def num_drafts(self) -> int:
        return sum(counts.num_drafts for counts in self.drafts.values())

    @property
    def num_draft_tokens(self) -> int:
        return sum(counts.num_drafted for counts in self.drafts.values())

    @property
    def accepted_by_place(self) -> list[int]:
        """In how many drafts the first token was accepted, the first two, and so on."""
        by_proposer = [counts.accepted_by_place for counts in self.drafts.values()] or [DraftCounts().accepted_by_place]
        return [sum(counts) for counts in zip(*by_proposer, strict=True)]

    @property
    def num_accepted_tokens(self) -> int:
        return sum(counts.num_accepted for counts in self.drafts.values())


DeltasByRequest = dict[str, list[SequenceDelta]]


@dataclass(slots=True)
class EngineCore:
    """Ties scheduler, model runner and sequences together. Belongs to one thread; only `runner` and `masks` work in others.

    `is_async` allows `schedule_ahead`; up to `max_in_flight` steps, each of other sequences, are in flight by `schedule_beside`.
    `report_unsupported` is called with each grammar whose backend turns out not to support it, and why.
    """

    runner: ModelRunner
    scheduler: Scheduler
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    is_async: bool = False
    max_in_flight: int = 1
    masks: MaskPool = field(default_factory=MaskPool)
    deadlines: Deadlines = field(default_factory=Deadlines)
    observer: StepObserver | None = None
    publisher: Publisher | None = None
    report_unsupported: Callable[[CompiledGrammar, str], None] | None = None
    _sequences: dict[str, list[Sequence]] = field(default_factory=dict)
    _num_arrivals: int = 0
    _ahead: Step | None = None  # what is in flight behind the step that `update` is to be called with
    _ahead_batch: Batch | None = None
    _step_size: StepSize = field(init=False)
    _factory: SequenceFactory = field(init=False)
    _outputs: ResultProcessor = field(init=False)
    _beams: BeamProcessor = field(init=False)
    _exact: ExactProcessor = field(init=False)
    _ends: AnswerEnds = field(init=False)

    def __post_init__(self) -> None:
        self._step_size = StepSize(self.scheduler)
        self._factory = SequenceFactory(
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_token_ids,
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            device=self.runner.loaded.device,
            speculation=self.scheduler.speculation,
        )
        if self.scheduler.persistence is not None:
            self.scheduler.persistence.loader.wake = lambda: self.masks.wake()
        # A GPU computes while masks are filled, so they cost nothing; on the CPU they take time from the model.
        self.scheduler.num_parts = self.max_in_flight
        self.masks.samples_first = self.runner.loaded.device.type == "cpu"
        self._outputs = ResultProcessor(
            scheduler=self.scheduler,
            masks=self.masks,
            tokenizer=self.tokenizer,
            stop_token_ids=self.stop_token_ids,
            vocab_size=self.vocab_size,
            retire=self._retire,
            report_unsupported=self._report_unsupported,
        )
        self._beams = BeamProcessor(self._outputs)
        self._exact = ExactProcessor(self._outputs)
        self._ends = AnswerEnds(lambda: self.tokenizer.vocabulary(self.vocab_size, self.stop_token_ids))

    def hash_prompt(self, request: Request) -> None:
        """Computes the prompt's block hashes, which `add` would do otherwise. For any thread, before `add`. Raises `InvalidRequest`."""
        request.check_prompt(self.max_model_len, self.vocab_size)
        if self.scheduler.pool.enable_prefix_caching:
            hash_prompt(request.content_ids, self.scheduler.block_size, request.block_hashes, request.prefix_key)

    def find_end(self, request: Request) -> None:
        """Finds how short an answer can be that is to end within its `max_tokens`, which `add` would do otherwise.

        For any thread, before `add`. Raises `InvalidRequest`.
        """
        check_closing_request(request)
        assert request.grammar is not None
        request.end = self._ends.of(request.grammar)
        if request.call_grammar is not None:
            request.call_end = self._ends.of(request.call_grammar)
        if request.preamble is not None:
            request.preamble = replace(request.preamble, num_reserved=request.end.num_tokens)

    def receive(self, request: Request, state: bytes) -> ReceivedBlocks:
        """The blocks of the request's prompt that another process has exported. For any thread. Raises `InvalidRequest`."""
        assert self.transfer is not None
        request = request.expanded()
        self.hash_prompt(request)
        return self.transfer.receive(state, request.block_hashes)

    def add(self, request: Request) -> None:
        """Queues a request. Raises `InvalidRequest` for one that can never be served and `QueueFull` beyond the queue's bounds."""
        request = request.expanded()
        self._check(request)
        if request.ends_within and request.end is None:
            self.find_end(request)
        self.scheduler.waiting.check_admission(request.priority)
        self._num_arrivals += 1
        lanes = num_lanes(request, self.scheduler, self.max_model_len) if request.exact else 0
        sequences = self._factory.make(request, self._num_arrivals, lanes)
        self.scheduler.add(sequences[0])
        if request.preamble is not None and request.grammar is not None:
            constraints = [sequence.constraint for sequence in sequences if sequence.constraint is not None]
            self.masks.warm_up(constraints, request.grammar, self.vocab_size)
        self._sequences[request.request_id] = sequences
        self.deadlines.add(request.request_id, request.deadline)
        if request.received is not None and self.transfer is not None:
            self.transfer.received[request.request_id] = request.received

    def abort(self, request_id: str) -> None:
        """Drops a request and frees its blocks at once. Unknown and finished requests are ignored."""
        for sequence in self._sequences.pop(request_id, []):
            if sequence.status is not Status.FINISHED:
                self._release(sequence)
        self.deadlines.discard(request_id)
        if self.transfer is not None:
            self.transfer.release(request_id)

    def end_sequence(self, request_id: str, index: int, num_tokens: int) -> None:
        """Ends a sequence after its first `num_tokens`; those beyond do not count. One that has ended is ignored."""
        for sequence in self._sequences.get(request_id, []):
            if sequence.index == index and sequence.status is not Status.FINISHED:
                self._outputs.num_generation_tokens -= sequence.num_output_tokens - num_tokens
                return self._retire(sequence)

    def expire(self) -> DeltasByRequest:
        """Ends the requests whose deadline has passed. May be called at any time, also between `schedule` and `update`."""
        deltas: DeltasByRequest = {}
        for request_id in self.deadlines.take_expired():
            unfinished = [sequence for sequence in self._sequences[request_id] if sequence.status is not Status.FINISHED]
            deltas[request_id] = self._time_out(unfinished)
        return deltas

    def _time_out(self, unfinished: list[Sequence]) -> list[SequenceDelta]:
        group = unfinished[0].search
        if isinstance(group, ExactGroup):
            return self._exact.time_out(group)
        search = beam_search_of(unfinished[0])
        return [self._outputs.time_out(sequence) for sequence in unfinished] if search is None else self._beams.time_out(search)

    @property
    def transfer(self) -> BlockTransfer | None:
        """What hands prompts over to other processes, if they are handed over."""
        return None if self.scheduler.persistence is None else self.scheduler.persistence.transfer

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running)

    def schedule(self) -> Step | None:
        """The next step; None where nothing is to be computed, or all of it waits for late masks.

        Each step must be passed to `update` or `fail`.
        """
        step = self.scheduler.schedule()
        if not step:
            assert step.num_held_up or not self.has_work, "there is work, and none of it can be scheduled"
            return None
        return step

    def schedule_ahead(self, step: Step, batch: Batch) -> Step | None:
        """The step after one in flight; None where it depends on that one's results, there is no room for it, or nothing to compute.

        It must be built before `update` gets the results of the step in flight, and passed to `update`, `fail` or `cancel_step` afterwards.
        Where only room or work is missing, the step in flight counts as computed all the same, and its rows as pending until `update`.
        """
        if not self.is_async:
            return None
        can_look_ahead = is_predictable(self.scheduler, batch)
        self.scheduler.weighs_drafts = can_look_ahead
        if not can_look_ahead or step.drafts or self.scheduler.wants_drafts(step):
            return None
        step.count_computed()
        for row, sampler in enumerate(batch.sampler_rows):
            sampler.sequence.pending_row = row
        for sequence in step.dropped:
            sequence.pending_row = None
        if not self.scheduler.has_room():  # which depends on what the step in flight computes
            return None
        self._ahead, self._ahead_batch = self.scheduler.schedule(is_ahead=True) or None, None
        return self._ahead

    def schedule_beside(self, in_flight: TypingSequence[Step]) -> Step | None:
        """A step of other sequences than those of the steps in flight; None without any, or without room for them.

        It must be passed to `update`, `fail` or `cancel_step` after these.
        """
        for step in in_flight:
            step.count_computed()
        if not self.scheduler.has_room():  # for which sequences in flight would have to be preempted
            return None
        self.scheduler.in_flight = {sequence for step in in_flight for sequence in step.num_tokens}
        try:
            return self.scheduler.schedule(is_ahead=True) or None
        finally:
            self.scheduler.in_flight = set()

    def build(self, step: Step) -> Batch:
        """The step as a batch for the runner. Filling its masks begins."""
        if self.observer is not None:
            self.observer.begin(step)
        is_ahead = step is self._ahead
        batch = build_batch(
            step,
            self.masks,
            self.runner.cache.block_tables_PN,
            block_size=self.scheduler.block_size,
            vocab_size=self.vocab_size,
            min_tokens=self.runner.min_tokens,
            pin_masks=self.runner.loaded.device.type == "cuda",
            is_ahead=is_ahead,
            adapters=self.scheduler.adapters,
        )
        scheduler = self.scheduler
        if (drafter := self.runner.drafter) is not None and (speculation := scheduler.speculation) is not None:
            drafting = draft_rows(
                step, batch.sampler_rows, scheduler.block_size, scheduler.pool, speculation.draft_context, drafter.computes_alone
            )
            batch = replace(batch, drafting=drafting)
        if is_ahead:
            self._ahead_batch = batch
        return batch

    def update(self, step: Step, batch: Batch, output: StepOutput) -> DeltasByRequest:
        """Processes what a step computed. Requests that were aborted meanwhile are skipped; a sequence that fails, fails alone."""
        self._step_size.count_step(batch.inputs.input_ids_1T.shape[1])
        if self.max_in_flight == 1 or batch.masks is not None:
            self.masks.end(batch.masks if self.max_in_flight > 1 else None)
        for sequence, first_token, logprobs in output.prompt_logprobs:
            assert sequence.prompt_logprobs is not None
            sequence.prompt_logprobs[first_token : first_token + len(logprobs)] = logprobs
        deltas: DeltasByRequest = {}
        for wanted, outputs in zip(batch.outputs, output.outputs, strict=True):
            if isinstance(outputs, str):
                request_id = wanted.sequences[0].request.request_id
                if any(sequence.status is Status.RUNNING for sequence in wanted.sequences):
                    deltas[request_id] = self._fail_request(request_id, outputs)
                continue
            for sequence in wanted.sequences:
                if sequence in step.dropped:
                    continue
                assert sequence.outputs is not None
                sequence.outputs.add(wanted.first_token, outputs)
        for sampler in batch.sampler_rows:
            sampler.sequence.pending_row = None
        step.count_computed()
        self.scheduler.save(step.still_promised(self.scheduler.pool))
        if self.scheduler.states is not None:
            self.scheduler.states.publish(step.snapshots, step.dropped)
        for sequence in step.num_tokens:
            if sequence.status is Status.RUNNING and sequence.forks and self.scheduler.can_fork(sequence):
                self.scheduler.fork(sequence)
        samples = {row: position for position, row in enumerate(output.rows)}
        for row, sampler in enumerate(batch.sampler_rows):
            sequence = sampler.sequence
            if sampler.num_drafted or sequence.status is not Status.RUNNING or sequence in step.dropped:
                continue
            if sequence.search is not None:
                self._take_member(sequence, output, samples.get(row))
                continue
            if batch.num_pending:
                self.scheduler.publish_last_block(sequence)
            delta = None
            if sequence.is_plain and row in samples and not (step.drafts and sequence in step.drafts):
                delta = self._outputs.take_plain(sequence, output.samples, samples[row])
            if delta is None:
                delta = self._take_row(sequence, output, row, samples, step.drafts.get(sequence, []))
            if delta is not None:
                deltas.setdefault(sequence.request.request_id, []).append(delta)
        if self._beams.touched:
            deltas |= self._beams.take_deltas()
        if self._exact.touched:
            deltas |= self._exact.take_deltas()
        for draft in output.drafts:
            draft.deliver()
        if self._ahead is not None:
            self._settle_ahead(self._ahead, step, batch, output, samples)
        self._outputs.decided.clear()
        if self.transfer is not None and self.transfer.received:
            self.transfer.delete_used(request_id for request_id, own in deltas.items() if any(delta.token_ids for delta in own))
        self._notify_end(step, deltas)
        return deltas

    def _settle_ahead(self, ahead: Step, step: Step, batch: Batch, output: StepOutput, samples: dict[int, int]) -> None:
        """Drops sequences from the step ahead whose pending token is not what was sampled, and has its masks filled for the others."""
        for row, sampler in enumerate(batch.sampler_rows):
            sequence = sampler.sequence
            if (sequence.constraint is None and sequence.thinking is None) or sequence not in ahead.num_tokens or sequence in step.dropped:
                continue
            num_uncomputed, place = sequence.num_uncomputed_tokens, samples.get(row)
            is_as_sampled = place is not None and num_uncomputed == 1 and sequence.token_ids[-1] == output.samples.token_ids[place]
            is_as_sampled = is_as_sampled and sequence not in self._outputs.decided
            # A grammar's rules for the row are only read now; those of a thinking budget alone have been read already.
            if not is_as_sampled or sequence.samples_again or (sequence.constraint is None and sequence.sampling.block_stop):
                self.scheduler.drop(sequence, ahead)
        if self._ahead_batch is not None and self._ahead_batch.masks is not None:
            self._settle_masks(ahead, self._ahead_batch, self._ahead_batch.masks.deferred)
        else:
            self.masks.cancel_deferred()  # of a step that could not be built
        self._ahead = self._ahead_batch = None

    def _settle_masks(self, ahead: Step, batch: Batch, deferred: list[ConstrainedRows]) -> None:
        constrained, dropped = [], []
        for one in deferred:
            sampler = batch.sampler_rows[one.first_row]
            sequence, sampling = sampler.sequence, sampler.sampling
            if sequence.status is Status.FINISHED or sequence in ahead.dropped:
                dropped.append(one)
                continue
            sampling.is_constrained, sampling.block_stop = sequence.is_constrained, sequence.sampling.block_stop
            if sampling.is_constrained:
                constrained.append(one)
        self.masks.fill_deferred(constrained, dropped)

    def _take_row(
        self, sequence: Sequence, output: StepOutput, row: int, samples: dict[int, int], draft: list[int]
    ) -> SequenceDelta | None:
        """What a row and those of its draft bring their sequence; None where its token is computed again."""
        delta = SequenceDelta(sequence.index)
        num_known = len(sequence.token_ids)
        if row in samples:
            rows = [samples[drafted] for drafted in range(row, row + len(draft) + 1) if drafted in samples]
            self._outputs.take_samples(sequence, delta, output, rows, draft)
        elif sequence.mask is not None and sequence.mask.needs_no_sample:
            self._outputs.take_without_sample(sequence, delta, sequence.mask)
        else:
            self.scheduler.uncompute_last(sequence)
            return None
        if draft:
            self._outputs.count_accepted(sequence, delta, draft, sequence.token_ids[num_known:])
        self._outputs.take_certain(sequence, delta)
        if not delta.token_ids and delta.finish_reason is None:
            return None
        if delta.prompt is not None:
            self._outputs.count_prompt(sequence)
        if sequence.outputs is not None:
            delta.outputs = sequence.outputs.take(len(delta.token_ids))
        return delta

    def fail(self, step: Step, reason: str) -> DeltasByRequest:
        """Ends every request of a step that failed as a whole; the others go on."""
        deltas: DeltasByRequest = {}
        self.masks.end()
        self.scheduler.unpublish_blocks(step)
        # By its sequences, not by name alone: a request that was aborted meanwhile may have given its id to another.
        for request_id in {sequence.request.request_id for sequence in step.num_tokens if sequence.status is Status.RUNNING}:
            deltas[request_id] = self._fail_request(request_id, reason)
        self._notify_end(step, deltas)
        return deltas

    def fail_image(self, step: Step, batch: Batch, failure: ImageFailed) -> DeltasByRequest:
        """Ends the requests of a step with an image that cannot be encoded. The step's other sequences are computed anew."""
        self.masks.end()
        for sampler in batch.sampler_rows:
            sampler.sequence.pending_row = None
        failed = {
            sequence.request.request_id
            for sequence in step.num_tokens
            if sequence.status is Status.RUNNING
            and any(isinstance(source, PromptImage) and source.digest == failure.digest for source in sequence.request.embeds)
        }
        self.scheduler.unpublish_blocks(step)
        deltas = {request_id: self._fail_request(request_id, IMAGE_FAILED) for request_id in failed}
        self.scheduler.cancel_step(step)
        self._notify_end(step, deltas)
        return deltas

    def retry_smaller(self, step: Step, batch: Batch) -> bool:
        """After a step that the device has too little memory for: its sequences are preempted, and steps have half its tokens from now on.

        False where it has a single token, and nothing has been done.
        """
        num_tokens = sum(step.num_tokens.values()) + sum(map(len, step.drafts.values()))
        if num_tokens == 1:
            return False
        limit = self._step_size.halve(num_tokens)
        logger.warning("Out of memory in a step of %d tokens: it is computed again, in steps of at most %d", num_tokens, limit)
        self.masks.end()
        for sampler in batch.sampler_rows:
            sampler.sequence.pending_row = None
        self.cancel_step(step)
        return True

    def _fail_request(self, request_id: str, reason: str) -> list[SequenceDelta]:
        unfinished = [sequence for sequence in self._sequences[request_id] if sequence.status is not Status.FINISHED]
        if isinstance(group := unfinished[0].search, ExactGroup):
            return self._exact.fail(group, reason)
        search = beam_search_of(unfinished[0])
        if search is not None:
            return self._beams.fail(search, reason)
        deltas = [SequenceDelta(sequence.index) for sequence in unfinished]
        for sequence, delta in zip(unfinished, deltas, strict=True):
            self._outputs.fail(sequence, delta, reason)
        return deltas

    def cancel_step(self, step: Step) -> None:
        """Cancels a step that failed, or whose predecessor did: its sequences that have not ended are computed anew."""
        if step is self._ahead:
            self.masks.cancel_deferred()
            self._ahead = self._ahead_batch = None
        self.scheduler.cancel_step(step)
        self._notify_end(step, {})

    def close(self) -> None:
        """Stops the threads beside the model's. Waits some seconds for the KV cache to be written, where it persists."""
        self.masks.close()
        if self.scheduler.persistence is not None:
            self.scheduler.persistence.close()
        if self.publisher is not None:
            self.publisher.close()

    def step(self) -> DeltasByRequest:
        """One whole step in this thread: schedule, launch, collect, update. Waits where all work waits for late masks."""
        expired = self.expire()
        while (step := self.schedule()) is None:
            if expired or not self.has_work:
                return expired
            self.masks.wait()
            expired = self.expire()
        batch = self.build(step)
        try:
            output = self.runner.launch(batch).collect()
        except ImageFailed as failure:
            logger.exception("An image cannot be encoded")
            return expired | self.fail_image(step, batch, failure)
        return expired | self.update(step, batch, output)

    def stats(self) -> EngineStats:
        scheduler, speculation = self.scheduler, self.scheduler.speculation
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=sum(len(sequence.self_and_forks) for sequence in scheduler.waiting),
            kv_cache_usage=scheduler.pool.usage,
            num_prefix_cache_queries=scheduler.num_prefix_queries,
            num_prefix_cache_hits=scheduler.num_prefix_hits,
            num_prompt_tokens=self._outputs.num_prompt_tokens,
            num_generation_tokens=self._outputs.num_generation_tokens,
            num_forced_tokens=self._outputs.num_forced_tokens,
            num_preemptions=scheduler.num_preemptions,
            step_tokens=self._step_size.tokens.copy(),
            drafts={} if speculation is None else {name: counts.copy() for name, counts in speculation.counts.items()},
            persistence=None if scheduler.persistence is None else scheduler.persistence.stats(),
            adapters=scheduler.adapter_stats(),
            cache=scheduler.blocks.info(self.runner.cache.dtype),
        )

    def check_integrity(self) -> None:
        """Asserts that blocks and sequences are accounted for."""
        self.scheduler.check_integrity()
        live = {sequence for sequences in self._sequences.values() for sequence in sequences if sequence.status is not Status.FINISHED}
        known = {member for sequence in (*self.scheduler.running, *self.scheduler.waiting) for member in sequence.self_and_forks}
        assert live == known, "a sequence is lost between its request and the scheduler"
        self.masks.check_integrity()
        for sequence in live:
            if sequence.constraint is not None:
                sequence.constraint.check_integrity()

    def _notify_end(self, step: Step, deltas: DeltasByRequest) -> None:
        if self.observer is not None:
            self.observer.end(step, deltas)

    def _check(self, request: Request) -> None:
        request.check_prompt(self.max_model_len, self.vocab_size)
        if request.embeds:
            self.runner.embedder.check(request.embeds)
            if request.params.prompt_logprobs is not None and any(isinstance(source, PromptEmbeds) for source in request.embeds):
                raise InvalidRequest("`prompt_logprobs` are those of tokens, and the prompt holds vectors", "prompt_logprobs")
        request.params.check_token_ids(self.vocab_size)
        if request.beam is not None:
            check_beam_request(request, self.scheduler, self.stop_token_ids, self.max_model_len)
        if request.exact:
            check_exact_request(request, self.scheduler)
        request.check_combinations()
        if request.params.n > self.scheduler.max_num_seqs and not request.exact:
            raise InvalidRequest(f"`n` must be at most {self.scheduler.max_num_seqs}, the number of sequences that run at once", "n")
        if request.outputs:
            self.runner.outputs.check(request.outputs)
        elif request.with_context_outputs:
            raise InvalidRequest("`with_context_outputs` needs `outputs`, and the request names none", "with_context_outputs")
        if request.adapter is not None and self.scheduler.adapters is None:
            raise InvalidRequest("this engine was built without adapters: set `enable_lora` or --enable-lora", "model")
        if request.is_exported and self.transfer is None:
            raise InvalidRequest("this engine was built without a directory for prompts: set `kv_transfer_dir` or --kv-transfer-dir")
        if request.request_id in self._sequences:
            raise InvalidRequest(f"request id {request.request_id!r} is in use", "request_id")

    def _take_member(self, sequence: Sequence, output: StepOutput, position: int | None) -> None:
        """Takes what a step has computed for one of a group's sequences."""
        processor = self._exact if isinstance(sequence.search, ExactGroup) else self._beams
        if position is not None:
            processor.take_samples(sequence, output.samples, position)
        elif sequence.mask is not None and sequence.mask.needs_no_sample:
            processor.take_without_sample(sequence, sequence.mask)
        else:
            self.scheduler.uncompute_last(sequence)

    def _report_unsupported(self, grammar: CompiledGrammar, reason: str) -> None:
        if self.report_unsupported is not None:
            self.report_unsupported(grammar, reason)

    def _release(self, sequence: Sequence) -> None:
        for member in sequence.self_and_forks:
            if member.constraint is not None:
                self.masks.abandon(member.constraint)
            if member.proposer is not None:
                # The sequences of a request share the prompt, which is learnt from the first of them.
                member.proposer.end(member.num_prompt_tokens if member.index else member.num_cached_tokens)
        self.scheduler.finish(sequence)

    def _retire(self, sequence: Sequence) -> None:
        if sequence.request.is_exported and self.transfer is not None:
            sequence.hash_blocks(self.scheduler.block_size)
            num_usable = (sequence.num_prompt_tokens - 1) // self.scheduler.block_size  # what is received is never the last token
            self.transfer.held.hold(sequence.request.request_id, sequence.block_hashes, num_usable)
        self._release(sequence)
        siblings = self._sequences.get(sequence.request.request_id, [])
        if all(sibling.status is Status.FINISHED for sibling in siblings):
            self._sequences.pop(sequence.request.request_id, None)
            self.deadlines.discard(sequence.request.request_id)
