"""Processes a step's results: accepts or rejects draft tokens, appends tokens, reads them as text and events, and ends answers."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from penstock.engine.constraints.masks import MaskJob, MaskPool, failure_of
from penstock.engine.constraints.state import MAX_FORCED_TOKENS, CallDecision, ConstraintState, ForbiddenToken, read_kept
from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.contracts.parsing import Phase
from penstock.engine.deltas import FinishReason, GrammarFault, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.request import Request
from penstock.engine.runner import StepOutput
from penstock.engine.sampling.sampler import SamplerOutput
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.sequence import Mark, Sequence, Status
from penstock.engine.speculation.completions import proposer_of_copies
from penstock.engine.text.answer import PreambleParams
from penstock.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
REPETITION = "repetition_detected"  # what `stop_reason` says where that ended an answer


@dataclass(slots=True, kw_only=True)
class ResultProcessor:
    """Turns what was sampled for one sequence into its delta. A sequence that fails, fails alone.

    `retire` is called with each sequence that has ended, once its delta is whole, and `report_unsupported` with each grammar whose
    backend turned out not to support it, and why. `decided` are the sequences of this step of which it has turned out whether they are
    calls or content: they go on otherwise than was sampled, or under another grammar.
    """

    scheduler: Scheduler
    masks: MaskPool
    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    vocab_size: int
    retire: Callable[[Sequence], None]
    report_unsupported: Callable[[CompiledGrammar, str], None]
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_forced_tokens: int = 0
    decided: set[Sequence] = field(default_factory=set)

    def take_plain(self, sequence: Sequence, samples: SamplerOutput, row: int) -> SequenceDelta | None:
        """Takes the next token of a sequence that `is_plain`.

        None where it is the first, ends the answer, could not be sampled, or may not be what its grammar allows. That is to be left to
        `take_samples`, which would take the others as well, and longer.
        """
        token_id, constraint = samples.token_ids[row], sequence.constraint
        num_output_tokens = len(sequence.token_ids) - len(sequence.request.prompt_token_ids)
        if not num_output_tokens or token_id in sequence.end_token_ids or row in samples.failures or row in samples.pressures:
            return None
        is_masked = constraint is not None and constraint.mask is not None
        if constraint is not None and not constraint.advance_at_once(token_id):
            return None
        event = sequence.answer.plain_text(token_id)
        is_last = num_output_tokens + 1 >= sequence.max_tokens
        if event is None or is_last or (constraint is not None and not constraint.has_choice):
            delta = SequenceDelta(sequence.index)
            self._read_or_fail(sequence, delta, lambda: self._append(sequence, token_id, delta))
            if constraint is not None and sequence.status is Status.RUNNING:
                self.take_certain(sequence, delta)
            return delta
        sequence.append(token_id)
        self.num_generation_tokens += 1
        delta = SequenceDelta(sequence.index, [token_id], [event])
        if constraint is None:
            return delta
        delta.num_preamble_tokens = sequence.answer.num_preamble_tokens
        if is_masked:
            mask = self.masks.fill_at_once(constraint, sequence.answer, self.vocab_size, has_choice=True)
            if mask.needs_no_sample:  # it has failed
                self.take_without_sample(sequence, delta, mask)
        return delta

    def take_samples(self, sequence: Sequence, delta: SequenceDelta, output: StepOutput, rows: list[int], draft: list[int]) -> None:
        """Takes the next token, and those after it for as long as the draft tokens before them were accepted.

        A draft token is accepted with the probability that the model gives it, and the token in its place otherwise has the distribution
        of the others: rejection sampling (Leviathan et al., arXiv:2211.17192) with a deterministic proposer.
        """
        num_known = len(sequence.token_ids)
        constraint, is_constrained = sequence.constraint, sequence.is_constrained
        is_final = sequence.mask is not None or not is_constrained  # else the grammar checks each sample, which no mask has restricted
        num_right = 0
        while num_right < len(rows):
            if num_right:
                self.scheduler.keep_computed(sequence, len(sequence.token_ids))
            if is_final:
                self._take_sample(sequence, delta, output.samples, rows[num_right])
            else:
                self._take_unmasked(sequence, delta, output, rows[num_right])
                if sequence.token_ids[num_known:] == draft[: num_right + 1]:
                    self.take_certain(sequence, delta)  # as a mask would do, which allows nothing else after that token
            said = sequence.token_ids[num_known:]
            if sequence.status is not Status.RUNNING or len(said) <= num_right or said != draft[: len(said)]:
                break
            if sequence.sampling.block_stop or sequence.is_constrained != is_constrained:
                break  # the rows after this one were sampled by other rules
            if is_constrained and constraint is not None and constraint.closing is not None and constraint.closing.is_due:
                break  # whether the next token leaves an end is not known
            if constraint is not None and not is_final and not self.masks.samples_unmasked(constraint, sequence.answer):
                break
            num_right = len(said)

    def count_accepted(self, sequence: Sequence, delta: SequenceDelta, draft: list[int], said: list[int]) -> None:
        """Counts how many draft tokens were accepted, and keeps what was computed for them."""
        assert self.scheduler.speculation is not None
        pairs = enumerate(zip(said, draft, strict=False))
        num_right = next((place for place, (token_id, drafted) in pairs if token_id != drafted), min(len(said), len(draft)))
        is_predicted = sequence.proposer is not None and sequence.proposer.is_predicted  # it has read nothing since the draft
        self.scheduler.speculation.count(len(draft), num_right, is_predicted=is_predicted)
        if is_predicted:
            delta.num_predicted, delta.num_predicted_right = len(draft), num_right
        if sequence.status is Status.RUNNING:
            num_known = len(sequence.token_ids) - len(said)
            self.scheduler.keep_computed(sequence, min(num_known + num_right, len(sequence.token_ids) - 1))  # the last one is sampled from

    def _take_sample(self, sequence: Sequence, delta: SequenceDelta, samples: SamplerOutput, row: int) -> None:
        if sequence.constraint is not None:
            sequence.constraint.mask = None
        if row in samples.pressures:
            delta.pressures.append((len(delta.events), samples.pressures[row]))
        if row in samples.failures:
            self.fail(sequence, delta, samples.failures[row])
        else:
            self._read_or_fail(sequence, delta, lambda: self._accept(sequence, delta, samples.token_ids[row], samples.logprobs[row]))
            if row in samples.pressures and sequence.samples_again:
                delta.pressures.pop()

    def _take_unmasked(self, sequence: Sequence, delta: SequenceDelta, output: StepOutput, row: int) -> None:
        assert output.sample_again is not None
        token_id = None if row in output.samples.failures else output.samples.token_ids[row]
        sample_again = partial(output.sample_again, row)
        self._read_or_fail(sequence, delta, lambda: self._accept_unmasked(sequence, delta, token_id, sample_again))

    def _accept_unmasked(
        self, sequence: Sequence, delta: SequenceDelta, token_id: int | None, sample_again: Callable[[Tensor], SamplerOutput]
    ) -> None:
        """Advances the grammar by a token that was sampled without its mask; samples another under the mask where it is rejected."""
        # The mask also decides whether the answer may end here. And where logits are not finite, those that the mask leaves may be.
        constraint = sequence.constraint
        assert constraint is not None
        is_refused = token_id is None or self._ends(sequence, token_id) or not constraint.advance_guess(sequence.answer, token_id)
        taken = None if is_refused else token_id
        if not constraint.is_quick:  # it may not have looked: the token is sampled in another step, under a mask that delays no step
            constraint.rollback(int(taken is not None))
            constraint.num_masks_apart = 1
            self.scheduler.uncompute_last(sequence)
        elif taken is not None and not constraint.leaves_end(sequence.answer, taken):
            self._sample_again(sequence, constraint)
        elif taken is not None:
            self._append(sequence, taken, delta)
        elif (mask := self.masks.fill_at_once(constraint, sequence.answer, self.vocab_size)).needs_no_sample:
            self.take_without_sample(sequence, delta, mask)
        else:
            self._take_sample(sequence, delta, sample_again(mask.row_W), 0)

    def take_without_sample(self, sequence: Sequence, delta: SequenceDelta, mask: MaskJob) -> None:
        """Takes what the grammar says where nothing is sampled: forced tokens, the end of the answer, or a failure."""
        if mask.error is not None:
            self.fail(sequence, delta, mask.error)
        else:
            constraint = sequence.constraint
            assert constraint is not None
            constraint.mask = None
            self._read_or_fail(sequence, delta, lambda: self._accept_mask(sequence, constraint, delta, mask))

    def take_certain(self, sequence: Sequence, delta: SequenceDelta) -> None:
        """Takes the tokens that a quick grammar forces, which are computed in the next step with the rest (jump-forward).

        Where they are many, the mask keeps the rest for the next step, which samples nothing.
        """
        constraint = sequence.constraint
        if constraint is None or not constraint.is_open(sequence.answer):
            return
        while sequence.status is Status.RUNNING and constraint.can_fill_at_once:
            only_forced = self.masks.samples_unmasked(constraint, sequence.answer)
            mask = self.masks.fill_at_once(constraint, sequence.answer, self.vocab_size, only_forced=only_forced)
            if not mask.needs_no_sample or len(delta.token_ids) > MAX_FORCED_TOKENS:
                break
            self.take_without_sample(sequence, delta, mask)

    def _read_or_fail(self, sequence: Sequence, delta: SequenceDelta, accept: Callable[[], None]) -> None:
        """Calls `accept`, unless nothing but the prompt was asked for. An error ends the sequence."""
        try:
            if sequence.num_output_tokens == (0 if sequence.decision is None else len(sequence.decision.held.token_ids)):
                delta.prompt = self.prompt_info(sequence)
            if sequence.max_tokens == 0:
                self._finish(sequence, delta, FinishReason.LENGTH)
            else:
                accept()
        except ForbiddenToken as error:
            self.fail(sequence, delta, str(error))
        except UnsupportedGrammar as error:
            self.fail(sequence, delta, failure_of(error))
        except Exception as error:  # a plug-in's parser or grammar: whatever it raises ends its own sequence
            logger.exception("An answer could not be read")
            self.fail(sequence, delta, f"reading the answer raised {type(error).__name__}: {error}")

    def _accept_mask(self, sequence: Sequence, constraint: ConstraintState, delta: SequenceDelta, mask: MaskJob) -> None:
        """Ends the answer where only the end can follow, or appends the forced tokens as if they had been sampled."""
        if mask.is_finished:
            return self._finish(sequence, delta, FinishReason.STOP)
        for token_id in mask.forced:
            constraint.take(sequence.answer, token_id, "it forced")
            self.num_forced_tokens += 1
            self._append(sequence, token_id, delta)
            if delta.finish_reason is not None:
                return

    def _accept(self, sequence: Sequence, delta: SequenceDelta, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Appends a sampled token, or what the engine puts in its place, and adds it to `delta`, or holds it until calls are decided on."""
        decision = sequence.decision
        if decision is None:
            return self._take_token(sequence, delta, token_id, logprobs)
        self._take_token(sequence, decision.held, token_id, logprobs)
        if sequence.decision is None or sequence.answer.is_settled or sequence.status is Status.FINISHED:
            decision.flush(delta)

    def _take_token(self, sequence: Sequence, delta: SequenceDelta, token_id: int, logprobs: TokenLogprobs | None) -> None:
        is_stopping = self._ends(sequence, token_id)
        room = sequence.max_tokens - sequence.num_output_tokens
        repetition = sequence.request.params.repetition_detection
        thinking = sequence.thinking
        is_lost = is_stopping or (thinking is not None and self._is_repeating(sequence))
        if thinking is not None and thinking.must_close(sequence.answer, is_stopping=is_lost, room=room):
            for forced in thinking.end_token_ids:
                if delta.finish_reason is None:
                    certain = TokenLogprobs(forced, 0.0, 1)  # nothing else could have come here
                    self._append(sequence, forced, delta, None if sequence.request.params.logprobs is None else certain)
            sequence.sampling.block_stop = not thinking.has_closed
            thinking.has_closed = True
            return
        preamble = sequence.request.preamble
        is_spent = preamble is not None and preamble.is_spent(sequence.answer, sequence.token_ids, repetition)
        is_over = is_stopping or is_spent
        if is_over and self._decide_at_end(sequence, delta, has_sample=True, is_stopping=is_stopping):
            return
        if preamble is not None and preamble.must_close(sequence.answer, is_over=is_over, room=room):
            return self._close_preamble(sequence, delta, preamble)
        if is_spent:  # and its cue has no room
            return self._finish(sequence, delta, FinishReason.LENGTH, sequence.request.params.length_stop_reason)
        constraint = sequence.constraint
        if constraint is not None and not is_stopping:
            constraint.take(sequence.answer, token_id)
            if not constraint.leaves_end(sequence.answer, token_id):
                return self._sample_again(sequence, constraint)
        if is_stopping:
            delta.token_ids.append(token_id)
            if logprobs is not None:
                delta.logprobs.append(logprobs)
            self.num_generation_tokens += 1
            named = token_id in sequence.request.params.stop_token_ids
            if named and sequence.request.params.include_stop_str_in_output:
                delta.events += sequence.answer.feed(token_id)
            if constraint is not None and not constraint.is_open(sequence.answer):
                # The marker that would have ended the reasoning has no room.
                return self._finish(sequence, delta, FinishReason.LENGTH, sequence.request.params.length_stop_reason)
            return self._finish(sequence, delta, FinishReason.STOP, token_id if named else None)
        self._append(sequence, token_id, delta, logprobs)

    def _sample_again(self, sequence: Sequence, constraint: ConstraintState) -> None:
        """Has another token sampled in a later step: the answer may not end in time after the one that the grammar has just taken."""
        constraint.rollback(1)
        self.scheduler.uncompute_last(sequence)

    def _close_preamble(self, sequence: Sequence, delta: SequenceDelta, preamble: PreambleParams) -> None:
        """Writes the cue after the free text, which is proposed from here on: an answer that copies it costs the rows of its drafts."""
        copied = sequence.token_ids[sequence.num_prompt_tokens :]
        for token_id in preamble.cue_token_ids:
            sequence.append(token_id)
            delta.token_ids.append(token_id)
            if sequence.request.params.logprobs is not None:
                delta.logprobs.append(TokenLogprobs(token_id, 0.0, 1, is_preamble=True))  # nothing else could have come here
        self.num_generation_tokens += len(preamble.cue_token_ids)
        delta.events += sequence.answer.end_preamble(preamble.cue_token_ids, sequence.token_ids)
        if preamble.reads_calls:
            sequence.decision = None  # for content
        elif sequence.decision is not None:
            sequence.answer.begin_undecided(sequence.request.call_opening)
        self._begin_closing(sequence)
        delta.num_preamble_tokens = sequence.answer.num_preamble_tokens
        sequence.sampling.block_stop = True  # as where reasoning has ended: an answer is wanted
        if sequence.proposer is not None and copied:
            sequence.proposer = proposer_of_copies(
                sequence.token_ids,
                copied,
                preamble.schema,
                encode=partial(self.tokenizer.encode, add_special_tokens=False),
                decode=partial(self.tokenizer.decode, skip_special_tokens=True),
                other=sequence.proposer,
                num_prompt_tokens=sequence.num_prompt_tokens,
            )

    def _ends(self, sequence: Sequence, token_id: int) -> bool:
        has_grammar = sequence.sampling.is_constrained or sequence.answer.is_undecided
        return token_id in sequence.end_token_ids or (has_grammar and token_id in self.stop_token_ids)

    def _finish_grammar_if_over(self, sequence: Sequence) -> bool:
        # A slow grammar must not be asked here, on the loop: its next mask will tell, or at the last token nothing would.
        constraint = sequence.constraint
        if constraint is None or (constraint.is_slow and not (constraint.closing is not None and sequence.has_spent)):
            return False
        return constraint.finish_if_over(sequence.answer)

    def _append(self, sequence: Sequence, token_id: int, delta: SequenceDelta, logprobs: TokenLogprobs | None = None) -> None:
        answer, constraint, decision = sequence.answer, sequence.constraint, sequence.decision
        if decision is not None and answer.reads_calls and answer.is_settled:
            sequence.mark = Mark.of(sequence)
        sequence.append(token_id)
        self.num_generation_tokens += 1
        delta.token_ids.append(token_id)
        num_reasoning_tokens, num_preamble_tokens = answer.num_reasoning_tokens, answer.num_preamble_tokens
        before = None if constraint is None else answer.phase
        delta.events += answer.feed(token_id) if constraint is None else constraint.read(answer, token_id, self.tokenizer)
        if logprobs is not None:
            is_reasoning = answer.num_reasoning_tokens > num_reasoning_tokens
            is_preamble = answer.num_preamble_tokens > num_preamble_tokens
            is_content = not is_reasoning and not is_preamble
            delta.logprobs.append(logprobs if is_content else replace(logprobs, is_reasoning=is_reasoning, is_preamble=is_preamble))
        delta.num_reasoning_tokens, delta.num_preamble_tokens = answer.num_reasoning_tokens, answer.num_preamble_tokens
        if decision is not None and self._decide(sequence, delta):
            return
        is_repeating = self._is_repeating(sequence) and not self._goes_on(sequence)
        is_cut = sequence.stop_match is not None or sequence.has_spent or is_repeating
        if answer.has_ended:
            self._finish(sequence, delta, FinishReason.STOP, answer.stop_match)
        elif is_cut and self._decide_at_end(sequence, delta, has_sample=False):
            return
        elif sequence.stop_match is not None:
            self._finish(sequence, delta, FinishReason.STOP, self.tokenizer.decode(list(sequence.stop_match), skip_special_tokens=False))
        elif self._finish_grammar_if_over(sequence):
            self._finish(sequence, delta, FinishReason.STOP)
        elif sequence.has_spent:
            self._finish(sequence, delta, FinishReason.LENGTH, sequence.request.params.length_stop_reason)
        elif is_repeating:
            self._finish(sequence, delta, FinishReason.LENGTH, REPETITION)
        elif constraint is not None and before is not None and constraint.must_not_stop(before, answer):
            sequence.sampling.block_stop = True

    def _is_repeating(self, sequence: Sequence) -> bool:
        """Whether what it has said so far ends with what the request calls a repetition. Free text before an answer does not count."""
        repetition, answer = sequence.request.params.repetition_detection, sequence.answer
        if repetition is None or (answer.is_in_preamble and answer.phase is not Phase.REASONING):
            return False
        return repetition.finds(sequence.token_ids, sequence.num_prompt_tokens)

    def _goes_on(self, sequence: Sequence) -> bool:
        """Whether an answer follows reasoning that repeats itself, or one that repeats itself has to be complete, which it soon is then."""
        thinking = sequence.thinking
        if sequence.answer.phase is Phase.REASONING:
            return thinking is not None and not thinking.has_closed
        closing = None if sequence.constraint is None else sequence.constraint.closing
        if closing is None or not sequence.is_constrained:
            return False
        closing.hurry()
        return True

    def _decide(self, sequence: Sequence, delta: SequenceDelta) -> bool:
        """Whether what the last token shows of calls or content has tokens rolled back. `delta` is what was held."""
        answer, decision = sequence.answer, sequence.decision
        assert decision is not None
        has_content = answer.is_undecided and answer.has_said
        if not answer.has_called and not has_content:
            return False
        if answer.is_settled:  # the token that has ended the reasoning holds text beyond that
            sequence.mark = Mark.of(sequence)
        if answer.has_called:
            return not self._begin_calls(sequence, decision, delta)
        self._begin_content(sequence, decision, delta)
        return True

    def _decide_at_end(self, sequence: Sequence, delta: SequenceDelta, *, has_sample: bool, is_stopping: bool = False) -> bool:
        """The same where no more free text comes: by what parsers have held. True where nothing is left to do for the last token.

        A preamble without a call goes on to its cue, and content is wanted even where the model would have none. Where it `has_sample`, one
        more token was sampled freely.
        """
        answer, decision = sequence.answer, sequence.decision
        if decision is None or not answer.reads_calls or answer.phase is Phase.REASONING:
            return False
        if answer.is_settled:
            sequence.mark = Mark.of(sequence)
        delta.events += answer.flush_free()
        if answer.has_called:
            if not self._begin_calls(sequence, decision, delta):
                return True
            assert sequence.constraint is not None
            if is_stopping and sequence.constraint.can_end(answer):
                self._finish(sequence, delta, FinishReason.STOP)
            elif has_sample:
                self._roll_back(sequence, decision, delta, is_call=True)
            return has_sample
        if not answer.is_undecided:
            return False
        self._begin_content(sequence, decision, delta)
        return True

    def _begin_calls(self, sequence: Sequence, decision: CallDecision, delta: SequenceDelta) -> bool:
        """Goes on under the grammar of calls. Whether it allows the beginning that was generated freely, so that this is kept."""
        mark, answer = sequence.mark, sequence.answer
        assert mark is not None
        sequence.decision = None
        self.decided.add(sequence)
        answer.num_reasoning_tokens, answer.num_preamble_tokens = mark.num_reasoning_tokens, mark.num_preamble_tokens
        answer.begin_rest(sequence.token_ids[: mark.num_tokens], mark.num_tokens - sequence.num_prompt_tokens, decision.make_tool_parser())
        constraint = decision.make_constraint()
        events = read_kept(constraint, answer, sequence.token_ids[mark.num_tokens :], self.tokenizer)
        if events is None:
            self._roll_back(sequence, decision, delta, is_call=True)
            return False
        sequence.constraint = constraint
        self._begin_closing(sequence)
        sequence.proposer = decision.make_proposer(True)
        delta.events = events
        delta.logprobs = [replace(logprobs, is_reasoning=False, is_preamble=False) for logprobs in delta.logprobs]
        delta.num_reasoning_tokens, delta.num_preamble_tokens = mark.num_reasoning_tokens, mark.num_preamble_tokens
        return True

    def _begin_content(self, sequence: Sequence, decision: CallDecision, delta: SequenceDelta) -> None:
        """Has the content sampled under its grammar, in place of what has been generated of it."""
        assert sequence.mark is not None
        assert sequence.constraint is not None
        sequence.decision = None
        self.decided.add(sequence)
        sequence.constraint.rollback(len(sequence.token_ids) - sequence.mark.num_tokens)
        self._roll_back(sequence, decision, delta, is_call=False)

    def _roll_back(self, sequence: Sequence, decision: CallDecision, delta: SequenceDelta, *, is_call: bool) -> None:
        """Rolls back what was held, and has a call or content sampled in its place."""
        mark = sequence.mark
        assert mark is not None
        delta.token_ids.clear()
        delta.events.clear()
        delta.logprobs.clear()
        delta.num_reasoning_tokens, delta.num_preamble_tokens = mark.num_reasoning_tokens, mark.num_preamble_tokens
        answer = sequence.answer
        answer.num_reasoning_tokens, answer.num_preamble_tokens = mark.num_reasoning_tokens, mark.num_preamble_tokens
        self.num_generation_tokens -= len(sequence.token_ids) - mark.num_tokens
        self.scheduler.roll_back(sequence, mark.num_tokens)
        tool_parser = decision.make_tool_parser() if is_call else None
        answer.begin_rest(sequence.token_ids, sequence.num_output_tokens, tool_parser)
        sequence.go_on_with(mark.sampling.apart())
        sequence.stops, sequence.outputs = mark.stops, mark.outputs
        if is_call:
            sequence.constraint = decision.make_constraint()
        self._begin_closing(sequence)
        sequence.proposer = decision.make_proposer(is_call)

    def _begin_closing(self, sequence: Sequence) -> None:
        """Counts anew what is left for calls or content that are to end within `max_tokens`."""
        assert sequence.constraint is not None
        closing = sequence.sampling.closing = sequence.constraint.closing
        if closing is not None:
            closing.begin(sequence.max_tokens - sequence.num_output_tokens)

    def _finish(self, sequence: Sequence, delta: SequenceDelta, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        delta.events += sequence.answer.finish()
        if reason is FinishReason.LENGTH and sequence.answer.has_ended:
            # What a parser had held back completed a stop string after all, or was a call too many.
            reason, stop_reason = FinishReason.STOP, sequence.answer.stop_match
        delta.finish_reason = reason
        delta.stop_reason = stop_reason
        if sequence.constraint is not None and sequence.constraint.closing is not None:
            delta.is_closed = sequence.constraint.closing.is_closed
        delta.num_reasoning_tokens = sequence.answer.num_reasoning_tokens
        delta.num_preamble_tokens = sequence.answer.num_preamble_tokens
        self.retire(sequence)

    def time_out(self, sequence: Sequence) -> SequenceDelta:
        """Ends the sequence where it is, with what it has said."""
        delta = SequenceDelta(sequence.index)
        try:
            self._finish(sequence, delta, FinishReason.TIMED_OUT)
        except Exception as error:  # as in `_read_or_fail`
            logger.exception("An answer could not be read")
            self.fail(sequence, delta, f"reading the answer raised {type(error).__name__}: {error}")
        return delta

    def fail(self, sequence: Sequence, delta: SequenceDelta, reason: str) -> None:
        delta.finish_reason = FinishReason.ERROR
        delta.error = reason
        delta.num_reasoning_tokens = sequence.answer.num_reasoning_tokens
        delta.num_preamble_tokens = sequence.answer.num_preamble_tokens
        self.report(sequence.request, reason)
        self.retire(sequence)

    def report(self, request: Request, reason: str) -> None:
        """Where a request has failed because of its grammar."""
        if request.grammar is not None and isinstance(reason, GrammarFault):
            self.report_unsupported(request.grammar, reason)

    def count_prompt(self, sequence: Sequence) -> None:
        """To be called where a sequence's first tokens are taken. The prompt of a request with several sequences counts once."""
        if sequence.index == 0:
            self.num_prompt_tokens += sequence.num_prompt_tokens

    def prompt_info(self, sequence: Sequence) -> PromptInfo:
        logprobs = sequence.prompt_logprobs
        context = None if sequence.outputs is None else sequence.outputs.context
        queue_seconds = sequence.queue_seconds or 0.0
        return PromptInfo(
            sequence.num_prompt_tokens,
            sequence.num_cached_tokens,
            None if logprobs is None else tuple(logprobs),
            queue_seconds,
            self.scheduler.waiting.seconds_waited(sequence) - queue_seconds,
            {} if context is None else context.rows.joined(),
            0 if context is None else context.first_token or 0,
        )
