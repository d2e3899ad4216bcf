from collections.abc import Callable

import pytest

from penstock.engine.contracts.parsing import Event, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.calls.json_call import CallKeys, JsonCall
from penstock.plugins.calls.json_stream import CallEnvelope, CallHead, JsonStream
from penstock.testing import check_cuts, read

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


def test_an_added_token_in_a_marker_comes_back_as_one() -> None:
    envelope = CallEnvelope(openings=("``json",), is_array=True)
    parser = JsonStream(Turn(tool_choice="auto", added_tokens=frozenset({"``"})), envelope)
    (token, text) = [event.text for event in read(parser, [SpecialText("``"), "json x"]) if isinstance(event, Text)]
    assert (token, text) == ("``", "json x")
    assert isinstance(token, SpecialText)
