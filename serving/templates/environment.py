"""Where chat templates run: Jinja's immutable sandbox with what templates on model hubs expect, and bounds on what one may cost."""

import ctypes
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar

import jinja2
from jinja2.compiler import CodeGenerator, Frame, operators
from jinja2.ext import Extension
from jinja2.filters import make_attrgetter
from jinja2.nodes import Compare, Concat, Const, Dict, Expr, Getitem, List, Node, Slice, Tuple
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from penstock.serving.templates import bounds as template_bounds
from penstock.serving.templates.bounds import check_size
from penstock.serving.tools import ToolArguments

Result = TypeVar("Result")


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
    concat = staticmethod(template_bounds.concatenate)
    buffer = template_bounds.Buffer
    built = staticmethod(template_bounds.built)
    comparable = staticmethod(template_bounds.comparable)

    def __init__(self) -> None:
        extensions: list[str | type[Extension]] = [GenerationBlock, "jinja2.ext.loopcontrols"]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=template_bounds.writable)
        self.filters |= {"tojson": to_json, "join": self.join, "sum": self.sum, "indent": template_bounds.indent}
        self.filters |= {"replace": template_bounds.replace, "format": template_bounds.percent_format}
        self.filters |= {name: template_bounds.bounded_filter(name, function) for name, function in self.filters.items()}
        self.tests |= {name: template_bounds.check_compared(self.tests[name]) for name in template_bounds.COMPARING_TESTS}
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = strftime_now

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        template_bounds.check_operation(operator, left, right)
        return template_bounds.built(self.binop_table[operator](left, right))

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        args = template_bounds.call_arguments(function, args)
        template_bounds.check_method(function, (*args, *kwargs.values()))
        return template_bounds.built(super().call(context, function, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            template_bounds.check_format(value.__self__, (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return checked

    def join(self, values: Iterable[Any], separator: str = "", attribute: str | int | None = None) -> str:
        """Jinja's filter, bounded."""
        return template_bounds.join(separator, values if attribute is None else map(make_attrgetter(self, attribute), values))

    def sum(self, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
        """Jinja's filter, bounded."""
        return template_bounds.add_up(values if attribute is None else map(make_attrgetter(self, attribute), values), start)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """Jinja's own filter escapes HTML; models were trained on plain JSON. A call's arguments stay as the model spelled them."""
    if isinstance(value, ToolArguments) and not (ensure_ascii or indent is not None or separators or sort_keys):
        return template_bounds.built(str(value))
    if indent is not None:
        check_size(template_bounds.text_size(value) * (1 + indent))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(template_bounds.writable(message))


def strftime_now(pattern: str) -> str:
    template_bounds.check_pattern(pattern)
    return datetime.now().astimezone().strftime(pattern)


def render_bounded(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Renders, and raises `TemplateTooLarge` where the output grows too long, or all that the template builds for it."""
    pieces = template_bounds.Buffer()
    num_chars = 0
    with template_bounds.budgeted():
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
