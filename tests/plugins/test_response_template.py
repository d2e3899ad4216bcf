"""Templates of the kind that checkpoints bring, and what transformers itself makes of the same answers."""

import json
from typing import Any

import pytest

from penstock.engine.contracts.parsing import Event, Phase, Reasoning, SpecialText, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.errors import ConfigurationError
from penstock.engine.text.answer import ParserChain
from penstock.plugins.response_templates.parsers import TemplateCalls, TemplateReasoning
from penstock.testing import check_parser, merged, read

ANALYSIS = "<|channel|>analysis<|message|>"
THINK = {"open": "<think>", "close": "</think>"}
CALL = {
    "open": "<tool_call>",
    "close": "</tool_call>",
    "repeats": True,
    "content": "json",
    "transform": {"type": "function", "function": "{content}"},
}
HERMES = {"start_anchor": "<|im_start|>assistant\n", "fields": {"thinking": THINK, "tool_calls": CALL, "content": {"close": "<|im_end|>"}}}
TAGS = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": THINK,
        "tool_calls": {
            "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
            "close": "</tool_call>",
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
GEMMA = {
    "start_anchor": ["<|turn>model\n", "<tool_response|>"],
    "fields": {
        "thinking": {"open": "<|channel>thought\n", "close": "<channel|>"},
        "tool_calls": {
            "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
            "close": "<tool_call|>",
            "repeats": True,
            "content": "json",
            "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": ["<turn|>", "<eos>"]},
    },
}
HARMONY = {
    "start_anchor": "<|start|>assistant",
    "fields": {
        "thinking": {"open": ANALYSIS, "close": "<|end|>", "repeats": True, "join": "\n"},
        "content": {"open": "<|channel|>final<|message|>", "close": "<|end|>"},
        "tool_calls": {
            "open_pattern": r"<\|channel\|>commentary to=functions\.(?P<name>\w+).*?<\|message\|>",
            "close": "<|call|>",
            "repeats": True,
            "content": "json",
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}
COMMAND = {
    "start_anchor": "<|CHATBOT_TOKEN|>",
    "fields": {
        "thinking": {"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
        "content": {"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
        "tool_calls": {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform_each": True,
            "transform": {"function": {"name": "{tool_name}", "arguments": "{parameters}"}},
        },
    },
}
ERNIE = {
    "start_anchor": "Assistant:",
    "fields": {
        "thinking": {"open_pattern": r"(?:^|<think>\s*)", "close": "</think>"},
        "content": {"open": "<response>\n", "close_pattern": r"\n?</response>"},
        "tool_calls": CALL,
    },
}
ROLE = "<|start|>assistant"
CALLS = '<tool_call>{"name": "f", "arguments": {"x": "a"}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>'
PARAMETERS = '<parameter=x>\n[{"a": 1}]\n</parameter>\n<parameter=y>\nb c\n</parameter>'
ACTION = '[\n{"tool_call_id": "0", "tool_name": "f", "parameters": {"x": 1}}\n]'
ANSWERS: list[tuple[dict[str, Any], str]] = [
    (HERMES, f"<think>\nwhy\n</think>\n\n{CALLS}"),
    (HERMES, "<think>why</think>\nbecause <b>it</b> is"),
    (TAGS, f"<think>why</think>\n<tool_call>\n<function=f>\n{PARAMETERS}\n</function>\n</tool_call>"),
    (GEMMA, '<|channel>thought\nwhy<channel|><|tool_call>call:f{n:0,s:<|"|>Paris, {x}<|"|>,l:[<|"|>a<|"|>],o:{k:null}}<tool_call|>'),
    (HARMONY, f'{ANALYSIS}why<|end|>{ROLE}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"x": 1}}'),
    (HARMONY, f"{ANALYSIS}a<|end|>{ROLE}{ANALYSIS}b<|end|>{ROLE}<|channel|>final<|message|>c"),
    (COMMAND, f"<|START_THINKING|>why<|END_THINKING|>\n<|START_ACTION|>{ACTION}<|END_ACTION|>"),
    (COMMAND, "<|START_THINKING|>why<|END_THINKING|><|START_RESPONSE|>because<|END_RESPONSE|>"),
    (ERNIE, 'why\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'),
    (ERNIE, "why</think>\n\n<response>\nbecause\n</response>\n"),
]


def both(text: str, template: dict[str, Any] | None, **turn: Any) -> list[Event]:
    start = Turn(response_template=template, tool_choice="auto", **turn)
    chain = ParserChain([TemplateReasoning(start), TemplateCalls(start)])
    return merged([*(event for char in text for event in chain.feed(char)), *chain.finish()])


def message(events: list[Event]) -> dict[str, Any]:
    """As transformers says it."""
    calls: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ToolCallArguments):
            calls[event.index][1] += event.fragment
    parts = {
        "thinking": "".join(event.text for event in events if isinstance(event, Reasoning)),
        "content": "".join(event.text for event in events if isinstance(event, Text)),
        "tool_calls": [{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls],
    }
    return {key: value for key, value in parts.items() if value}


@pytest.mark.parametrize(("template", "text"), ANSWERS)
def test_answers_are_read_as_transformers_reads_them(template: dict[str, Any], text: str) -> None:
    from transformers.utils.chat_parsing import parse_response

    expected = parse_response(text, template, prefix="")
    if "tool_calls" in expected:
        calls = expected["tool_calls"] if isinstance(expected["tool_calls"], list) else [expected["tool_calls"]]
        expected["tool_calls"] = [{"name": one["function"]["name"], "arguments": one["function"].get("arguments", {})} for one in calls]
    assert message(both(text, template)) == expected


@pytest.mark.parametrize("factory", [TemplateReasoning, TemplateCalls])
@pytest.mark.parametrize(
    ("template", "markers"), [(HERMES, ["<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", " ", "\n"])]
)
def test_any_cut_and_any_stop_give_the_same_answer(factory: Any, template: dict[str, Any], markers: list[str]) -> None:
    turn = Turn(response_template=template, tool_choice="auto")
    check_parser(factory, [ANSWERS[0][1], "a<think>b"], markers=markers, turn=turn, max_examples=12)


def test_patterns_may_be_cut_anywhere() -> None:
    turn = Turn(response_template=GEMMA, tool_choice="auto")
    check_parser(TemplateCalls, [ANSWERS[3][1]], markers=["<|tool_call>", "<tool_call|>"], turn=turn, max_examples=8)


@pytest.mark.parametrize(
    ("tail", "phase"),
    [
        ("<|im_start|>assistant\n", Phase.UNDECIDED),
        ("<|im_start|>assistant\n<think>\n", Phase.REASONING),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", Phase.CONTENT),
        ("a</think><|im_end|>\n<|im_start|>assistant\n", Phase.UNDECIDED),
    ],
)
def test_the_start_is_read_from_the_prompt(tail: str, phase: Phase) -> None:
    parser = TemplateReasoning(Turn(prompt_tail=tail, response_template=HERMES))
    assert parser.phase is phase
    assert (parser.start_marker, parser.end_marker) == ("<think>", "</think>")
    events = read(parser, ["why</think>because"])
    assert events[0] == {Phase.REASONING: Reasoning("why")}.get(phase, Text("why</think>because"))


def test_the_phase_follows_the_fields() -> None:
    parser = TemplateReasoning(Turn(response_template=HERMES))
    phases = []
    for piece in ("<think>", "why", "</think>", "because"):
        parser.feed(piece)
        phases.append(parser.phase)
    assert phases == [Phase.REASONING, Phase.REASONING, Phase.CONTENT, Phase.CONTENT]


def test_reasoning_and_content_stream() -> None:
    parser = TemplateReasoning(Turn(response_template=HERMES))
    parser.feed("<think>")
    assert parser.feed("why") == [Reasoning("why")]
    parser.feed("</think>")
    assert parser.feed("because") == [Text("because")]


@pytest.mark.parametrize("body", ["no JSON", "[1]", '{"name": 1}', '{"name": "f", "arguments": {"x": NaN}}'])
def test_a_field_that_is_no_call_is_content(body: str) -> None:
    text = f"a <tool_call>{body}</tool_call> b"
    assert read(TemplateCalls(Turn(response_template=HERMES, tool_choice="auto")), [text]) == [Text(text)]


def test_with_tool_choice_none_a_call_is_text() -> None:
    turn = Turn(response_template=HERMES, tool_choice="none")
    text = '<tool_call>{"name": "f"}</tool_call>'
    assert read(TemplateCalls(turn), [text]) == [Text(text)]


def test_without_a_template_everything_is_content() -> None:
    assert both("<think>a</think>b", None) == [Text("<think>a</think>b")]


def test_an_answer_that_knows_no_fields_is_content() -> None:
    assert both("because", HARMONY) == [Text("because")]
    assert both("<|channel|>analysis<|message|>why<|end|>because", HARMONY) == [Reasoning("why"), Text("because")]


def test_strings_are_coerced_by_the_schema() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    events = both('<tool_call>{"name": "f", "arguments": {"n": "3", "s": "3"}}</tool_call>', HERMES, tools=tools)
    assert message(events)["tool_calls"] == [{"name": "f", "arguments": {"n": 3, "s": "3"}}]


def test_a_quoted_delimiter_is_text_where_it_is_a_token() -> None:
    turn = Turn(response_template=GEMMA, tool_choice="auto", added_tokens=frozenset({"<|tool_call>", "<tool_call|>"}))
    assert read(TemplateCalls(turn), ["<|tool_call>call:f{}<tool_call|>"]) == [Text("<|tool_call>call:f{}<tool_call|>")]
    pieces = [SpecialText("<|tool_call>"), "call:f{}", SpecialText("<tool_call|>")]
    assert read(TemplateCalls(turn), pieces) == [ToolCallStart(0, "f", ""), ToolCallArguments(0, "{}")]


def test_no_answer_makes_a_pattern_hang() -> None:
    template = {"start_anchor": "x", "fields": {"thinking": {"open_pattern": "(a*)*b", "close_pattern": "(c|cc)+d"}, "content": {}}}
    events = read(TemplateReasoning(Turn(response_template=template)), ["a" * 3000, "b" + "c" * 3000])
    assert events == [Reasoning("c" * 3000)]  # with backtracking it would take years


@pytest.mark.parametrize(
    "template",
    [
        {"fields": {}, "version": 2},
        {"fields": {"thinking": {"open": ""}}},
        {"fields": {"a": {}, "b": {}}},
        {"fields": {"thinking": {"open_pattern": "(?=a)"}}},
        {"fields": {"thinking": {"open_pattern": "("}}},
    ],
)
def test_a_template_that_is_wrong_is_the_operators_to_mend(template: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        TemplateReasoning(Turn(response_template=template))
