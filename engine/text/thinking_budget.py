"""Closing a model's reasoning for it when it has thought long enough."""

from penstock.engine.parsing import Phase
from penstock.engine.text.answer import Answer


class ThinkingBudget:
    """At most `budget` tokens of reasoning, then the engine itself writes the end marker. None is no limit.

    A model that would end its answer while it still reasons has its reasoning closed as well: whoever sets a budget or a grammar wants an
    answer. So it has once: where it opens another block after that, it may end its answer there.
    A marker that no longer fits into the answer is not begun: half of one would pass for something that the model said.
    """

    def __init__(self, budget: int | None, end_token_ids: list[int]) -> None:
        self.budget = budget
        self.end_token_ids = end_token_ids
        self.has_closed = False
        """Whether the end marker has been written."""

    def must_close(self, answer: Answer, *, is_stopping: bool, room: int) -> bool:
        """Whether the end marker takes the place of the token just sampled.

        `is_stopping` says that this token would end the answer, `room` how many tokens the answer may still have, this one included.
        """
        is_spent = self.budget is not None and answer.num_reasoning_tokens >= self.budget
        is_due = answer.phase is Phase.REASONING and (is_spent or (is_stopping and not self.has_closed))
        return is_due and room >= len(self.end_token_ids)
