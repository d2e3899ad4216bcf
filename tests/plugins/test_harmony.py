"""Harmony, as the reasoning parser, the tool parser and both in a row read it."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from penstock.engine.contracts.parsing import Event, Phase, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.text.answer import ParserChain
from penstock.plugins.harmony import HarmonyCalls
from penstock.plugins.reasoning.formats import openai_gptoss
from penstock.testing import check_cuts, check_tool_format, merged, read

TOKENS = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")
AUTO = Turn(prompt_tail="<|start|>assistant", tool_choice="auto")
ANALYSIS = "<|channel|>analysis<|message|>I think<|end|>"
ROLE = "<|start|>assistant"
FINAL = f"{ROLE}<|channel|>final<|message|>Hello<|return|>"
CALL = f'{ROLE}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": "a"}}<|call|>'
SAMPLES = [
    f"{ANALYSIS}{ROLE}<|channel|>final<|message|>Hi<|return|>",
    f'<|channel|>commentary<|message|>I<|end|>{ROLE}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": "a"}}<|call|>',
    '<|channel|>commentary to=functions.f<|message|>{"x": 1}<|channel|>final<|message|>b',
    ' to=functions.f<|channel|>commentary json<|message|>{}<|call|>commentary<|channel|>analysis to=functions.g<|message|>{"a',
    "Hi<|channel|>wrong<|message|> to=functions.f<|message|>no<|end|>",
]
MARKERS = (*TOKENS, "assistant", "analysis", "commentary", "final", " json")


def both(text: str, turn: Turn = AUTO) -> list[Event]:
    chain = ParserChain([HarmonyCalls(turn)], reasoning=openai_gptoss(turn))
    return merged([*(event for char in text for event in chain.feed(char)), *chain.finish()])


@pytest.mark.parametrize(("tool_choice", "num_samples"), [("auto", len(SAMPLES)), ("required", 1)])
def test_reasoning_keeps_its_promises(tool_choice: str, num_samples: int) -> None:
    check_cuts(openai_gptoss, SAMPLES[:num_samples], markers=MARKERS, turn=Turn(tool_choice=tool_choice), max_examples=10)


def test_calls_keep_their_promises() -> None:
    check_cuts(HarmonyCalls, SAMPLES, markers=MARKERS, max_examples=10)


def test_what_the_format_allows_is_read_as_calls() -> None:
    check_tool_format(HarmonyCalls, markers=TOKENS, num_walks=2)


@pytest.mark.parametrize("parse", [both, lambda text: read(HarmonyCalls(AUTO), [text])])
def test_analysis_is_reasoning_and_final_is_content(parse: Callable[[str], list[Event]]) -> None:
    assert parse(ANALYSIS + FINAL) == [Reasoning("I think"), Text("Hello")]
    assert parse(f"<|end|>{ROLE}{ANALYSIS}{ROLE}{ANALYSIS}{FINAL}") == [Reasoning("I thinkI think"), Text("Hello")]


HEADERS = [
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
    "<|channel|>commentary to=functions.f<|message|>",
    "<|channel|>commentary to=functions.f json<|message|>",
    "<|channel|>analysis to=functions.f code<|message|>",
    " to=functions.f<|channel|>commentary json<|message|>",
    " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
]


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("before", ["", ANALYSIS + ROLE])
@pytest.mark.parametrize("end", ["<|call|>", "<|end|>", ""])
@pytest.mark.parametrize("has_reasoning_parser", [True, False])
def test_a_call_is_read_whatever_the_order_of_its_header(header: str, before: str, end: str, has_reasoning_parser: bool) -> None:
    text = f'{before}{header}{{"x": "y"}}{end}'
    events = both(text) if has_reasoning_parser else read(HarmonyCalls(AUTO), list(text))
    assert [event for event in events if not isinstance(event, Reasoning)] == [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, '{"x": "y"}'),
    ]


def test_several_messages_are_several_calls() -> None:
    events = both(f"{ANALYSIS}{CALL}{CALL.replace('functions.f', 'functions.my-tools.g')}{FINAL}")
    names = [(event.index, event.name) for event in events if isinstance(event, ToolCallStart)]
    assert names == [(0, "f"), (1, "my-tools.g")]
    assert [event for event in events if isinstance(event, Text)] == [Text("Hello")]


def test_the_channel_that_is_written_between_calls_is_no_content() -> None:
    events = both(f"{CALL}commentary<|channel|>commentary to=functions.g<|message|>{{}}<|call|>")
    assert not [event for event in events if isinstance(event, Text)]
    assert both(f"{CALL}commentary on this")[-1] == Text("commentary on this")


def test_a_short_text_before_a_call_is_content() -> None:
    events = both(f"{ANALYSIS}{ROLE}<|channel|>commentary<|message|>I look<|end|>{CALL}")
    assert events[:3] == [Reasoning("I think"), Text("I look"), ToolCallStart(0, "f", "")]


@pytest.mark.parametrize("channel", ["commentary", "analysis"])
def test_what_goes_to_other_tools_is_no_content(channel: str) -> None:
    text = f"<|channel|>{channel} to=python code<|message|>print(1)<|end|>"
    assert both(text + FINAL) == [Reasoning("print(1)"), Text("Hello")]


@pytest.mark.parametrize(
    "header", ["<|channel|>final <|constrain|> JSON <|message|>", "<|channel|>FINAL to=user<|message|>", "<|message|>"]
)
def test_a_final_message_may_say_what_it_holds(header: str) -> None:
    assert both(f"{ANALYSIS}{ROLE}{header}Hello") == [Reasoning("I think"), Text("Hello")]


def test_arguments_arrive_character_by_character() -> None:
    parser = HarmonyCalls(AUTO)
    parser.feed(" to=functions.f<|message|>")
    assert [event.fragment for char in '{"x": "ab"}' for event in parser.feed(char) if isinstance(event, ToolCallArguments)] == [
        '{"',
        "x",
        '":',
        " ",
        '"',
        "a",
        "b",
        '"}',
    ]


@pytest.mark.parametrize("end", ["<|call|>", ""])
def test_a_call_without_arguments_has_an_empty_object(end: str) -> None:
    assert both(f" to=functions.f<|message|>{end}")[-1] == ToolCallArguments(0, "{}")


def test_a_message_that_is_no_object_is_content() -> None:
    assert both(" to=functions.f<|message|>foo<|call|>") == [Text(" to=functions.f<|message|>foo")]


def test_arguments_that_go_wrong_leave_the_rest_visible() -> None:
    events = both(' to=functions.f<|message|>{"x": 1, oops}<|call|>')
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": 1}'), Text(", oops}")]
    assert both(' to=functions.f<|message|>{"x": oops}<|call|>')[-1] == ToolCallArguments(0, '{"x": "oops"}')
    assert both(" to=functions.f<|message|>{oops}<|call|>") == [Text(" to=functions.f<|message|>{oops}")]


@pytest.mark.parametrize("header", ["<|channel|>commentary to=functions.f <|constrain|>json", "<|channel|>commentary to=functions.f"])
@pytest.mark.parametrize("parse", [both, lambda text: read(HarmonyCalls(AUTO), [text])])
def test_a_call_whose_arguments_are_no_json_is_shown_with_its_header(parse: Callable[[str], list[Event]], header: str) -> None:
    text = f"{header}<|message|>no JSON"
    assert parse(f"{text}<|call|>{FINAL}") == parse(f"{ROLE}{text}<|call|>{FINAL}") == [Text(f"{text}Hello")]


def test_a_marker_of_messages_in_a_string_is_part_of_it() -> None:
    events = both(CALL.replace('"a"', '"say <|end|> and <|start|>assistant"') + FINAL)
    assert events == [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, '{"x": "say <|end|> and <|start|>assistant"}'),
        Text("Hello"),
    ]


def test_without_a_tool_parser_a_call_does_not_vanish() -> None:
    events = read(openai_gptoss(AUTO), [ANALYSIS + CALL])
    assert events == [Reasoning("I think"), Text(CALL.removeprefix(ROLE))]


def test_with_tool_choice_none_a_call_is_text() -> None:
    events = both(CALL, Turn(tool_choice="none"))
    assert events == [Text(CALL.removeprefix(ROLE))]


def test_quoted_markers_call_nothing_where_they_are_tokens() -> None:
    turn = Turn(tool_choice="auto", added_tokens=frozenset(TOKENS))
    final = [SpecialText("<|channel|>"), "final", SpecialText("<|message|>")]
    events = [event for piece in [*final, CALL] for event in ParserChain([HarmonyCalls(turn)], reasoning=openai_gptoss(turn)).feed(piece)]
    assert read(HarmonyCalls(turn), [*final, CALL, " to=functions.f"]) == [Text(f"{CALL} to=functions.f")]
    assert not [event for event in events if isinstance(event, ToolCallStart)]


def test_the_phase_is_content_once_the_final_header_is_complete() -> None:
    parser = openai_gptoss(AUTO)
    phases = []
    for piece in ("<|channel|>analysis<|message|>", "why", "<|end|><|start|>assistant", "<|channel|>final", "<|message|>", "Hello"):
        parser.feed(piece)
        phases.append(parser.phase)
    assert phases == [Phase.REASONING] * 4 + [Phase.CONTENT] * 2


def test_the_end_marker_ends_the_reasoning_wherever_it_is_written() -> None:
    for begun in ("", "<|channel|>analysis", "<|channel|>analysis<|message|>why", f"{ANALYSIS}{ROLE}<|channel|>commentary"):
        parser = openai_gptoss(AUTO)
        events = read(parser, [begun, parser.end_marker, "Hello"])
        assert events[-1] == Text("Hello"), begun
        assert parser.phase is Phase.CONTENT


def test_the_phase_is_content_where_the_name_of_a_function_begins() -> None:
    parser = openai_gptoss(replace(AUTO, is_constrained=True))
    parser.feed(f"{ANALYSIS}{ROLE}<|channel|>commentary")
    assert parser.phase is Phase.REASONING
    assert parser.feed(" to=functions.") == [Text(HarmonyCalls.tool_format.opening)]
    assert parser.phase is Phase.CONTENT  # type: ignore[comparison-overlap]


def test_a_forced_call_begins_with_the_message_after_the_reasoning() -> None:
    parser = openai_gptoss(Turn(prompt_tail=ROLE, tool_choice="required", is_constrained=True))
    parser.feed("<|channel|>analysis<|message|>why")
    assert parser.phase is Phase.REASONING
    assert parser.feed(parser.end_marker) == []
    assert parser.phase is Phase.CONTENT  # type: ignore[comparison-overlap]
    assert parser.feed(" to=functions.f") == [Text(" to=functions."), Text("f")]


def test_a_prompt_that_opened_the_final_message_leaves_content() -> None:
    tail = f"{ANALYSIS}{ROLE}<|channel|>final<|message|>Hel"
    parser = openai_gptoss(Turn(prompt_tail=tail))
    assert parser.phase is Phase.CONTENT
    assert read(parser, ["lo<|return|>"]) == [Text("lo")]


def test_arguments_are_one_document() -> None:
    events = both(CALL.replace('"a"', '{"b": [1, "<|end", null]}'))
    arguments = "".join(event.fragment for event in events if isinstance(event, ToolCallArguments))
    assert json.loads(arguments) == {"x": {"b": [1, "<|end", None]}}
