"""How far a step goes ahead of what is known, and what came of it."""

import heapq
from dataclasses import dataclass, field

from penstock.engine.speculation import NgramProposer

MAX_DRAFT = 16  # tokens
MIN_ACCURACY = 0.3  # of so few guesses as are remembered, less may be luck
MIN_MAX_ROWS = 32  # what a step may have with drafts, however few sequences may run at once


@dataclass(slots=True)
class Speculation:
    """Decides how many tokens each sequence tries in a step, by what they cost and how sure its guesses have been.

    A step over R rows takes about as long as `rows_for_weights` + R rows would if the weights cost nothing to read: one more row adds
    1 / (`rows_for_weights` + R) to the step. With S sequences, a draft's row gains a token of S with the probability that it and all
    before it are right. So it is worth its time where that probability is above S / (`rows_for_weights` + R). The likeliest come first,
    and all together they make a step at most half as long again, or are no more than one sequence may have: those who wait for others'
    drafts gain nothing by them.

    `lengths` counts drafts by how many of their tokens were right.
    """

    rows_for_weights: float
    num_drafted: int = 0
    lengths: list[int] = field(default_factory=lambda: [0] * (MAX_DRAFT + 1))

    def share(self, proposers: list[NgramProposer], limit: int, *, num_rows: int, num_sequences: int) -> list[int]:
        """How many tokens each may propose, at most `limit` in all, in a step of `num_rows` rows without them for `num_sequences`."""
        limit = min(limit, max(MAX_DRAFT, int((self.rows_for_weights + num_rows) / 2)))
        lengths = [0] * len(proposers)
        queue = [
            (-proposer.accuracy, index)
            for index, proposer in enumerate(proposers)
            if proposer.read() and proposer.has_guess and proposer.accuracy >= MIN_ACCURACY
        ]
        heapq.heapify(queue)
        for num_drafted in range(limit):
            if not queue or -queue[0][0] * (self.rows_for_weights + num_rows + num_drafted) <= num_sequences:
                break
            probability, index = queue[0]
            lengths[index] += 1
            if lengths[index] < MAX_DRAFT:
                heapq.heapreplace(queue, (probability * proposers[index].accuracy, index))
            else:
                heapq.heappop(queue)
        return lengths

    def is_worthwhile(self, proposers: list[NgramProposer], *, num_rows: int) -> bool:
        """Whether any of them, as sure as it is now, would be given a token to try in a step of `num_rows` sequences."""
        return any(
            proposer.read()
            and proposer.has_guess
            and proposer.accuracy >= MIN_ACCURACY
            and proposer.accuracy * (self.rows_for_weights + num_rows) > num_rows
            for proposer in proposers
        )

    def count(self, num_drafted: int, num_accepted: int) -> None:
        self.num_drafted += num_drafted
        self.lengths[num_accepted] += 1
