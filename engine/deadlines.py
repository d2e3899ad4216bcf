"""Deadlines of requests."""

import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class Deadlines:
    """When which request has to end, in `time.monotonic()`."""

    _by_request: dict[str, float] = field(default_factory=dict)

    def add(self, request_id: str, deadline: float | None) -> None:
        if deadline is not None:
            self._by_request[request_id] = deadline

    def discard(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)

    def take_overdue(self) -> list[str]:
        """The requests whose time is over, each once."""
        if not self._by_request:
            return []
        now = time.monotonic()
        overdue = [request_id for request_id, deadline in self._by_request.items() if deadline <= now]
        for request_id in overdue:
            del self._by_request[request_id]
        return overdue

    def seconds_left(self, at_most: float) -> float:
        """Until the next of them, or `at_most`."""
        return max(0.0, min(at_most, min(self._by_request.values(), default=float("inf")) - time.monotonic()))
