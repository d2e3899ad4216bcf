"""Calls in Gemma's notation: `gemma4` and `functiongemma`."""

import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import CallableTool, Event, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.testing import check_cuts, check_parser, check_tool_format, read
from penstock.testing.decoding import accepts, byte_vocabulary, split_pieces
from penstock.testing.parser_check import check_cost, split_atoms
from penstock.testing.tool_format_check import SAMPLE_TOOLS
from tests.helpers.tool_parsers import tool_format, tool_parser

functiongemma = tool_parser("functiongemma")
gemma4 = tool_parser("gemma4")

Q = '<|"|>'
MARKERS = ("<|tool_call>", "<tool_call|>", Q)
SAMPLES = [
    f"Look: <|tool_call>call:f{{k:{Q}a<b, {{c}}{Q},n:42,l:[true,{Q}x{Q}],o:{{{Q}3{Q}:null}}}}<tool_call|>"
    "\n<|tool_call>call:g{}<tool_call|>!",
    f"<|tool_call>call:f{{k:{Q}cut",
    "<|tool_call>calls:f{}<tool_call|> <|tool_call>call:<tool_call|>",
    "<|tool_call>call:f{k:a b,[:x<tool_call|>",
]
PROPERTIES = {
    "zip": {"type": "string"},
    "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "tags": {"type": "array", "items": {"type": "string"}},
    "place": {"type": "object", "properties": {"lat": {"type": "number"}, "name": {"type": "string"}}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": PROPERTIES, "required": ["zip"]}}}
]
AUTO = Turn(tool_choice="auto")
TYPED = Turn(tool_choice="auto", tools=TOOLS)


def calls(events: list[Event]) -> list[tuple[str, Any]]:
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            found[event.index] = (found[event.index][0], found[event.index][1] + event.fragment)
    return [(name, json.loads(arguments)) for name, arguments in found]


def arguments_of(written: str, turn: Turn = AUTO) -> Any:
    ((name, arguments),) = calls(read(gemma4(turn), list(f"<|tool_call>call:f{{{written}}}<tool_call|>")))
    assert name == "f"
    return arguments


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_any_cut_and_any_stop_give_the_same_answer(tool_choice: str) -> None:
    samples = SAMPLES if tool_choice == "auto" else SAMPLES[:1]
    check_parser(gemma4, samples, markers=MARKERS, turn=Turn(tool_choice=tool_choice, tools=TOOLS), max_examples=15)


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("", {}),
        ("  ", {}),
        (f"location:{Q}Paris, France{Q}", {"location": "Paris, France"}),
        (f"location:{Q}San Francisco{Q},unit:{Q}celsius{Q}", {"location": "San Francisco", "unit": "celsius"}),
        (
            "count:42,left:108.,flag:true,none:null,neg:-1.5e3",
            {"count": 42, "left": 108.0, "flag": True, "none": None, "neg": -1500.0},
        ),
        (f"nested:{{inner:{Q}value{Q}}},list:[{Q}a{Q},{Q}b]{Q}]", {"nested": {"inner": "value"}, "list": ["a", "b]"]}),
        (f"outer:{{inner:{{{Q}3{Q}:{Q}new text{Q}}}}}", {"outer": {"inner": {"3": "new text"}}}),
        ("items:[42,true,3.14,[],{}],b:[]", {"items": [42, True, 3.14, [], {}], "b": []}),
        ("key:", {"key": ""}),
        ("city:New York , n:1", {"city": "New York", "n": 1}),
        (f'q:"keep , oldText: literal",note:{Q}ok{Q}', {"q": "keep , oldText: literal", "note": "ok"}),
        (r'q:"a \", b: \"{c",n:1', {"q": 'a ", b: "{c', "n": 1}),
        ('q:"a\tb","k":["x, y",{"z":"]"}],five:5" pipe', {"q": "a\tb", "k": ["x, y", {"z": "]"}], "five": '5" pipe'}),
        ("a:None,b:[None,True],c:{d:None}", {"a": None, "b": [None, True], "c": {"d": None}}),
        ("q:hello, world,n:1", {"q": "hello, world", "n": 1}),
        ("q:to Oslo, note to self: call, a.b:2", {"q": "to Oslo, note to self: call", "a.b": 2}),
        (f"q:x, ,y,k:{Q}v{Q}", {"q": "x,y", "k": "v"}),
        (f"q:{Q}x{Q},oops,n:1,last", {"q": "x", "oops": None, "n": "1,last"}),
        ("a:[1,],b:2,", {"a": [1], "b": 2}),
        (f'html:{Q}<a href="x">\n\\{Q}', {"html": '<a href="x">\n\\'}),
    ],
)
def test_values_become_json(written: str, arguments: Any) -> None:
    assert arguments_of(written) == arguments


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("zip:94103", {"zip": "94103"}),
        (f"zip:{Q}94103{Q}", {"zip": "94103"}),
        (f"count:{Q}42{Q}", {"count": 42}),
        ("count:null", {"count": None}),
        (f"tags:[1,{Q}2{Q}]", {"tags": ["1", "2"]}),
        (f"place:{{lat:{Q}1.5{Q},name:7}}", {"place": {"lat": 1.5, "name": "7"}}),
        (f"other:{Q}42{Q},more:42", {"other": "42", "more": 42}),
    ],
)
def test_values_are_coerced_by_the_schema(written: str, arguments: Any) -> None:
    assert arguments_of(written, TYPED) == arguments


@pytest.mark.parametrize("name", ["get-weather", "weather.get", "get_weather"])
def test_names_may_have_marks_in_them(name: str) -> None:
    assert calls(read(gemma4(AUTO), [f"<|tool_call>call:{name}{{}}<tool_call|>"])) == [(name, {})]


def test_the_word_before_the_name_may_be_missing() -> None:
    assert calls(read(gemma4(AUTO), ["<|tool_call>:f{n:42}<tool_call|>"])) == [("f", {"n": 42})]


def test_text_and_calls_may_alternate() -> None:
    events = read(gemma4(AUTO), list(SAMPLES[0]))
    assert [name for name, _ in calls(events)] == ["f", "g"]
    assert [event for event in events if isinstance(event, Text)] == [Text("Look: "), Text("!")]


def test_strings_stream_character_by_character() -> None:
    parser = gemma4(AUTO)
    parser.feed("<|tool_call>call:f{k:")
    parser.feed(Q)
    assert [parser.feed(char) for char in 'a"'] == [[ToolCallArguments(0, '"a')], [ToolCallArguments(0, '\\"')]]


@pytest.mark.parametrize(
    ("cut", "arguments", "closed"),
    [
        ("", "{", {}),
        (f"k:{Q}London", '{"k": "London', {"k": "London"}),
        ("k:[1,2", '{"k": [1, 2', {"k": [1, 2]}),
        (f"a:1,k:{{b:{Q}", '{"a": 1, "k": {"b": ', {"a": 1, "k": {"b": ""}}),
        ("a:x,k", '{"a": "x', {"a": "x,k"}),
        ("a:tr", '{"a": tr', {"a": "tr"}),
        ('a:"x, y', '{"a": "x, y', {"a": '"x, y'}),
    ],
)
def test_a_call_that_is_cut_keeps_what_came_and_one_that_ends_is_closed(cut: str, arguments: str, closed: Any) -> None:
    turn = Turn(tool_choice="auto", added_tokens=frozenset({"<tool_call|>"}))
    text = f"<|tool_call>call:f{{{cut}"
    (start, *fragments) = read(gemma4(turn), [text])
    assert (start, fragments) == (ToolCallStart(0, "f", ""), [ToolCallArguments(0, arguments)])
    assert calls(read(gemma4(turn), [text, SpecialText("<tool_call|>")])) == [("f", closed)]


def test_the_end_marker_closes_a_string_that_nothing_else_closes() -> None:
    text = f"<|tool_call>call:f{{k:{Q}abc<tool_call|>"
    assert calls(read(gemma4(AUTO), list(text))) == [("f", {"k": "abc"})]
    assert calls(read(gemma4(AUTO), list(f"{text} {Q}}}<tool_call|>"))) == [("f", {"k": "abc<tool_call|> "})]
    events = read(gemma4(AUTO), list(f"{text}\nDone."))
    assert (calls(events), events[-1]) == ([("f", {"k": "abc"})], Text("\nDone."))
    check_cuts(gemma4, [f"{text}\nDone."], markers=MARKERS, turn=AUTO, max_examples=10)


@pytest.mark.parametrize("vocabulary", [frozenset[str](), frozenset(MARKERS)])
def test_a_string_that_was_not_closed_ends_with_its_call(vocabulary: frozenset[str]) -> None:
    turn = Turn(tool_choice="auto", added_tokens=vocabulary)
    text = f"<|tool_call>call:f{{k:{Q}a}}<tool_call|><|tool_call>call:g{{k:[{Q}b]}}<tool_call|>\n<|tool_call>call:h{{}}<tool_call|>Tail"
    events = read(gemma4(turn), split_atoms(text, vocabulary))
    assert calls(events) == [("f", {"k": "a"}), ("g", {"k": ["b"]}), ("h", {})]
    assert events[-1] == Text("Tail")
    check_cuts(gemma4, [text], markers=MARKERS, turn=AUTO, max_examples=10)


def test_a_string_may_quote_the_markers() -> None:
    quoted = "a}<tool_call|> and <|tool_call> and }"
    events = read(gemma4(AUTO), list(f"<|tool_call>call:f{{k:{Q}{quoted}{Q}}}<tool_call|>"))
    assert calls(events) == [("f", {"k": quoted})]


@pytest.mark.parametrize("between", ["", "\n", ",", " , "])
def test_several_calls_may_stand_between_one_pair_of_markers(between: str) -> None:
    text = f"<|tool_call>call:f{{a:1}}{between}call:g{{}}<tool_call|>!"
    events = read(gemma4(AUTO), list(text))
    assert calls(events) == [("f", {"a": 1}), ("g", {})]
    assert events[-1] == Text("!")
    check_cuts(gemma4, [text], markers=MARKERS, turn=AUTO, max_examples=10)


def test_what_follows_a_call_between_the_markers_and_is_none_is_text() -> None:
    events = read(gemma4(AUTO), list("<|tool_call>call:f{}, call: g{}<tool_call|>, call:g{}"))
    assert calls(events) == [("f", {}), ("g", {})]
    events = read(gemma4(AUTO), list("<|tool_call>call:f{}, call it<tool_call|>"))
    assert (calls(events), events[-1]) == ([("f", {})], Text(", call it<tool_call|>"))


@pytest.mark.parametrize("text", ["<|tool_call>call f{}<tool_call|>", "<|tool_call>{}", "<|tool_call>call:f", "call:f{}<tool_call|>"])
def test_what_is_no_call_is_text(text: str) -> None:
    assert read(gemma4(AUTO), list(text)) == [Text(text)]


def test_a_quoted_call_calls_nothing_where_the_markers_are_tokens() -> None:
    assert read(gemma4(Turn(tool_choice="auto", added_tokens=frozenset(MARKERS))), [SAMPLES[0]]) == [Text(SAMPLES[0])]


FUNCTION_MARKERS = ("<start_function_call>", "<end_function_call>", "<escape>")


def test_line_breaks_before_a_value_are_looked_at_once() -> None:
    check_cost(functiongemma, "<start_function_call>call:f{k:", AUTO)


def test_functiongemma_keeps_its_promises() -> None:
    check_cuts(
        functiongemma,
        ["<start_function_call>call:f{a:<escape>x<escape>,n:<escape>42<escape>}<end_function_call>b"],
        markers=FUNCTION_MARKERS,
        max_examples=15,
    )


@pytest.mark.parametrize(
    ("written", "turn", "arguments"),
    [
        ("city:<escape>Tokyo<escape>,country:<escape>Japan<escape>", AUTO, {"city": "Tokyo", "country": "Japan"}),
        ("city:<escape>NYC<escape>unit:<escape>celsius<escape>", AUTO, {"city": "NYC", "unit": "celsius"}),
        (
            "\n\nquery:<escape>python<escape>\n,\nlimit:<escape>10<escape>,on:<escape>true<escape>\n",
            AUTO,
            {"query": "python", "limit": 10, "on": True},
        ),
        ("zip:<escape>10<escape>,count:<escape>10<escape>", TYPED, {"zip": "10", "count": 10}),
        ("a:1,b:{c:<escape>d<escape>}", AUTO, {"a": 1, "b": {"c": "d"}}),
    ],
)
def test_functiongemma_has_all_values_between_delimiters(written: str, turn: Turn, arguments: Any) -> None:
    text = f"<start_function_call>call:f{{{written}}}<end_function_call>"
    assert calls(read(functiongemma(turn), list(text))) == [("f", arguments)]


class Typed:
    """functiongemma as it is served: with the schemas of the tools, without which strings cannot be told from numbers."""

    tool_format = tool_format("functiongemma")

    def __init__(self, turn: Turn) -> None:
        tools = [{"function": {"name": name, "parameters": schema}} for name, schema in SAMPLE_TOOLS.items()]
        parser = functiongemma(replace(turn, tools=tools))
        self.feed, self.finish = parser.feed, parser.finish


@pytest.mark.parametrize(("factory", "markers"), [(gemma4, MARKERS), (Typed, FUNCTION_MARKERS)])
def test_what_the_format_allows_is_read_as_calls(factory: ToolParserFactory, markers: tuple[str, ...]) -> None:
    check_tool_format(factory, markers=markers, num_walks=2)


def callable_tool(schema: Any, *, is_lenient: bool = False) -> CallableTool:
    return CallableTool("f", GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "tools[0]", is_lenient=is_lenient))


NESTED = {
    "type": "object",
    "properties": {
        "a": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "array", "items": {"type": "integer"}, "maxItems": 2}]},
        "b": {"type": ["object", "null"], "properties": {"c": {"enum": ["x y", 1, None]}}, "required": ["c"]},
    },
    "required": ["b"],
    "$defs": {"text": {"type": "string"}},
}


@pytest.mark.parametrize(
    ("written", "is_allowed"),
    [
        ("b:null", True),
        (f"a:{Q}any, {{text}}{Q},b:{{c:{Q}x y{Q}}}", True),
        ("a:[1,2],b:{c:1}", True),
        ("a:[],b:{c:null}", True),
        ("a:[1,2,3],b:null", False),
        ("a:[1]", False),
        ("b:{}", False),
        ("a:1,b:null", False),
        ("b:null,a:[]", False),
    ],
)
def test_grammars_follow_the_schema(written: str, is_allowed: bool) -> None:
    vocabulary = byte_vocabulary(MARKERS)
    structure = tool_format("gemma4").calls([callable_tool(NESTED)], is_single=True)
    grammar = LlguidanceBackend(vocabulary).compile(GrammarSpec(GrammarKind.STRUCTURE, "", structure=structure))
    assert accepts(grammar.matcher(), vocabulary, split_pieces(f"call:f{{{written}}}<tool_call|>", vocabulary)) == is_allowed


@pytest.mark.parametrize("schema", [{"properties": {"a": {"type": "string", "pattern": "x"}}}, {"properties": {}, "minProperties": 1}])
def test_what_the_notation_cannot_be_held_to_is_refused_where_it_is_strict(schema: Any) -> None:
    tool_format("gemma4").calls([callable_tool(schema, is_lenient=True)], is_single=True)
    with pytest.raises(UnsupportedGrammar):
        tool_format("gemma4").calls([callable_tool(schema)], is_single=True)


SELF_REFERENCES = {"properties": {name: {"$ref": "#"} for name in "abcdefgh"}}


@pytest.mark.parametrize("schema", [SELF_REFERENCES, {"properties": {"a:b": {}}}, {"properties": {"a": {"enum": []}}}, {"required": 1}])
def test_what_the_notation_has_no_way_to_write_is_refused(schema: Any) -> None:
    with pytest.raises(UnsupportedGrammar):
        tool_format("gemma4").calls([callable_tool(schema, is_lenient=True)], is_single=True)
