"""Where a sequence's grammar begins: not before its reasoning has ended."""

from torch import Tensor

from penstock.engine.answer import Answer
from penstock.engine.grammar import GrammarMatcher
from penstock.engine.parsing import Phase


class GrammarGate:
    """Lets reasoning pass freely and holds everything after it to the grammar.

    Where the model may open its reasoning itself, its first token is either what the grammar allows or `start_token_id`, the marker.
    The backend knows the model's `stop_token_ids`; the request's own are allowed where those are, and nowhere else.
    """

    def __init__(
        self,
        matcher: GrammarMatcher,
        start_token_id: int | None,
        *,
        stop_token_ids: frozenset[int] = frozenset(),
        client_stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._matcher = matcher
        self._stop_token_ids = sorted(stop_token_ids)
        self._client_stop_ids = sorted(client_stop_ids - stop_token_ids)
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
        if self._client_stop_ids:
            may_end = any(_is_set(row_W, token_id) for token_id in self._stop_token_ids)
            for token_id in self._client_stop_ids:
                _set(row_W, token_id, may_end)
        if self._may_still_reason(answer):
            assert self._start_token_id is not None
            _set(row_W, self._start_token_id, True)

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


def _is_set(row_W: Tensor, token_id: int) -> bool:
    word, bit = divmod(token_id, 32)
    return word < len(row_W) and bool(int(row_W[word]) >> bit & 1)


def _set(row_W: Tensor, token_id: int, allowed: bool) -> None:
    word, bit = divmod(token_id, 32)
    mask = (1 << bit) if bit < 31 else -(1 << 31)  # the sign bit of an int32
    row_W[word] = int(row_W[word]) | mask if allowed else int(row_W[word]) & ~mask
