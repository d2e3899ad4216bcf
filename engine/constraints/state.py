"""Constrained decoding: a sequence's position in its constraint, and the choice between tool calls and content."""

import copy
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from penstock.engine.constraints.closing import Closing
from penstock.engine.constraints.masks import SLOW, MaskJob, MaskState, allocate_bitmask
from penstock.engine.contracts.grammar import GrammarMatcher
from penstock.engine.contracts.parsing import Event, Parser, Phase, Reasoning, Text
from penstock.engine.contracts.proposer import SequenceProposer
from penstock.engine.deltas import SequenceDelta
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UNFIT_START = "the text in the token that ended the reasoning does not fit the grammar"
MAX_FORCED_TOKENS = 64  # at once: the loop reads them all before it turns to another sequence


class ConstraintPhase(Enum):
    """What determines a sequence's next token."""

    REASONING = "reasoning"  # the model alone: the grammar begins when its reasoning, and the free text before the answer, has ended
    UNDECIDED = "undecided"  # the grammar, or else the marker with which the model may open its reasoning itself
    ACTIVE = "active"  # the grammar, to the end of the answer
    FINISHED = "finished"  # nothing: only the end can follow


PHASE_TRANSITIONS: Mapping[ConstraintPhase, frozenset[ConstraintPhase]] = {
    ConstraintPhase.REASONING: frozenset({ConstraintPhase.UNDECIDED, ConstraintPhase.ACTIVE}),
    ConstraintPhase.UNDECIDED: frozenset({ConstraintPhase.REASONING, ConstraintPhase.ACTIVE, ConstraintPhase.FINISHED}),
    ConstraintPhase.ACTIVE: frozenset({ConstraintPhase.FINISHED}),
    ConstraintPhase.FINISHED: frozenset(),
}

_KNOWN_PHASES = (ConstraintPhase.ACTIVE, ConstraintPhase.FINISHED)
_PHASE_OF_ANSWER = {
    Phase.REASONING: ConstraintPhase.REASONING,
    Phase.PREAMBLE: ConstraintPhase.REASONING,
    Phase.UNDECIDED: ConstraintPhase.UNDECIDED,
    Phase.CONTENT: ConstraintPhase.ACTIVE,
}


class ForbiddenToken(Exception):
    """The grammar rejects a token that its own mask allowed or that it forced."""


class ConstraintState:
    """One sequence's state in its constraint: reasoning is unconstrained, and the grammar applies to everything after it.

    Where the model may open its reasoning itself, its first token is either what the grammar allows or `start_token_id`, the marker.
    The backend knows the model's `stop_token_ids`; the request's own are allowed where those are, and nowhere else.
    `may_force` says that what the grammar forces needs no sampling: nothing else in the request decides on it. `has_quick_masks` says that
    the grammar's masks take so little time that they may be filled on the event loop, unless the matcher denies it of the next one;
    `is_greedy` that sampling draws nothing. `may_look_ahead` is whether the grammar may be asked about draft tokens, and
    `samples_end` whether a stop token is sampled even where nothing else can follow. With a `closing`, the answer ends within its
    `max_tokens`.

    `mask` is the job of the next mask, from when it is asked for until it has been used. The next `num_masks_apart` masks delay no step,
    since one was slow. Once it `is_warm`, its first mask takes no longer than others. Methods take the answer as the sequence has it: a
    beam's may be another after each token.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        start_token_id: int | None,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        client_stop_ids: frozenset[int] = frozenset(),
        may_force: bool = False,
        has_quick_masks: bool = False,
        is_greedy: bool = False,
        samples_end: bool = False,
        closing: Closing | None = None,
    ) -> None:
        self.closing = closing
        self._matcher = matcher
        self._has_quick_masks = has_quick_masks
        self._is_greedy = is_greedy
        self._all_stop_ids = stop_token_ids | client_stop_ids
        self._stop_token_ids = sorted(stop_token_ids)
        self._client_stop_ids = sorted(client_stop_ids - stop_token_ids)
        self._start_token_id = start_token_id
        self.may_force = may_force
        self.may_look_ahead = True
        self.samples_end = samples_end
        self._phase = ConstraintPhase.REASONING
        self._left: list[tuple[int, ConstraintPhase]] = []  # each phase that was left, and behind how many tokens: for `rollback`
        self._taken: list[int] = []  # for each accepted token, how many the matcher advanced by
        self._num_accepted = 0
        self.mask: MaskJob | None = None
        self.num_masks_apart = 0
        self.is_warm = False
        self._quick_job: MaskJob | None = None

    @property
    def has_begun(self) -> bool:
        """Whether the grammar has advanced by any token."""
        return self._num_accepted > 0

    def phase(self, answer: Answer) -> ConstraintPhase:
        """What decides on the token after those that have been taken. Until the grammar has taken any, the answer tells."""
        return self._phase if self._phase in _KNOWN_PHASES else _PHASE_OF_ANSWER[answer.phase]

    def is_open(self, answer: Answer) -> bool:
        """Whether the next token is the grammar's to decide."""
        return self.phase(answer) is not ConstraintPhase.REASONING

    @property
    def is_quick(self) -> bool:
        """Whether the grammar takes so little time for its next mask that it may be asked on the event loop."""
        return self._has_quick_masks and self._matcher.is_quick

    @property
    def is_slow(self) -> bool:
        """Whether a mask was slow: until enough others have been quick, no step waits for one, and the loop asks the grammar nothing."""
        return self.num_masks_apart > 0

    @property
    def can_fill_at_once(self) -> bool:
        """Whether its masks are filled as soon as a token is there: not the first one, which may take longer, unless it `is_warm`."""
        return self.is_quick and (self.has_begun or self.is_warm) and not self.is_slow and (self.closing is None or not self.closing.is_due)

    def can_sample_first(self, answer: Answer) -> bool:
        """Whether the next token may be sampled without a mask and then shown to the grammar: with one, it would be the same.

        So it is where nothing is drawn. What is most probable of all tokens and allowed, is most probable of the allowed ones.
        """
        is_free = self._is_greedy and self.may_force and self.may_look_ahead
        if self._phase is ConstraintPhase.ACTIVE and self.closing is None:  # as nearly always
            return is_free and self._has_quick_masks and not self.num_masks_apart and self._matcher.is_quick
        return is_free and self.can_fill_at_once and answer.phase is not Phase.REASONING

    def can_have_draft(self, answer: Answer) -> bool:
        """Whether the next step may verify draft tokens."""
        # A late mask's other rows are those of an earlier draft, and a slow grammar would have a mask to fill for each draft token.
        is_late = self.mask is not None and not self.mask.is_quick
        is_slow = self.is_slow or (self.mask is not None and not self.can_fill_at_once)
        return not is_late and not is_slow and self.phase(answer) is not ConstraintPhase.UNDECIDED

    @property
    def waits_for_mask(self) -> bool:
        """Whether its mask missed its step and is not there yet: until then nothing of the sequence can be computed."""
        return self.mask is not None and self.mask.is_pending

    def is_stop(self, token_id: int) -> bool:
        """Whether the token would end the answer."""
        return token_id in self._all_stop_ids

    def fill_bitmask(self, answer: Answer, row_W: Tensor) -> None:
        """int32 [ceil(V / 32)]: what may come next."""
        if not self.is_open(answer):
            row_W.fill_(-1)
            return
        self._matcher.fill_bitmask(row_W)
        if self._client_stop_ids:
            may_end = any(_is_set(row_W, token_id) for token_id in self._stop_token_ids)
            for token_id in self._client_stop_ids:
                _set(row_W, token_id, may_end)
        if self._may_still_reason(answer):
            assert self._start_token_id is not None
            _set(row_W, self._start_token_id, True)

    def restrict(self, answer: Answer, row_W: Tensor) -> None:
        """Masks what would leave no end within `max_tokens`, as far as `prepare_closing` has found that out."""
        if self.closing is not None and self.is_open(answer):
            self.closing.restrict(self._matcher, row_W)

    def prepare_closing(self, answer: Answer) -> None:
        """Finds out how the answer may end, where that has to be known for the next mask or token. May take as long as many masks."""
        if self.closing is not None and self.is_open(answer):
            self.closing.prepare(self._matcher)

    def leaves_end(self, answer: Answer, token_id: int) -> bool:
        """Whether the answer may still end within its `max_tokens` after a token that was sampled, which it has not read yet.

        If not, it is to be rolled back, and another to be sampled.
        """
        if self.closing is None or not self.is_open(answer):
            return True
        if not self._taken[-1]:  # the marker that begins reasoning
            return self.closing.may_reason(token_id)
        return self.closing.may_end_after(self._matcher, token_id)

    def forced_tokens(self, answer: Answer) -> list[int]:
        """What is certain to come next, as far as nothing but the grammar decides it. May take as long as a mask does."""
        if not self.may_force or not self.is_open(answer) or self._may_still_reason(answer):
            return []
        forced: list[int] = []
        for token_id in self._matcher.forced_tokens()[:MAX_FORCED_TOKENS]:
            if token_id in self._all_stop_ids:
                break  # it would end the answer in its middle: a dead end, found where it is sampled
            forced.append(token_id)
        return forced

    def take(self, answer: Answer, token_id: int, how: str = "was sampled") -> None:
        """As `advance`, but raises `ForbiddenToken` where the grammar forbids the token; `how` says where it is from."""
        if not self.advance(answer, token_id):
            raise ForbiddenToken(f"the grammar does not allow the token that {how}")

    def read(self, answer: Answer, token_id: int, tokenizer: Tokenizer) -> list[Event]:
        """Has the answer read a token that has been taken, and gives its events as they are to be shown. Raises `ForbiddenToken`.

        Where the token ends the reasoning, the grammar begins with what else it holds.
        """
        before = answer.phase
        events = self.shown(answer, answer.feed(token_id))
        return self.begin(answer, events, tokenizer) if is_end_of_reasoning(before, answer) and not answer.has_ended else events

    def advance(self, answer: Answer, token_id: int) -> bool:
        """Takes a token before the answer reads it; False, with nothing changed, where the grammar forbids it."""
        phase = self.phase(answer)
        is_marker = token_id == self._start_token_id and self._may_still_reason(answer)
        is_free = phase is ConstraintPhase.REASONING or is_marker
        if not is_free and not self._matcher.advance(token_id):
            return False
        self._enter(phase)
        self._taken.append(0 if is_free else 1)
        if not is_free:
            self._num_accepted += 1
            self._enter(ConstraintPhase.ACTIVE)
        return True

    def advance_guess(self, answer: Answer, token_id: int) -> bool:
        """As `advance`, for a token that need not be what is said: a grammar that fails at it refuses it, and is shown no other."""
        try:
            return self.advance(answer, token_id)
        except Exception as error:  # a plug-in's code: what it fails at is sampled again under a mask, and ends its request then
            self.stop_guessing(error)
            return False

    def advance_at_once(self, token_id: int) -> bool:
        """As `advance_guess`, for a sample in the midst of what a quick grammar decides. Its mask, if it had one, has been used.

        False, with nothing changed, also elsewhere, and where it has to be looked at more closely whether the grammar allows it.
        """
        is_amid = self._phase is ConstraintPhase.ACTIVE and self.closing is None and not self.num_masks_apart
        if not is_amid or not self._has_quick_masks or not self.may_look_ahead or token_id in self._all_stop_ids:
            return False
        if self.mask is not None and not (self.mask.is_quick and self.mask.state is MaskState.READY):
            return False
        matcher = self._matcher
        try:
            if not matcher.advance(token_id):
                return False
            is_quick = matcher.is_quick
            if not is_quick:  # it may not have looked
                matcher.rollback(1)
        except Exception as error:  # as in `advance_guess`
            self.stop_guessing(error)
            return False
        if is_quick:
            self._taken.append(1)
            self._num_accepted += 1
            self.mask = None
        return is_quick

    @property
    def has_choice(self) -> bool:
        """Whether it is known that neither the end nor a forced token must follow. If not, `finish_if_over` and `forced_tokens` tell."""
        began_at = time.perf_counter()
        try:
            has_choice = self._matcher.has_choice
        except Exception:  # a plug-in's code: what it raises then ends its own request
            return False
        return has_choice and time.perf_counter() - began_at < SLOW

    def stop_guessing(self, error: Exception) -> None:
        """The grammar failed at what may never be said: that ends nothing, but it is asked about no other guesses."""
        logger.info("A grammar failed at a token that was only guessed, and is asked about no others: %s: %s", type(error).__name__, error)
        self.may_look_ahead = False

    def advance_rest(self, token_ids: list[int]) -> bool:
        """Takes what the last token held beyond the end of the reasoning, as tokens of its own.

        False, with nothing changed, where the grammar forbids it.
        """
        for num_taken, token_id in enumerate(token_ids):
            if not self._matcher.advance(token_id):
                if num_taken:
                    self._matcher.rollback(num_taken)
                return False
        if token_ids:
            self._taken[-1] += len(token_ids)
            self._num_accepted += len(token_ids)
            self._enter(ConstraintPhase.ACTIVE)
            if self.closing is not None:
                self.closing.forget()
        return True

    def begin(self, answer: Answer, events: list[Event], tokenizer: Tokenizer) -> list[Event]:
        """Takes what the token that ended the reasoning held beyond that, and gives the `events` of that token as they are to be shown.

        Raises `ForbiddenToken` where the text does not fit the grammar and a parser holds it, which would read the rest as a part of it.
        """
        # White space there belongs to the marker, and text that the grammar does not begin with to the reasoning.
        rest = answer.new_content
        if rest.isspace():
            return [event for event in events if not isinstance(event, Text)]
        if rest and not self.advance_rest(tokenizer.encode(rest, add_special_tokens=False)):
            if "".join(event.text for event in events if isinstance(event, Text)) != rest:
                raise ForbiddenToken(UNFIT_START)
            return [Reasoning(event.text) if isinstance(event, Text) else event for event in events]
        return events

    def must_not_stop(self, before: Phase, answer: Answer) -> bool:
        """Whether stop ids must be blocked: the last token ended the reasoning, after the phase `before`, and the grammar has not begun."""
        return is_end_of_reasoning(before, answer) and not self.has_begun

    def shown(self, answer: Answer, events: list[Event]) -> list[Event]:
        """What the answer has just given. Content that some formats have before the reasoning is over goes with the reasoning.

        All content is promised to be the grammar's.
        """
        if self.is_open(answer):
            return events
        return [Reasoning(event.text) if isinstance(event, Text) else event for event in events]

    def fork(self) -> "ConstraintState | None":
        """An independent copy in the same state; None if the matcher cannot be forked."""
        matcher = self._matcher.fork()
        if matcher is None:
            return None
        other = copy.copy(self)
        other._matcher = matcher
        other._taken = list(self._taken)
        other._left = list(self._left)
        other.mask = other._quick_job = None
        return other

    def rollback(self, num_tokens: int) -> None:
        """Undoes `advance` for the last tokens. The answer must not have read them."""
        if num_tokens == 0:
            return
        num_taken = sum(self._taken[-num_tokens:])
        del self._taken[-num_tokens:]
        self._num_accepted -= num_taken
        while self._left and self._left[-1][0] > len(self._taken):
            self._phase = self._left.pop()[1]
        if num_taken:
            self._matcher.rollback(num_taken)

    def finish_if_over(self, answer: Answer) -> bool:
        """Moves to FINISHED where only the end can follow, and returns whether it did."""
        if not self.is_open(answer) or not self._matcher.finished:
            return False
        self._enter(self.phase(answer))
        self._enter(ConstraintPhase.FINISHED)
        return True

    def can_end(self, answer: Answer) -> bool:
        """Whether the answer is complete as it is. Asks the matcher, which must be quick at it."""
        if not self.is_open(answer):
            return False
        for token_id in self._stop_token_ids:
            if self._matcher.advance(token_id):
                self._matcher.rollback(1)
                return True
        return self._matcher.finished

    def fill_at_once(self, answer: Answer, vocab_size: int, *, only_forced: bool, has_choice: bool = False) -> MaskJob:
        """Fills the next mask in this thread, always in the same row; with `only_forced`, `mask` is None where nothing is forced.

        Where the matcher `has_choice`, it is not asked what it forces.
        """
        if self._quick_job is None:
            self._quick_job = MaskJob(self, answer, allocate_bitmask(1, vocab_size), is_quick=True)
        self._quick_job.run_at_once(only_forced=only_forced, has_choice=has_choice)
        self.mask = None if self._quick_job.state is MaskState.IDLE else self._quick_job
        return self._quick_job

    def check_integrity(self) -> None:
        """Asserts that tokens, phases and the mask agree, unless a thread is at the mask. For tests."""
        if self.mask is not None and not self.mask.is_quick and not self.mask.has_returned:
            return
        assert self._num_accepted == sum(self._taken)
        assert all(num_tokens <= len(self._taken) for num_tokens, _ in self._left)
        assert not self._num_accepted or self._phase in (ConstraintPhase.ACTIVE, ConstraintPhase.FINISHED)
        assert self.mask is None or self.mask.state is not MaskState.IDLE

    def _enter(self, phase: ConstraintPhase) -> None:
        if phase is self._phase:
            return
        assert phase in PHASE_TRANSITIONS[self._phase], f"from {self._phase} to {phase}"
        self._left.append((len(self._taken), self._phase))
        self._phase = phase

    def _may_still_reason(self, answer: Answer) -> bool:
        return self._start_token_id is not None and self.phase(answer) is ConstraintPhase.UNDECIDED


def is_end_of_reasoning(before: Phase, answer: Answer) -> bool:
    """Whether the answer's last token, which followed on the phase `before`, has ended its reasoning."""
    return before is Phase.REASONING and answer.phase is Phase.CONTENT


def _is_set(row_W: Tensor, token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(row_W) and bool(int(row_W[word]) >> bit & 1)


def _set(row_W: Tensor, token_id: int, allowed: bool) -> None:
    word, bit = divmod(token_id, 32)
    mask = (1 << bit) if bit < 31 else -(1 << 31)  # the sign bit of an int32
    row_W[word] = int(row_W[word]) | mask if allowed else int(row_W[word]) & ~mask


@dataclass(slots=True)
class CallDecision:
    """Whether one sequence's answer is tool calls or content. It is open while the model generates freely, and nothing of that is shown.

    With one mask for both, the model's probability of anything that neither allows, such as a refusal in text, would go to the calls as
    well. So the first token of a call, or of other text, decides, as the tool parser reads it. What was generated for a call is kept as
    far as the grammar of calls allows it; else, and for content, its tokens are rolled back and sampled again under the grammar. They are
    `held` until then. The sequence's mark is where they began: at first, after reasoning, in a preamble after what belongs to no call.

    The makers are for what follows: the constraint of calls, a parser that reads them, and the proposer of calls or of content.
    """

    make_constraint: Callable[[], ConstraintState]
    make_tool_parser: Callable[[], Parser]
    make_proposer: Callable[[bool], SequenceProposer | None]
    held: SequenceDelta

    def flush(self, delta: SequenceDelta) -> None:
        """Adds what was held to a delta."""
        held = self.held
        delta.token_ids += held.token_ids
        delta.events += held.events
        delta.logprobs += held.logprobs
        delta.finish_reason, delta.stop_reason = held.finish_reason, held.stop_reason
        delta.num_reasoning_tokens = max(delta.num_reasoning_tokens, held.num_reasoning_tokens)
        delta.num_preamble_tokens = max(delta.num_preamble_tokens, held.num_preamble_tokens)
        self.held = SequenceDelta(held.index)


def read_kept(constraint: ConstraintState, answer: Answer, token_ids: list[int], tokenizer: Tokenizer) -> list[Event] | None:
    """Has both take the tokens of a call that was generated freely, and gives its events; None where the grammar forbids them.

    White space before the call is none of the grammar's.
    """
    lead = 0
    while lead < len(token_ids) and tokenizer.decode(token_ids[lead : lead + 1], skip_special_tokens=False).isspace():
        lead += 1
    if lead == len(token_ids) or not all(constraint.advance_guess(answer, token_id) for token_id in token_ids[lead:]):
        return None
    events: list[Event] = []
    for token_id in token_ids:
        if not answer.has_ended:
            events += answer.feed(token_id)
    return events
