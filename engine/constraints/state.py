"""Where a sequence's grammar begins: not before its reasoning has ended."""

import copy
import logging

from torch import Tensor

from penstock.engine.events import Event, Reasoning, Text
from penstock.engine.grammar import GrammarMatcher
from penstock.engine.parsing import Phase
from penstock.engine.text.answer import Answer
from penstock.engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

UNFIT_START = "the text in the token that ended the reasoning does not fit the grammar"
MAX_FORCED_TOKENS = 64  # at once: the loop reads them all before it turns to anybody else


class GrammarGate:
    """Lets reasoning pass freely and holds everything after it to the grammar, to the end.

    Where the model may open its reasoning itself, its first token is either what the grammar allows or `start_token_id`, the marker.
    The backend knows the model's `stop_token_ids`; the request's own are allowed where those are, and nowhere else.
    `may_force` says that what the grammar forces needs no sampling: nothing else in the request has a say in it. `is_quick` says that the
    grammar's masks take so little time that they may be filled on the event loop, where the matcher does not deny it of the next one.
    `may_look_ahead` is whether it may be asked about tokens that are only guessed.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        start_token_id: int | None,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        client_stop_ids: frozenset[int] = frozenset(),
        may_force: bool = False,
        is_quick: bool = False,
    ) -> None:
        self._matcher = matcher
        self._is_quick = is_quick
        self._all_stop_ids = stop_token_ids | client_stop_ids
        self._stop_token_ids = sorted(stop_token_ids)
        self._client_stop_ids = sorted(client_stop_ids - stop_token_ids)
        self._start_token_id = start_token_id
        self.may_force = may_force
        self.may_look_ahead = True
        self._taken: list[int] = []  # for each token that was let pass, how many the matcher took for it
        self._num_accepted = 0

    @property
    def has_begun(self) -> bool:
        """Whether the grammar has taken anything."""
        return self._num_accepted > 0

    @property
    def is_quick(self) -> bool:
        return self._is_quick and bool(getattr(self._matcher, "is_quick", True))

    def is_open(self, answer: Answer) -> bool:
        """Whether the next token is the grammar's to decide."""
        return self.has_begun or answer.phase is not Phase.REASONING

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

    def advance(self, answer: Answer, token_id: int) -> bool:
        """Takes a token before the answer reads it; False, with nothing changed, where the grammar forbids it."""
        if not self.is_open(answer) or (token_id == self._start_token_id and self._may_still_reason(answer)):
            self._taken.append(0)
            return True
        if not self._matcher.advance(token_id):
            return False
        self._taken.append(1)
        self._num_accepted += 1
        return True

    def advance_guess(self, answer: Answer, token_id: int) -> bool:
        """As `advance`, for a token that need not be what is said: a grammar that fails at it refuses it, and is shown no other."""
        try:
            return self.advance(answer, token_id)
        except Exception as error:  # a plug-in's code: what it fails at is sampled again under a mask, and ends its request then
            self.stop_guessing(error)
            return False

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
        self._taken[-1] += len(token_ids)
        self._num_accepted += len(token_ids)
        return True

    def begin(self, answer: Answer, events: list[Event], tokenizer: Tokenizer) -> list[Event] | None:
        """Takes what the token that ended the reasoning held beyond that, and gives the `events` of that token as they are to be shown.

        None where the text does not fit the grammar and a parser holds it, which would read what follows as a part of it.
        """
        rest = answer.new_content
        if rest.isspace():
            return [event for event in events if not isinstance(event, Text)]
        if rest and not self.advance_rest(tokenizer.encode(rest, add_special_tokens=False)):
            if "".join(event.text for event in events if isinstance(event, Text)) != rest:
                return None
            return [Reasoning(event.text) if isinstance(event, Text) else event for event in events]
        return events

    def shown(self, answer: Answer, events: list[Event]) -> list[Event]:
        """What the answer has just given. Content that some formats have before the reasoning is over goes with the reasoning.

        All content is promised to be the grammar's.
        """
        if self.is_open(answer):
            return events
        return [Reasoning(event.text) if isinstance(event, Text) else event for event in events]

    def fork(self) -> "GrammarGate | None":
        """One in the same place, which goes on by itself; None where the matcher has no `fork`."""
        fork_matcher = getattr(self._matcher, "fork", None)
        if fork_matcher is None:
            return None
        other = copy.copy(self)
        other._matcher = fork_matcher()
        other._taken = list(self._taken)
        return other

    def rollback(self, num_tokens: int) -> None:
        """Takes back the last tokens that `advance` let pass. The answer must not have read them."""
        if num_tokens == 0:
            return
        num_taken = sum(self._taken[-num_tokens:])
        del self._taken[-num_tokens:]
        self._num_accepted -= num_taken
        if num_taken:
            self._matcher.rollback(num_taken)

    def is_finished(self, answer: Answer) -> bool:
        """Whether nothing but the end can follow."""
        return self.is_open(answer) and self._matcher.finished

    def _may_still_reason(self, answer: Answer) -> bool:
        return answer.phase is Phase.UNDECIDED and self._start_token_id is not None and not self.has_begun


def _is_set(row_W: Tensor, token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(row_W) and bool(int(row_W[word]) >> bit & 1)


def _set(row_W: Tensor, token_id: int, allowed: bool) -> None:
    word, bit = divmod(token_id, 32)
    mask = (1 << bit) if bit < 31 else -(1 << 31)  # the sign bit of an int32
    row_W[word] = int(row_W[word]) | mask if allowed else int(row_W[word]) & ~mask
