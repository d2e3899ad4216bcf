"""Where chat templates run: Jinja's immutable sandbox with what templates on model hubs expect, and bounds on the cost of each operation,
inside which no thread can be interrupted, and of a whole rendering."""

import ctypes
import functools
import json
import re
import threading
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from itertools import chain
from sys import getsizeof
from typing import Any, TypeVar

import jinja2
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension
from jinja2.filters import do_indent, make_attrgetter
from jinja2.nodes import Compare, Concat, Const, Dict, Expr, Getitem, List, Node, Slice, Tuple
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from penstock.serving.tools import ToolArguments

MAX_OUTPUT_CHARS = 2**25
MAX_BUILT_BYTES = 2**28  # by all operations of a rendering, whether the template keeps them or not
MAX_INT_BITS = 4096
CHARS_PER_ITEM = 16  # what an element of a list weighs
BYTES_PER_ITEM = 48  # what an element takes that was made with its list, such as a piece of a text
BYTES_PER_REFERENCE = 8
MAX_PATTERN_CHARS = 1000  # of `strftime_now`, where a directive of six may write 255
SPEC = re.compile(r"\d{8,}|:[^{}]*\{")
FIELD = re.compile(r"\{[^{}:]*:([^{}]*)\}")
PERCENT_SPEC = re.compile(r"\d{8,}|%[-+ #0\d.]*\*")
PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([\d.]*)")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
MAX_EXPANSION = 100  # what an error handler of `encode` may write for a character
COMPARING_FILTERS = ("dictsort", "groupby", "max", "min", "sort", "unique")
COMPARING_TESTS = ("in", "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan", "<=", "le")
ITEM_FILTERS = ("groupby", "list", "slice", "sort")  # those that make a list of a text's characters
BLANKS = "\t \xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a\u202f\u205f\u3000\x1f" + LINE_ENDS
WIDTH_FILTERS = ("batch", "center", "round", "slice", "tojson", "truncate", "wordwrap")
TEXT_FILTERS = (  # those that begin with `str` of their value
    *("capitalize", "center", "e", "escape", "forceescape", "lower", "pprint", "safe", "string", "striptags", "title", "tojson", "trim"),
    *("truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"),
)

TEXTS = (str, bytes)  # a union written where it is used is made anew at each operation
SEQUENCES = (list, tuple)
CONTAINERS: tuple[type[Any], ...] = (list, tuple, dict, type({}.items()))
TEXTS_AND_NUMBERS = (str, bytes, int)
COMPARING = (*CONTAINERS, LoopContext)

Result = TypeVar("Result")


class TemplateTooLarge(jinja2.TemplateError):
    """A template would write more than `MAX_OUTPUT_CHARS`, build more than `MAX_BUILT_BYTES`, or compute with more than `MAX_INT_BITS`."""


class Budget:
    """What the operations of one rendering have built."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        self.num_bytes = 0


_budget: ContextVar[Budget | None] = ContextVar("template budget", default=None)  # None while a template is compiled


@contextmanager
def budgeted() -> Iterator[None]:
    """For one rendering in this thread."""
    token = _budget.set(Budget())
    try:
        yield
    finally:
        _budget.reset(token)


def spend(num_bytes: int) -> None:
    """Raises `TemplateTooLarge` once the rendering has built more than `MAX_BUILT_BYTES`."""
    budget = _budget.get()
    if budget is not None:
        budget.num_bytes += num_bytes
        if budget.num_bytes > MAX_BUILT_BYTES:
            raise TemplateTooLarge(f"the template builds texts and lists of more than {MAX_BUILT_BYTES} bytes together")


def built(value: Result) -> Result:
    """What an operation has built, counted. Elements of containers count as if they were built with it."""
    if isinstance(value, str):
        spend(getsizeof(value))
    else:
        spend(getsizeof(value) + (BYTES_PER_ITEM * len(value) if isinstance(value, CONTAINERS) else 0))
    return value


class Buffer(list[str]):
    """The pieces of a macro or a `set` block, counted."""

    def append(self, piece: str) -> None:
        spend(BYTES_PER_REFERENCE)
        list.append(self, piece)


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


def comparable(value: Result) -> Result:
    """A value that is to be compared or hashed, which takes as long as to write it: a list may hold another many times over."""
    if isinstance(value, CONTAINERS):
        check_size(text_size(value))
    return value


def check_compared(function: Any) -> Callable[..., bool]:
    """The test, with the values that it compares checked."""

    @functools.wraps(function)
    def checked(*args: Any) -> bool:
        return bool(function(*map(comparable, args)))

    return checked


def concatenate(pieces: Iterable[Any]) -> str:
    """What `~`, a macro and a `set` block do with their parts."""
    texts = [piece if isinstance(piece, str) else built(str(writable(piece))) for piece in pieces]
    check_size(sum(map(len, texts)))
    return built("".join(texts))


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
    if operator == "+" and isinstance(left, str) and isinstance(right, str):
        check_size(len(left) + len(right))
    elif isinstance(left, int) and isinstance(right, int):
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


def call_arguments(function: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, where `join` would get an iterator with the pieces themselves, so that they can be counted."""
    if not arguments or isinstance(arguments[0], Sized) or not isinstance(getattr(function, "__self__", None), str | bytes):
        return arguments
    return ([*arguments[0]],) if function.__name__ == "join" else arguments


def check_method(function: Any, arguments: tuple[Any, ...]) -> None:
    """For calls of the methods of texts and numbers: those that pad, repeat or split, and those that replace text by longer text."""
    owner = getattr(function, "__self__", None)
    if owner is dict:
        check_size(BYTES_PER_ITEM * sum(len(each) for each in arguments if isinstance(each, Sized)))
    if isinstance(owner, COMPARING):
        for value in (*arguments, owner) if function.__name__ in ("index", "count") else arguments:
            comparable(value)
    if not isinstance(owner, TEXTS_AND_NUMBERS):
        return
    check_widths(*arguments)
    match function.__name__, arguments:
        case "split" | "rsplit" | "splitlines", _ if isinstance(owner, TEXTS) and _size(owner) * BYTES_PER_ITEM > MAX_OUTPUT_CHARS:
            check_size(BYTES_PER_ITEM * _num_pieces(owner, *arguments[:1]))
        case "encode", (_, _, *_):
            check_size(MAX_EXPANSION * _size(owner))
        case "replace", (old, new, *_):
            check_size(_replaced_size(owner, old, new))
        case "join", (pieces, *_) if isinstance(pieces, Collection):
            check_size(_size(owner) * len(pieces) + (len(pieces) if isinstance(pieces, str | bytes) else sum(map(_size, pieces))))
        case "expandtabs", (width, *_) if isinstance(width, int):
            check_size(_size(owner) * max(width, 1))
        case "translate", (table, *_) if isinstance(table, Mapping):
            check_size(_size(owner) * max(map(_size, table.values()), default=1))


def check_widths(*arguments: object) -> None:
    for argument in arguments:
        if isinstance(argument, int):
            check_size(abs(argument))


def bounded_filter(name: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """The filter, with its value and its numbers checked before, and its result counted."""
    writes, has_widths, takes_apart = name in TEXT_FILTERS, name in WIDTH_FILTERS, name in ITEM_FILTERS
    compares = name in COMPARING_FILTERS
    place = int(hasattr(function, "jinja_pass_arg"))  # of the value: after the context or environment

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Result:
        if writes:
            writable(args[place])
        if has_widths:
            check_widths(*args[place + 1 :], *kwargs.values())
        if takes_apart and isinstance(args[place], str):
            check_size(BYTES_PER_ITEM * _size(args[place]))
        if compares:
            args = (*args[:place], comparable(args[place] if isinstance(args[place], Sized) else [*args[place]]), *args[place + 1 :])
        return built(function(*args, **kwargs))

    return bounded


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


def _num_pieces(text: str | bytes, separator: Any = None) -> int:
    """At most so many are the parts of a text between separators, or between blanks and line ends."""
    if isinstance(text, str) and not isinstance(separator, str):
        return 1 + sum(map(text.count, BLANKS))
    return 1 + (text.count(separator) if isinstance(separator, str | bytes) else len(text))  # type: ignore[arg-type]  # both of one type


def _replaced_size(text: Any, old: Any, new: Any) -> int:
    if not isinstance(text, str) or not isinstance(old, str) or not isinstance(new, str):
        return 0
    return len(text) + text.count(old) * max(len(new) - len(old), 0)


def _size(value: Any) -> int:
    if isinstance(value, TEXTS):
        return len(value)
    return CHARS_PER_ITEM * len(value) if isinstance(value, SEQUENCES) else 0


class TemplateTimeout(BaseException):
    """A template ran for longer than it may. A BaseException, so that no handler inside the template engine stops it."""


class GenerationBlock(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja reads the class attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class BoundedCodeGenerator(CodeGenerator):
    """Lets the environment do what `~` does, count what slices, literals and blocks build, and look at what is compared."""

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: Getitem, frame: Frame) -> None:
        if isinstance(node.arg, Slice):
            self._counted(super().visit_Getitem, node, frame)
        elif isinstance(node.arg, Const):
            super().visit_Getitem(node, frame)
        else:
            self.write("environment.getitem(")
            self.visit(node.node, frame)
            self.write(", ")
            self._compared(node.arg, frame)
            self.write(")")

    def visit_List(self, node: List, frame: Frame) -> None:
        self._counted(super().visit_List, node, frame)

    def visit_Dict(self, node: Dict, frame: Frame) -> None:
        self.write("environment.built({")
        for item in node.items:
            self._compared(item.key, frame)
            self.write(": ")
            self.visit(item.value, frame)
            self.write(", ")
        self.write("})")

    def visit_Compare(self, node: Compare, frame: Frame) -> None:
        if sum(not _is_plain(operand) for operand in (node.expr, *(other.expr for other in node.ops))) < 2:
            super().visit_Compare(node, frame)
            return
        self.write("(")
        self._compared(node.expr, frame)
        for other in node.ops:
            self.write(f" {operators[other.op]} ")
            self._compared(other.expr, frame)
        self.write(")")

    def visit_Tuple(self, node: Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._counted(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def buffer(self, frame: Frame) -> None:
        frame.buffer = self.temporary_identifier()
        self.writeline(f"{frame.buffer} = environment.buffer()")

    def _compared(self, node: Expr, frame: Frame) -> None:
        if _is_plain(node):
            self.visit(node, frame)
            return
        self.write("environment.comparable(")
        self.visit(node, frame)
        self.write(")")

    def _counted(self, visit: Callable[[Any, Frame], None], node: Node, frame: Frame) -> None:
        self.write("environment.built(")
        visit(node, frame)
        self.write(")")


def _is_plain(node: Expr) -> bool:
    """Whether a comparison with it takes no time, whatever the other side is."""
    return isinstance(node, Const) or (isinstance(node, List | Tuple) and all(isinstance(item, Const) for item in node.items))


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates with transformers' settings, filters and globals.

    A thread can be interrupted between bytecodes but not inside one huge multiplication, so what could start one is bounded:
    operators, methods of texts, and filters. What they build is counted for the rendering as a whole.
    """

    intercepted_binops = frozenset(["*", "**", "+", "%", "//"])
    code_generator_class = BoundedCodeGenerator
    concat = staticmethod(concatenate)
    buffer = Buffer
    built = staticmethod(built)
    comparable = staticmethod(comparable)

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = [GenerationBlock, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=writable)
        self.filters |= {"tojson": to_json, "join": self.join, "sum": self.sum, "indent": indent}
        self.filters |= {"replace": replace, "format": percent_format}
        self.filters |= {name: bounded_filter(name, function) for name, function in self.filters.items()}
        self.tests |= {name: check_compared(self.tests[name]) for name in COMPARING_TESTS}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operation(operator, left, right)
        return built(self.binop_table[operator](left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        args = call_arguments(function, args)
        check_method(function, (*args, *kwargs.values()))
        return built(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def join(self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        """Jinja's filter, bounded."""
        return join(separator, values if attribute is None else map(make_attrgetter(self, attribute), values))

    def sum(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """Jinja's filter, bounded."""
        return add_up(values if attribute is None else map(make_attrgetter(self, attribute), values), start)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON. A call's arguments stay as the model spelled them."""
    if isinstance(value, ToolArguments) and not (ensure_ascii or indent is not None or separators or sort_keys):
        return built(str(value))
    if indent is not None:
        check_size(text_size(value) * (1 + indent))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(writable(message))


def strftime_now(pattern: str) -> str:
    check_pattern(pattern)
    return datetime.now().astimezone().strftime(pattern)


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders, and raises `TemplateTooLarge` where the output grows too long, or all that the template builds for it."""
    pieces = Buffer()
    num_chars = 0
    with budgeted():
        for piece in template.generate(variables):
            num_chars += len(piece)
            check_size(num_chars)
            pieces.append(piece)
    return "".join(pieces)


class Interruptible:
    """One function call in some thread, which `interrupt` ends from another with `TemplateTimeout`.

    The lock makes sure that the exception reaches the call and never what the thread does next: once the call is over it is not sent,
    and if it was sent but has not arrived it is waited for.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread_id: int | None = None
        self._is_interrupted = False

    def run(self, function: Callable[[], Result], seconds: float | None = None) -> Result:
        """Raises `TemplateTimeout` after so many seconds, and where `interrupt` came before the end or even the start."""
        with self._lock:
            if self._is_interrupted:
                raise TemplateTimeout
            self._thread_id = threading.get_ident()
        timer = None if seconds is None else threading.Timer(seconds, self.interrupt)
        try:
            if timer is not None:
                timer.daemon = True
                timer.start()
            return function()
        finally:
            self._end()
            if timer is not None:
                timer.cancel()

    def interrupt(self) -> None:
        with self._lock:
            self._is_interrupted = True
            if self._thread_id is not None:
                _raise_in_thread(self._thread_id, TemplateTimeout)

    def _end(self) -> None:
        """Another exception takes the place of one that may not have arrived, and is waited for.

        Taking it back would cost less here and everywhere else more: Python 3.11 and 3.12 then look for an exception at every step, in
        every thread, from there on (and 3.11 hangs where such code is traced).
        """
        while True:
            try:
                with self._lock:
                    thread_id, self._thread_id = self._thread_id, None
                    if not self._is_interrupted or thread_id is None:
                        return
                    _raise_in_thread(thread_id, TemplateTimeout)
                    while True:
                        pass
            except TemplateTimeout:
                continue


def _raise_in_thread(thread_id: int, exception: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(exception))
