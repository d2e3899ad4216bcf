"""Admission: the tokens of a step that a sequence gets, and whether it starts now: it waits for blocks that are being computed, and where
the running sequences will need all of them once they have grown to what is expected of them.
"""

import bisect
import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.kv_cache.block_pool import BlockPool
from penstock.engine.kv_cache.manager import BlockTable, KVCacheManager
from penstock.engine.multimodal.inputs import PromptEmbeds, spans_within
from penstock.engine.sequence import Sequence

SHORT_CHUNK = 8  # a chunk of at most so many tokens goes through the decode kernel, which is faster for so few
MIN_CHUNK = 128  # a long prompt's share of a step never falls below this while others wait: smaller matrices waste the processor
FIRST_LENGTH = 2048  # tokens; what answers are expected to have before any has ended
NUM_FIRST = 16  # as many answers are taken to have ended so: the first that do end are the shortest ones
NUM_REMEMBERED = 512
RESERVED = 0.95  # of the expected growth: all of it would leave blocks unused, to compute at best a few hundredths less


def is_chunk(sequence: Sequence, num_tokens: int) -> bool:
    """Whether these next tokens of the sequence go through the prefill kernel, which alone knows attention in both directions."""
    if num_tokens == 1 or not sequence.request.embeds:
        return num_tokens > SHORT_CHUNK
    first = sequence.num_computed_tokens
    return num_tokens > SHORT_CHUNK or any(spans_within(sequence.request.embeds, first, first + num_tokens))


@dataclass(slots=True)
class TokenBudget:
    """The tokens one step may compute; lives for one call of `schedule`. As many may be those of images that begin in the step."""

    left: int
    _num_image_tokens: int = 0
    _max_image_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self._max_image_tokens = self.left

    def take(self, wanted: int, num_others: int) -> int:
        """What one sequence may have of it. A long prompt takes half at most, so that it does not shut out those behind it."""
        share = max(MIN_CHUNK, self.left // 2) if num_others else self.left
        granted = min(wanted, share, self.left)
        self.left -= granted
        return granted

    def fit_images(self, sequence: Sequence, granted: int) -> int:
        """How many tokens the sequence computes where so many were granted: none of an image that has to wait for a later step, and of
        those whose tokens attend in both directions all or none.

        One image is always computed, however large it is.
        """
        if not sequence.request.embeds:
            return granted
        return self._with_whole_spans(sequence, self._before_image(sequence, granted))

    def _with_whole_spans(self, sequence: Sequence, granted: int) -> int:
        first = sequence.num_computed_tokens
        end = first + granted
        for start, stop in spans_within(sequence.request.embeds, first, end):
            if stop > end and (stop - end <= self.left or stop - start > self._max_image_tokens):
                self.left = max(0, self.left - (stop - end))
                return stop - first
            if stop > end:
                num_tokens = max(0, start - first)
                self.left += granted - num_tokens
                return num_tokens
        return granted

    def _before_image(self, sequence: Sequence, granted: int) -> int:
        first = sequence.num_computed_tokens
        for source in sequence.request.embeds:
            start, size = source.positions[0], len(source.positions)
            if isinstance(source, PromptEmbeds) or not first <= start < first + granted:
                continue
            if self._num_image_tokens and self._num_image_tokens + size > self._max_image_tokens:
                self.left += granted - (start - first)
                return start - first
            self._num_image_tokens += size
        return granted


class BlocksUnderway:
    """The blocks that running prompts will fill in later steps; lives for one call of `schedule`.

    Sequences that wait for the same prompt are found to be at the same place by one look each, however long it is.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._hashes: set[bytes] = set()
        self._found: dict[bytes, tuple[int, bytes]] = {}  # where a walk along cached blocks ended that began with this block

    def add(self, hashes: list[bytes]) -> None:
        self._hashes.update(hashes)

    def has_next_of(self, sequence: Sequence, num_usable: int) -> bool:
        """Whether the first of its usable blocks that is not cached will be soon. Begins where the sequence was the last time."""
        if not self._hashes:
            return False
        hashes = sequence.block_hashes
        start = place = min(sequence.num_blocks_found, num_usable)
        if place < num_usable:
            stop, last = self._found.get(hashes[place], (place, b""))
            if place < stop <= num_usable and hashes[stop - 1] == last:  # chained hashes: all blocks up to there are the same
                place = stop
        while place < num_usable and self._pool.has(hashes[place]):
            place += 1
        if start < place:
            self._found[hashes[start]] = (place, hashes[place - 1])
        sequence.num_blocks_found = place
        return place < num_usable and hashes[place] in self._hashes


class OutputLengths:
    """Expects of an answer the mean length of the last answers that were longer than it is so far.

    Source: the Past-Future scheduler (Gong et al., ASPLOS 2025).
    """

    def __init__(self) -> None:
        self._recent: deque[int] = deque([FIRST_LENGTH] * NUM_FIRST)
        self._sorted: list[int] = list(self._recent)
        self._mean_of_longer: list[float] = []  # by place in `_sorted`; empty where it has to be computed anew

    def add(self, num_tokens: int) -> None:
        """An answer has ended with so many tokens."""
        if len(self._recent) == NUM_REMEMBERED:
            self._sorted.pop(bisect.bisect_left(self._sorted, self._recent.popleft()))
        self._recent.append(num_tokens)
        bisect.insort(self._sorted, num_tokens)
        self._mean_of_longer = []

    def expected(self, num_said: int) -> int:
        """The expected length of an answer that has so many tokens; twice as many as it has where none was longer."""
        if not self._mean_of_longer:
            lengths = np.array(self._sorted[::-1])
            self._mean_of_longer = (np.cumsum(lengths) / np.arange(1, len(lengths) + 1))[::-1].tolist()
        place = bisect.bisect_right(self._sorted, num_said)
        return 2 * num_said if place == len(self._sorted) else math.ceil(self._mean_of_longer[place])


class BlockForecast:
    """The most blocks that will be in use at once, if each sequence grows as is expected of it and then gives up its blocks.

    Lives for one call of `schedule`. For each sequence: the blocks that it needs for the tokens that it has, those for the tokens that are
    still expected of it, and those that it holds alone. In layers with a sliding window it is taken to hold the whole window from now on.
    """

    def __init__(self, lengths: OutputLengths, blocks: KVCacheManager) -> None:
        self._lengths = lengths
        self._blocks = blocks
        self._needed: list[int] = []
        self._growth: list[int] = []
        self._own: list[int] = []
        self._num_to_come = 0

    def add(self, sequence: Sequence) -> None:
        """Adds a sequence that runs, with those that will run once their prompt is computed."""
        found = sequence.num_blocks_found
        num_own = sum(len(table) - max(found, table.num_freed) for table in sequence.block_tables)
        self._add(sequence, sequence.block_tables, num_own)

    def fits(self, sequence: Sequence, cached: list[BlockTable], num_used: int, num_blocks: int) -> bool:
        """Whether so many blocks will do where the sequence runs, too, on cached blocks. With those, `num_used` are in use."""
        before = len(self._needed), self._num_to_come
        self._add(sequence, cached, 0)
        fits = num_used + self._num_to_come <= num_blocks or num_used + self._peak() <= num_blocks
        num_before, self._num_to_come = before
        for column in (self._needed, self._growth, self._own):
            del column[num_before:]
        return fits

    def _add(self, sequence: Sequence, held: list[BlockTable], num_own: int) -> None:
        blocks, num_full = self._blocks, self._blocks.num_full_groups
        num_tokens = len(sequence.token_ids)
        num_blocks = -(-num_tokens // blocks.block_size)
        needed = (num_blocks - len(held[0])) * num_full
        num_sliding = sum(len(table.held) for table in held[num_full:])
        for member in sequence.self_and_forks:
            num_said = member.num_output_tokens
            num_left = min(self._lengths.expected(num_said), member.max_tokens) - num_said
            num_expected = num_tokens + RESERVED * num_left
            growth = (math.ceil(num_expected / blocks.block_size) - num_blocks) * num_full
            if blocks.has_windows:
                needed += max(0, blocks.num_sliding_blocks(math.ceil(num_expected)) - num_sliding)
                num_sliding = 0
            self._needed.append(needed)
            self._growth.append(growth)
            self._own.append(num_own)
            self._num_to_come += needed + growth
            needed = num_own = 0

    def _peak(self) -> int:
        """How many more blocks than now are in use at most."""
        growth = np.array(self._growth)
        order = np.argsort(growth)
        growth, needed, own = growth[order], np.array(self._needed)[order], np.array(self._own)[order]
        # When one ends, those before it hold nothing any more, and it and all after it have grown by as much as it has.
        still_needed = np.cumsum(needed[::-1])[::-1]
        given_up = np.cumsum(own) - own
        num_running = np.arange(len(order), 0, -1)
        return int((still_needed + num_running * growth - given_up).max())
