"""What constraints have cost so far."""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


class CompileOutcome(StrEnum):
    """How a backend's attempt at a constraint ended."""

    COMPILED = "compiled"
    REFUSED = "refused"
    FAILED = "failed"


@dataclass(slots=True)
class CompileSeconds:
    """A backend's times. `counts[i]` are those from `BOUNDS[i - 1]`, excluded, to `BOUNDS[i]`; the last, those beyond all bounds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass(frozen=True, slots=True)
class GrammarStats:
    """`num_attempts` and `seconds` are by backend, and have counted since the start as have queries and hits. The others are of now."""

    num_attempts: Mapping[tuple[str, CompileOutcome], int]
    seconds: Mapping[str, CompileSeconds]
    num_cache_queries: int
    num_cache_hits: int
    num_cache_entries: int
    num_cache_bytes: int
    num_running: int
    num_waiting: int


class CompileCounts:
    """Counted in the threads that compile, read in another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_attempts: Counter[tuple[str, CompileOutcome]] = Counter()
        self._seconds: dict[str, CompileSeconds] = {}

    def add(self, backend: str, outcome: CompileOutcome, seconds: float) -> None:
        with self._lock:
            self._num_attempts[backend, outcome] += 1
            self._seconds.setdefault(backend, CompileSeconds()).add(seconds)

    def read(self) -> tuple[dict[tuple[str, CompileOutcome], int], dict[str, CompileSeconds]]:
        """Copies, which go on as they are."""
        with self._lock:
            return dict(self._num_attempts), {name: CompileSeconds([*one.counts], one.total) for name, one in self._seconds.items()}
