"""Admission: the queue of waiting sequences, by priority, age and arrival, with bounds on sequences and tokens, and whether one starts now.

It waits for blocks that are being computed, and where the running sequences will need all of them once they have grown to what is expected
of them.
"""

import bisect
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from penstock.engine.errors import QueueFull
from penstock.engine.kv_cache.blocks import BlockPool, BlockTable, KVCacheManager
from penstock.engine.request import BACKGROUND
from penstock.engine.sequence import Sequence

MAX_EMBED_BYTES = 2**31  # of the images and vectors that wait: a small file may be a large image
PACE_SECONDS = 20.0  # after which what was measured counts for a third
MAX_RETRY_SECONDS = 60  # OpenAI's and Anthropic's clients wait as long as they are asked to up to this
ASSUMED_SECONDS = 1.0  # for which a queue has to be observed until what is assumed of its pace counts no more
FIRST_IN_BACKGROUND = (True, BACKGROUND, -1, -1)
FIRST_LENGTH = 2048  # tokens; what answers are expected to have before any has ended
NUM_FIRST = 16  # as many answers are taken to have ended so: the first that do end are the shortest ones
NUM_REMEMBERED = 512
RESERVED = 0.95  # of the expected growth: all of it would leave blocks unused, to compute at best a few hundredths less


@dataclass(slots=True)
class WaitingLoad:
    """The waiting sequences, forks included, the tokens of their prompts, and the bytes of images and vectors in these."""

    num_sequences: int = 0
    num_tokens: int = 0
    num_embed_bytes: int = 0

    def add(self, sequence: Sequence, sign: int) -> None:
        self.num_sequences += sign * sequence.max_num_running
        self.num_tokens += sign * sequence.num_prompt_tokens
        self.num_embed_bytes += sign * sequence.request.num_embed_bytes

    def __iadd__(self, other: "WaitingLoad") -> "WaitingLoad":
        self.num_sequences += other.num_sequences
        self.num_tokens += other.num_tokens
        self.num_embed_bytes += other.num_embed_bytes
        return self


@dataclass(slots=True)
class Pace:
    """How many, of sequences or tokens, leave the queue in a time. What is longer ago counts less, and after a minute little."""

    _seconds: float = 0.0
    _amount: float = 0.0
    _now: float = 0.0

    def add(self, amount: int, seconds: float, now: float) -> None:
        """What has left within so many seconds up to now."""
        kept = math.exp((self._now - now) / PACE_SECONDS)
        self._now = now
        self._seconds = self._seconds * kept + seconds
        self._amount = self._amount * kept + amount

    @property
    def seconds(self) -> float:
        """For which it has been measured, as far as that still counts."""
        return self._seconds

    def seconds_for(self, amount: int, at_least: int = 0, assumed: int = 0, assumed_seconds: float = 0.0) -> float:
        """Counts with `at_least` so many where fewer have left; otherwise it is 0 before any has.

        Where `assumed` is given, so many a second are taken to have left for the `assumed_seconds` before anything was measured.
        """
        left = max(self._amount + assumed_seconds * assumed, at_least)
        return amount * (self._seconds + assumed_seconds) / left if left else 0.0


@dataclass(frozen=True, slots=True)
class AssumedPace:
    """What leaves a queue in a second until that is measured: as many sequences as there are places, and one step's tokens of prompts."""

    num_sequences: int = 1
    num_tokens: int = 1


def unmeasured_seconds(*paces: Pace) -> float:
    """For how long the assumed pace counts beside what was measured: none, once that is a second."""
    return max(0.0, ASSUMED_SECONDS - sum(pace.seconds for pace in paces))


@dataclass(slots=True)
class QueueTime:
    """How long what waits takes to be scheduled, by how quickly others were, while they waited too.

    Two things may keep sequences waiting, and each has its pace: that sequences end, where all places are taken, or that prompts are
    computed. What is measured under one of them says nothing about the other.
    """

    by_sequences: Pace = field(default_factory=Pace)
    by_tokens: Pace = field(default_factory=Pace)
    _observed: float | None = None  # while sequences wait: when they were counted last
    _num_sequences: int = 0  # that have left the queue since then
    _num_tokens: int = 0

    def count(self, sequence: Sequence) -> None:
        """It is scheduled."""
        self._num_sequences += sequence.max_num_running
        self._num_tokens += sequence.num_prompt_tokens

    def observe(self, now: float, num_free: int, *, is_empty: bool) -> None:
        """The scheduler has admitted what it could, and this many places are free."""
        if self._observed is not None:
            seconds = now - self._observed
            if num_free:
                self.by_tokens.add(self._num_tokens, seconds, now)
            else:
                self.by_sequences.add(self._num_sequences, seconds, now)
        self._observed = None if is_empty else now
        self._num_sequences = self._num_tokens = 0

    @property
    def is_observed(self) -> bool:
        """Whether sequences waited the last time."""
        return self._observed is not None

    def seconds_for(self, load: WaitingLoad, num_free: int, assumed: AssumedPace | None = None) -> float:
        """As measured, which is 0 before anything was; with `assumed`, as long as too little was measured, as that says."""
        pace = assumed or AssumedPace()
        rest = 0.0 if assumed is None else unmeasured_seconds(self.by_sequences, self.by_tokens)
        # Where none has ended yet, the next one may: without that, all that comes until the first has ended would be added.
        for_places = self.by_sequences.seconds_for(max(0, load.num_sequences - num_free), 1, pace.num_sequences, rest)
        return max(for_places, self.by_tokens.seconds_for(load.num_tokens, 0, pace.num_tokens, rest))


class WaitingQueue:
    """In order of priority, then arrival. Sequences with forks wait as one, and count as all that will run.

    `max_sequences`, `max_tokens`, of prompts, and `MAX_EMBED_BYTES` bound the queue: no request is added once one is reached, so an idle
    server refuses none. None is no bound. Neither is one added while those that wait take `max_seconds` to be scheduled, as far as can be
    said (`QueueTime`); 0 is no bound. A sequence that has waited for `aging_seconds` goes before all that have not, whatever their
    priority, so that each is scheduled in the end; 0 switches that off. Preempted sequences come back whatever the bounds, with the age
    that they have. Background sequences do not age, and have bounds of their own, as large, so that they never have another refused.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_tokens: int | None = None,
        max_seconds: float = 0.0,
        aging_seconds: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sequences: list[Sequence] = []
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._aging_seconds = aging_seconds
        self._clock = clock
        self._load, self._background_load = WaitingLoad(), WaitingLoad()
        self._by_rank: dict[tuple[bool, int], WaitingLoad] = {}  # foreground sequences, by the beginning of their order
        self._time = QueueTime()
        self.count_free: Callable[[], int] = int  # the scheduler's: how many sequences more may run
        self.assumed = AssumedPace()  # the scheduler's

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._sequences

    @property
    def num_foreground(self) -> int:
        """How many are not background sequences; in the order they are the first. Those with forks count as one."""
        return bisect.bisect_left(self._sequences, FIRST_IN_BACKGROUND, key=scheduling_order)

    def first(self, count: int) -> list[Sequence]:
        """Those that are to be scheduled first."""
        return self._sequences[:count]

    def check_admission(self, priority: int = 0) -> None:
        """Raises `QueueFull` where a bound is reached. Of foreground sequences, those behind one of this priority do not count, as long as
        all together are not twice as many as the bound.
        """
        is_background = priority == BACKGROUND
        load = self._background_load if is_background else self._load
        reason = self._reason_to_refuse(load, 1)
        if not reason:
            return
        if not is_background and not self._reason_to_refuse(self._load_before(priority), 1) and not self._reason_to_refuse(load, 2):
            return
        seconds = retry_seconds(self._time.seconds_for(load, self.count_free(), self.assumed))
        raise QueueFull(f"{reason}; try again in {seconds} s", seconds)

    def _reason_to_refuse(self, load: WaitingLoad, factor: int) -> str:
        """Which of the bounds, times the factor, a load has reached; empty where none."""
        if load.num_sequences >= factor * self._max_sequences:
            return f"{load.num_sequences} sequences are waiting already"
        if self._max_tokens is not None and load.num_tokens >= factor * self._max_tokens:
            return f"prompts with {load.num_tokens} tokens are waiting already"
        if load.num_embed_bytes >= MAX_EMBED_BYTES:
            return f"prompts with {load.num_embed_bytes} bytes of images and vectors are waiting already"
        if self._max_seconds and load is not self._background_load and (seconds := self._seconds_for(load)) >= factor * self._max_seconds:
            return f"the queue takes {seconds:.1f} s"
        return ""

    def _load_before(self, priority: int) -> WaitingLoad:
        """What waits before a new sequence of this priority. Its time goes with the number of priorities, not of sequences: each refusal
        has to know it.
        """
        load = WaitingLoad()
        for rank, own in self._by_rank.items():
            if rank <= (True, priority):
                load += own
        return load

    def _seconds_for(self, load: WaitingLoad) -> float:
        return self._time.seconds_for(load, self.count_free())

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence with its forks. Raises `QueueFull`."""
        self.check_admission(sequence.request.priority)
        for member in sequence.self_and_forks:
            member.queued_at = self._clock()
        self.put_back(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queues a sequence that was preempted."""
        bisect.insort(self._sequences, sequence, key=scheduling_order)
        self._count(sequence, 1)

    def remove(self, sequence: Sequence) -> None:
        self._sequences.remove(sequence)
        self._count(sequence, -1)

    def admit(self, sequence: Sequence) -> None:
        """Removes a sequence that is scheduled."""
        self.remove(sequence)
        self._time.count(sequence)

    def observe(self) -> None:
        """To be called when the scheduler has admitted what it could."""
        if self._load.num_sequences or self._time.is_observed:
            self._time.observe(self._clock(), self.count_free(), is_empty=not self._load.num_sequences)

    def seconds_waited(self, sequence: Sequence) -> float:
        """Since it was first queued."""
        return self._clock() - sequence.queued_at

    def age(self) -> None:
        """Moves those that have waited for long to the front, in order of arrival. To be called before the order counts."""
        if not self._aging_seconds:
            return
        oldest = self._clock() - self._aging_seconds
        aged = [
            sequence
            for sequence in self._sequences
            if not sequence.has_aged and sequence.queued_at <= oldest and not sequence.is_background
        ]
        if aged:
            for sequence in aged:
                self._count_rank(sequence, -1)
                sequence.has_aged = True
                self._count_rank(sequence, 1)
            self._sequences.sort(key=scheduling_order)

    def check_integrity(self) -> None:
        """Asserts that the order holds and that the counts are those of the sequences."""
        assert self._sequences == sorted(self._sequences, key=scheduling_order)
        foreground, background = self._sequences[: self.num_foreground], self._sequences[self.num_foreground :]
        for load, sequences in ((self._load, foreground), (self._background_load, background)):
            assert all(sequence.is_background == (sequences is background) for sequence in sequences)
            assert load.num_sequences == sum(sequence.max_num_running for sequence in sequences)
            assert load.num_tokens == sum(sequence.num_prompt_tokens for sequence in sequences)
            assert load.num_embed_bytes == sum(sequence.request.num_embed_bytes for sequence in sequences)
        ranks = {sequence.order[:2] for sequence in foreground}
        assert self._by_rank.keys() == ranks
        for rank, own in self._by_rank.items():
            assert own.num_tokens == sum(sequence.num_prompt_tokens for sequence in foreground if sequence.order[:2] == rank)

    def _count(self, sequence: Sequence, sign: int) -> None:
        if sequence.is_background:
            self._background_load.add(sequence, sign)
        else:
            self._load.add(sequence, sign)
            self._count_rank(sequence, sign)

    def _count_rank(self, sequence: Sequence, sign: int) -> None:
        load = self._by_rank.setdefault(rank := sequence.order[:2], WaitingLoad())
        load.add(sequence, sign)
        if not load.num_sequences:
            del self._by_rank[rank]


def retry_seconds(seconds: float) -> int:
    """What `Retry-After` says where a queue takes so long."""
    return min(MAX_RETRY_SECONDS, max(1, math.ceil(seconds)))


def scheduling_order(sequence: Sequence) -> tuple[bool, int, int, int]:
    return sequence.order


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
