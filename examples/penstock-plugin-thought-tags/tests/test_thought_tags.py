from penstock_plugin_thought_tags import ThoughtTags

from penstock import Phase, Reasoning, Text, Turn
from penstock.testing import check_parser, read


def test_any_cut_and_any_stop_give_the_same_answer() -> None:
    samples = ["<thought>why</thought>because", "because<thought>why", "a < b </thought>", "<thou"]
    check_parser(ThoughtTags, samples, markers=["<thought>", "</thought>"])


def test_reasoning_and_content_are_told_apart() -> None:
    assert read(ThoughtTags(Turn()), ["<thought>why</thought>because"]) == [Reasoning("why"), Text("because")]


def test_content_that_a_grammar_holds_stays_as_it_is() -> None:
    turn = Turn(prompt_tail="<thought>", is_constrained=True)
    assert read(ThoughtTags(turn), ['why</thought>"<thought>"']) == [Reasoning("why"), Text('"<thought>"')]


def test_an_open_prompt_begins_in_reasoning() -> None:
    parser = ThoughtTags(Turn(prompt_tail="<thought>"))
    assert parser.phase is Phase.REASONING
    assert read(parser, ["why</thought>because"]) == [Reasoning("why"), Text("because")]
