from typing import Any

import pytest

from penstock.engine.events import ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.testing import check_parser, read
from tests.helpers.tool_parsers import tool_parser
from tests.plugins.tools.parameter_samples import calls, content

MARK = "]<]minimax[>["
dots = tool_parser("dots")
minimax_m2 = tool_parser("minimax_m2")
minimax_m3 = tool_parser("minimax_m3")
step3 = tool_parser("step3")

ORDER = {
    "type": "object",
    "properties": {
        "user": {"type": "integer"},
        "note": {"type": "string"},
        "shipping": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "integer"}}},
        "items": {"type": "array", "items": {"type": "object", "properties": {"sku": {"type": "string"}, "qty": {"type": "integer"}}}},
        "meta": {"type": "object", "additionalProperties": {"type": "string"}},
        "any": {"type": "object"},
    },
}
TURN = Turn(tool_choice="auto", tools=({"type": "function", "function": {"name": "order", "parameters": ORDER}},))


def invoke(value: str) -> str:
    return f'<minimax:tool_call><invoke name="weather"><parameter name="city">{value}</parameter></invoke></minimax:tool_call>'


@pytest.mark.parametrize(
    "value", ["a &lt;b&gt; &amp; c", "    if x:\n        return 1\n", "hello\u00a0", '<parameter name="x">', "</invoke>", "\n"]
)
def test_entities_and_white_space_of_strings_stay_as_they_are(value: str) -> None:
    assert calls(minimax_m2, invoke(value)) == [("weather", {"city": value})]


@pytest.mark.parametrize("tag", ['<invoke name="weather">', "<invoke name='weather'>", "<invoke name=weather>"])
def test_names_may_be_quoted_in_any_way(tag: str) -> None:
    assert calls(minimax_m2, f"<minimax:tool_call>\n{tag}\n</invoke></minimax:tool_call>") == [("weather", {})]


def test_one_section_holds_several_calls() -> None:
    two = '<invoke name="a"><parameter name="x">1</parameter></invoke>\n<invoke name="b"></invoke>'
    assert calls(minimax_m2, f"<minimax:tool_call>{two}</minimax:tool_call>") == [("a", {"x": "1"}), ("b", {})]
    garbage = "<dots_function_call>garbage</dots_function_call>"
    text = f"{garbage}<dots_function_call>{two}</dots_function_call>"
    assert calls(dots, text) == [("a", {"x": "1"}), ("b", {})]
    assert content(dots, text) == garbage


def test_step3_passes_over_what_comes_before_the_tag_and_between_calls() -> None:
    call = '<steptml:invoke name="weather"><steptml:parameter name="city"> Oslo\n</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
    first, second = f"<｜tool_call_begin｜>function<｜tool_sep｜>weather\n{call}", f"<｜tool_call_begin｜>{call}"
    text = f"See.<｜tool_calls_begin｜>{first}<｜tool_sep｜>{second}<｜tool_calls_end｜>\nDone."
    assert calls(step3, text) == [("weather", {"city": " Oslo\n"})] * 2
    assert content(step3, text) == "See.\nDone."


def element(name: str, *inner: str) -> str:
    return f"{MARK}<{name}>{''.join(inner)}{MARK}</{name}>"


def order(*arguments: str) -> str:
    return f'{MARK}<tool_call>\n{MARK}<invoke name="order">{"".join(arguments)}{MARK}</invoke>\n{MARK}</tool_call>'


ITEMS = element("items", element("item", element("sku", "7"), element("qty", "2")), element("item", element("sku", "b")))
ITEMS_READ = [{"sku": "7", "qty": 2}, {"sku": "b"}]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), {}),
        ((element("user", "42"), element("note", "a < b > c\n")), {"user": 42, "note": "a < b > c\n"}),
        ((element("shipping", element("city", "Oslo"), element("zip", "018956")),), {"shipping": {"city": "Oslo", "zip": 18956}}),
        ((ITEMS, element("user", "1")), {"items": ITEMS_READ, "user": 1}),
        ((element("items", element("item", element("sku", "x"))),), {"items": [{"sku": "x"}]}),
        ((element("items"), element("any"), element("note")), {"items": [], "any": {}, "note": ""}),
        ((element("meta", element("source", "1"), element("b", "2")),), {"meta": {"source": "1", "b": "2"}}),
        ((element("any", element("tag", "a"), element("tag", "b")),), {"any": {"tag": ["a", "b"]}}),
        ((element("any", '{"a": 1}'),), {"any": {"a": 1}}),
        ((ITEMS.removesuffix(f"{MARK}</items>"), element("user", "1")), {"items": ITEMS_READ, "user": 1}),
        ((f"{MARK}</bogus>", element("user", "1")), {"user": 1}),
        ((element("user", "1"), element("user", "2")), {"user": 1}),
        ((f"{MARK}<user>1",), {"user": 1}),
        ((f"{MARK}\n<user>1{MARK} </user>",), {"user": 1}),
    ],
)
def test_elements_nest_as_the_schema_says(arguments: tuple[str, ...], expected: dict[str, Any]) -> None:
    text = f"Sure.\n{order(*arguments)}\n"
    assert calls(minimax_m3, text, TURN) == [("order", expected)]
    assert content(minimax_m3, text, TURN) == "Sure.\n"


NESTED = f"""{MARK}<tool_call>
{MARK}<invoke name="order">{MARK}<shipping>{MARK}<city>Oslo{MARK}</city>{MARK}<zip>150{MARK}</zip>{MARK}</shipping>\
{MARK}<items>{MARK}<item>{MARK}<sku>a{MARK}</sku>{MARK}</item>{MARK}<item>{MARK}<sku>bcd"""


@pytest.mark.parametrize(
    ("end", "arguments"),
    [
        ("", '{"shipping": {"city": "Oslo", "zip": 150}, "items": [{"sku": "a"}, {"sku": "bcd'),
        ("bcd", '{"shipping": {"city": "Oslo", "zip": 150}, "items": [{"sku": "a"}, {"sku": '),
        (f"<item>{MARK}<sku>bcd", '{"shipping": {"city": "Oslo", "zip": 150}, "items": [{"sku": "a"}'),
        (NESTED.partition("slo")[2], '{"shipping": {"city": "Oslo'),
        (NESTED.partition(f"50{MARK}")[2], '{"shipping": {"city": "Oslo", "zip": 150'),
    ],
)
def test_nested_elements_that_are_cut_are_not_closed(end: str, arguments: str) -> None:
    events = read(minimax_m3(TURN), [NESTED.removesuffix(end)])
    assert events == [ToolCallStart(0, "order", ""), ToolCallArguments(0, arguments)]


def test_nested_elements_may_be_cut_anywhere() -> None:
    check_parser(minimax_m3, [NESTED], markers=(MARK, "<tool_call>"), turn=TURN, max_examples=10)
