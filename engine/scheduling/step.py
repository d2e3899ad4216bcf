"""A step as it is scheduled: the tokens of each sequence, and what is copied before and after them. And how many tokens steps have."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.engine.kv_cache.block_pool import BlockPool
from penstock.engine.sequence import Sequence
from penstock.engine.system.histogram import Histogram

if TYPE_CHECKING:
    from penstock.engine.scheduling.scheduler import Scheduler

STEPS_UNTIL_LARGER = 256  # that a step's size stays lowered for: memory that others took may be free again
STEP_BOUNDS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The states after the first `position` tokens of a sequence, which a step copies to a slot."""

    sequence: Sequence
    position: int
    slot: int


@dataclass(slots=True)
class Step:
    """One pass over the model: tokens per sequence (decodes first), and blocks (source, target) to copy before it.

    `promised` are the blocks that the pass fills and that others may count on already, in the same pass: every layer writes the keys and
    values of all tokens before any of them attends. With each comes the generation that it has in the pool. `num_held_up` counts the
    sequences passed over because their mask, or blocks from disk, are not there yet. `drafts` are the draft tokens of sequences. They are
    not in `num_tokens`. `num_wanted` is how many of the next ones a draft model is to propose.
    `is_counted` says that its tokens are among the computed ones of their sequences, although the step may still be under way.
    `snapshots` are those of recurrent layers' states that the pass takes.
    `dropped` were scheduled while the step before was in flight, and continue otherwise than was assumed: their rows count for nothing.
    """

    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    promised: dict[int, int] = field(default_factory=dict)
    num_held_up: int = 0
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    num_wanted: dict[Sequence, int] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    is_counted: bool = False
    dropped: set[Sequence] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.num_tokens)

    def still_promised(self, pool: BlockPool) -> list[int]:
        """The promised blocks that hold, or will hold, what they were promised with.

        A sequence that ends while the step is in flight frees its blocks, and a step scheduled ahead may publish them for another sequence.
        """
        return [block for block, generation in self.promised.items() if pool.generation(block) == generation]


@dataclass(slots=True)
class StepSize:
    """The most tokens of a step: as many as were asked for, or fewer for a while after a step that ran out of memory.

    `tokens` are those of the steps so far.
    """

    scheduler: "Scheduler"
    tokens: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS))
    _usual: int = field(init=False)
    _num_steps_left: int = 0

    def __post_init__(self) -> None:
        self._usual = self.scheduler.max_num_batched_tokens

    def halve(self, num_tokens: int) -> int:
        """Of a step of so many tokens; returns what is left."""
        self.scheduler.max_num_batched_tokens = max(1, num_tokens // 2)
        self._num_steps_left = STEPS_UNTIL_LARGER
        return self.scheduler.max_num_batched_tokens

    def count_step(self, num_tokens: int) -> None:
        """A step of so many tokens has been computed."""
        self.tokens.observe(num_tokens)
        if self.scheduler.max_num_batched_tokens == self._usual:
            return
        self._num_steps_left -= 1
        if self._num_steps_left == 0:
            self.scheduler.max_num_batched_tokens = min(self._usual, 2 * self.scheduler.max_num_batched_tokens)
            self._num_steps_left = STEPS_UNTIL_LARGER
