"""What the engine counts. Reading it costs nothing and stops nobody."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The first three are of this moment, the others have counted since the start. Tokens are tokens, `kv_cache_usage` is from 0 to 1.

    `accepted_lengths` counts drafts by how many of their tokens were right, none of them first.
    """

    num_running: int
    num_waiting: int
    kv_cache_usage: float
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_forced_tokens: int
    num_preemptions: int
    num_steps: int
    num_draft_tokens: int = 0
    accepted_lengths: tuple[int, ...] = ()

    @property
    def num_drafts(self) -> int:
        return sum(self.accepted_lengths)

    @property
    def accepted_by_place(self) -> list[int]:
        """In how many drafts the first token was right, the first two, and so on."""
        return [sum(self.accepted_lengths[place:]) for place in range(1, len(self.accepted_lengths))]

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_place)
