"""JSON that comes inside a string of the request, and values of the request as JSON text."""

import json
from typing import Any, NoReturn

from penstock.engine.errors import InvalidRequest


def read_json(text: str, param: str) -> Any:
    """The value. Raises `InvalidRequest` for what is not JSON, and for an object with a name in it twice: which of them counts is open."""
    try:
        return json.loads(text, object_pairs_hook=_unique_names, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"`{param}` is not valid JSON: {str(error)[:200]}", param) from None


def write_json(value: Any, param: str) -> str:
    """The value's text, its members in their order. Raises `InvalidRequest` for what has none, such as halves of surrogate pairs."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"`{param}` cannot be written as JSON: {str(error)[:200]}", param) from None
    return text


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in members if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice[:100]!r} twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
