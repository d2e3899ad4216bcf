"""A compiled index of outlines_core, and one sequence's place in it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outlines_core import Guide  # type: ignore[import-untyped]
from torch import Tensor

from penstock.engine.constraints.masks import allocate_bitmask, num_words
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher

MAX_ROLLBACK = 2**20
MAX_FORCED_TOKENS = 64
MAX_CACHED_ROWS = 256


@dataclass(frozen=True, slots=True)
class _StateFacts:
    """What only a look at a whole row tells. `only_token` is the token that must come next, stop tokens apart."""

    only_token: int | None
    may_only_stop: bool


class OutlinesCoreGrammar(CompiledGrammar):
    """An index and what has been learnt of its states; shared by all sequences with this constraint.

    Its masks are looked up: `has_quick_masks`.

    In `index` the text is between two NULs, which stop tokens spell and nothing else does. `index_bytes` is its size in memory.
    """

    has_quick_masks = True

    def __init__(self, index: Any, vocab_size: int, stop_token_ids: Sequence[int], index_bytes: int, *, schema: str | None = None) -> None:
        self.index = index
        self.schema = schema
        self.stop_token_ids = frozenset(stop_token_ids)
        self._vocab_size = vocab_size
        self.num_bytes = index_bytes + MAX_CACHED_ROWS * num_words(vocab_size) * 4
        self._not_stop_row = allocate_bitmask(1, vocab_size)[0].bitwise_not_()
        for token_id in stop_token_ids:
            self._not_stop_row[token_id // 32] &= ~_bit(token_id)
        self._rows: dict[int, Tensor] = {}
        self._facts: dict[int, _StateFacts] = {}

    def matcher(self) -> "OutlinesCoreMatcher":
        guide = Guide(self.index, MAX_ROLLBACK)
        guide.advance(min(self.stop_token_ids), return_tokens=False)  # past the NUL in front of the text
        return OutlinesCoreMatcher(self, guide)

    def row(self, guide: Any) -> Tensor:
        """int32 [ceil(V / 32)]: the guide's state's row, to be copied from."""
        state = guide.get_state()
        row = self._rows.get(state)
        if row is None:
            row = allocate_bitmask(1, self._vocab_size)[0]
            guide.write_mask_into(row.data_ptr(), row.numel(), row.element_size())
            if len(self._rows) < MAX_CACHED_ROWS:
                self._rows[state] = row
        return row

    def facts(self, guide: Any) -> _StateFacts:
        state = guide.get_state()
        facts = self._facts.get(state)
        if facts is None:
            facts = self._facts[state] = self._look(self.row(guide))
        return facts

    def _look(self, row: Tensor) -> _StateFacts:
        texts = row & self._not_stop_row
        if not texts.any():
            return _StateFacts(None, True)
        words = row.nonzero().flatten().tolist()
        bits = int(row[words[0]]) & 0xFFFFFFFF
        is_single = len(words) == 1 and bits & (bits - 1) == 0
        return _StateFacts(words[0] * 32 + bits.bit_length() - 1 if is_single else None, False)


class OutlinesCoreMatcher(GrammarMatcher):
    """One sequence's place in the index. A stop token ends it: after one, nothing is allowed."""

    def __init__(self, grammar: OutlinesCoreGrammar, guide: Any) -> None:
        self._grammar = grammar
        self._guide = guide
        self._is_stopped = False

    def fill_bitmask(self, row: Tensor) -> None:
        if self._is_stopped:
            row.zero_()
        else:
            row.copy_(self._grammar.row(self._guide))

    def advance(self, token_id: int) -> bool:
        if self._is_stopped or self._grammar.index.get_next_state(self._guide.get_state(), token_id) is None:
            return False
        self._guide.advance(token_id, return_tokens=False)
        self._is_stopped = token_id in self._grammar.stop_token_ids
        return True

    def rollback(self, num_tokens: int) -> None:
        if num_tokens:
            self._guide.rollback_state(num_tokens)
            self._is_stopped = False

    def forced_tokens(self) -> list[int]:
        forced: list[int] = []
        while not self._is_stopped and len(forced) < MAX_FORCED_TOKENS:
            token_id = self._grammar.facts(self._guide).only_token
            if token_id is None:
                break
            self._guide.advance(token_id, return_tokens=False)
            forced.append(token_id)
        if forced:
            self._guide.rollback_state(len(forced))
        return forced

    @property
    def finished(self) -> bool:
        return self._is_stopped or self._grammar.facts(self._guide).may_only_stop


def _bit(token_id: int) -> int:
    """The token's bit in its word, as int32: the highest is the sign."""
    bit = token_id % 32
    return 1 << bit if bit < 31 else -(1 << 31)
