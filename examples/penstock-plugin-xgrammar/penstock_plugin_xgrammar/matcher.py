"""A compiled grammar of xgrammar, and one sequence's place in it."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from penstock import CompiledGrammar, GrammarMatcher

MAX_FORCED_TOKENS = 64


class XgrammarGrammar(CompiledGrammar):
    """Shared by all sequences with this constraint. `warnings` is what a lenient schema left out."""

    def __init__(self, compiled: Any, vocab_size: int, stop_token_ids: Iterable[int], warnings: tuple[str, ...] = ()) -> None:
        self.compiled = compiled
        self.vocab_size = vocab_size
        self.stop_token_ids = frozenset(stop_token_ids)
        self.num_bytes = int(compiled.memory_size_bytes)
        self.warnings = warnings
        self.text_row = new_row(vocab_size).bitwise_not_()
        for token_id in self.stop_token_ids:
            self.text_row[token_id // 32] &= ~_bit(token_id)

    def matcher(self) -> "XgrammarMatcher":
        import xgrammar

        return XgrammarMatcher(self, xgrammar.GrammarMatcher(self.compiled))


class XgrammarMatcher(GrammarMatcher):
    """One sequence's place. A stop token ends it: after one, nothing is allowed."""

    def __init__(self, grammar: XgrammarGrammar, engine: Any) -> None:
        self._grammar = grammar
        self._engine = engine
        self._is_stopped = False
        self._scratch_W: Tensor | None = None

    def fill_bitmask(self, row: Tensor) -> None:
        if self._is_stopped:
            row.zero_()
            return
        if not self._engine.fill_next_token_bitmask(row.view(1, -1)):
            row.fill_(-1)
        num_used = self._grammar.vocab_size % 32
        if num_used:  # the engine sets the bits behind the last token
            row[-1] &= (1 << num_used) - 1

    def advance(self, token_id: int) -> bool:
        # What is out of range or after the end the engine refuses too, but with a line on the standard error stream.
        if self._is_stopped or not 0 <= token_id < self._grammar.vocab_size or not self._engine.accept_token(token_id):
            return False
        self._is_stopped = token_id in self._grammar.stop_token_ids
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._engine.rollback(num_tokens)
            self._is_stopped = False

    def fork(self) -> "XgrammarMatcher":
        other = XgrammarMatcher(self._grammar, self._engine.fork())
        other._is_stopped = self._is_stopped
        return other

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while not self._is_stopped and len(forced) < MAX_FORCED_TOKENS:
            token_id = _only_token(self._row())
            if token_id is None or token_id in self._grammar.stop_token_ids:
                break
            accepted = self._engine.accept_token(token_id)
            assert accepted
            forced.append(token_id)
        if forced:
            self._engine.rollback(len(forced))
        return forced

    @property
    def finished(self) -> bool:
        if self._is_stopped:
            return True
        return bool(self._engine.is_completed()) and not (self._row() & self._grammar.text_row).any()

    def _row(self) -> Tensor:
        """int32 [ceil(V / 32)], overwritten by the next call."""
        if self._scratch_W is None:
            self._scratch_W = new_row(self._grammar.vocab_size)
        self.fill_bitmask(self._scratch_W)
        return self._scratch_W


def new_row(vocab_size: int) -> Tensor:
    """int32 [ceil(V / 32)], nothing allowed."""
    return torch.zeros(-(-vocab_size // 32), dtype=torch.int32)


def _only_token(row_W: Tensor) -> int | None:
    if int(row_W.count_nonzero()) != 1:
        return None
    word = int(row_W.nonzero()[0])
    bits = int(row_W[word]) & 0xFFFFFFFF
    return word * 32 + bits.bit_length() - 1 if bits & (bits - 1) == 0 else None


def _bit(token_id: int) -> int:
    """The token's bit in its word, as int32: the highest is the sign."""
    bit = token_id % 32
    return 1 << bit if bit < 31 else -(1 << 31)
