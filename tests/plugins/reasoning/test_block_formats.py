"""Gemma 4, Mistral, Command and Apertus."""

import pytest

from penstock.engine.contracts.hooks import ReasoningParserFactory
from penstock.engine.contracts.parsing import Phase, Reasoning, SpecialText, Text, Turn
from penstock.plugins.reasoning.formats import FORMATS
from penstock.testing import check_cuts, read

apertus = FORMATS["apertus"]
cohere_command = FORMATS["cohere_command"]
gemma4 = FORMATS["gemma4"]
mistral = FORMATS["mistral"]

FAMILIES: dict[str, tuple[ReasoningParserFactory, list[str], list[str]]] = {
    "gemma4": (
        gemma4,
        ["<|channel>thought\nwhy<channel|>a<|channel>thousand<channel|>b<channel|>", "<|channel>why<|tool_call>call:f{}"],
        ["<|channel>", "thought\n", "thought", "<channel|>", "<|tool_call>"],
    ),
    "mistral": (mistral, ["[THINK]why[/THINK]\na[THINK]b[/THINK]", "<think>why</think>a"], ["[THINK]", "[/THINK]", "<think>", "</think>"]),
    "cohere": (
        cohere_command,
        [
            "<|START_THINKING|> why <|END_THINKING|>\n<|START_TEXT|> a b \n<|END_TEXT|>",
            "<|START_THINKING|>why<|END_THINKING|> <|START_ACTION|>[]",
        ],
        ["<|START_THINKING|>", "<|END_THINKING|>", "<|START_TEXT|>", "<|END_TEXT|>", "<|START_ACTION|>", "\n", " "],
    ),
    "apertus": (
        apertus,
        ["<|inner_prefix|>why<|tools_prefix|>[]<|tools_suffix|>so<|inner_suffix|>a"],
        ["<|inner_prefix|>", "<|inner_suffix|>", "<|tools_prefix|>", "<|tools_suffix|>"],
    ),
}
OFF = {
    "gemma4": "<|turn>model\n<|channel>thought\n<channel|>",
    "mistral": "[/INST][THINK][/THINK]",
    "cohere": "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>",
    "apertus": "<|assistant_start|><|inner_prefix|><|inner_suffix|>",
}


def split(factory: ReasoningParserFactory, text: str, tail: str = "") -> tuple[str, str]:
    events = read(factory(Turn(prompt_tail=tail)), list(text))
    parts = [(event, event.text) for event in events if isinstance(event, Text | Reasoning)]
    return (
        "".join(part for event, part in parts if isinstance(event, Reasoning)),
        "".join(part for event, part in parts if isinstance(event, Text)),
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_any_cut_and_any_stop_give_the_same_answer(family: str) -> None:
    factory, samples, markers = FAMILIES[family]
    check_cuts(factory, samples, markers=markers, max_examples=15)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_closed_the_block_leaves_content(family: str) -> None:
    factory = FAMILIES[family][0]
    assert factory(Turn(prompt_tail=OFF[family])).phase is Phase.CONTENT
    assert split(factory, "because", OFF[family]) == ("", "because")
    assert factory(Turn()).phase is Phase.UNDECIDED


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_opened_the_block_leaves_reasoning(family: str) -> None:
    factory = FAMILIES[family][0]
    parser = factory(Turn(prompt_tail=factory(Turn()).start_marker))
    assert parser.phase is Phase.REASONING
    assert read(parser, ["why", parser.end_marker, "because"]) == [Reasoning("why"), Text("because")]
    assert parser.phase is Phase.CONTENT  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quoted_marker_is_text_where_it_is_a_token(family: str) -> None:
    factory, samples, markers = FAMILIES[family]
    text = samples[0].strip()
    assert read(factory(Turn(added_tokens=frozenset(markers) - {" ", "\n", "thought\n"})), [text]) == [Text(text)]


@pytest.mark.parametrize("family", FAMILIES)
def test_content_that_a_grammar_holds_stays_as_it_is(family: str) -> None:
    factory = FAMILIES[family][0]
    parser = factory(Turn(prompt_tail=OFF[family], is_constrained=True))
    content = f'{{"say": "{parser.start_marker}a{parser.end_marker}"}}'
    assert read(parser, [content]) == [Text(content)]
    assert parser.phase is Phase.CONTENT


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|channel>This is reasoning", "This is reasoning", ""),
        ("This is content", "", "This is content"),
        ("<|channel>This\nThat<channel|>This is the rest\nThat", "This\nThat", "This is the rest\nThat"),
        ("Before\n<|channel>why<channel|>\nThis is the rest", "why", "Before\n\nThis is the rest"),
        ("<|channel>thought\nwhy<channel|>because", "why", "because"),
        ("<|channel>thought\n<channel|>", "", ""),
        ("<|channel>thought<channel|>Hi", "", "Hi"),
        ("<|channel>thoughtful<channel|>Hi", "thoughtful", "Hi"),
        ("<|channel>thousand reasons<channel|>Done", "thousand reasons", "Done"),
        ("text<channel|>This is the rest", "", "textThis is the rest"),
        ("<|channel>thought\nwhy<|tool_call>call:f{}", "why", "<|tool_call>call:f{}"),
        ("<|tool_call>", "", "<|tool_call>"),
    ],
)
def test_gemma4(text: str, reasoning: str, content: str) -> None:
    assert split(gemma4, text) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("[THINK]why[/THINK]because", "why", "because"),
        ("[THINK]why", "why", ""),
        ("This is content", "", "This is content"),
        ("[/THINK]This is the rest", "", "This is the rest"),
        ("Before\n[THINK]why[/THINK]\nThis is the rest", "why", "Before\n\nThis is the rest"),
        ("<think>\nwhy\n</think>\nbecause", "\nwhy\n", "\nbecause"),
        ("a <think>b", "", "a <think>b"),
        ('[THINK]why[TOOL_CALLS]f{"x": 1}[/THINK]b', 'why[TOOL_CALLS]f{"x": 1}', "b"),
    ],
)
def test_mistral(text: str, reasoning: str, content: str) -> None:
    assert split(mistral, text) == (reasoning, content)


def test_mistral_with_a_token_of_its_own_does_not_look_for_text() -> None:
    turn = Turn(added_tokens=frozenset({"[THINK]", "[/THINK]"}))
    assert read(mistral(turn), ["<think>why</think>because"]) == [Text("<think>why</think>because")]
    assert read(mistral(turn), [SpecialText("[THINK]"), "</think>", SpecialText("[/THINK]"), "b"]) == [Reasoning("</think>"), Text("b")]


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|START_THINKING|> why <|END_THINKING|>\n<|START_RESPONSE|>foo bar<|END_RESPONSE|>", "why", "foo bar"),
        ("<|START_THINKING|>why<|END_THINKING|><|START_TEXT|>\nfoo\n<|END_TEXT|>", "why", "\nfoo\n"),
        ("<|START_THINKING|>why<|END_THINKING|><|START_ACTION|>\n[]<|END_ACTION|>", "why", "<|START_ACTION|>\n[]<|END_ACTION|>"),
        ("<|START_THINKING|>why<|START_ACTION|>[]", "why", "<|START_ACTION|>[]"),
        ("because", "", "because"),
        ("<|START_RESPONSE|>because<|END_RESPONSE|>", "", "because"),
    ],
)
def test_cohere(text: str, reasoning: str, content: str) -> None:
    assert split(cohere_command, text) == (reasoning, content)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("<|inner_prefix|>Let me think<|inner_suffix|>The answer", "Let me think", "The answer"),
        ("<think>not a block</think>plain answer", "", "<think>not a block</think>plain answer"),
        ('<|tools_prefix|>[{"f": {}}]<|tools_suffix|>', "", '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>'),
        (
            '<|inner_prefix|>why<|tools_prefix|>[{"f": {}}]<|tools_suffix|>so<|inner_suffix|>done',
            "whyso",
            '<|tools_prefix|>[{"f": {}}]<|tools_suffix|>done',
        ),
    ],
)
def test_apertus(text: str, reasoning: str, content: str) -> None:
    assert split(apertus, text) == (reasoning, content)
