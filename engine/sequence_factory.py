"""From a request to its sequences: answer, sampling state, constraint, thinking budget, drafts and beams."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from penstock.engine.beam_search import (
    BeamGroup,
    BeamReader,
    BeamSearch,
    end_token_ids,
    must_not_stop,
    num_candidates,
)
from penstock.engine.constraints.closing import Closing, check_room
from penstock.engine.constraints.state import CallDecision, ConstraintState
from penstock.engine.contracts.grammar import CompiledGrammar
from penstock.engine.contracts.parsing import Phase
from penstock.engine.contracts.proposer import DraftedSequence, SequenceProposer
from penstock.engine.deltas import SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.exact.group import ExactGroup
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.sampling.params import BeamSearchParams, SamplingParams
from penstock.engine.sampling.rows import SamplingState, TokenRules
from penstock.engine.scheduling.step import Speculation
from penstock.engine.sequence import Sequence, SequenceOutputs
from penstock.engine.text.answer import Answer, ThinkingBudget
from penstock.engine.text.streaming import StopSequences
from penstock.engine.text.tokenizer import Tokenizer


def token_rules(params: SamplingParams, tokenizer: Tokenizer, vocab_size: int, bad_sequences: Iterable[tuple[int, ...]] = ()) -> TokenRules:
    """Takes up to a second: the rules of a request that comes in over HTTP are made in a worker, and given with the request."""
    words = [spelling for word in params.bad_words for spelling in (word, " " + word.lstrip(" "))]
    bad_words_ids = [tokenizer.encode(word, add_special_tokens=False) for word in words]
    return TokenRules.of(params, [*bad_words_ids, *bad_sequences], vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceFactory:
    """Without `speculation`, sequences have no draft tokens."""

    tokenizer: Tokenizer
    stop_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device
    speculation: Speculation | None

    def make(self, request: Request, arrival: int, num_lanes: int = 1) -> list[Sequence]:
        """The request's n sequences; the first has the others as its forks. Exact sampling begins with one of its `num_lanes`."""
        rules = (request.rules or token_rules(request.params, self.tokenizer, self.vocab_size, request.bad_sequences)).on(self.device)
        if request.beam is not None:
            sequences = self._make_search(request, request.beam, self._make_one(request, 0, arrival, rules)).sequences
        elif request.exact:
            first = self._make_one(request, 0, arrival, rules)
            group = first.search = ExactGroup.of(first, lambda: self._make_lane_constraint(request), self.stop_token_ids, num_lanes)
            sequences = group.sequences
        else:
            first = self._make_one(request, 0, arrival, rules)
            first.forks = [self._make_one(request, index, arrival, rules, first) for index in range(1, request.params.n)]
            sequences = [first, *first.forks]
        if request.outputs:
            shares = SequenceOutputs.for_all(len(sequences), len(request.prompt_token_ids), with_context=request.with_context_outputs)
            for sequence, outputs in zip(sequences, shares, strict=True):
                sequence.outputs = outputs
        return sequences

    def _make_search(self, request: Request, beam: BeamSearchParams, first: Sequence) -> BeamSearch:
        stops = end_token_ids(request, self.stop_token_ids)
        group = BeamGroup(
            width=beam.beam_width,
            max_tokens=first.max_tokens,
            num_candidates=num_candidates(beam.beam_width, len(stops)),
            length_penalty=beam.length_penalty,
            early_stopping=beam.early_stopping,
        )
        reader = BeamReader(request, self.tokenizer, stops, lambda answer: self._make_constraint(request, answer))
        search = first.search = BeamSearch(request=request, group=group, reader=reader, sequences=[first])
        first.sampling.num_candidates = group.num_candidates
        first.sampling.block_stop = must_not_stop(first, first.answer.phase)
        return search

    def _make_one(self, request: Request, index: int, arrival: int, rules: TokenRules, first: Sequence | None = None) -> Sequence:
        params = request.params
        answer = request.make_answer()
        # What samples the first token for another process leaves it free: the other one decides.
        is_left_free = request.call_grammar is not None and request.is_exported and request.preamble is None
        decides = request.call_grammar is not None and not is_left_free
        if request.preamble is not None:
            answer.begin_preamble(reads_calls=request.preamble.reads_calls, opening=request.call_opening)
        elif decides:
            answer.begin_undecided(request.call_opening)
        room = self.max_model_len - len(request.prompt_token_ids)
        token_ids = list(request.prompt_token_ids)
        sampling = SamplingState(
            params,
            request.prompt_token_ids,
            placeholders=request.placeholders,
            vocab_size=self.vocab_size,
            stop_token_ids=self.stop_token_ids | frozenset(params.stop_token_ids),
            rules=rules,
            processors=request.logits_processors,
            seed_offset=index,
            request_id=request.request_id,
            client_id=request.client_id,
            counts=None if first is None else first.sampling.counts,
            first_token_id=request.first_token_ids[index] if request.first_token_ids else None,
        )
        sequence = Sequence(
            request=request,
            index=index,
            arrival=arrival,
            token_ids=token_ids,
            block_hashes=list(request.block_hashes),
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            answer=answer,
            sampling=sampling,
            end_token_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_token_ids),
            constraint=None if is_left_free else self._make_constraint(request, answer),
            thinking=self._make_thinking_budget(request, answer),
            stops=StopSequences(request.stop_sequences, params.min_tokens) if request.stop_sequences else None,
            prompt_logprobs=None if params.prompt_logprobs is None or index else [None] * len(request.prompt_token_ids),
        )
        sampling.measures_pressure = request.measures_pressure
        if request.end is not None:
            self._keep_within(sequence)
        sequence.proposer = self._make_proposer(sequence, request.grammar)
        if decides:
            sequence.decision = self._make_decision(sequence)
        return sequence

    def _make_decision(self, sequence: Sequence) -> CallDecision:
        request, make_answer = sequence.request, sequence.request.make_answer
        call_grammar = request.call_grammar
        assert call_grammar is not None
        assert isinstance(make_answer, AnswerFactory)
        assert make_answer.tools is not None, "calls cannot be read"

        def make_constraint() -> ConstraintState:
            constraint = self._constraint_of(request, call_grammar, None)
            if request.call_end is not None:
                constraint.closing = Closing(request.call_end, sequence.max_tokens)
            return constraint

        return CallDecision(
            make_constraint=make_constraint,
            make_tool_parser=functools.partial(make_answer.tools, make_answer.turn),
            make_proposer=lambda is_call: self._make_proposer(sequence, call_grammar if is_call else request.grammar),
            held=SequenceDelta(sequence.index),
        )

    def _make_proposer(self, sequence: Sequence, grammar: CompiledGrammar | None) -> SequenceProposer | None:
        request = sequence.request
        # A logits processor may remember the tokens that it saw, and outputs are those of each token.
        if self.speculation is None or request.logits_processors or request.outputs or request.beam is not None or request.exact:
            return None
        if request.embeds and self.speculation.draft_cost:
            return None  # a draft model sees token ids alone
        drafted = DraftedSequence(
            token_ids=sequence.token_ids,
            num_prompt_tokens=sequence.num_prompt_tokens,
            key=request.prefix_key,
            grammar=grammar,
            placeholders=request.placeholders,
        )
        return self.speculation.begin(drafted, request.prediction)

    def _keep_within(self, sequence: Sequence) -> None:
        """Has the answer end within its `max_tokens`, and what precedes it end before. Raises `InvalidRequest` where there is no room."""
        end, preamble, thinking = sequence.request.end, sequence.request.preamble, sequence.thinking
        assert end is not None
        assert sequence.constraint is not None
        num_of_cue = 0 if preamble is None else len(preamble.cue_token_ids)
        num_of_marker = 0
        if thinking is not None:
            thinking.num_reserved = num_of_cue + end.num_tokens
            num_of_marker = len(thinking.end_token_ids)
        is_reasoning = sequence.answer.phase is Phase.REASONING
        check_room(end, sequence.max_tokens, num_of_cue + num_of_marker * is_reasoning)
        sequence.constraint.closing = sequence.sampling.closing = Closing(
            end, sequence.max_tokens, num_of_marker + num_of_cue + end.num_tokens
        )

    def _make_lane_constraint(self, request: Request) -> ConstraintState:
        constraint = self._make_constraint(request, request.make_answer())
        assert constraint is not None
        return constraint

    def _make_constraint(self, request: Request, answer: Answer) -> ConstraintState | None:
        return None if request.grammar is None else self._constraint_of(request, request.grammar, answer.start_marker)

    def _constraint_of(self, request: Request, grammar: CompiledGrammar, start: str | None) -> ConstraintState:
        return ConstraintState(
            grammar.matcher(),
            None if start is None else self.tokenizer.token_id(start),
            stop_token_ids=self.stop_token_ids,
            client_stop_ids=frozenset(request.params.stop_token_ids),
            may_force=_is_free_of_other_rules(request),
            has_quick_masks=grammar.has_quick_masks,
            is_greedy=request.params.is_greedy,
            samples_end=request.exact,
        )

    def _make_thinking_budget(self, request: Request, answer: Answer) -> ThinkingBudget | None:
        # Also without a budget under a grammar: an answer that ends within its reasoning lacks what the grammar demands.
        if (request.params.thinking_token_budget is None and request.grammar is None) or not answer.end_marker:
            return None
        return ThinkingBudget(request.params.thinking_token_budget, self.tokenizer.encode(answer.end_marker, add_special_tokens=False))


def _is_free_of_other_rules(request: Request) -> bool:
    """Whether nothing but the grammar can forbid a token, and nothing is reported of the tokens beside it."""
    if request.measures_pressure:
        return False
    params = request.params
    rules = (params.bad_words, request.bad_sequences, params.allowed_token_ids, params.logit_bias, request.logits_processors)
    is_sampled = request.beam is None and not request.exact
    return params.logprobs is None and is_sampled and not request.outputs and not any(rules)


def check_closing_request(request: Request) -> None:
    """Raises `InvalidRequest` naming the field of a request for an answer within its `max_tokens` that this cannot honour."""
    field = "structured_outputs.within_max_tokens"
    if request.grammar is None:
        raise InvalidRequest(f"`{field}` needs a constraint", field)
    params = request.params
    for name, given in (
        ("use_beam_search", request.beam),
        ("structured_outputs.sampling", request.exact),
        # What these forbid may be all that an ending has.
        ("bad_words", params.bad_words),
        ("allowed_token_ids", params.allowed_token_ids),
        ("logits_processors", request.logits_processors),
        ("kv_transfer_params", request.is_exported or request.first_token_ids),
    ):
        if given:
            raise InvalidRequest(f"`{name}` cannot be combined with `{field}`", name)
