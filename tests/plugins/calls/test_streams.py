"""Streams of calls: what is a call and what stays text, ids, copies, and two streams one after the other."""

import copy
from collections.abc import Callable

import pytest

from penstock.engine.contracts.parsing import Event, SpecialText, Text, ToolCallArguments, ToolCallStart, ToolParser, Turn
from penstock.plugins.calls.json_call import CallKeys, JsonCall
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead, JsonStream
from penstock.plugins.calls.stream import ParsersInTurn
from penstock.testing import check_cuts, merged, read

AUTO = Turn(tool_choice="auto")
ARRAY = CallEnvelope(openings=("<calls>",), closings=("</calls>",), is_array=True)
SECTION = CallEnvelope(sections=("<all>",), openings=("<one>",), closings=("```", "</one>", "</all>"))
HEAD = CallHead({"name": {"#": "id", "=": None, "{": None}, "id": {"=": None}})
BARE = CallEnvelope(openings=("<tag>",), separators=(";",), bare=("{",))
F = '{"name": "f", "arguments": {}}'
G = '{"name": "g", "arguments": {}}'


def array(turn: Turn) -> JsonStream:
    return JsonStream(turn, ARRAY)


def section(turn: Turn) -> JsonStream:
    return JsonStream(turn, SECTION, head=HEAD)


def bare(turn: Turn) -> JsonStream:
    return JsonStream(turn, BARE, call=lambda: JsonCall(CallKeys(is_bare=True)))


def called(*names: str) -> list[Event]:
    return [event for index, name in enumerate(names) for event in (ToolCallStart(index, name, ""), ToolCallArguments(index, "{}"))]


ARRAYS = {
    f"<calls>[{F}]</calls>": called("f"),
    f" <calls>\n[ {F} ,\n{G} ]\n</calls>\n": [Text(" "), *called("f", "g")],
    f"<calls>[{F}, {G}": called("f", "g"),
    f"<calls>[{F},": called("f"),
    f"<calls>[{F}, {{": [*called("f"), Text(", {")],
    f"<calls>[{F}, 5]</calls>": [*called("f"), Text(", 5]</calls>")],
    f"<calls>[{F}</calls> after": [*called("f"), Text(" after")],
    f"<calls>[{F}]<calls>[{G}]": called("f", "g"),
    f"<calls>[{F}] </calls></calls>": [*called("f"), Text("</calls>")],
    f"<calls>[{F}]]": [*called("f"), Text("]")],
    f"<calls>[{F}] [": [*called("f"), Text(" [")],
    "<calls>[]</calls>": [Text("<calls>[]</calls>")],
    f"<calls>{F}</calls>": [Text(f"<calls>{F}</calls>")],
    "<calls> [ prose ]": [Text("<calls> [ prose ]")],
    "<calls> [": [Text("<calls> [")],
    "<calls> ": [Text("<calls> ")],
}
SECTIONS = {
    "<all><one>f={}</one></all>": called("f"),
    "<all>\n<one> f = {} </one>\n<one>g{}</one> </all>!": [*called("f", "g"), Text("!")],
    "<all><one>f#7={}": called("f"),
    "<one>f=</one>": called("f"),
    "<one>f=": [ToolCallStart(0, "f", "")],
    "<one>f={}``` </one></all>": called("f"),
    "<one>f={} </all></one>": [*called("f"), Text("</one>")],
    "<all></all>": [Text("<all></all>")],
    "<all>noise<one>f={}": [Text("<all>noise"), *called("f")],
    "<one>two words={}": [Text("<one>two words={}")],
    "<one>f<one>g={}": [Text("<one>f"), *called("g")],
    "<one>={}": [Text("<one>={}")],
    "<one>f=prose": [Text("<one>f=prose")],
    f"<one>{'f' * 600}={{}}": [Text(f"<one>{'f' * 600}={{}}")],
    '<one>f={"x": </one><one>g={}': [
        ToolCallStart(0, "f", ""),
        ToolCallArguments(0, '{"x": null}'),
        ToolCallStart(1, "g", ""),
        ToolCallArguments(1, "{}"),
    ],
}
BARES = {
    f"Well: {F}; {G} !": [Text("Well: "), *called("f", "g"), Text(" !")],
    f"{F}\n{G}": called("f", "g"),
    f"{F}; ": called("f"),
    f"{F}; and": [*called("f"), Text("; and")],
    f'{{"a": {F}}} {{{F}': [Text(f'{{"a": {F}}} {{'), *called("f")],
    f'{{"a": [{F}': [Text(f'{{"a": [{F}')],
    '{"name": "f"} {"name": "f", "arguments": 1}': [Text('{"name": "f"} {"name": "f", "arguments": 1}')],
    '{"name": "f", "arguments": {oops}}': [Text('{"name": "f", "arguments": {oops}}')],
    '{"name": "f", "arguments": {': [Text('{"name": "f", "arguments": {')],
}


@pytest.mark.parametrize(
    ("factory", "text", "events"),
    [(factory, text, events) for factory, cases in ((array, ARRAYS), (section, SECTIONS), (bare, BARES)) for text, events in cases.items()],
)
def test_what_is_a_call_and_what_stays_text(factory: Callable[[Turn], JsonStream], text: str, events: list[Event]) -> None:
    assert read(factory(AUTO), [text]) == events


@pytest.mark.parametrize(("factory", "cases", "envelope"), [(array, ARRAYS, ARRAY), (section, SECTIONS, SECTION), (bare, BARES, BARE)])
def test_any_cut_and_any_stop_give_the_same_answer(
    factory: Callable[[Turn], JsonStream], cases: dict[str, list[Event]], envelope: CallEnvelope
) -> None:
    markers = [marker for marker in (*envelope.sections, *envelope.openings, *envelope.closings) if marker != "```"]
    samples = [text for text in cases if 20 < len(text) < 80][:5]
    check_cuts(factory, samples, markers=markers, max_examples=60)


def test_a_native_id_is_kept() -> None:
    starts = [event for event in section(AUTO).feed("<one>f#7={}</one><one>g={}") if isinstance(event, ToolCallStart)]
    assert starts[0].id == "7"
    assert starts[1].id.startswith("call_")


@pytest.mark.parametrize("size", [1, 1000])
def test_an_id_after_the_arguments_is_too_late_however_the_answer_is_cut(size: int) -> None:
    text = '<calls>[{"name": "f", "id": "1", "arguments": {}}, {"name": "g", "arguments": {}, "id": "2"}]</calls>'
    parser = JsonStream(AUTO, ARRAY, call=lambda: JsonCall(CallKeys(id="id")))
    events = [event for start in range(0, len(text), size) for event in parser.feed(text[start : start + size])]
    first, second = (event.id for event in events if isinstance(event, ToolCallStart))
    assert first == "1"
    assert second.startswith("call_")


def test_json_that_is_no_call_is_given_out_as_it_comes() -> None:
    parser = bare(AUTO)
    assert parser.feed('{"city"') == []
    assert parser.feed(":") == [Text('{"city":')]
    assert parser.feed(' "O') == [Text(' "O')]


def test_an_end_token_ends_a_call_in_the_middle_of_a_string() -> None:
    tokens = frozenset({"<calls>", "</calls>"})
    pieces = [SpecialText("<calls>"), '[{"name": "f", "arguments": {"x": "y', SpecialText("</calls>"), "z"]
    events = read(array(Turn(tool_choice="auto", added_tokens=tokens)), pieces)
    assert events == [ToolCallStart(0, "f", ""), ToolCallArguments(0, '{"x": "y"}'), Text("z")]


def test_what_is_passed_over_after_a_call_that_its_end_token_has_cut_is_text_with_all_its_markers() -> None:
    tokens = frozenset({"<calls>", "</calls>"})
    pieces = [
        SpecialText("<calls>"),
        '[{"name": "f", "arguments": {"x": "y',
        SpecialText("</calls>"),
        'z"}}]',
        SpecialText("</calls>"),
        " b",
    ]
    _, _, *texts = read(array(Turn(tool_choice="auto", added_tokens=tokens)), pieces)
    assert texts == [Text('z"}}]'), Text("</calls>"), Text(" b")]


def test_an_added_token_in_a_marker_comes_back_as_one() -> None:
    envelope = CallEnvelope(openings=("``json",), is_array=True)
    parser = JsonStream(Turn(tool_choice="auto", added_tokens=frozenset({"``"})), envelope)
    (token, text) = [event.text for event in read(parser, [SpecialText("``"), "json x"]) if isinstance(event, Text)]
    assert (token, text) == ("``", "json x")
    assert isinstance(token, SpecialText)


def test_a_copy_of_a_stream_in_a_call_reads_on_by_itself() -> None:
    text = f"<calls>[{F}, {G}]</calls> b"
    for end in range(len(text)):
        parser = array(AUTO)
        before = parser.feed(text[:end])
        copied = copy.deepcopy(parser)
        parser.feed(' x"}]')
        events = [*before, *copied.feed(text[end:]), *copied.finish()]
        assert merged(events) == [*called("f", "g"), Text(" b")]


class InBrackets(ToolParser):
    """Inside a call from `[` to `]`."""

    is_in_call = False

    def feed(self, text: str) -> list[Event]:
        for character in text:
            self.is_in_call = character == "[" or (self.is_in_call and character != "]")
        return [Text(text)]

    def finish(self) -> list[Event]:
        return []


def test_no_text_overtakes_what_the_first_parser_holds_when_the_second_one_begins_a_call() -> None:
    text = "[[CALL [/CALL][Ce[CALL"
    for pieces in ([text], list(text), [text[:2], text[2:]]):
        parser = ParsersInTurn(JsonStream(Turn(tool_choice="auto"), CallEnvelope(openings=("[CALL]", "Call"))), InBrackets)
        assert read(parser, pieces) == [Text(text)]
