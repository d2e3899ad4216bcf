"""How long what a request leaves in the prefix cache is to stay there, beside what others leave."""

from dataclasses import dataclass

DEFAULT_RETENTION = 35
MAX_RETENTION = 100


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """Blocks of a lower priority, from 0 to 100, are evicted first. After `seconds`, if any, the priority is the default one again."""

    priority: int = DEFAULT_RETENTION
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Retention:
    """Rules for ranges (first token, end or None, rule) of the prompt, the first that touches a block, and one for the blocks after it.

    Blocks that no rule is for keep the priority that they have: requests without any do not take it from those that share their blocks.
    """

    ranges: tuple[tuple[int, int | None, RetentionRule], ...] = ()
    output: RetentionRule | None = None

    def rule_of(self, block: int, block_size: int, num_prompt_tokens: int) -> RetentionRule | None:
        """The rule for the sequence's block of that number."""
        first, end = block * block_size, (block + 1) * block_size
        if first >= num_prompt_tokens:
            return self.output
        touching = (rule for start, stop, rule in self.ranges if start < end and (stop is None or stop > first))
        return next(touching, None)
