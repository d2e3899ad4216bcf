"""Closing a model's reasoning for it when it has thought long enough."""

from penstock.engine.answer import Answer
from penstock.engine.parsing import Phase


class ThinkingBudget:
    """At most `budget` tokens of reasoning, then the engine itself writes the end marker.

    A model that would end its answer while it still reasons has its reasoning closed as well: whoever sets a budget wants an answer.
    """

    def __init__(self, budget: int, end_token_ids: list[int]) -> None:
        self.budget = budget
        self.end_token_ids = end_token_ids

    def must_close(self, answer: Answer, *, is_stopping: bool) -> bool:
        """Whether the end marker takes the place of the token just sampled; `is_stopping` says that it would end the answer."""
        return answer.phase is Phase.REASONING and (is_stopping or answer.num_reasoning_tokens >= self.budget)
