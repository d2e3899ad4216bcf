"""What holds for every parser that comes with the server: its own example is read, and text made of its own markers is read the same
however it is cut. PENSTOCK_PARSER_EXAMPLES in the environment makes that hundreds of texts for each."""

import json
from functools import lru_cache
from typing import Any

import pytest

from penstock.engine.contracts.parsing import Phase, Reasoning, Text, ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.manager import Plugins, Registry
from penstock.testing import check_cost, check_cuts, check_parser, read, split_atoms

MAX_EXAMPLES, FEW_EXAMPLES = 5, 2
HARMONY = ("assistant", "analysis", "commentary", "final", " json")
SPACE = tuple(" \t\r\n")
TAKEN = {  # beyond what a format is known by: white space and words that belong to markers
    "apriel": SPACE,
    "cohere_command": SPACE,
    "ernie45": ("\n", " "),
    "gemma4": ("<|channel>", "thought\n", "thought"),
    "granite_33": ("\n", " "),
    "granite_thinking": ("\n", " "),
    "hunyuan_a13b": ("\n", " "),
    "muse_glimmer": SPACE,
    "openai": HARMONY,
    "openai_gptoss": ("<|channel|>", "<|message|>", *HARMONY),
    "step3p5": ("\n", " "),
}
ADDING = "minimax_m2_append_think"  # puts back the marker that the prompt has taken, and tells no reasoning apart
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
}


@lru_cache
def plugins() -> Plugins:
    return Plugins.start(["none"])


DECLARED = "response_template"  # has no markers of its own
REASONING = sorted(set(plugins().reasoning_parsers) - {DECLARED})
TOOLS = sorted(set(plugins().tool_parsers) - {DECLARED})


@pytest.mark.parametrize("name", REASONING)
def test_a_reasoning_parser_is_known_by_something(name: str) -> None:
    info = plugins().reasoning_parsers.infos[name]
    assert info.models
    assert info.markers
    assert info.example


@pytest.mark.parametrize("name", TOOLS)
def test_a_tool_parser_is_known_by_something(name: str) -> None:
    info = plugins().tool_parsers.infos[name]
    assert info.models
    assert info.markers
    assert info.example


@pytest.mark.parametrize("name", REASONING)
def test_the_example_of_a_reasoning_parser_has_reasoning_and_content(name: str) -> None:
    registry = plugins().reasoning_parsers
    info = registry.infos[name]
    events = read(registry[name](Turn(prompt_tail=info.prompt_tail)), [info.example])
    assert {type(event) for event in events} == ({Text} if name == ADDING else {Reasoning, Text}), events


@pytest.mark.parametrize("name", TOOLS)
def test_the_example_of_a_tool_parser_calls_the_tool(name: str) -> None:
    registry = plugins().tool_parsers
    info = registry.infos[name]
    turn = Turn(prompt_tail=info.prompt_tail, tools=[TOOL], tool_choice="auto")
    events = read(registry[name](turn), [info.example])
    assert [event.name for event in events if isinstance(event, ToolCallStart)] == ["weather"]
    fragments = [event.fragment for event in events if isinstance(event, ToolCallArguments)]
    assert json.loads("".join(fragments)) == {"city": "Oslo"}


def of_each_class(registry: Registry[Any], names: list[str]) -> list[str]:
    """One parser of each class; the others differ in their markers."""
    return list({type(registry[name](Turn(tools=[TOOL], tool_choice="auto"))): name for name in names}.values())


def with_depth(registry: Registry[Any], names: list[str]) -> list[Any]:
    """Each parser, and whether it is checked in depth: by default one of each class, the others only where that is asked for."""
    whole = of_each_class(registry, names)
    return [
        *(pytest.param(name, name in whole, id=name) for name in names),
        *(pytest.param(name, True, id=f"{name}-deep", marks=pytest.mark.thorough) for name in names if name not in whole),
    ]


@pytest.mark.parametrize("name", of_each_class(plugins().reasoning_parsers, REASONING))
def test_a_reasoning_parser_reads_markers_without_end_once(name: str) -> None:
    registry = plugins().reasoning_parsers
    info = registry.infos[name]
    turn = Turn(prompt_tail=info.prompt_tail)
    check_cost(registry[name], info.example, turn, fillers=[info.markers[0] + info.markers[-1]], positions=[len(info.example) // 2])


@pytest.mark.parametrize("name", of_each_class(plugins().tool_parsers, TOOLS))
def test_a_tool_parser_reads_markers_and_brackets_without_end_once(name: str) -> None:
    registry = plugins().tool_parsers
    info = registry.infos[name]
    turn = Turn(prompt_tail=info.prompt_tail, tools=[TOOL], tool_choice="auto")
    fillers = [info.markers[0] + info.markers[-1], '[{"' * 6]
    check_cost(registry[name], info.example, turn, fillers=fillers, positions=[info.example.index("Oslo")])


@pytest.mark.parametrize("name", TOOLS)
def test_a_cut_within_the_last_marker_of_a_call_shows_nothing_of_it(name: str) -> None:
    registry = plugins().tool_parsers
    info = registry.infos[name]
    turn = Turn(prompt_tail=info.prompt_tail, tools=[TOOL], tool_choice="auto")
    whole = read(registry[name](turn), [info.example])
    before = sum(len(event.text) for event in whole if isinstance(event, Text))
    is_whole = False
    for end in range(len(info.example)):
        events = read(registry[name](turn), [info.example[:end]])
        is_whole = is_whole or "".join(event.fragment for event in events if isinstance(event, ToolCallArguments)) == '{"city": "Oslo"}'
        if is_whole:
            assert sum(len(event.text) for event in events if isinstance(event, Text)) <= before, events


@pytest.mark.parametrize(("name", "is_deep"), with_depth(plugins().reasoning_parsers, REASONING))
def test_a_reasoning_parser_keeps_its_promises_on_its_own_markers(name: str, is_deep: bool) -> None:
    registry = plugins().reasoning_parsers
    info = registry.infos[name]
    turn = Turn(prompt_tail="</think>" if name == ADDING else info.prompt_tail)
    markers = () if name == ADDING else (*info.markers, *TAKEN.get(name, ()))
    check_parser(registry[name], [info.example], markers=markers, turn=turn, max_examples=MAX_EXAMPLES if is_deep else FEW_EXAMPLES)


@pytest.mark.parametrize(("name", "is_deep"), with_depth(plugins().tool_parsers, TOOLS))
def test_a_tool_parser_keeps_its_promises_on_its_own_markers(name: str, is_deep: bool) -> None:
    registry = plugins().tool_parsers
    info = registry.infos[name]
    turn = Turn(prompt_tail=info.prompt_tail, tools=[TOOL], tool_choice="auto")
    markers = [marker for marker in info.markers if not marker[0].isspace()]  # others are no single tokens
    tricky = info.example.replace("Oslo", '[\\"{}\\"] </tool_call>, \\u00e9')
    middle = len(info.example) - min(24, len(info.example) // 2)
    quoting = info.example.replace("Oslo", 'a"b')
    samples = [f"{tricky}\nb", f"a {quoting}", f"{info.example[:middle]} x{info.example[middle:]} b"][: 3 if is_deep else 1]
    markers += TAKEN.get(name, ())
    check_cuts(registry[name], samples, markers=markers, turn=turn, max_examples=MAX_EXAMPLES if is_deep else FEW_EXAMPLES)
    positions = [samples[0].index("[\\"), len(samples[0])]  # in a string, after the call
    check_cost(registry[name], samples[0], turn, positions=positions[: 2 if is_deep else 1])


@pytest.mark.parametrize("name", REASONING)
def test_nothing_is_reasoning_again_where_a_grammar_holds_the_content(name: str) -> None:
    registry = plugins().reasoning_parsers
    info = registry.infos[name]
    markers = frozenset(marker for marker in info.markers if marker == marker.strip())
    turn = Turn(prompt_tail=info.prompt_tail, added_tokens=markers, is_constrained=True)
    for text in (info.example * 2, "".join([info.example, *info.markers, "more", *reversed(info.markers)])):
        parser, phases = registry[name](turn), [Phase.UNDECIDED]
        for piece in split_atoms(text, markers):
            parser.feed(piece)
            phases.append(parser.phase)
        assert Phase.CONTENT in phases
        assert Phase.REASONING not in phases[phases.index(Phase.CONTENT) :]
