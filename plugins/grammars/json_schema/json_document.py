"""Reads the JSON that a client sends inside a constraint, bounded in depth."""

import json
from collections.abc import Iterable
from typing import Any, NoReturn

from penstock.engine.errors import UnsupportedGrammar

MAX_DEPTH = 192  # of the document: a schema within another stands up to two levels deeper, and a value in it has levels of its own

_CONTAINERS = (dict, list)


def parse_document(text: str, param: str) -> Any:
    """The decoded document, members in the client's order. Raises `UnsupportedGrammar` where it is not JSON or nests too deeply."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UnsupportedGrammar(f"not valid JSON: {error}", param) from error
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return document
    level: list[Iterable[Any]] = [[document]]
    for _ in range(MAX_DEPTH + 2):
        inner = [child for members in level for child in members if isinstance(child, _CONTAINERS)]
        level = [child.values() if isinstance(child, dict) else child for child in inner]
        if not level:
            return document
    raise UnsupportedGrammar(f"nested deeper than {MAX_DEPTH}", param)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")
