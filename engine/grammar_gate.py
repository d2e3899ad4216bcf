"""Where a sequence's grammar begins: not before its reasoning has ended."""

from torch import Tensor

from penstock.engine.answer import Answer
from penstock.engine.grammar import GrammarMatcher
from penstock.engine.parsing import Phase


class GrammarGate:
    """Lets reasoning pass freely and holds everything after it to the grammar.

    Where the model may open its reasoning itself, its first token is either what the grammar allows or `start_token_id`, the marker.
    """

    def __init__(self, matcher: GrammarMatcher, start_token_id: int | None) -> None:
        self._matcher = matcher
        self._start_token_id = start_token_id
        self._num_accepted = 0

    def is_open(self, answer: Answer) -> bool:
        """Whether the next token is the grammar's to decide."""
        return answer.phase is not Phase.REASONING

    def fill_bitmask(self, answer: Answer, row_W: Tensor) -> None:
        """int32 [ceil(V / 32)]: what may come next."""
        if not self.is_open(answer):
            row_W.fill_(-1)
            return
        self._matcher.fill_bitmask(row_W)
        if self._may_still_reason(answer):
            assert self._start_token_id is not None
            word, bit = divmod(self._start_token_id, 32)
            row_W[word] |= (1 << bit) if bit < 31 else -(1 << 31)

    def advance(self, answer: Answer, token_id: int) -> bool:
        """Takes a sampled token before the answer reads it; False where the grammar forbids it."""
        if not self.is_open(answer) or (token_id == self._start_token_id and self._may_still_reason(answer)):
            return True
        self._num_accepted += 1
        return self._matcher.advance(token_id)

    def is_finished(self, answer: Answer) -> bool:
        """Whether nothing but the end can follow."""
        return self.is_open(answer) and self._matcher.finished

    def _may_still_reason(self, answer: Answer) -> bool:
        return answer.phase is Phase.UNDECIDED and self._start_token_id is not None and self._num_accepted == 0
