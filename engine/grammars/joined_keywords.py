"""What one value may have to satisfy at once: engines make one automaton for all of it, as large as their product."""

import math
from collections.abc import Callable
from decimal import Decimal
from typing import Any
from urllib.parse import unquote


def num_patterns(schema: dict[str, Any]) -> float:
    """Patterns and formats of the schema itself."""
    return sum(isinstance(schema.get(keyword), str) for keyword in ("pattern", "format"))


def divisor_bits(schema: dict[str, Any]) -> float:
    """How many bits the remainder of a division by `multipleOf` takes."""
    return math.log2(divisor(schema.get("multipleOf")))


def divisor(value: Any) -> int:
    """A number's digits: where the point stands makes no difference. 1 for anything else."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, float) and math.isfinite(value)):
        return 1
    return int("".join(map(str, Decimal(str(value)).as_tuple().digits)).rstrip("0") or "1")


class JoinedKeywords:
    """The most that `weight`, of single schemas, comes to in those that a value has to match together. May raise `RecursionError`."""

    def __init__(self, root: Any, weight: Callable[[dict[str, Any]], float]) -> None:
        self._root = root
        self._weight = weight
        self._known: dict[int, float] = {}

    def most(self) -> float:
        return self._most(self._root)

    def _most(self, schema: Any) -> float:
        if not isinstance(schema, dict | list):
            return 0
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = 0  # what it is while one looks at it from within
        if isinstance(schema, list):
            most = max(map(self._most, schema), default=0)
        else:
            joined = schema.get("allOf")
            reference = schema.get("$ref")
            most = self._weight(schema)
            most += sum(map(self._most, joined)) if isinstance(joined, list) else 0
            most += self._most(referred(self._root, reference)) if isinstance(reference, str) else 0
            others = (child for keyword, child in schema.items() if keyword not in ("allOf", "$defs", "definitions", "enum", "const"))
            most += max(map(self._most, others), default=0)
        self._known[id(schema)] = most
        return most


def referred(root: Any, reference: str) -> Any:
    """What a reference within the document leads to; None where it leads nowhere, which is for the backends to refuse."""
    target = root
    for step in reference.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(step)
        elif isinstance(target, list) and (place := position(step, len(target))) is not None:
            target = target[place]
        else:
            return None
    return target


def position(step: str, length: int) -> int | None:
    """Where in an array of that length a step of a JSON Pointer leads; None where nowhere. It may be as long as its author likes."""
    is_number = step.isascii() and step.isdigit() and len(step) <= len(str(length))
    return int(step) if is_number and int(step) < length else None
