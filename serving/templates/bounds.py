"""Bounds on the cost of one operation of a template. A thread can be interrupted between bytecodes, but not inside any of these."""

import functools
import re
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from itertools import chain
from typing import Any, ParamSpec, TypeVar

import jinja2
from jinja2.filters import do_indent
from jinja2.utils import Namespace

MAX_OUTPUT_CHARS = 2**25
MAX_INT_BITS = 4096
CHARS_PER_ITEM = 16  # what an element of a list weighs
MAX_PATTERN_CHARS = 1000  # of `strftime_now`, where a directive of six may write 255
SPEC = re.compile(r"\d{8,}|:[^{}]*\{")
FIELD = re.compile(r"\{[^{}:]*:([^{}]*)\}")
PERCENT_SPEC = re.compile(r"\d{8,}|%[-+ #0\d.]*\*")
PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([\d.]*)")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
WIDTH_FILTERS = ("batch", "center", "round", "slice", "tojson", "truncate", "wordwrap")
TEXT_FILTERS = (  # those that begin with `str` of their value
    *("capitalize", "center", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "title", "tojson", "trim"),
    *("truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TemplateTooLarge(jinja2.TemplateError):
    """A template would produce more than `MAX_OUTPUT_CHARS`, or compute with numbers of more than `MAX_INT_BITS`."""


def check_size(num_chars: int) -> None:
    if num_chars > MAX_OUTPUT_CHARS:
        raise TemplateTooLarge(f"the template produces more than {MAX_OUTPUT_CHARS} characters")


def text_size(value: object) -> int:
    """About how many characters `str` makes of a value with all that it holds. Beyond `MAX_OUTPUT_CHARS` they are not counted.

    Raises `TemplateError` for an object that would be written with its address, such as a function.
    """
    if isinstance(value, str):
        return len(value)
    num_chars, pending = 0, [iter((value,))]
    while pending and num_chars <= MAX_OUTPUT_CHARS:
        try:
            item = next(pending[-1])
        except StopIteration:
            pending.pop()
            continue
        match item:
            case str() | bytes():
                num_chars += len(item) + 4
            case int():
                num_chars += item.bit_length() // 3 + 2
            case dict() | Mapping():
                pending.append(chain.from_iterable(item.items()))
            case list() | tuple() | set() | frozenset() | KeysView() | ValuesView() | ItemsView():
                pending.append(iter(item))
            case Namespace():
                pending.append(iter((item._Namespace__attrs,)))
            case _:
                text = str(item)
                if ADDRESS.search(text):
                    raise jinja2.TemplateError(f"the template writes a {type(item).__name__}, which is no text")
                num_chars += len(text) + 2
    return num_chars


def writable(value: Result) -> Result:
    """The value of an expression that is to be written."""
    if not isinstance(value, str):
        check_size(text_size(value))
    return value


def concatenate(pieces: Iterable[Any]) -> str:
    """What `~`, a macro and a `set` block do with their parts."""
    texts, num_chars = [], 0
    for piece in pieces:
        texts.append(str(writable(piece)))
        num_chars += len(texts[-1])
        check_size(num_chars)
    return "".join(texts)


def join(separator: str, pieces: Iterable[Any]) -> str:
    texts, num_chars = [], 0
    for piece in pieces:
        texts.append(str(writable(piece)))
        num_chars += len(texts[-1]) + len(separator)
        check_size(num_chars)
    return separator.join(texts)


def add_up(values: Iterable[Any], start: Any) -> Any:
    for value in values:
        check_operation("+", start, value)
        start = start + value
    return start


def indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter, bounded."""
    text = str(writable(value))
    check_size(len(text) + (1 + sum(map(text.count, LINE_ENDS))) * (len(width) if isinstance(width, str) else width))
    return do_indent(text, width, first, blank)


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
    check_size(len(text) + text.count("%") * max(map(text_size, items), default=0) + _sum_of_numbers(PERCENT_FIELD.findall(text)))


def check_format(text: str, values: Iterable[object]) -> None:
    """The same for `text.format(*values)`."""
    if SPEC.search(text):
        raise TemplateTooLarge("a width in a format string is too large")
    check_size(len(text) + text.count("{") * max(map(text_size, values), default=0) + _sum_of_numbers(FIELD.findall(text)))


def check_pattern(text: str) -> None:
    """For `strftime_now`."""
    if len(text) > MAX_PATTERN_CHARS:
        raise TemplateTooLarge(f"a pattern for a date has more than {MAX_PATTERN_CHARS} characters")


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


def check_filter_text(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """The filter, with the value that it writes checked."""
    place = int(hasattr(function, "jinja_pass_arg"))  # after the context or environment

    @functools.wraps(function)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for value in args[place : place + 1]:
            writable(value)
        return function(*args, **kwargs)

    return checked


def replace(value: object, old: object, new: object, count: int | None = None) -> str:
    """Jinja's filter, bounded."""
    text, found, instead = (str(writable(each)) for each in (value, old, new))
    check_size(_replaced_size(text, found, instead))
    return text.replace(found, instead, -1 if count is None else count)


def percent_format(value: object, *args: object, **kwargs: object) -> str:
    """Jinja's filter `format`, bounded. Raises `TypeError` where both kinds of arguments are given."""
    if args and kwargs:
        raise TypeError("format takes positional or keyword arguments, not both")
    text = str(writable(value))
    check_percent(text, kwargs or args)
    return text % (kwargs or args)


def _sum_of_numbers(specs: Iterable[str]) -> int:
    return sum(int(number) for spec in specs for number in re.findall(r"\d+", spec))


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    if not isinstance(text, str) or not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    return CHARS_PER_ITEM * len(value) if isinstance(value, list | tuple) else 0
