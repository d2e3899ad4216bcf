"""What a field of an executor's request may be, as far as Python's types go."""

from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any, NoReturn


def check_type(value: object, name: str, kinds: type | tuple[type, ...], what: str) -> None:
    """Raises `TypeError` for a value that is neither None nor of these kinds. A bool is a number to nobody."""
    if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool)):
        wrong(name, what, value)


def check_integers(instance: object, *names: str) -> None:
    for name in names:
        check_type(getattr(instance, name), name, Integral, "an integer")


def check_numbers(instance: object, *names: str) -> None:
    for name in names:
        check_type(getattr(instance, name), name, Real, "a number")


def check_flags(instance: object, *names: str) -> None:
    for name in names:
        check_type(getattr(instance, name), name, bool, "True or False")


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """The ids of a sequence, a tensor or an array. Raises `TypeError` for anything else."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, str | bytes) or not isinstance(items, Iterable):
        wrong(name, "token ids", value)
    ids = tuple(items)
    for item in ids:
        check_type(item, name, Integral, "made of integers")
        if item is None:
            wrong(name, "made of integers", item)
    return tuple(map(int, ids))


def words(value: Any, name: str) -> tuple[str | tuple[int, ...], ...]:
    """Words, each text or token ids. Raises `TypeError` for anything else."""
    if value is None:
        return ()
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        wrong(name, "a list of words, each token ids or text", value)
    return tuple(word if isinstance(word, str) else token_ids(word, f"{name}[{place}]") for place, word in enumerate(value))


def wrong(name: str, what: str, value: object) -> NoReturn:
    raise TypeError(f"`{name}` must be {what}, got {value!r:.100}")
