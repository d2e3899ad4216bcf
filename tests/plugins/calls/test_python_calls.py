"""Calls in Python's notation: `pythonic`, `llama4_pythonic`, `olmo3` and `lfm2`."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import CallableTool, Event, FormatInfo, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.manager import Plugins
from penstock.testing import check_cuts, check_parser, check_tool_format, read
from penstock.testing.parser_check import split_atoms
from tests.helpers.tool_parsers import tool_format, tool_parser

lfm2 = tool_parser("lfm2")
llama4_pythonic = tool_parser("llama4_pythonic")
olmo3 = tool_parser("olmo3")
pythonic = tool_parser("pythonic")

AUTO = Turn(tool_choice="auto")
FAMILIES: dict[str, tuple[ToolParserFactory, list[str], tuple[str, ...]]] = {
    "pythonic": (pythonic, ["[f(x='a', y=[1, {'b': None}]), g()] ", "[f(x=1), bad('a, (b'), g(s='it's", "[1, f(x=1)]"], ()),
    "llama4": (
        llama4_pythonic,
        ["a<|python_start|>[f(x=1)]<|python_end|>b", "[f(x=1)]<|python_end|>"],
        ("<|python_start|>", "<|python_end|>"),
    ),
    "olmo3": (
        olmo3,
        ["a<function_calls>f(x=true)\nbad(s)\ng(y='b')</function_calls>b", "<function_calls>f(x={'a'"],
        ("<function_calls>", "</function_calls>"),
    ),
    "lfm2": (
        lfm2,
        ["a<|tool_call_start|>[f(x={'a', 'b'}), g(y='say 'hi' now')]<|tool_call_end|>", "<|tool_call_start|>[]<|tool_call_end|>"],
        ("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
}


def calls(events: list[Event]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            found.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            found[event.index] = (found[event.index][0], found[event.index][1] + event.fragment)
    return found


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


def arguments_of(written: str) -> str:
    ((name, arguments),) = calls(read(pythonic(AUTO), list(f"[f({written})]")))
    assert name == "f"
    json.loads(arguments)
    return arguments


@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_and_any_stop_give_the_same_answer(family: str) -> None:
    factory, samples, markers = FAMILIES[family]
    check_parser(factory, samples, markers=markers, max_examples=15)


@pytest.mark.parametrize("family", ["llama4", "olmo3", "lfm2"])
def test_what_the_format_allows_is_read_as_calls(family: str) -> None:
    factory, _, markers = FAMILIES[family]
    check_tool_format(factory, markers=markers, num_walks=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_tool_choice_none_everything_is_text(family: str) -> None:
    factory, samples, _ = FAMILIES[family]
    assert read(factory(Turn(tool_choice="none")), [samples[0]]) == [Text(samples[0])]


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("city='San Francisco', metric=\"celsius\"", '{"city": "San Francisco", "metric": "celsius"}'),
        (
            "a={'x': 'y', 'z': {}}, b=[], c=None, d=True, e=null, f=false,",
            '{"a": {"x": "y", "z": {}}, "b": [], "c": null, "d": true, "e": null, "f": false}',
        ),
        (
            "a=-1, b=+2.50, c=1e5, d=07, e=1_000, f=0x1F, g=.5, h=5.",
            '{"a": -1, "b": 2.5, "c": 1e5, "d": 7, "e": 1000, "f": 31, "g": 0.5, "h": 5.0}',
        ),
        (r"city='Martha\'s Vineyard', metric='\"cool units\"'", '{"city": "Martha\'s Vineyard", "metric": "\\"cool units\\""}'),
        (r"x='\u00e9\x41\101\N{BULLET}\d\/'", '{"x": "éAA•\\\\d/"}'),
        ("x='a\nb', y='\x00'", '{"x": "a\\nb", "y": "\\u0000"}'),
        ("x='''it's''', y=\"\"\"a\"b\"\"\"", '{"x": "it\'s", "y": "a\\"b"}'),
        ("x='a' 'b'\n'c'", '{"x": "abc"}'),
        ("x=('a', 1), y={'a', 'b'}, z={1: 2}", '{"x": ["a", 1], "y": ["a", "b"], "z": {"1": 2}}'),
        ("x='grep -F \"]\" log', y='a)b'", '{"x": "grep -F \\"]\\" log", "y": "a)b"}'),
        ("command='sed -n '360,450p' /x'", '{"command": "sed -n \'360,450p\' /x"}'),
        ("x='print(latex(y='\\,'))'", '{"x": "print(latex(y=\'\\\\,\'))"}'),
        ("x=r'\\d'", '{"x": "\\\\d"}'),
        ("x='晴れ \\ud83d\\ude00'", '{"x": "晴れ \\ud83d\\ude00"}'),
        ("", "{}"),
    ],
)
def test_literals_become_json(written: str, arguments: str) -> None:
    assert arguments_of(written) == arguments


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@settings(max_examples=30)
@given(st.recursive(SCALARS, lambda values: st.lists(values) | st.dictionaries(st.text(), values)))
def test_whatever_python_prints_is_read(value: object) -> None:
    assert json.loads(arguments_of(f"x={value!r}")) == {"x": value}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[f(x=1), g()]", ["f", "g"]),
        (" \n[f(x=1),g()]\n", ["f", "g"]),
        ("[grocery.order(a=1)]", ["grocery.order"]),
        ("How can I help?", []),
        ("See [f(x=1)]", []),
        ("[1, 2]", []),
        ("[see](http://x)", []),
        ("[]", []),
        ("f(x=1)", []),
        ("[f('Tokyo')]", []),
        ("[f(x=)]", []),
        ("[f(x=y)]", []),
        ("[f(**x)]", []),
        ("[f(x=1+2)]", []),
    ],
)
def test_a_list_of_calls_is_the_whole_answer(text: str, names: list[str]) -> None:
    events = read(pythonic(AUTO), list(text))
    assert [name for name, _ in calls(events)] == names
    assert text_of(events) == ("" if names else text)


@pytest.mark.parametrize("bad", ["bad(x=b'z')", "bad(x=1e999)", "bad('a, (b')", "bad(x=y)"])
@pytest.mark.parametrize("pattern", ["[{bad}, f(x=1)]", "[f(x=1), {bad}]"])
def test_what_is_no_call_does_not_keep_others_from_being_read(bad: str, pattern: str) -> None:
    events = read(pythonic(AUTO), [pattern.format(bad=bad)])
    assert calls(events) == [("f", '{"x": 1}')]
    assert bad in text_of(events)


def test_strings_stream_character_by_character() -> None:
    parser = pythonic(AUTO)
    assert parser.feed("[f(x=") == []
    assert [type(event) for event in parser.feed("'")] == [ToolCallStart, ToolCallArguments]
    assert [event.fragment for char in 'a"\n字' for event in parser.feed(char) if isinstance(event, ToolCallArguments)] == [
        "a",
        '\\"',
        "\\n",
        "字",
    ]


@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ("", "{"),
        ("x", "{"),
        ("x=", "{"),
        ("x='San", '{"x": "San'),
        ("x='San'", '{"x": "San"'),
        ("x='San')", '{"x": "San"}'),
        ("x=[1, {'a': 'b", '{"x": [1, {"a": "b'),
        ("x=1, y", '{"x": 1'),
        ("x='a', y=Tr", '{"x": "a"'),
        ("x=1)", '{"x": 1}'),
    ],
)
@pytest.mark.parametrize("family", ["pythonic", "llama4", "olmo3", "lfm2"])
def test_a_call_that_is_cut_keeps_what_came_from_its_name_on_and_is_not_closed(family: str, cut: str, arguments: str) -> None:
    factory, _, markers = FAMILIES[family]
    start = f"{markers[0] if markers else ''}{'' if family == 'olmo3' else '['}"
    events = read(factory(AUTO), list(f"{start}f({cut}"))
    assert (calls(events), text_of(events)) == ([("f", arguments)], "")


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("a=1, x=1 2", {"a": 1, "x": "1 2"}),
        ("a=1, x=y", {"a": 1, "x": "y"}),
        ("a=1, x=1+2, y=f(3, [4]), z=", {"a": 1, "x": "1+2", "y": "f(3, [4])", "z": None}),
        ("a=[1, x, b'z'], b={c: d, 'e': 1e999}", {"a": [1, "x", "b'z'"], "b": {"c": "d", "e": "1e999"}}),
        ("a=[1, {'b': 2", {"a": [1, {"b": 2}]}),
    ],
)
def test_a_value_that_is_no_literal_is_a_string_where_the_call_has_started(written: str, arguments: object) -> None:
    events = read(pythonic(AUTO), list(f"[f({written}), g()]"))
    assert [(name, json.loads(text)) for name, text in calls(events)] == [("f", arguments), ("g", {})]
    check_cuts(pythonic, [f"[f({written}), g()]"], max_examples=10)


@pytest.mark.parametrize("wrong", ["b", "**c", "'d'", "= 1"])
def test_arguments_that_make_no_sense_are_closed_and_leave_the_rest_visible(wrong: str) -> None:
    events = read(pythonic(AUTO), list(f"[f(x=1, {wrong}), g()]"))
    assert calls(events) == [("f", '{"x": 1}'), ("g", "{}")]
    assert text_of(events) == f"{wrong})"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('[f(x="NYC"]', ["f"]),
        ('[f(x="NYC"],', ["f"]),
        ('[f(x="NYC"], g(y=1)]', ["f", "g"]),
        ("[f(x=1], g(y=1)]", ["f"]),
        ("[f(x=[1, 2]]", ["f"]),
        ("[f(x=1, ]", ["f"]),
    ],
)
def test_the_last_bracket_of_a_call_may_be_missing(text: str, names: list[str]) -> None:
    events = read(pythonic(AUTO), list(text))
    assert [name for name, _ in calls(events)] == names
    assert json.loads(calls(events)[0][1])["x"] in ("NYC", 1, [1, 2])
    check_cuts(pythonic, [text], max_examples=10)


@pytest.mark.parametrize("body", ["f(x='a')", "f(x='a'), g()", "f(x='a')\ng()"])
def test_lfm2_may_leave_the_brackets_out(body: str) -> None:
    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    events = read(lfm2(AUTO), list(f"Now: {start}{body}{end}"))
    assert calls(events) == [("f", '{"x": "a"}'), ("g", "{}")][: body.count("(")]
    assert text_of(events) == "Now: "
    check_cuts(lfm2, [f"{start}{body}{end}", f"{start}two words(x=1){end}"], markers=(start, end), turn=AUTO, max_examples=15)


@pytest.mark.parametrize(
    "text", ["<|python_start|>[f(x=1)]<|python_end|>", "[f(x=1)]", "<|python_start|>[f(x=1)]", " <|python_start|> [f(x=1)]"]
)
def test_llama4_may_leave_its_markers_out(text: str) -> None:
    events = read(llama4_pythonic(AUTO), list(text))
    assert calls(events) == [("f", '{"x": 1}')]
    assert not text_of(events)


def test_llama4_keeps_code_that_is_no_call() -> None:
    text = "Run <|python_start|>print(1)<|python_end|>"
    assert read(llama4_pythonic(AUTO), [text]) == [Text(text)]


def test_olmo3_writes_a_line_for_each_call() -> None:
    events = read(olmo3(AUTO), list("Look:\n<function_calls>\nf(x=null)\n\ng(y='b')\n</function_calls>\n"))
    assert calls(events) == [("f", '{"x": null}'), ("g", '{"y": "b"}')]
    assert text_of(events) == "Look:\n"


def test_lfm2_may_write_its_calls_in_json_too() -> None:
    start, end = "<|tool_call_start|>", "<|tool_call_end|>"
    text = f'{start}[{{"name": "f", "arguments": {{"x": 1}}}}]{end} {start}[g(y="z"), f()]{end}\n{start}{{"name": "g"}}{end}'
    assert calls(read(lfm2(AUTO), [text])) == [("f", '{"x": 1}'), ("g", '{"y": "z"}'), ("f", "{}"), ("g", "{}")]
    check_cuts(lfm2, [text, f'{start}[f(x="{start}{{"name": "g", "arguments": {{'], markers=(start, end), turn=AUTO, max_examples=25)


def test_lfm2_may_write_text_around_its_calls() -> None:
    events = read(lfm2(AUTO), list("Let me check. <|tool_call_start|> [f(x='a'), g()]<|tool_call_end|>\nDone."))
    assert calls(events) == [("f", '{"x": "a"}'), ("g", "{}")]
    assert text_of(events) == "Let me check. \nDone."


def test_a_quoted_marker_calls_nothing_where_it_is_a_token() -> None:
    turn = Turn(tool_choice="auto", added_tokens=frozenset({"<|tool_call_start|>", "<|tool_call_end|>"}))
    text = "<|tool_call_start|>[f(x=1)]<|tool_call_end|>"
    assert read(lfm2(turn), [text]) == [Text(text)]
    pieces = [SpecialText("<|tool_call_start|>"), "[f(x='<|tool_call_end|>')]", SpecialText("<|tool_call_end|>")]
    assert calls(read(lfm2(turn), pieces)) == [("f", '{"x": "<|tool_call_end|>"}')]


def test_the_end_token_ends_a_call_even_inside_a_string() -> None:
    turn = Turn(tool_choice="auto", added_tokens=frozenset({"<|tool_call_start|>", "<|tool_call_end|>"}))
    events = read(lfm2(turn), [SpecialText("<|tool_call_start|>"), "[f(x='a", SpecialText("<|tool_call_end|>"), "b"])
    assert calls(events) == [("f", '{"x": "a"}')]
    assert text_of(events) == "b"


@pytest.mark.parametrize("is_lenient", [True, False])
def test_schemas_that_are_no_list_of_properties_are_refused_where_they_are_strict(is_lenient: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "minProperties": 1}
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "tools[0]", is_lenient=is_lenient)
    if is_lenient:
        tool_format("lfm2").calls([CallableTool("f", spec)], is_single=True)
    else:
        with pytest.raises(UnsupportedGrammar, match="minProperties"):
            tool_format("lfm2").calls([CallableTool("f", spec)], is_single=True)


UNCLOSED = ["lfm2", "llama4_pythonic", "olmo3"]


def unclosed(info: FormatInfo) -> str:
    start, end = info.example.split("Oslo")
    return f"{start}Oslo{end[1:]}"


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_string_that_was_not_closed_ends_with_its_call(name: str) -> None:
    registry = Plugins.start(["none"]).tool_parsers
    info = registry.infos[name]
    text = f'{unclosed(info)}Then {unclosed(info).replace("Oslo", "Rome")}{info.example}Tail isn\'t "it".'
    markers = tuple(marker for marker in info.markers if len(marker) > 1)
    for vocabulary in (frozenset[str](), frozenset(markers)):
        events = read(registry[name](Turn(tool_choice="auto", added_tokens=vocabulary)), split_atoms(text, vocabulary))
        fragments = ["".join(e.fragment for e in events if isinstance(e, ToolCallArguments) and e.index == index) for index in range(3)]
        assert fragments == ['{"city": "Oslo"}', '{"city": "Rome"}', '{"city": "Oslo"}']
        assert "".join(event.text for event in events if isinstance(event, Text)) == 'Then Tail isn\'t "it".'
    check_cuts(registry[name], [text], markers=markers, turn=Turn(tool_choice="auto"), max_examples=5)


@pytest.mark.parametrize("name", UNCLOSED)
def test_a_string_may_quote_the_markers(name: str) -> None:
    registry = Plugins.start(["none"]).tool_parsers
    info = registry.infos[name]
    markers = [marker for marker in info.markers if len(marker) > 1]
    quoted = f"a){markers[-1]} and {markers[0]} (b)"
    events = read(registry[name](Turn(tool_choice="auto")), [info.example.replace("Oslo", quoted)])
    assert events == [ToolCallStart(0, "weather", ""), ToolCallArguments(0, json.dumps({"city": quoted}))]
