"""Which numbers of a JSON Schema llguidance can ask for: it has doubles, and whole numbers of 64 bits."""

import math

LARGEST_EXACT = 2**53
_LARGEST_BOUND = 2**63 - 1024  # the largest double of 64 bits with a sign


def nearest_bound(bound: int, *, is_lower: bool) -> int | None:
    """The nearest double within, where the bound itself is none; None for one that would leave too little."""
    if abs(bound) <= LARGEST_EXACT:
        return bound
    if abs(bound) > _LARGEST_BOUND and (bound < 0) != is_lower:
        return None
    nearest = float(max(-_LARGEST_BOUND, min(bound, _LARGEST_BOUND)))
    if is_lower and int(nearest) < bound:
        nearest = math.nextafter(nearest, math.inf)
    elif not is_lower and int(nearest) > bound:
        nearest = math.nextafter(nearest, -math.inf)
    return int(nearest)
