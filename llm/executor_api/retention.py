"""How long a request's blocks stay in the KV cache. Names and meanings are those of TensorRT-LLM's `KvCacheRetentionConfig`."""

from dataclasses import dataclass, field
from datetime import timedelta

from penstock.engine.block_pool import DEFAULT_RETENTION, MAX_RETENTION, Retention, RetentionRule
from penstock.llm.executor_api.checks import check_integers, check_type


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Blocks that hold tokens from `token_start` up to `token_end`, not included, or the end of the prompt.

    Those of a lower `priority`, from 0 to 100, are evicted first; after `duration_ms` (milliseconds or a timedelta), if any, it is the
    default one again, 35. Raises `ValueError` and `TypeError` for what is none of this.
    """

    token_start: int
    token_end: int | None = None
    priority: int = DEFAULT_RETENTION
    duration_ms: float | timedelta | None = None

    def __post_init__(self) -> None:
        check_integers(self, "token_start", "token_end", "priority")
        check_duration(self.duration_ms, "duration_ms")
        check_priority(self.priority, "priority")
        if self.token_start < 0 or (self.token_end is not None and self.token_end <= self.token_start):
            raise ValueError(f"`token_end` must come after `token_start`, got {self.token_start} and {self.token_end}")


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Ranges of the prompt, earlier ones before later ones, and the priority of the blocks that only hold what was generated."""

    token_range_retention_configs: list[TokenRangeRetentionConfig] = field(default_factory=list)
    decode_retention_priority: int = DEFAULT_RETENTION
    decode_duration_ms: float | timedelta | None = None

    def __post_init__(self) -> None:
        for place, token_range in enumerate(self.token_range_retention_configs):
            check_type(token_range, f"token_range_retention_configs[{place}]", TokenRangeRetentionConfig, "a TokenRangeRetentionConfig")
        check_integers(self, "decode_retention_priority")
        check_duration(self.decode_duration_ms, "decode_duration_ms")
        check_priority(self.decode_retention_priority, "decode_retention_priority")

    @property
    def retention(self) -> Retention:
        """The same in the engine's terms."""
        ranges = tuple(
            (given.token_start, given.token_end, RetentionRule(given.priority, _seconds(given.duration_ms)))
            for given in self.token_range_retention_configs
        )
        return Retention(ranges, RetentionRule(self.decode_retention_priority, _seconds(self.decode_duration_ms)))


def check_duration(value: float | timedelta | None, name: str) -> None:
    check_type(value, name, (int, float, timedelta), "a number of milliseconds or a timedelta")


def check_priority(value: int, name: str) -> None:
    if not 0 <= value <= MAX_RETENTION:
        raise ValueError(f"`{name}` must be from 0 to {MAX_RETENTION}, got {value}")


def _seconds(duration: float | timedelta | None) -> float | None:
    if duration is None:
        return None
    return duration.total_seconds() if isinstance(duration, timedelta) else duration / 1000
