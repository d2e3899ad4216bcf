"""A reasoning parser and a tool parser of one family, one behind the other: what a call's arguments hold is no marker."""

import json
from functools import lru_cache

import pytest

from penstock.engine.contracts.parsing import Event, Reasoning, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.engine.text.answer import ParserChain
from penstock.plugins.manager import Plugins
from penstock.testing import join_atoms, read, split_atoms

PAIRS = (
    ("apertus", "apertus"),
    ("apriel", "apriel"),
    ("cohere_command", "cohere"),
    ("deepseek_r1", "deepseek_v3"),
    ("deepseek_v3", "deepseek_v31"),
    ("deepseek_v3", "deepseek_v32"),
    ("deepseek_v4", "deepseek_v4"),
    ("deepseek_v4", "deepseek_v41"),
    ("ernie45", "ernie45"),
    ("gemma4", "gemma4"),
    ("glm45", "glm45"),
    ("glm47", "glm47"),
    ("granite", "granite"),
    ("granite_thinking", "hermes"),
    ("granite_thinking", "granite4"),
    ("holo2", "hermes"),
    ("holo2", "llama3_json"),
    ("hunyuan_a13b", "hunyuan_a13b"),
    ("hy_v3", "hy_v3"),
    ("interns1", "internlm"),
    ("k2_horizon", "k2_horizon"),
    ("kimi_k2", "kimi_k2"),
    ("mimo", "qwen3_coder"),
    ("minimax_m2", "minimax_m2"),
    ("minimax_m3", "minimax_m3"),
    ("mistral", "mistral"),
    ("nemotron_v3", "qwen3_coder"),
    ("olmo3", "olmo3"),
    ("openai_gptoss", "openai"),
    ("plamo3", "plamo3"),
    ("poolside_v1", "glm45"),
    ("qwen3", "hermes"),
    ("qwen3", "qwen3_coder"),
    ("qwen3", "pythonic"),
    ("qwen3", "xlam"),
    ("seed_oss", "seed_oss"),
    ("step3", "step3"),
    ("step3p5", "qwen3_coder"),
)
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


@lru_cache
def plugins() -> Plugins:
    return Plugins.start(["none"])


def reasoning_markers(name: str) -> list[str]:
    return sorted({marker.strip() for marker in plugins().reasoning_parsers.infos[name].markers})


def chain(reasoning: str, tools: str, added_tokens: frozenset[str]) -> ParserChain:
    info = plugins().reasoning_parsers.infos[reasoning]
    turn = Turn(prompt_tail=info.prompt_tail, added_tokens=added_tokens, tools=[TOOL], tool_choice="auto")
    return ParserChain([plugins().tool_parsers[tools](turn)], reasoning=plugins().reasoning_parsers[reasoning](turn))


def answer_with(reasoning: str, tools: str, city: str) -> str:
    """Reasoning, some content and a call."""
    example = plugins().reasoning_parsers.infos[reasoning].example
    return f"{example}{plugins().tool_parsers.infos[tools].example}".replace("Oslo.", "").replace("because", "").replace("Oslo", city)


def cuts(atoms: list[str]) -> list[list[str]]:
    """The same answer whole and in pieces of several sizes."""
    sizes = (len(atoms), 1, 2, 3, 7)
    return [[piece for start in range(0, len(atoms), size) for piece in join_atoms(atoms[start : start + size])] for size in sizes]


def arguments_of(events: list[Event]) -> list[object]:
    calls = ["" for event in events if isinstance(event, ToolCallStart)]
    for event in events:
        if isinstance(event, ToolCallArguments):
            calls[event.index] += event.fragment
    return [json.loads(call) for call in calls]


@pytest.mark.parametrize("is_token", [False, True], ids=["text", "token"])
@pytest.mark.parametrize(("reasoning", "tools"), PAIRS)
def test_a_marker_of_reasoning_in_an_argument_is_part_of_it(reasoning: str, tools: str, is_token: bool) -> None:
    for marker in set(reasoning_markers(reasoning)) - set(plugins().tool_parsers.infos[tools].markers):
        added_tokens = frozenset({marker} if is_token else ())
        for city in (marker, f"use {marker} here", f"{marker}a{marker}"):
            for pieces in cuts(split_atoms(answer_with(reasoning, tools, city), added_tokens)):
                assert arguments_of(read(chain(reasoning, tools, added_tokens), pieces)) == [{"city": city}], (marker, pieces)


@pytest.mark.parametrize(
    ("reasoning", "tools", "after"),
    [
        ("mistral", "mistral", "[THINK]more[/THINK]done"),
        ("gemma4", "gemma4", "<|channel>thought\nmore<channel|>done"),
        ("apertus", "apertus", "<|inner_prefix|>more<|inner_suffix|>done"),
        ("qwen3", "hermes", "</think>done"),  # one end marker too many
        ("poolside_v1", "glm45", "</think>done"),
        ("k2_horizon", "k2_horizon", "</ifm|think>done"),
        ("plamo3", "plamo3", "<|plamo:end_think:plamo|>done"),
    ],
)
def test_markers_are_read_again_after_a_call(reasoning: str, tools: str, after: str) -> None:
    text = answer_with(reasoning, tools, "Bergen") + after
    for pieces in cuts(list(text)):
        events = read(chain(reasoning, tools, frozenset()), pieces)
        assert arguments_of(events) == [{"city": "Bergen"}]
        assert [event for event in events if isinstance(event, Text)][-1] == Text("done")


@pytest.mark.parametrize(
    ("reasoning", "tools", "text"),
    [
        ("apriel", "apriel", "<tool_calls>[Hr"),
        ("apriel", "apriel", "</tool_calls<tool_calls>[<to HerH"),
        ("mistral", "mistral", "[[TO[TOOL_CALLS][[CALL_ID[/T[TO"),
    ],
)
def test_no_text_overtakes_what_the_reasoning_parser_holds_when_a_call_begins(reasoning: str, tools: str, text: str) -> None:
    for pieces in cuts(list(text)):
        events = read(chain(reasoning, tools, frozenset()), pieces)
        assert "".join(event.text for event in events if isinstance(event, Text | Reasoning)) == text, pieces


@pytest.mark.parametrize(
    ("reasoning", "tools"),
    [("poolside_v1", "glm45"), ("k2_horizon", "k2_horizon"), ("plamo3", "plamo3"), ("qwen3", "hermes"), ("kimi_k2", "kimi_k2")],
)
@pytest.mark.parametrize("is_token", [False, True], ids=["text", "token"])
def test_the_end_marker_after_a_call_that_ended_the_reasoning_is_no_content(reasoning: str, tools: str, is_token: bool) -> None:
    infos = plugins().reasoning_parsers.infos[reasoning], plugins().tool_parsers.infos[tools]
    added_tokens = frozenset(marker for info in infos for marker in info.markers) if is_token else frozenset()
    end = infos[0].markers[1]
    for pieces in cuts(split_atoms(f"why{infos[1].example} then{end}done", added_tokens)):
        events = read(chain(reasoning, tools, added_tokens), pieces)
        assert events[0] == Reasoning("why")
        assert arguments_of(events) == [{"city": "Oslo"}]
        assert "".join(event.text for event in events if isinstance(event, Text)).strip() == "thendone"
