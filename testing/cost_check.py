"""What a parser does with a text, counted in steps: time would depend on the machine."""

import sys
from collections.abc import Callable, Iterable
from itertools import product
from types import FrameType
from typing import Any, SupportsIndex

from penstock.engine.events import SpecialText
from penstock.engine.parsing import Parser
from penstock.engine.turn import Turn
from penstock.testing.answers import split_atoms

FILLERS = ("lorem ipsum ", "\n" * 12)
FEW = 12  # times that a filler is put in, and then four times as often
MAX_POSITIONS = 5
SLACK = 4000  # steps: text that breaks a call makes what follows cheaper


def check_cost(
    factory: Callable[[Turn], Parser], sample: str, turn: Turn, *, fillers: Iterable[str] = FILLERS, positions: Iterable[int] | None = None
) -> None:
    """Raises `AssertionError` where four times as much text, put in anywhere, costs much more than four times as much to read.

    The text is words, or line breaks, or `fillers`; it is put in at `positions`, where they are given. Counted are the lines of Python
    that run and the characters that methods of `str` look at or copy, with one character to a piece.
    """
    if positions is None:
        positions = sorted({len(sample) * number // (MAX_POSITIONS - 1) for number in range(MAX_POSITIONS)})
    _cost(factory(turn), sample, turn.added_tokens)  # a first run may also fill caches
    alone = _cost(factory(turn), sample, turn.added_tokens)
    for position, filler in product(positions, fillers):
        texts = [f"{sample[:position]}{filler * num}{sample[position:]}" for num in (FEW, 4 * FEW)]
        short, long = (_cost(factory(turn), text, turn.added_tokens) - alone for text in texts)
        assert long <= 6 * short + SLACK, (
            f"{len(filler) * FEW} more characters after {sample[:position]!r} cost {short} steps, four times as many cost {long}: "
            "what has been read is read again"
        )


def _cost(parser: Parser, text: str, added_tokens: frozenset[str]) -> int:
    meter = [0]

    def count_lines(frame: FrameType, event: str, argument: object) -> Any:
        meter[0] += event == "line"
        return count_lines

    pieces = [atom if isinstance(atom, SpecialText) else MeteredText(atom, meter) for atom in split_atoms(text, added_tokens)]
    before = sys.gettrace()
    sys.settrace(count_lines)
    try:
        for piece in pieces:
            for _ in parser.feed(piece):
                pass
        for _ in parser.finish():
            pass
    finally:
        sys.settrace(before)
    return meter[0]


class MeteredText(str):
    """Text that counts, in `meter[0]`, the characters that its methods look at or copy."""

    __slots__ = ("meter",)
    meter: list[int]

    def __new__(cls, text: str, meter: list[int]) -> "MeteredText":
        metered = super().__new__(cls, text)
        metered.meter = meter
        return metered

    def _count(self, num_characters: int, result: str) -> str:
        self.meter[0] += num_characters
        return MeteredText(result, self.meter)

    def __add__(self, other: str) -> str:
        return self._count(len(self) + len(other), str.__add__(self, other))

    def __radd__(self, other: str) -> str:
        return self._count(len(self) + len(other), str.__add__(other, self))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        result = str.__getitem__(self, key)
        return self._count(len(result), result)


def _metered(name: str) -> Callable[..., Any]:
    method = getattr(str, name)

    def count(self: MeteredText, *arguments: Any, **named: Any) -> Any:
        self.meter[0] += len(self)
        return method(self, *arguments, **named)

    return count


_METHODS = "__contains__ count endswith find index isspace partition rfind rindex split splitlines startswith"
for _name in _METHODS.split():
    setattr(MeteredText, _name, _metered(_name))
