"""Patterns looked for in text that arrives, at a cost per character that only the patterns set: no input can make a search hang.

A backtracking-free search (Thompson 1968; with priorities and captures as in Pike's `sam`): all ways to read the text are followed at once.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from re import _constants, _parser  # type: ignore[attr-defined]  # the one place where Python's own syntax of patterns is read
from typing import Any

from penstock.engine.contracts.parsing import SpecialText
from penstock.engine.errors import ConfigurationError
from penstock.plugins.markers import split_symbols

MAX_SIZE = 2000
"""Instructions of all patterns that are looked for together."""

Captures = tuple[tuple[str, int], ...]  # a group's name and where it begins or, the second time, ends
Thread = tuple[int, int, Captures]  # the next instruction, where the match begins, and what it has captured


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction. Those without `takes` take no symbol and lead to all of `nexts`, the first preferred."""

    takes: Callable[[str], bool] | None = None
    nexts: tuple[int, ...] = ()
    group: str = ""
    at: str = ""  # "start" or "end" of the whole text
    found: int = -1


@dataclass(frozen=True, slots=True)
class Found:
    """`index` of the pattern, the symbols from `start` to `end`, and the text of its named groups."""

    index: int
    start: int
    end: int
    captures: Captures


@dataclass(slots=True)
class Program:
    """Patterns and literals, the first preferred where several begin at one place."""

    added_tokens: frozenset[str]
    steps: list[Step] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)

    def add_literal(self, text: str) -> None:
        self._add([split_symbols(text, self.added_tokens)])

    def add_pattern(self, pattern: str) -> None:
        """Raises `ConfigurationError` for what is no regular expression, such as look-around."""
        try:
            tree = _parser.parse(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigurationError(f"the pattern {pattern!r} cannot be read: {error}") from error
        groups = {number: name for name, number in tree.state.groupdict.items()}
        self._add([_Compiler(self, groups, pattern).items(tree)])

    def _add(self, items: Sequence[Any]) -> None:
        found = self.append(Step(found=len(self.entries)))
        self.entries.append(self.link(items[0], found))

    def append(self, step: Step) -> int:
        if len(self.steps) >= MAX_SIZE:
            raise ConfigurationError("the patterns of the response template are too large")
        self.steps.append(step)
        return len(self.steps) - 1

    def link(self, items: Sequence[Any], target: int) -> int:
        """Instructions for one item after the other, the last one leading to `target`; returns the first."""
        for item in reversed(items):
            target = self.append(Step(_equal(item), (target,))) if isinstance(item, str) else item(target)
        return target


class _Compiler:
    """Turns Python's tree of a pattern into items: texts, and functions from the instruction after them to their first."""

    def __init__(self, program: Program, groups: Mapping[int, str], pattern: str) -> None:
        self._program = program
        self._groups = groups
        self._pattern = pattern

    def items(self, tree: Any) -> list[Any]:
        items: list[Any] = []
        literal = ""
        for operation, argument in tree:
            if operation is _constants.LITERAL:
                literal += chr(argument)
                continue
            items += split_symbols(literal, self._program.added_tokens)
            literal = ""
            items.append(self._item(operation, argument))
        return items + split_symbols(literal, self._program.added_tokens)

    def _item(self, operation: Any, argument: Any) -> Callable[[int], int]:
        append, link = self._program.append, self._program.link
        if operation is _constants.ANY:
            return lambda target: append(Step(lambda symbol: True, (target,)))
        if operation in (_constants.IN, _constants.NOT_LITERAL):
            members = argument if operation is _constants.IN else [(_constants.NEGATE, None), (_constants.LITERAL, argument)]
            takes = _one_of(members)
            return lambda target: append(Step(takes, (target,)))
        if operation is _constants.BRANCH:
            branches = [self.items(branch) for branch in argument[1]]
            return lambda target: append(Step(nexts=tuple(link(branch, target) for branch in branches)))
        if operation is _constants.SUBPATTERN and not argument[1] and not argument[2]:
            inner, name = self.items(argument[3]), self._groups.get(argument[0], "")
            if not name:
                return lambda target: link(inner, target)
            return lambda target: append(Step(nexts=(link(inner, append(Step(nexts=(target,), group=name))),), group=name))
        if operation in (_constants.MAX_REPEAT, _constants.MIN_REPEAT):
            return self._repeat(*argument, is_lazy=operation is _constants.MIN_REPEAT)
        if operation is _constants.AT and argument in (_constants.AT_BEGINNING, _constants.AT_BEGINNING_STRING):
            return lambda target: append(Step(nexts=(target,), at="start"))
        if operation is _constants.AT and argument in (_constants.AT_END, _constants.AT_END_STRING):
            return lambda target: append(Step(nexts=(target,), at="end"))
        raise ConfigurationError(f"the pattern {self._pattern!r} has something that is not regular: {str(operation).lower()}")

    def _repeat(self, low: int, high: Any, tree: Any, *, is_lazy: bool) -> Callable[[int], int]:
        append, link = self._program.append, self._program.link
        inner = self.items(tree)

        def choice(inside: int, after: int) -> Step:
            return Step(nexts=(after, inside) if is_lazy else (inside, after))

        def build(target: int) -> int:
            first = target
            if high is _constants.MAXREPEAT:
                first = append(Step())
                self._program.steps[first] = choice(link(inner, first), target)
            else:
                for _ in range(high - low):
                    first = append(choice(link(inner, first), target))
            for _ in range(low):
                first = link(inner, first)
            return first

        return build


def _equal(wanted: str) -> Callable[[str], bool]:
    is_special = isinstance(wanted, SpecialText)
    return lambda symbol: symbol == wanted and isinstance(symbol, SpecialText) == is_special


def _one_of(members: Any) -> Callable[[str], bool]:
    """Of an added token, all characters have to be in the set."""
    is_negated = members[0][0] is _constants.NEGATE
    tests = [_member(operation, argument) for operation, argument in members if operation is not _constants.NEGATE]
    return lambda symbol: all(any(test(char) for test in tests) != is_negated for char in symbol)


def _member(operation: Any, argument: Any) -> Callable[[str], bool]:
    if operation is _constants.LITERAL:
        return lambda char: ord(char) == argument
    if operation is _constants.RANGE:
        return lambda char: argument[0] <= ord(char) <= argument[1]
    found = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}
    kind = str(argument).removeprefix("CATEGORY_")
    pattern = re.compile(found[kind] if kind in found else found[kind.removeprefix("NOT_")].upper())
    return lambda char: pattern.match(char) is not None


class Search:
    """Looks for the first match in symbols that are fed one by one: characters, and added tokens as a whole.

    `found` is set once nothing that comes can change it. `first_open` is where a match that is still possible begins.
    """

    def __init__(self, program: Program, position: int) -> None:
        self.found: Found | None = None
        self._program = program
        self.position = position
        self._best: Found | None = None
        self._threads: list[Thread] = []
        self._start()

    @property
    def first_open(self) -> int:
        starts = [thread[1] for thread in self._threads]
        return min(starts if self._best is None else [*starts, self._best.start], default=self.position)

    def feed(self, symbol: str) -> None:
        """Takes one symbol."""
        threads, self._threads = self._threads, []
        self.position += 1
        seen: set[int] = set()
        for place, start, captures in threads:
            step = self._program.steps[place]
            if step.takes is not None and step.takes(symbol) and self._follow(step.nexts, start, captures, seen):
                break
        self._start(seen)

    def finish(self) -> None:
        """The text is over."""
        threads, self._threads = self._threads, []
        seen: set[int] = set()
        for place, start, captures in threads:
            if self._follow((place,), start, captures, seen, is_end=True):
                break
        self._threads.clear()
        self.found = self._best

    def _start(self, seen: set[int] | None = None) -> None:
        if self._best is None:
            self._follow(self._program.entries, self.position, (), seen if seen is not None else set())
        if self._best is not None and not self._threads:
            self.found = self._best

    def _follow(self, places: Sequence[int], start: int, captures: Captures, seen: set[int], *, is_end: bool = False) -> bool:
        """Adds all that can come next, the preferred first; True where the match is complete, so that what is less preferred is over."""
        pending = [(place, captures) for place in reversed(places)]
        while pending:
            place, taken = pending.pop()
            if place in seen:
                continue
            seen.add(place)
            step = self._program.steps[place]
            if step.found >= 0:
                self._best = Found(step.found, start, self.position, taken)
                return True
            if step.takes is not None:
                self._threads.append((place, start, taken))
                continue
            if step.at == "end" and not is_end:
                self._threads.append((place, start, taken))
                continue
            if step.at == "start" and self.position:
                continue
            if step.group:
                taken = (*taken, (step.group, self.position))
            pending += [(following, taken) for following in reversed(step.nexts)]
        return False
