"""Formats in which reasoning, text and calls are messages or channels of their own: what each parser leaves for the other."""

import json

import pytest

from penstock.engine.contracts.parsing import Event, Phase, Reasoning, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.text.answer import ParserChain
from penstock.plugins.manager import Plugins
from penstock.testing import check_cuts, read, split_atoms

PLUGINS = Plugins.start(["none"])
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
TOKENS = {
    "apriel": (),
    "inkling": (
        *("<|message_model|>", "<|content_text|>", "<|content_thinking|>", "<|content_invoke_tool_json|>"),
        *("<|end_message|>", "<|content_model_end_sampling|>"),
    ),
    "kimi_k3": ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
    "muse_glimmer": ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
    "solar_open": (
        *("<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|calls|>"),
        *("<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"),
    ),
}
NAMES = sorted(TOKENS)


def call_of(name: str) -> str:
    return PLUGINS.tool_parsers.infos[name].example


def answer(name: str, text: str, turn: Turn) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content and calls of both parsers of that name."""
    chain = ParserChain([PLUGINS.reasoning_parsers[name](turn), PLUGINS.tool_parsers[name](turn)])
    events: list[Event] = [event for piece in split_atoms(text, turn.added_tokens) for event in chain.feed(piece)]
    events += chain.finish()
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            called, arguments = calls[event.index]
            calls[event.index] = (called, arguments + event.fragment)
    reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
    return reasoning, "".join(event.text for event in events if isinstance(event, Text)), calls


ANSWERS = [
    ("apriel", "Why.\n[BEGIN FINAL RESPONSE]\nOslo.\n[END FINAL RESPONSE]", "Why.", "\nOslo."),
    ("apriel", "Here are my reasoning steps:\nWhy.", "Why.", ""),
    ("apriel", "Why.\n{call}", "Why.", "{called}"),
    ("apriel", "Why.\n[BEGIN FINAL RESPONSE]{call}", "Why.", "{called}"),
    ("inkling", "<|content_thinking|>Why.<|end_message|><|message_model|><|content_text|>Oslo.<|end_message|>", "Why.", "Oslo."),
    ("inkling", "<|content_text|>Oslo.<|content_model_end_sampling|>", "", "Oslo."),
    ("inkling", "<|content_thinking|>Why.<|end_message|><|message_model|>weather{call}", "Why.", "{called}"),
    ("inkling", "<|content_thinking|>Why.{call}", "Why.", "{called}"),
    ("kimi_k3", "Why.<|close|>think<|sep|><|open|>response<|sep|>Oslo.<|close|>response<|sep|><|close|>message<|sep|>", "Why.", "Oslo."),
    (
        "kimi_k3",
        "Why.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>{call}<|close|>message<|sep|>",
        "Why.",
        "{called}",
    ),
    ("kimi_k3", "Why.{call}", "Why.", "{called}"),
    ("muse_glimmer", " to=self<|message|>Why.<|eom|><|start|>assistant to=user<|message|>Oslo.<|eot|>", "Why.", "Oslo."),
    ("muse_glimmer", " to=user<|message|>Oslo.<|eot|>", "", "Oslo."),
    ("muse_glimmer", " to=self<|message|>Why.<|eom|><|start|>assistant to=weather<|message|>{call}<|eot|>", "Why.", "{called}"),
    ("muse_glimmer", " to=self<|message|>Why.<|eom|><|start|>assistant to=weather.weather<|message|>{call}<|eom|>", "Why.", "{called}"),
    ("solar_open", "<|think|>Why.<|end|><|begin|>assistant<|content|>Oslo.<|end|>", "Why.", "Oslo."),
    ("solar_open", "<|content|>Oslo.", "", "Oslo."),
    ("solar_open", "<|think|>Why.<|end|><|begin|>assistant{call}", "Why.", "{called}"),
]


@pytest.mark.parametrize(("name", "text", "reasoning", "content"), ANSWERS, ids=[f"{name}-{row}" for row, (name, *_) in enumerate(ANSWERS)])
@pytest.mark.parametrize("has_tokens", [True, False], ids=["tokens", "text"])
def test_each_part_of_an_answer_is_told_from_the_others(name: str, text: str, reasoning: str, content: str, has_tokens: bool) -> None:
    turn = Turn(
        prompt_tail=PLUGINS.reasoning_parsers.infos[name].prompt_tail,
        added_tokens=frozenset(TOKENS[name] if has_tokens else ()),
        tools=(TOOL,),
        tool_choice="auto",
    )
    expected = [("weather", {"city": "Oslo"})] if content == "{called}" else []
    found_reasoning, found_content, calls = answer(name, text.replace("{call}", call_of(name)), turn)
    assert found_reasoning == reasoning
    assert found_content == ("" if expected else content)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected


@pytest.mark.parametrize("name", NAMES)
def test_any_cut_and_any_stop_give_the_same_answer(name: str) -> None:
    info = PLUGINS.reasoning_parsers.infos[name]
    samples = [text.replace("{call}", "C") for other, text, *_ in ANSWERS if other == name]
    taken = (*info.markers, *TOKENS[name], "to=weather<|message|>", "to=weather.weather<|message|>", "weather", "\n", " ")
    turn = Turn(prompt_tail=info.prompt_tail, tools=(TOOL,), tool_choice="auto")
    check_cuts(PLUGINS.reasoning_parsers[name], samples, markers=taken, turn=turn, max_examples=15)


@pytest.mark.parametrize(
    ("name", "tail", "phase"),
    [
        ("apriel", "<|begin_assistant|>\nHere are my reasoning steps:\n", Phase.REASONING),
        ("apriel", "<|assistant|>\n", Phase.REASONING),
        ("apriel", "<|assistant|>\nWhy.\n[BEGIN FINAL RESPONSE]\nOs", Phase.CONTENT),
        ("inkling", "<|content_text|>Hi<|end_message|><|message_model|>", Phase.UNDECIDED),
        ("inkling", "<|message_model|><|content_thinking|>", Phase.REASONING),
        ("inkling", "<|message_model|><|content_text|>", Phase.CONTENT),
        ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>', Phase.REASONING),
        ("kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>', Phase.CONTENT),
        ("muse_glimmer", "<|eot|><|start|>assistant", Phase.UNDECIDED),
        ("solar_open", "<|begin|>user<|content|>Hi<|end|><|begin|>assistant", Phase.UNDECIDED),
        ("solar_open", "<|begin|>assistant<|think|><|end|><|begin|>assistant", Phase.UNDECIDED),
    ],
)
def test_an_answer_starts_as_the_prompt_ends(name: str, tail: str, phase: Phase) -> None:
    assert PLUGINS.reasoning_parsers[name](Turn(prompt_tail=tail)).phase is phase


def test_what_is_for_someone_else_keeps_its_header() -> None:
    parser = PLUGINS.reasoning_parsers["muse_glimmer"](Turn())
    assert read(parser, [" to=stranger<|message|>Psst.<|eom|>"]) == [Text(" to=stranger<|message|>Psst.")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<think>Why.</think>\n<response>\nOslo.\n</response>", "Why.", "Oslo."),
        ("<think>Why.</think>Oslo.", "Why.", "Oslo."),
        ("Oslo.", "", "Oslo."),
        ("<response>Oslo.</response>", "", "Oslo."),
    ],
)
def test_granite_33_wraps_its_response(text: str, reasoning: str, content: str) -> None:
    events = read(PLUGINS.reasoning_parsers["granite_33"](Turn()), [text])
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    assert "".join(event.text for event in events if isinstance(event, Text)) == content
