"""What one operation of a template may cost. A thread can be interrupted between bytecodes, but not inside any of these."""

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar

import jinja2

MAX_OUTPUT_CHARS = 2**25
MAX_INT_BITS = 4096
CHARS_PER_ITEM = 16  # what an element of a list weighs
SPEC = re.compile(r"\d{8,}|:[^{}]*\{")
PERCENT_SPEC = re.compile(r"\d{8,}|%[-+ #0\d.]*\*")
WIDTH_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TemplateTooLarge(jinja2.TemplateError):
    """A template would produce more than `MAX_OUTPUT_CHARS`, or compute with numbers of more than `MAX_INT_BITS`."""


def check_size(num_chars: int) -> None:
    if num_chars > MAX_OUTPUT_CHARS:
        raise TemplateTooLarge(f"the template produces more than {MAX_OUTPUT_CHARS} characters")


def concatenate(pieces: Iterable[Any]) -> str:
    """What `~`, a macro and a `set` block do with their parts."""
    texts, num_chars = [], 0
    for piece in pieces:
        texts.append(str(piece))
        num_chars += len(texts[-1])
        check_size(num_chars)
    return "".join(texts)


def join(separator: str, pieces: Iterable[Any]) -> str:
    texts = [str(piece) for piece in pieces]
    check_size(len(separator) * len(texts) + sum(map(len, texts)))
    return separator.join(texts)


def check_operation(operator: str, left: Any, right: Any) -> None:
    """Raises `TemplateTooLarge` for a sum, product, power, remainder or formatted text that is too large to compute."""
    if isinstance(left, int) and isinstance(right, int):
        num_bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if num_bits > MAX_INT_BITS:
            raise TemplateTooLarge(f"the template computes with numbers of more than {MAX_INT_BITS} bits")
    elif operator == "+":
        check_size(_size(left) + _size(right))
    elif operator == "*":
        check_size(_size(left) * max(right, 0) if isinstance(right, int) else _size(right) * left if isinstance(left, int) else 0)
    elif operator == "%" and isinstance(left, str):
        check_percent(left, right)


def check_percent(text: str, values: Any) -> None:
    """For `text % values`: a width that is too large, or that is only known while it is written."""
    if PERCENT_SPEC.search(text):
        raise TemplateTooLarge("a width in a format string is too large")
    items = values.values() if isinstance(values, Mapping) else values if isinstance(values, tuple) else (values,)
    check_size(len(text) + text.count("%") * max(map(_size, items), default=0))


def check_format(text: str) -> None:
    """The same for `text.format(...)`."""
    if SPEC.search(text):
        raise TemplateTooLarge("a width in a format string is too large")


def check_method(function: Any, arguments: tuple[Any, ...]) -> None:
    """For calls of the methods of texts and numbers: those that pad or repeat, and those that put longer text in place of shorter."""
    owner = getattr(function, "__self__", None)
    if not isinstance(owner, str | bytes | int):
        return
    check_widths(*arguments)
    match function.__name__, arguments:
        case "replace", (old, new, *_):
            check_size(_replaced_size(owner, old, new))
        case "join", (pieces, *_) if isinstance(pieces, list | tuple):
            check_size(_size(owner) * len(pieces) + sum(map(_size, pieces)))
        case "expandtabs", (width, *_) if isinstance(width, int):
            check_size(_size(owner) * max(width, 1))
        case "translate", (table, *_) if isinstance(table, Mapping):
            check_size(_size(owner) * max(map(_size, table.values()), default=1))


def check_widths(*arguments: object) -> None:
    for argument in arguments:
        if isinstance(argument, int):
            check_size(abs(argument))


def check_filter_widths(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The filter, with its numbers checked; not the value that it is applied to, which may be any."""

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        check_widths(*args[1:], *kwargs.values())
        return function(*args, **kwargs)

    return checked


def replace(value: object, old: object, new: object, count: int | None = None) -> str:
    """Jinja's filter, bounded."""
    check_size(_replaced_size(str(value), str(old), str(new)))
    return str(value).replace(str(old), str(new), -1 if count is None else count)


def percent_format(value: object, *args: object, **kwargs: object) -> str:
    """Jinja's filter `format`, bounded. Raises `TypeError` where both kinds of arguments are given."""
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    check_percent(str(value), kwargs or args)
    return str(value) % (kwargs or args)


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    if not isinstance(text, str) or not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return CHARS_PER_ITEM * len(value) if isinstance(value, list | tuple) else 0
