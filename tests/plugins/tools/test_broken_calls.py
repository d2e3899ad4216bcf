"""What holds for every tool parser where a model writes a call wrong: no call that has ended comes out with arguments that are no JSON."""

import json
from collections.abc import Iterator
from functools import lru_cache

import pytest

from penstock.engine.contracts.parsing import Event, FormatInfo, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.manager import Plugins
from penstock.testing import check_cuts, read
from penstock.testing.parser_check import join_atoms, split_atoms

WRONG = (" oops ", '"', "'", "}", "]", ",", "\n", "\\", "<")
AFTER = " after"


@lru_cache
def plugins() -> Plugins:
    return Plugins.start(["none"])


DECLARED = "response_template"  # has no example
TOOL_PARSERS = pytest.mark.parametrize("name", sorted(set(plugins().tool_parsers) - {DECLARED}))
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}


def answer(name: str, text: str, tokens: frozenset[str], *, is_whole: bool = False) -> list[Event]:
    registry = plugins().tool_parsers
    turn = Turn(prompt_tail=registry.infos[name].prompt_tail, added_tokens=tokens, tools=[TOOL], tool_choice="auto")
    atoms = split_atoms(text, tokens)
    return read(registry[name](turn), join_atoms(atoms) if is_whole else atoms)


def tokens_of(info: FormatInfo) -> frozenset[str]:
    return frozenset(marker for marker in info.markers if len(marker) > 1 and not marker[0].isspace())


def parts_of(info: FormatInfo) -> tuple[str, str, str]:
    """The example up to its tool's name, the arguments, and what ends the call: from the first marker after the arguments on."""
    start = info.example.rindex("weather") + len("weather")
    value_end = info.example.rindex("Oslo") + len("Oslo")
    ends = [place for marker in tokens_of(info) if (place := info.example.find(marker, value_end)) >= 0]
    end = min(ends, default=len(info.example))
    return info.example[:start], info.example[start:end], info.example[end:]


def broken(arguments: str) -> Iterator[str]:
    for place in range(len(arguments)):
        yield arguments[:place]
        yield arguments[:place] + arguments[place + 1 :]
        for wrong in WRONG[place % 2 :: 2]:
            yield arguments[:place] + wrong + arguments[place:]


@TOOL_PARSERS
def test_a_call_that_has_ended_has_arguments_in_json_or_is_content(name: str) -> None:
    info = plugins().tool_parsers.infos[name]
    head, arguments, end = parts_of(info)
    for vocabulary in (tokens_of(info), frozenset[str]()):
        for number, written in enumerate(broken(arguments)):
            text = f"{head}{written}{end}{AFTER}"
            events = answer(name, text, vocabulary, is_whole=number % 12 > 0)  # one character at a time takes far longer
            has_ended = "".join(event.text for event in events if isinstance(event, Text)).endswith(AFTER)
            assert has_ended or not (vocabulary and end), f"{text!r}: the end of the call is part of it in {events}"
            for index in [event.index for event in events if isinstance(event, ToolCallStart)] if has_ended else ():
                fragments = [event.fragment for event in events if isinstance(event, ToolCallArguments) and event.index == index]
                assert is_object("".join(fragments)), f"{text!r} gives {events}"


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": %s}}\n</tool_call>'
SECOND = HERMES % '"Rome"'
ROME = [ToolCallStart(1, "weather", ""), ToolCallArguments(1, '{"city": "Rome"}')]


@pytest.mark.parametrize(
    ("written", "city"),
    [
        ('"Oslo" /* c */', 'Oslo" /* c */}}\n'),
        ('"Oslo', "Oslo}}\n"),
        ('"Oslo" // c\n', 'Oslo" // c\n}}\n'),
        ('"Oslo");', 'Oslo");}}\n'),
        ('"Oslo";', 'Oslo";}}\n'),
        ('"Oslo\\', "Oslo\\}}\n"),
        ('"use </tool_call> here"', "use </tool_call> here"),
        ('"he said "go", ok"', 'he said "go", ok'),
        ('"Oslo", ok', 'Oslo", ok}}\n'),
        ('"use <tool_call> and </tool_call>"', "use <tool_call> and </tool_call>"),
    ],
)
def test_a_marker_in_text_ends_a_call_unless_it_stands_in_a_string_that_ends_as_it_should(written: str, city: str) -> None:
    call = HERMES % written
    for text, following in (
        (f"{call}\nAfter", [Text("\nAfter")]),
        (f'{call}\nHe said "x", "y"', [Text('\nHe said "x", "y"')]),
        (f"{call}\n{SECOND} After", [*ROME, Text(" After")]),
        (call.removesuffix("</tool_call>") + SECOND, ROME),
    ):
        start, arguments, *rest = answer("hermes", text, frozenset())
        assert isinstance(start, ToolCallStart)
        assert isinstance(arguments, ToolCallArguments)
        assert json.loads(arguments.fragment) == {"city": city}
        assert rest == following


def test_a_marker_in_a_string_that_is_cut_ends_the_call() -> None:
    events = answer("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call> c', frozenset())
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"a": "b"}'), Text(" c")]
    events = answer("hermes", '<tool_call>{"name": "f", "arguments": {"a": "b</tool_c', frozenset())
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"a": "b</tool_c')]
    events = answer("hermes", '<tool_call>{"arguments": {"a": "b</tool_call>' + HERMES % '"Oslo"', frozenset())
    assert events == [
        Text('<tool_call>{"arguments": {"a": "b</tool_call>'),
        ToolCallStart(0, "weather", ""),
        ToolCallArguments(0, '{"city": "Oslo"}'),
    ]


def test_calls_that_a_marker_ends_are_the_same_however_they_are_cut() -> None:
    values = ('"Oslo', '"O" /* c */', '"a </tool_call> b"', '"a </tool_call> b", c"', '"a", b", "c": 1', '"O"}}')
    samples = [f'{HERMES % value}\n{SECOND} "a", b' for value in values]
    check_cuts(plugins().tool_parsers["hermes"], samples, markers=("<tool_call>", "</tool_call>"), max_examples=30)


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
