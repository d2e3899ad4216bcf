"""A step as it is scheduled: the tokens of each sequence, what is copied before and after them, and how many tokens a step may have."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.engine.deltas import SequenceDelta
from penstock.engine.kv_cache.blocks import BlockPool
from penstock.engine.multimodal.inputs import PromptEmbeds, spans_within
from penstock.engine.sequence import Sequence, Status
from penstock.engine.system.histogram import Histogram

if TYPE_CHECKING:
    from penstock.engine.scheduling.scheduler import Scheduler

SHORT_CHUNK = 8  # a chunk of at most so many tokens goes through the decode kernel, which is faster for so few
MIN_CHUNK = 128  # a long prompt's share of a step never falls below this while others wait: smaller matrices waste the processor
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

    def count_computed(self) -> None:
        """Its tokens are computed, or will be before anything that is scheduled from now on."""
        if self.is_counted:
            return
        self.is_counted = True
        for sequence, num_tokens in self.num_tokens.items():
            if sequence.status is Status.RUNNING:
                sequence.num_computed_tokens += num_tokens

    def still_promised(self, pool: BlockPool) -> list[int]:
        """The promised blocks that hold, or will hold, what they were promised with.

        A sequence that ends while the step is in flight frees its blocks, and a step scheduled ahead may publish them for another sequence.
        """
        return [block for block, generation in self.promised.items() if pool.generation(block) == generation]


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


class StepObserver(Protocol):
    """Called on the engine's loop, twice for each step: must be quick and not raise. A step may begin before the previous one has ended."""

    def begin(self, step: Step) -> None:
        """The step has been scheduled, and not computed yet."""

    def end(self, step: Step, deltas: dict[str, list[SequenceDelta]]) -> None:
        """The step's results have been processed. `deltas` are those by request, empty where the step was cancelled."""
