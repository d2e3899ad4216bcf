"""What is particular to formats that a few families write, beyond what holds for all of their kind."""

import json
from typing import Any

import pytest

from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import Event, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.testing import check_cuts, check_tool_format, read
from tests.helpers.tool_parsers import format_info, tool_parser

command_r = tool_parser("command_r")
functionary_v31 = tool_parser("functionary_v31")
functionary_v32 = tool_parser("functionary_v32")
gigachat3 = tool_parser("gigachat3")
inkling = tool_parser("inkling")
k2_horizon = tool_parser("k2_horizon")
kimi_k3 = tool_parser("kimi_k3")
minimax_m1 = tool_parser("minimax_m1")
muse_glimmer = tool_parser("muse_glimmer")
solar_open = tool_parser("solar_open")

ORDER = {
    "type": "object",
    "properties": {"note": {"type": "string"}, "count": {"type": "integer"}, "tags": {"type": "array"}},
}
TOOL = {"type": "function", "function": {"name": "order", "parameters": ORDER}}
TURN = Turn(tool_choice="auto", tools=(TOOL,))
ANY_TOOL = Turn(tool_choice="auto")


def answer(factory: ToolParserFactory, text: str, turn: Turn = TURN) -> tuple[list[tuple[str, Any]], str]:
    """Calls and content."""
    calls: list[list[str]] = []
    content = ""
    for event in read(factory(turn), [text]):
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.fragment
        elif isinstance(event, Text):
            content += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls], content


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def k3_call(name: str, *arguments: str) -> str:
    return f'<|open|>call tool="{name}" index="1"<|sep|>{"".join(arguments)}<|close|>call<|sep|>'


def k3_section(*calls: str) -> str:
    return f"<|open|>tools<|sep|>{''.join(calls)}<|close|>tools<|sep|>"


def test_kimi_k3_types_its_arguments() -> None:
    arguments = argument("note", "string", ' a "b" '), argument("count", "number", "3"), argument("tags", "array", '["<|x|>"]')
    text = k3_section(k3_call("order", *arguments), k3_call("order"))
    expected = [("order", {"note": ' a "b" ', "count": 3, "tags": ["<|x|>"]}), ("order", {})]
    assert answer(kimi_k3, text) == (expected, "")
    assert answer(kimi_k3, text, ANY_TOOL) == (expected, "")


def test_kimi_k3_escapes_attributes() -> None:
    text = k3_section(k3_call("a&amp;b", argument("say &quot;x&quot;", "string", "&amp;")))
    assert answer(kimi_k3, text, ANY_TOOL) == ([("a&b", {'say "x"': "&amp;"})], "")


def test_a_tag_of_kimi_k3_that_is_none_is_content() -> None:
    for text in ("<|open|>tools<|sep|><|open|>call index=1<|sep|>", "<|open|>call ", k3_section()):
        assert answer(kimi_k3, text) == ([], text)


def k2_parameter(name: str, kind: str, value: str) -> str:
    kind = f"<ifm|arg_type>{kind}</ifm|arg_type>" if kind else ""
    return f"<ifm|arg_key>{name}</ifm|arg_key>{kind}<ifm|arg_value>{value}</ifm|arg_value>"


def k2_section(*bodies: str) -> str:
    return f"<ifm|tool_calls>{chr(10).join(f'<ifm|tool_call>{body}</ifm|tool_call>' for body in bodies)}</ifm|tool_calls>"


def test_k2_horizon_writes_calls_in_three_ways() -> None:
    parameters = "order" + k2_parameter("note", "", "3") + k2_parameter("count", "", "3")
    typed = "order" + k2_parameter("note", "string", "3") + k2_parameter("count", "integer", "3")
    expected = ("order", {"note": "3", "count": 3})
    assert answer(k2_horizon, k2_section(parameters, parameters)) == ([expected, expected], "")
    assert answer(k2_horizon, k2_section(typed), ANY_TOOL) == ([expected], "")
    as_json = json.dumps({"name": "order", "arguments": expected[1]})
    assert answer(k2_horizon, f"So: {k2_section(as_json, as_json)}!") == ([expected, expected], "So: !")


def test_the_request_says_which_form_of_k2_horizon_is_forced() -> None:
    in_json = Turn(tool_choice="auto", chat_template_kwargs={"tool_call_format": "json"})
    assert k2_horizon(in_json).tool_format is not k2_horizon(TURN).tool_format


def test_minimax_m1_writes_one_call_to_a_line() -> None:
    calls = '{"name": "f", "arguments": {}}\n{"name": "g", "arguments": {"x": 1}}'
    assert answer(minimax_m1, f"<tool_calls>\n{calls}\n</tool_calls>") == ([("f", {}), ("g", {"x": 1})], "")
    assert answer(minimax_m1, calls) == ([], calls)


@pytest.mark.parametrize("before", ["<|function_call|>", "<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"])
def test_gigachat_writes_calls_after_text(before: str) -> None:
    assert answer(gigachat3, f'Now.{before}{{"name": "f", "arguments": {{"x": 1}}}}') == ([("f", {"x": 1})], "Now.")


def test_gigachat_is_forced_to_what_its_vocabulary_holds() -> None:
    separator = "<|message_sep|>\n\n"
    older = gigachat3(Turn(tool_choice="auto", added_tokens=frozenset({separator, "<|role_sep|>\n"}))).tool_format
    newer = gigachat3(Turn(tool_choice="auto", added_tokens=frozenset({separator, "<|function_call|>"}))).tool_format
    assert older is not None
    assert newer is not None
    assert (older.opening, newer.opening) == (f"{separator}function call<|role_sep|>\n", "<|function_call|>")


def test_solar_open_gives_its_own_ids() -> None:
    call = "<|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>f<|tool_call:args|>{}<|tool_call:end|>"
    [start, _] = solar_open(ANY_TOOL).feed(f"<|tool_calls|>{call}<|calls|>")
    assert start == ToolCallStart(0, "f", "a1b2c3d4e5")


def test_inkling_wraps_arguments_under_a_key_of_its_own() -> None:
    block = '<|content_invoke_tool_json|>{"name": "f", "args": {"x": 1}}<|end_message|>'
    assert answer(inkling, f"{block}<|message_model|>{block}") == ([("f", {"x": 1})] * 2, "")


def test_muse_keeps_the_types_of_the_schema() -> None:
    parameters = "".join(
        f'<atem:parameter name="{name}">{value}</atem:parameter>\n' for name, value in (("note", " 3 "), ("count", "3"), ("tags", "[1]"))
    )
    text = f'<atem:function_calls>\n<atem:invoke name="order">\n{parameters}</atem:invoke>\n</atem:function_calls>'
    assert answer(muse_glimmer, text) == ([("order", {"note": " 3 ", "count": 3, "tags": [1]})], "")


def test_command_r_answers_directly_where_it_calls_nothing() -> None:
    def actions(*names: str) -> str:
        written = ",\n".join(f'    {{\n        "tool_name": "{name}",\n        "parameters": {{"x": 1}}\n    }}' for name in names)
        return f"Plan: see.\nAction:\n```json\n[\n{written}\n]```"

    assert answer(command_r, actions("order", "order")) == ([("order", {"x": 1})] * 2, "Plan: see.\n")
    assert answer(command_r, actions("directly-answer")) == ([], actions("directly-answer"))


def test_functionary_v31_names_functions_in_tags() -> None:
    assert answer(functionary_v31, 'Hm. <function=f>{"x": 1}</function><function=g>{}</function>') == ([("f", {"x": 1}), ("g", {})], "Hm. ")
    for text in ("<function=f>x</function>", "<function=f g>{}</function>", "<function="):
        assert answer(functionary_v31, text) == ([], text)


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        ('order\n{"count": 1}', 1, ""),
        ('all\nLet me see.\n>>>order\n{"count": 1}\n>>>order\n{"count": 2}', 2, "Let me see.\n"),
        ('>>>order\n{"count": 1}', 1, ""),
        ("all\nDone.", 0, "Done."),
        ("all\n>>> print(1)", 0, ">>> print(1)"),
        ("order\nof things", 0, "order\nof things"),
        ("other\n{}", 0, "other\n{}"),
        ("al", 0, "al"),
        ("", 0, ""),
    ],
)
def test_functionary_v32_names_a_messages_recipient(text: str, calls: int, content: str) -> None:
    read_calls, read_content = answer(functionary_v32, text)
    assert read_calls == [("order", {"count": number}) for number in range(1, calls + 1)]
    assert read_content == content


FORMATS: dict[str, tuple[ToolParserFactory, tuple[str, ...]]] = {
    "command_r": (command_r, ()),
    "functionary_v31": (functionary_v31, ()),
    "k2_horizon": (k2_horizon, ("<ifm|tool_calls>", "<ifm|tool_call>", "</ifm|tool_call>", "</ifm|tool_calls>")),
    "kimi_k3": (kimi_k3, ("<|open|>", "<|close|>", "<|sep|>")),
    "muse_glimmer": (muse_glimmer, ()),
}


@pytest.mark.parametrize(("factory", "markers"), FORMATS.values(), ids=FORMATS)
def test_what_the_format_allows_is_read_as_calls(factory: ToolParserFactory, markers: tuple[str, ...]) -> None:
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = {"f": nothing, "g-2": nothing | {"properties": {"x": {"enum": ["]}", "日本"]}, "n": {"type": "integer"}}, "required": ["x"]}}
    check_tool_format(factory, markers=markers, tools=tools, num_walks=3)


def test_any_cut_of_a_typed_parameter_gives_the_same_answer() -> None:
    text = k2_section("order" + k2_parameter("note", "string", "3") + k2_parameter("count", "any", "[1]"))
    check_cuts(
        k2_horizon,
        [text, text.replace("</ifm|arg_type>", "")],
        markers=(*format_info("k2_horizon").markers, "string", "any"),
        turn=TURN,
        max_examples=20,
    )


def test_with_tool_choice_none_functionary_reads_only_a_messages_recipient() -> None:
    events: list[Event] = [*read(functionary_v32(Turn(tools=(TOOL,))), ["order\n{}"])]
    assert events == [Text("order\n{}")]
