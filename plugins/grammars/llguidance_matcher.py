"""A grammar compiled by llguidance, and one sequence's place in it."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_FORCED_TOKENS = 64


class MatcherFailed(Exception):
    """The grammar cannot go on: no token is left, or a step would cost too much. The message says which."""


class LlguidanceGrammar:
    """A matcher at the start, which is copied for each sequence and never advanced. `make_start` makes another.

    Copies share the lexer and what it has worked out. Once it has failed one sequence it fails them all, so the next ones get a new one.
    `num_bytes` is an estimate; `can_force` says whether the tokenizer's own spelling of forced text is known.
    """

    def __init__(
        self,
        start: "LLMatcher",
        make_start: Callable[[], "LLMatcher"],
        vocab_size: int,
        stop_token_ids: Iterable[int],
        *,
        can_force: bool,
        num_bytes: int,
        warnings: tuple[str, ...] = (),
    ) -> None:
        self._start = start
        self._make_start = make_start
        self.has_failed = False
        self.vocab_size = vocab_size
        self.can_force = can_force
        self.stop_token_ids = frozenset(stop_token_ids)
        self.stop_bits = sum(1 << token_id for token_id in self.stop_token_ids)
        self._num_bytes = num_bytes
        self._warnings = warnings

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._warnings

    def matcher(self) -> "LlguidanceMatcher":
        if self.has_failed:
            self._start = self._make_start()
            self.has_failed = False
        return LlguidanceMatcher(self, self._start.deep_copy())


class LlguidanceMatcher:
    """One sequence's place. Every method may raise `MatcherFailed`; the matcher is of no use after that.

    Stop tokens never reach the engine: its parser takes one for the end only where the answer may end, and some copies of it uncounted.
    """

    def __init__(self, grammar: LlguidanceGrammar, matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._is_ended = False

    def fill_bitmask(self, row: Tensor) -> None:
        if self._is_ended:
            row.zero_()
            return
        self._matcher.unsafe_compute_mask_ptr(row.data_ptr(), row.numel() * row.element_size())
        self._check()

    def advance(self, token_id: int) -> bool:
        """A token that spells what the grammar allows in another way than the tokenizer would is taken, though no mask may show it."""
        if self._is_ended or token_id >= self._grammar.vocab_size:
            return False
        if token_id in self._grammar.stop_token_ids:
            self._is_ended = self._matcher.is_accepting()
            return self._is_ended
        is_taken = self._matcher.try_consume_tokens([token_id]) == 1
        self._check()
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        if num_tokens and self._is_ended:
            self._is_ended = False
            num_tokens -= 1
        if num_tokens:
            self._matcher.rollback(num_tokens)
            self._check()

    def forced_tokens(self) -> list[int]:
        """At most `MAX_FORCED_TOKENS`."""
        forced: list[int] = []
        while self._grammar.can_force and not self._is_ended and len(forced) < MAX_FORCED_TOKENS:
            # One at a time: how the rest is spelled may depend on what is there already.
            token_ids = self._matcher.compute_ff_tokens()
            if not token_ids or token_ids[0] in self._grammar.stop_token_ids:
                break
            self._matcher.consume_token(token_ids[0])
            self._check()
            forced.append(token_ids[0])
        if forced:
            self._matcher.rollback(len(forced))
        self._check()
        return forced

    @property
    def finished(self) -> bool:
        if self._is_ended or self._matcher.is_stopped():
            return True
        if not self._matcher.is_accepting():
            return False
        mask = int.from_bytes(self._matcher.compute_bitmask(), "little")
        self._check()
        return not mask & ~self._grammar.stop_bits

    def _check(self) -> None:
        if self._matcher.is_error():
            self._grammar.has_failed = True
            raise MatcherFailed(self._matcher.get_error().partition("\n")[0])
