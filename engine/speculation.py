"""How far a step goes ahead of what is known, and what came of it."""

from dataclasses import dataclass, field

from penstock.engine.ngram_proposer import NgramProposer

MAX_DRAFT = 16  # tokens
MIN_ACCURACY = 0.3  # of so few guesses as are remembered, less may be luck
MIN_MAX_ROWS = 32  # what a step may have with drafts, however few sequences may run at once


@dataclass(slots=True)
class Speculation:
    """Decides how many tokens each sequence tries in a step, by what they cost and how sure its guesses have been.

    A step over R rows takes about as long as `rows_for_weights` + R rows would if the weights cost nothing to read: one more row adds
    1 / (`rows_for_weights` + R) to the step. With S sequences, a draft's row gains a token of S with the probability that it and all
    before it are right. So it is worth its time where that probability is above S / (`rows_for_weights` + R).

    `lengths` counts drafts by how many of their tokens were right.
    """

    rows_for_weights: float
    num_drafted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))

    def draft(self, proposer: NgramProposer, limit: int, *, num_rows: int, num_sequences: int) -> list[int]:
        """At most `limit` tokens, in a step that has `num_rows` rows without them and samples for `num_sequences`."""
        if not proposer.read() or proposer.accuracy < MIN_ACCURACY:
            return []
        num_tokens, probability = 0, proposer.accuracy
        while num_tokens < min(limit, MAX_DRAFT) and probability * (self.rows_for_weights + num_rows + num_tokens) > num_sequences:
            num_tokens += 1
            probability *= proposer.accuracy
        return proposer.propose(num_tokens) if num_tokens else []

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.lengths[num_accepted] += 1
