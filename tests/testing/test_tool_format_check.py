from collections.abc import Callable
from collections.abc import Sequence as Tools
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.parsing import CallableTool, Text, ToolParser, Turn
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, Value
from penstock.plugins.tools.json_formats import HERMES
from penstock.testing import check_tool_format

START, END = "<tool_call>", "</tool_call>"
ANY_OBJECT = GrammarSpec(GrammarKind.JSON_OBJECT, "")


class Blocks:
    """Hermes' format, made of parts that a test may exchange."""

    opening = START
    end: tuple[Structure, ...] = (Literal("\n"), Marker(END))

    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        call = Sequence((Literal("\n"), Either(tuple(map(self.call, tools))), *self.end))
        return call if is_single else Sequence((call, Repeat(Sequence((Literal("\n"), Marker(START), call)))))

    def call(self, tool: CallableTool) -> Structure:
        return Sequence((Literal(f'{{"name": "{tool.name}", "arguments": '), Value(self.arguments(tool)), Literal("}")))

    def arguments(self, tool: CallableTool) -> GrammarSpec:
        return tool.arguments


class AnyArguments(Blocks):
    def arguments(self, tool: CallableTool) -> GrammarSpec:
        return ANY_OBJECT


class AnyName(Blocks):
    def call(self, tool: CallableTool) -> Structure:
        name = GrammarSpec(GrammarKind.REGEX, "[a-z]{1,3}")
        return Sequence((Literal('{"name": "'), Value(name), Literal('", "arguments": {}}')))


class OtherKey(Blocks):
    def call(self, tool: CallableTool) -> Structure:
        return Sequence((Literal(f'{{"tool": "{tool.name}", "arguments": '), Value(tool.arguments), Literal("}")))


class LosesArguments(Blocks):
    def call(self, tool: CallableTool) -> Structure:
        return Literal(f'{{"name": "{tool.name}"}}')


class TextAfter(Blocks):
    end = (*Blocks.end, Literal(" Done."))


class AlwaysSeveral(Blocks):
    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        return super().calls(tools, is_single=False)


class NeverSeveral(Blocks):
    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        return super().calls(tools, is_single=True)


class PerhapsNone(Blocks):
    def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
        return Either((super().calls(tools, is_single=is_single), Literal("\nNothing.")))


def parser_with(tool_format: Any) -> Callable[[Turn], ToolParser]:
    def factory(turn: Turn) -> ToolParser:
        parser = HERMES(turn)
        parser.tool_format = tool_format
        return parser

    return factory


def test_a_format_that_is_its_parsers_passes() -> None:
    check_tool_format(parser_with(Blocks()), markers=(START, END), num_walks=3)


@pytest.mark.parametrize(
    ("tool_format", "complaint"),
    [
        (AnyArguments, "does not fit|with other arguments"),
        (AnyName, "not offered"),
        (OtherKey, "is no call"),
        (LosesArguments, "does not fit"),
        (TextAfter, "left as text"),
        (AlwaysSeveral, "is 2 calls|is . calls|second call"),
        (NeverSeveral, "has a second call"),
        (PerhapsNone, "is no call"),
    ],
)
def test_a_format_that_is_not_is_found(tool_format: type[Blocks], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_tool_format(parser_with(tool_format()), num_walks=8)


def test_a_format_that_ignores_the_offer_is_found() -> None:
    class Stubborn(Blocks):
        all: Tools[CallableTool] = ()

        def calls(self, tools: Tools[CallableTool], *, is_single: bool) -> Structure:
            self.all = tools if len(tools) > len(self.all) else self.all
            return super().calls(self.all, is_single=is_single)

    with pytest.raises(AssertionError, match="is allowed with"):
        check_tool_format(parser_with(Stubborn()), num_walks=2)


def test_a_parser_that_reads_something_else_around_calls_is_found() -> None:
    def shouts(turn: Turn) -> ToolParser:
        parser = HERMES(turn)
        feed = parser.feed
        parser.feed = lambda text: [  # type: ignore[method-assign]
            Text(event.text.upper()) if isinstance(event, Text) else event for event in feed(text)
        ]
        return parser

    with pytest.raises(AssertionError, match="as text"):
        check_tool_format(shouts, num_walks=2)


def test_a_parser_without_a_format_has_none_to_check() -> None:
    with pytest.raises(AssertionError, match="no `tool_format`"):
        check_tool_format(parser_with(None))


def test_the_format_may_depend_on_the_turn() -> None:
    check_tool_format(HERMES, num_walks=2)
