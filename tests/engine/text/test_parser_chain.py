from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import Event, Parser, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.text.answer import ParserChain
from penstock.plugins.reasoning.formats import FORMATS
from penstock.plugins.tools.json_formats import HERMES
from penstock.plugins.tools.json_formats import mistral as mistral_calls
from penstock.testing import check_cuts, merged, read

mistral = FORMATS["mistral"]
qwen3 = FORMATS["qwen3"]

MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>")
ANSWER = '<think>Use f.</think>\n\nWait.<tool_call>{"name": "f", "arguments": {}}</tool_call>'


def reasoning_then_tools(turn: Turn) -> ParserChain:
    return ParserChain([HERMES(turn)], reasoning=qwen3(turn))


def test_without_parsers_everything_is_text() -> None:
    chain = ParserChain([])
    assert chain.feed("a") == [Text("a")]
    assert chain.feed("") == []
    assert chain.finish() == []


def test_an_added_token_stays_one() -> None:
    event = reasoning_then_tools(Turn()).feed(SpecialText("<x>", is_hidden=False))[0]
    assert isinstance(event, Text)
    assert isinstance(event.text, SpecialText)
    assert not event.text.is_hidden


def test_a_chain_keeps_the_promises_of_its_parsers() -> None:
    samples = [
        ANSWER,
        "why<tool_call>{}</tool_call>",
        "a",
        '<think><tool_call>{"name": "f"}',
        '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call></think>a',
    ]
    check_cuts(reasoning_then_tools, samples, markers=MARKERS, max_examples=40)


def test_each_parser_reads_only_the_content_of_the_one_before() -> None:
    chain = reasoning_then_tools(Turn(tool_choice="auto"))
    events = merged([*chain.feed('<think>not a <tool_cal</think>l>, but this is: <tool_call>{"name": "f"}'), *chain.finish()])
    assert events[:2] == [Reasoning("not a <tool_cal"), Text("l>, but this is: ")]
    assert isinstance(events[2], ToolCallStart)


def test_markers_in_arguments_change_nothing_however_the_text_is_cut() -> None:
    turn = Turn(tool_choice="auto")
    text = '[THINK]why[/THINK][TOOL_CALLS]f{"x": "[THINK] and [/THINK]"}[THINK]b[/THINK]c[TOOL_CALLS]g{"x": "[THINK]'
    cuts = [[text], list(text), *([text[:position], text[position:]] for position in range(1, len(text)))]
    for pieces in cuts:
        assert read(ParserChain([mistral_calls(turn)], reasoning=mistral(turn)), pieces) == [
            Reasoning("why"),
            ToolCallStart(0, "f", ""),
            ToolCallArguments(0, '{"x": "[THINK] and [/THINK]"}'),
            Reasoning("b"),
            Text("c"),
            ToolCallStart(1, "g", ""),
            ToolCallArguments(1, '{"x": "[THINK]'),
        ]


class Letters(Parser):
    """Holds everything back until the end."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.held: list[str] = []

    def feed(self, text: str) -> Iterable[Event]:
        self.held.append(text)
        return []

    def finish(self) -> Iterable[Event]:
        return [Text("".join(self.held) + self.name)]


def test_what_one_parser_gives_back_at_the_end_is_read_by_the_next() -> None:
    chain = ParserChain([Letters("1"), Letters("2"), Letters("3")])
    assert chain.feed("a") == []
    assert chain.finish() == [Text("a123")]


@given(st.text(max_size=20))
def test_a_chain_of_one_is_the_parser_itself(text: str) -> None:
    turn = Turn(tool_choice="auto")
    chain, parser = ParserChain([HERMES(turn)]), HERMES(turn)
    assert [*chain.feed(text), *chain.finish()] == [*parser.feed(text), *parser.finish()]
