"""A step as it is scheduled: the tokens of each sequence, and what is copied before and after them."""

from dataclasses import dataclass, field

from penstock.engine.sequence import Sequence


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
    values of all tokens before any of them attends. `num_held_up` counts the sequences passed over because their mask, or blocks from disk,
    are not there yet. `drafts` are the draft tokens of sequences. They are not in `num_tokens`. `num_wanted` is how
    many of the next ones a draft model is to propose.
    `is_counted` says that its tokens are among the computed ones of their sequences, although the step may still be under way.
    `snapshots` are those of recurrent layers' states that the pass takes.
    `dropped` were scheduled while the step before was in flight, and continue otherwise than was assumed: their rows count for nothing.
    """

    num_tokens: dict[Sequence, int] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    promised: list[int] = field(default_factory=list)
    num_held_up: int = 0
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    num_wanted: dict[Sequence, int] = field(default_factory=dict)
    snapshots: list[Snapshot] = field(default_factory=list)
    is_counted: bool = False
    dropped: set[Sequence] = field(default_factory=set)

    def __bool__(self) -> bool:
        return bool(self.num_tokens)
