"""What every parser and every tool format must pass, for the tests of plug-ins. Needs `hypothesis`, and no particular test runner.

from penstock.testing import check_parser

def test_any_cut_and_any_stop_give_the_same_answer() -> None:
    check_parser(MyParser, ["<mine>why</mine>because"], markers=["<mine>", "</mine>"])
"""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from types import FrameType
from typing import Any, SupportsIndex

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.engine.events import Event, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart
from penstock.engine.hooks import GrammarBackendFactory, ToolParserFactory
from penstock.engine.parsing import Parser, Phase
from penstock.engine.turn import Turn
from penstock.tool_format_check import SAMPLE_TOOLS, ToolFormatCheck, Tools

FILLER = "lorem ipsum "
MAX_POSITIONS = 5
CALLS_ALLOWED = Turn(tool_choice="auto")


def check_parser(
    factory: Callable[[Turn], Parser],
    samples: Iterable[str],
    *,
    markers: Sequence[str] = (),
    turn: Turn = CALLS_ALLOWED,
    max_examples: int = 100,
) -> None:
    """Raises `AssertionError` where a parser breaks a promise of its contract.

    - Any cut, same answer: whole, one character at a time, every split in two, and every added token as a piece of its own.
    - Any stop, same answer: after every prefix, `finish` gives back what is held, and no text is lost. What a parser may take out are
      `markers` and whatever stands next to a tool call; all else comes out as `Text` or `Reasoning`, in order, added tokens as pieces.
    - The cost of a piece does not grow with what came before.

    Checked on `samples` and on text generated from them and the markers, both with a vocabulary as `turn` has it and with one that holds
    the markers as single tokens.
    """
    samples = list(samples)
    assert samples, "there is nothing to check a parser with"
    for vocabulary in (turn.added_tokens, turn.added_tokens | frozenset(markers)):
        this_turn = replace(turn, added_tokens=vocabulary)
        for sample in samples:
            atoms = split_atoms(sample, vocabulary)
            _check_every_split(factory, this_turn, atoms)
            for end in range(len(atoms) + 1):
                _check_answer(factory, this_turn, atoms[:end], markers)
        _check_generated(factory, this_turn, samples, markers, max_examples)
    for sample in samples:
        check_cost(factory, sample, turn)


def check_tool_format(
    factory: ToolParserFactory,
    *,
    markers: Sequence[str] = (),
    tools: Tools = SAMPLE_TOOLS,
    num_walks: int = 12,
    backend: GrammarBackendFactory | None = None,
) -> None:
    """Raises `AssertionError` where a tool parser's `tool_format` and the parser itself are not about the same calls.

    - What the grammar allows, the parser reads as calls of the offered tools, one where one is asked for, with arguments that are valid
      by their schemas, and with no text but white space left over. The same holds with text around the calls.
    - What calls another tool, does not fit its schema, is cut off, or is a second call where one is asked for, the grammar does not allow.
    - Text that opens no call is allowed where the model chooses; so is an opening that is quoted where the vocabulary has it as a token.

    `markers` are the texts that the format looks for: everything is checked with a vocabulary that has them as plain text, and with one
    that holds each as a single token. `tools` are the schemas of at least two tools' arguments by their names, `num_walks` says how many
    answers are made up by walking at random through each grammar, `backend` compiles them, by default `llguidance`.
    """
    assert len(tools) > 1, "to tell one tool from another takes two"
    for added_tokens in [(), tuple(markers)] if markers else [()]:
        ToolFormatCheck(factory, added_tokens, markers, tools, backend or _default_backend()).run(num_walks)


def _default_backend() -> GrammarBackendFactory:
    from penstock.plugins.grammars.llguidance import LlguidanceBackend

    return LlguidanceBackend


def read(parser: Parser, pieces: Iterable[str]) -> list[Event]:
    """Everything a parser says to these pieces and to their end, in the one form that does not depend on how they were cut."""
    events: list[Event] = []
    for piece in pieces:
        events.extend(parser.feed(piece))
    events.extend(parser.finish())
    return merged(events)


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbours of one kind joined, added tokens left apart; ids of tool calls blank, because they are fresh each time."""
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
    if not added_tokens:
        return list(text)
    longest_first = sorted(added_tokens, key=len, reverse=True)
    atoms: list[str] = []
    for part in re.split(f"({'|'.join(map(re.escape, longest_first))})", text):
        atoms.extend([SpecialText(part)] if part in added_tokens else part)
    return atoms


def join_atoms(atoms: Iterable[str]) -> list[str]:
    """The largest pieces in which they can arrive."""
    pieces: list[str] = []
    for is_special, run in groupby(atoms, key=lambda atom: isinstance(atom, SpecialText)):
        parts = list(run)
        pieces.extend(parts if is_special else ["".join(parts)])
    return pieces


def _check_every_split(factory: Callable[[Turn], Parser], turn: Turn, atoms: Sequence[str]) -> None:
    whole = join_atoms(atoms)
    expected = read(factory(turn), whole)
    for position in range(1, len(atoms)):
        cut = [*join_atoms(atoms[:position]), *join_atoms(atoms[position:])]
        _check_same(whole, expected, cut, read(factory(turn), cut))


def _check_answer(factory: Callable[[Turn], Parser], turn: Turn, atoms: Sequence[str], markers: Sequence[str]) -> None:
    """The answer that ends after these atoms: the same in the largest and in the smallest pieces, and with no text lost."""
    whole = join_atoms(atoms)
    expected = read(factory(turn), whole)
    _check_same(whole, expected, atoms, read(factory(turn), atoms))
    assert _phase(factory(turn), whole) is _phase(factory(turn), atoms), f"the phase after {whole} depends on how it is cut"
    calls = [event.index for event in expected if isinstance(event, ToolCallStart)]
    assert calls == list(range(len(calls))), f"{whole}: tool calls are numbered {calls}"
    assert _accounts_for(expected, atoms, markers), f"{whole}: text is lost, added or out of order in {expected}"


def _check_same(whole: Sequence[str], expected: list[Event], cut: Sequence[str], events: list[Event]) -> None:
    assert events == expected, f"{list(whole)} gives {expected}, but cut as {list(cut)} it gives {events}"
    apart = [isinstance(event, Text | Reasoning) and isinstance(event.text, SpecialText) for event in events]
    expected_apart = [isinstance(event, Text | Reasoning) and isinstance(event.text, SpecialText) for event in expected]
    assert apart == expected_apart, f"cut as {list(cut)}, other added tokens come out as plain text in {events}"


def _phase(parser: Parser, pieces: Iterable[str]) -> Phase | None:
    for piece in pieces:
        for _ in parser.feed(piece):
            pass
    phase = getattr(parser, "phase", None)
    assert phase is None or isinstance(phase, Phase)
    return phase


def _accounts_for(events: Iterable[Event], atoms: Sequence[str], markers: Sequence[str]) -> bool:
    """Whether the atoms are the events' text with nothing between but markers, and anything at all where a tool call stands."""
    wanted: list[str | None] = []  # None: a tool call
    for event in events:
        if isinstance(event, ToolCallStart | ToolCallArguments):
            wanted.extend([] if wanted and wanted[-1] is None else [None])
        elif isinstance(event.text, SpecialText):
            wanted.append(event.text)
        else:
            wanted.extend(event.text)
    reached: list[set[int]] = [set() for _ in range(len(atoms) + 1)]  # how many of `wanted` may be accounted for before each atom
    reached[0].add(0)
    for position, numbers in enumerate(reached):
        numbers |= {number + 1 for number in numbers if number < len(wanted) and wanted[number] is None}
        if position == len(atoms):
            break
        ends = [end for marker in markers if (end := _marker_end(atoms, position, marker)) is not None]
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


def check_cost(factory: Callable[[Turn], Parser], sample: str, turn: Turn) -> None:
    """Raises `AssertionError` where four times as much text, put in anywhere, costs much more than four times as much to read.

    Counted are the lines of Python that run and the characters that methods of `str` look at or copy, with one character to a piece.
    """
    step = max(1, len(sample) // (MAX_POSITIONS - 1))
    for position in [*range(0, len(sample), step), len(sample)]:
        costs = [_cost(factory(turn), f"{sample[:position]}{FILLER * num}{sample[position:]}", turn.added_tokens) for num in (0, 16, 64)]
        short, long = costs[1] - costs[0], costs[2] - costs[0]
        assert long <= 6 * short + 500, (
            f"{len(FILLER) * 16} more characters after {sample[:position]!r} cost {short} steps, four times as many cost {long}: "
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
