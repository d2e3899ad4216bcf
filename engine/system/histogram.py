"""A histogram that may be added to for every token: prometheus_client's own takes a lock and looks through the buckets one by one."""

from bisect import bisect_left
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """`counts[i]` are the values above `bounds[i - 1]`, up to `bounds[i]`; the last, those above all bounds. `total` is their sum.

    Belongs to one thread; others may read it, and see a value in `counts` before it is in `total`.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> "Histogram":
        return Histogram(self.bounds, [*self.counts], self.total)

    @property
    def num_values(self) -> int:
        return sum(self.counts)
