"""Who goes first, as a caller says it."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from penstock.engine.errors import InvalidRequest

Priority = int | Sequence[int] | None


def read_priority(given: Any, path: str = "priority") -> int:
    """Raises `InvalidRequest` for what cannot be compared with the priorities of other requests."""
    if not isinstance(given, Integral) or isinstance(given, bool):
        raise InvalidRequest(f"`{path}` must be an integer, of which the lower goes first, got {given!r:.100}", path)
    return int(given)


def read_priorities(given: Any, count: int, what: str) -> list[int]:
    """One for all of `count`, or one for each: `what` they are is said where there are not as many. None is 0. Raises `InvalidRequest`."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [0 if given is None else read_priority(given)] * count
    if len(given) != count:
        raise InvalidRequest(f"there are {count} {what} and {len(given)} priorities: give one, or one for each", "priority")
    return [read_priority(own, f"priority[{index}]") for index, own in enumerate(given)]
