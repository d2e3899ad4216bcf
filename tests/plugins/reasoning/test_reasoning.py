from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.engine.contracts.hooks import ReasoningParserFactory
from penstock.engine.contracts.parsing import Phase, Reasoning, SpecialText, Text, Turn
from penstock.plugins.reasoning.formats import FORMATS
from penstock.testing import check_cuts, join_atoms, read, split_atoms

deepseek_r1 = FORMATS["deepseek_r1"]
granite = FORMATS["granite"]
granite_thinking = FORMATS["granite_thinking"]
qwen3 = FORMATS["qwen3"]

THINK = ("<think>", "</think>")
QWEN = (*THINK, "<tool_call>", "<|im_start|>", "<|im_end|>")
GRANITE = ("Here is my thought process:", "Here's my thought process:", "Here is my response:", "Here's my response:")
OPEN = Turn(prompt_tail="<|im_start|>assistant\n<think>\n", tool_choice="auto")
CLOSED = Turn(prompt_tail="<|im_start|>assistant\n<think>\n\n</think>\n\n", tool_choice="auto")
UNTOLD = Turn(prompt_tail="<|im_start|>assistant\n", tool_choice="auto")

SAMPLES = [
    "<think>\nwhy\n</think>\n\nbecause",
    "why</think>because</think>still",
    " \n<think>a<think>b",
    "a</think>\n<think>b</think>c<think>d</think>e</think>f",
    "no markers, 1 < 2",
    "a<tool_call>{}</tool_call></think>b",
    "a<|im_end|>\n<|im_start|>b",
    "</think>",
    "",
]
SPEECH = [
    "Here is my thought process: why. Here is my response: because. Here is my response: again",
    "\nHere's my thought process:\nHere's my response:\n",
    "Here's my answer. Here is my thought process: none",
    "Here is",
]


def split(factory: ReasoningParserFactory, turn: Turn, *pieces: str) -> tuple[str, str]:
    """Reasoning and content."""
    events = read(factory(turn), pieces)
    return (
        "".join(event.text for event in events if isinstance(event, Reasoning)),
        "".join(event.text for event in events if isinstance(event, Text)),
    )


@pytest.mark.parametrize("turn", [OPEN, CLOSED, UNTOLD], ids=["open", "closed", "untold"])
@pytest.mark.parametrize(
    ("factory", "samples", "markers"),
    [(deepseek_r1, SAMPLES, THINK), (qwen3, SAMPLES, QWEN), (granite, SPEECH, GRANITE)],
    ids=["deepseek_r1", "qwen3", "granite"],
)
def test_any_cut_and_any_stop_give_the_same_answer(
    factory: ReasoningParserFactory, samples: Sequence[str], markers: Sequence[str], turn: Turn
) -> None:
    check_cuts(factory, samples, markers=markers, turn=turn, max_examples=40)


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3, granite])
def test_markers_are_those_that_the_parser_itself_reads(factory: ReasoningParserFactory) -> None:
    parser = factory(Turn(prompt_tail=factory(OPEN).start_marker))
    phases = [parser.phase]
    assert read(parser, ["why", parser.end_marker, "because"]) == [Reasoning("why"), Text("because")]
    assert [*phases, parser.phase] == [Phase.REASONING, Phase.CONTENT]


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3])
@pytest.mark.parametrize("turn", [OPEN, UNTOLD])
def test_a_start_marker_is_taken_out_whether_or_not_the_prompt_opened_it(factory: ReasoningParserFactory, turn: Turn) -> None:
    assert split(factory, turn, "<think>\nwhy</think>\n\nbecause") == ("\nwhy", "\n\nbecause")


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3])
def test_a_prompt_that_closed_the_reasoning_makes_all_of_it_content(factory: ReasoningParserFactory) -> None:
    assert factory(CLOSED).phase is Phase.CONTENT
    assert split(factory, CLOSED, "because <think>") == ("", "because <think>")


AGAIN = "<think>r1</think>c1<think>r2</think>c2"


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3])
def test_a_later_block_is_reasoning_where_its_start_marker_is_a_token(factory: ReasoningParserFactory) -> None:
    turn = Turn(added_tokens=frozenset(THINK))
    for pieces in (join_atoms(split_atoms(AGAIN, turn.added_tokens)), split_atoms(AGAIN, turn.added_tokens)):
        assert split(factory, turn, *pieces) == ("r1r2", "c1c2")


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3])
def test_a_later_block_in_text_keeps_both_markers_unless_it_follows_at_once(factory: ReasoningParserFactory) -> None:
    assert split(factory, Turn(), AGAIN) == ("r1", "c1<think>r2</think>c2")
    assert split(factory, OPEN, "r1</think>\n\n<think>r2</think>\n\nc") == ("r1\n\nr2", "\n\nc")
    assert split(factory, OPEN, "r1</think>\n\n<think></think>\n\nc") == ("r1\n\n", "\n\nc")


def test_an_end_marker_too_many_is_taken_out_beside_a_quoted_pair() -> None:
    assert split(qwen3, OPEN, "r</think>say <think>a</think> b</think> c</think>") == ("r", "say <think>a</think> b c</think>")


@pytest.mark.parametrize("turn", [OPEN, CLOSED, UNTOLD], ids=["open", "closed", "untold"])
@pytest.mark.parametrize("factory", [deepseek_r1, qwen3, granite_thinking])
def test_content_that_a_grammar_holds_stays_as_it_is(factory: ReasoningParserFactory, turn: Turn) -> None:
    turn = replace(turn, added_tokens=frozenset(THINK), is_constrained=True)
    before = "" if turn.prompt_tail.endswith("</think>\n\n") else "<think>why</think>"
    content = '{"say": "</think> and <think>a</think>"}'
    parser = factory(turn)
    events = read(parser, split_atoms(before + content, turn.added_tokens))
    assert "".join(event.text for event in events if isinstance(event, Text)) == content
    assert parser.phase is Phase.CONTENT


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3])
def test_a_prompt_that_closed_the_reasoning_keeps_both_markers_of_a_later_block(factory: ReasoningParserFactory) -> None:
    turn = replace(CLOSED, added_tokens=frozenset(THINK))
    text = "<think>why</think>because"
    assert split(factory, turn, *split_atoms(text, turn.added_tokens)) == ("", text)


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3])
def test_quoting_a_marker_that_is_a_token_changes_nothing(factory: ReasoningParserFactory) -> None:
    turn = Turn(prompt_tail="<think>\n", added_tokens=frozenset(THINK))
    assert split(factory, turn, "I write </think> now", SpecialText("</think>"), "yes") == ("I write </think> now", "yes")


@pytest.mark.parametrize("factory", [deepseek_r1, qwen3, granite])
def test_other_added_tokens_pass_through_as_pieces(factory: ReasoningParserFactory) -> None:
    turn = Turn(prompt_tail="<think>\n")
    events = [event for event in read(factory(turn), ["a", SpecialText("<x>"), "b"]) if isinstance(event, Text | Reasoning)]
    assert [event.text for event in events] == ["a", "<x>", "b"]
    assert isinstance(events[1].text, SpecialText)


def test_deepseek_r1_reasons_until_it_says_otherwise() -> None:
    assert deepseek_r1(UNTOLD).phase is Phase.REASONING
    assert split(deepseek_r1, UNTOLD, "never ends") == ("never ends", "")


def test_deepseek_r1_keeps_later_end_markers() -> None:
    assert split(deepseek_r1, OPEN, "a</think>b</think>c") == ("a", "b</think>c")


def test_qwen3_is_undecided_until_it_has_said_something() -> None:
    parser = qwen3(UNTOLD)
    phases = []
    for piece in (" ", "\n<th", "e"):
        parser.feed(piece)
        phases.append(parser.phase)
    assert phases == [Phase.UNDECIDED, Phase.UNDECIDED, Phase.CONTENT]


def test_qwen3_with_thinking_off_is_content_from_the_start() -> None:
    turn = Turn(chat_template_kwargs={"enable_thinking": False})
    assert qwen3(turn).phase is Phase.CONTENT


def test_qwen3_believes_the_prompt_before_the_request() -> None:
    turn = Turn(prompt_tail="<think>\n", chat_template_kwargs={"enable_thinking": False})
    assert qwen3(turn).phase is Phase.REASONING


def test_qwen3_takes_a_second_end_marker_out() -> None:
    assert split(qwen3, OPEN, "a</think></think>b</think>c") == ("a", "b</think>c")
    assert split(qwen3, CLOSED, "</think>b") == ("", "b")


def test_qwen3_ends_its_reasoning_with_a_tool_call_that_stays_readable() -> None:
    turn = Turn(prompt_tail="<think>\n", added_tokens=frozenset({*THINK, "<tool_call>"}))
    events = read(qwen3(turn), ["why", SpecialText("<tool_call>", is_hidden=False), "{}"])
    assert events == [Reasoning("why"), Text("<tool_call>"), Text("{}")]
    assert isinstance(events[1], Text)
    assert isinstance(events[1].text, SpecialText)
    assert not events[1].text.is_hidden


def test_qwen3_ends_its_reasoning_with_the_turn() -> None:
    assert split(qwen3, OPEN, "why<|im_end|>") == ("why", "<|im_end|>")


def test_qwen3_does_not_look_at_earlier_turns() -> None:
    tail = "a</think>b<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3(Turn(prompt_tail=tail)).phase is Phase.UNDECIDED


@pytest.mark.parametrize("start", ["Here is my thought process:", "Here's my thought process:"])
@pytest.mark.parametrize("end", ["Here is my response:", "Here's my response:"])
def test_granite_announces_reasoning_and_response_in_either_spelling(start: str, end: str) -> None:
    assert split(granite, Turn(), f"{start} why {end} because") == (" why ", " because")


def test_granite_without_announcement_is_content() -> None:
    assert split(granite, Turn(), "Here is my thought: Here is my response:") == ("", "Here is my thought: Here is my response:")


def test_granite_with_thinking_off_is_content_from_the_start() -> None:
    assert granite(Turn(chat_template_kwargs={"thinking": False})).phase is Phase.CONTENT
