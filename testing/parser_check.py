"""Whether a parser keeps its promises: any cut, any stop, nothing lost, at a cost that does not grow."""

import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import cycle, pairwise, product
from types import FrameType
from typing import Any, SupportsIndex

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import (
    Event,
    Parser,
    Phase,
    Reasoning,
    ReasoningParser,
    SpecialText,
    Text,
    ToolCallArguments,
    ToolCallStart,
    Turn,
)
from penstock.plugins.json.scanner import JsonScanner, State
from penstock.plugins.markers import join_pieces, split_symbols


def read(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """All events of a parser for these pieces and their end, normalized so that they do not depend on the cuts."""
    events: list[Event] = []
    for piece in pieces:
        events.extend(parser.feed(piece))
    events.extend(parser.finish())
    return merged(events)


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind joined, added tokens left separate; ids of tool calls blank, because they are fresh each time."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ToolCallStart):
            assert event.id, f"{event} has no id"
            result.append(replace(event, id=""))
        elif isinstance(event, ToolCallArguments):
            assert event.fragment, f"{event} is empty"
            if isinstance(last, ToolCallArguments) and last.index == event.index:
                result[-1] = replace(last, fragment=last.fragment + str(event.fragment))
            else:
                result.append(replace(event, fragment=str(event.fragment)))
        else:
            assert event.text, f"{event} is empty"
            joins = type(last) is type(event) and not isinstance(event.text, SpecialText)
            if joins and isinstance(last, Text | Reasoning) and not isinstance(last.text, SpecialText):
                result[-1] = type(event)(last.text + event.text)
            else:
                result.append(event)
    return result


def split_atoms(text: str, added_tokens: frozenset[str]) -> list[str]:
    """The smallest pieces in which text can arrive: single characters, and each added token whole."""
    return split_symbols(text, added_tokens)


def join_atoms(atoms: Iterable[str]) -> list[str]:
    """The largest pieces in which they can arrive."""
    return join_pieces(list(atoms))


FILLERS = ("lorem ipsum ", "\n" * 12)
FEW = 6  # times that a filler is put in, and then four times as often
NUM_POSITIONS = 5
SLACK = 8000  # steps: text that breaks a call makes what follows cheaper
RECENT = 32  # atoms before a stop that arrive one by one, more than a marker has; with all of them, texts would cost their length squared


def check_cost(
    factory: Callable[[Turn], Parser], sample: str, turn: Turn, *, fillers: Iterable[str] = FILLERS, positions: Iterable[int] | None = None
) -> None:
    """Raises `AssertionError` if four times as much text, inserted anywhere, costs much more than four times as much to read.

    The text is words, or line breaks, or `fillers`; it is inserted at `positions`, if given. The cost is the number of executed lines of
    Python and of characters that methods of `str` look at or copy, with one character per piece.
    """
    _check_costs(factory, sample, turn, product(_positions(sample) if positions is None else positions, fillers))


def _check_costs(factory: Callable[[Turn], Parser], sample: str, turn: Turn, places: Iterable[tuple[int, str]]) -> None:
    _cost(factory(turn), sample, turn.added_tokens)  # a first run may also fill caches
    alone = _cost(factory(turn), sample, turn.added_tokens)
    for position, filler in places:
        texts = [f"{sample[:position]}{filler * num}{sample[position:]}" for num in (FEW, 4 * FEW)]
        short, long = (_cost(factory(turn), text, turn.added_tokens) - alone for text in texts)
        assert long <= 6 * short + SLACK, (
            f"{len(filler) * FEW} more characters after {sample[:position]!r} cost {short} steps, four times as many cost {long}: "
            "what has been read is read again"
        )


def _positions(sample: str) -> list[int]:
    return sorted({len(sample) * number // (NUM_POSITIONS - 1) for number in range(NUM_POSITIONS)})


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


CALLS_ALLOWED = Turn(tool_choice="auto")


def check_parser(
    factory: Callable[[Turn], Parser],
    samples: Iterable[str],
    *,
    markers: Sequence[str] = (),
    turn: Turn = CALLS_ALLOWED,
    max_examples: int = 100,
) -> None:
    """Raises `AssertionError` if a parser breaks a promise of its contract: the promises in `check_cuts`, and of its cost.

    The cost of a piece must not grow with the text before it.
    """
    samples = list(samples)
    check_cuts(factory, samples, markers=markers, turn=turn, max_examples=max_examples)
    for number, sample in enumerate(samples):
        # Words and line breaks in turn: each of them at each position costs most of the time that a check takes.
        _check_costs(factory, sample, turn, zip(_positions(sample), cycle((*FILLERS[number % 2 :], *FILLERS[: number % 2]))))


def check_cuts(
    factory: Callable[[Turn], Parser],
    samples: Iterable[str],
    *,
    markers: Sequence[str] = (),
    turn: Turn = CALLS_ALLOWED,
    max_examples: int = 100,
) -> None:
    """Raises `AssertionError` if the answer depends on how its text arrives, or text is lost.

    - Any cut, same answer: whole, one character at a time, every split in two, and every added token as a separate piece.
    - Any stop, same answer: after every prefix, `finish` returns the buffered text, and no text is lost. A parser may only remove
      `markers` and text around a tool call; everything else is returned as `Text` or `Reasoning`, in order, added tokens as pieces.
    - Calls are numbered from 0, and the arguments of each are a prefix of one JSON document at every stop. While they
      arrive, `is_in_call` is true: markers of reasoning are part of them.

    Checked on `samples` and on text generated from them and the markers, both with the vocabulary of `turn` and with one that has
    the markers as single tokens. `max_examples` texts are generated for each of the two; PENSTOCK_PARSER_EXAMPLES in the environment
    is a lower bound for every check.
    """
    samples = list(samples)
    max_examples = max(max_examples, int(os.environ.get("PENSTOCK_PARSER_EXAMPLES", "0")))
    assert samples, "there is nothing to check a parser with"
    made = type(factory(turn))
    assert issubclass(made, Parser), f"`{made.__name__}` must derive from `penstock.ReasoningParser` or `penstock.ToolParser`"
    for vocabulary in dict.fromkeys((turn.added_tokens, turn.added_tokens | frozenset(markers))):
        this_turn = replace(turn, added_tokens=vocabulary)
        checked: list[list[str]] = []
        for sample in samples:
            atoms = split_atoms(sample, vocabulary)
            _check_every_split(factory, this_turn, atoms)
            _check_inside_calls(factory(this_turn), atoms)
            num_known = max((_num_shared(atoms, others) + 1 for others in checked), default=0)
            for end in range(num_known, len(atoms)):
                _check_answer(factory, this_turn, atoms[:end], markers, num_whole=max(0, end - RECENT))
            _check_answer(factory, this_turn, atoms, markers)
            checked.append(atoms)
        _check_generated(factory, this_turn, samples, markers, max_examples)


def _num_shared(atoms: Sequence[str], others: Sequence[str]) -> int:
    """With how many atoms both begin."""
    return next(
        (number for number, (atom, other) in enumerate(zip(atoms, others, strict=False)) if atom != other), min(len(atoms), len(others))
    )


def _check_every_split(factory: Callable[[Turn], Parser], turn: Turn, atoms: Sequence[str]) -> None:
    whole = join_atoms(atoms)
    expected = read(factory(turn), whole)
    for position in range(1, len(atoms)):
        cut = [*join_atoms(atoms[:position]), *join_atoms(atoms[position:])]
        _check_same(whole, expected, cut, read(factory(turn), cut))


def _check_answer(
    factory: Callable[[Turn], Parser], turn: Turn, atoms: Sequence[str], markers: Sequence[str], *, num_whole: int = 0
) -> None:
    """The answer that ends after these atoms: the same in the largest and in the smallest pieces, and with no text lost.

    In the second case the first `num_whole` atoms arrive in the largest pieces, too.
    """
    whole = join_atoms(atoms)
    pieces = [*join_atoms(atoms[:num_whole]), *atoms[num_whole:]]
    expected, phase = _read_with_phase(factory(turn), whole)
    events, phase_of_pieces = _read_with_phase(factory(turn), pieces)
    _check_same(whole, expected, pieces, events)
    assert phase is phase_of_pieces, f"the phase after {whole} depends on how it is cut"
    _check_calls(whole, expected)
    assert _accounts_for(expected, atoms, markers), f"{whole}: text is lost, added or out of order in {expected}"


def _check_calls(whole: Sequence[str], events: Iterable[Event]) -> None:
    """Each call begins once, in order, and its arguments so far can still become one JSON document."""
    arguments: list[JsonScanner] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            assert event.index == len(arguments), f"{whole}: call {len(arguments)} is numbered {event.index}"
            assert event.name, f"{whole}: a call has no name"
            arguments.append(JsonScanner())
        elif isinstance(event, ToolCallArguments):
            assert event.index < len(arguments), f"{whole}: arguments come before their call: {event}"
            scanner, fragment = arguments[event.index], event.fragment
            position = 0
            while position < len(fragment) and not scanner.is_over:
                position = scanner.take(fragment, position)
            is_json = scanner.state is not State.MALFORMED and not fragment[position:].strip()
            assert is_json, f"{whole}: the arguments cannot be JSON: {fragment!r}, from {fragment[position:]!r}"


def _check_inside_calls(parser: Parser, atoms: Sequence[str]) -> None:
    """Between two pieces of a call's arguments, the parser says that it is inside a call."""
    last = ToolCallArguments(-1, "")  # the last piece of arguments, and where the parser has denied being inside a call since
    denied_at: int | None = None
    for position, atom in enumerate(atoms, start=1):
        for event in parser.feed(atom):
            if isinstance(event, ToolCallArguments):
                is_denied = denied_at is not None and event.index == last.index
                assert not is_denied, f"call {event.index} goes on after {join_atoms(atoms[:denied_at])}, where `is_in_call` is not true"
                last, denied_at = event, None
        if denied_at is None and not parser.is_in_call:
            denied_at = position


def _check_same(whole: Sequence[str], expected: list[Event], cut: Sequence[str], events: list[Event]) -> None:
    assert events == expected, f"{list(whole)} gives {expected}, but cut as {list(cut)} it gives {events}"
    apart = [isinstance(event, Text | Reasoning) and isinstance(event.text, SpecialText) for event in events]
    expected_apart = [isinstance(event, Text | Reasoning) and isinstance(event.text, SpecialText) for event in expected]
    assert apart == expected_apart, f"cut as {list(cut)}, other added tokens come out as plain text in {events}"


def _read_with_phase(parser: Parser, pieces: Iterable[str]) -> tuple[list[Event], Phase | None]:
    """What `read` gives, and the phase before the end."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    phase: object = parser.phase if isinstance(parser, ReasoningParser) else None
    assert phase is None or isinstance(phase, Phase), f"`phase` is {phase!r}"
    return merged([*events, *parser.finish()]), phase


def _accounts_for(events: Iterable[Event], atoms: Sequence[str], markers: Sequence[str]) -> bool:
    """Whether the atoms are the events' text with nothing between but markers, and anything at all in place of a tool call."""
    wanted: list[str | None] = []  # None: a tool call
    for event in events:
        if isinstance(event, ToolCallStart | ToolCallArguments):
            wanted.extend([] if wanted and wanted[-1] is None else [None])
        elif isinstance(event.text, SpecialText):
            wanted.append(event.text)
        else:
            wanted.extend(event.text)
    starting: dict[str, list[str]] = {}
    for marker in filter(None, markers):
        starting.setdefault(marker[0], []).append(marker)
    reached: list[set[int]] = [set() for _ in range(len(atoms) + 1)]  # how many of `wanted` may be accounted for before each atom
    reached[0].add(0)
    for position, numbers in enumerate(reached):
        numbers |= {number + 1 for number in numbers if number < len(wanted) and wanted[number] is None}
        if position == len(atoms):
            break
        if not numbers:
            continue
        ends = [end for marker in starting.get(atoms[position][0], ()) if (end := _marker_end(atoms, position, marker)) is not None]
        for number in numbers:
            for end in ends:
                reached[end].add(number)
            if number < len(wanted) and _is_same_atom(wanted[number], atoms[position]):
                reached[position + 1].add(number + 1)
            if number and wanted[number - 1] is None:
                reached[position + 1].add(number)
    return len(wanted) in reached[-1]


def _marker_end(atoms: Sequence[str], position: int, marker: str) -> int | None:
    length = 0
    while length < len(marker) and position < len(atoms) and marker.startswith(atoms[position], length):
        length += len(atoms[position])
        position += 1
    return position if length == len(marker) else None


def _is_same_atom(wanted: str | None, atom: str) -> bool:
    return wanted == atom and isinstance(wanted, SpecialText) == isinstance(atom, SpecialText)


def _check_generated(
    factory: Callable[[Turn], Parser], turn: Turn, samples: Sequence[str], markers: Sequence[str], max_examples: int
) -> None:
    """Text made of markers, whole and in part, words of the samples and anything else, in any order and cut anywhere."""
    words = {word for sample in samples for word in re.findall(r"\w+|\s+|[^\w\s]", sample)}
    parts = sorted(words | {marker[:end] for marker in markers for end in range(1, len(marker) + 1)})
    specials: list[str] = [SpecialText(token) for token in sorted(turn.added_tokens)]
    known = [st.sampled_from(choices) for choices in (parts, samples, specials) if choices]
    texts = st.lists(st.one_of(*known, st.text(max_size=3)), max_size=12)

    @settings(max_examples=max_examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(texts, st.sets(st.integers(0, 60)))
    def check(parts: list[str], cuts: set[int]) -> None:
        atoms: list[str] = []
        for part in parts:
            atoms.extend([part] if isinstance(part, SpecialText) else part)
        _check_answer(factory, turn, atoms, markers)
        places = [0, *sorted(cut for cut in cuts if cut < len(atoms)), len(atoms)]
        pieces = [piece for start, end in pairwise(places) for piece in join_atoms(atoms[start:end])]
        whole = join_atoms(atoms)
        _check_same(whole, read(factory(turn), whole), pieces, read(factory(turn), pieces))

    check()
