import pytest

from penstock.engine.contracts.parsing import Phase, Turn


@pytest.mark.parametrize(
    ("tail", "phase"),
    [
        ("", Phase.UNDECIDED),
        ("<|im_start|>assistant\n", Phase.UNDECIDED),
        ("<think>", Phase.REASONING),
        ("<think>\n", Phase.REASONING),
        ("<think>\n\n</think>\n\n", Phase.CONTENT),
        ("<think></think>", Phase.CONTENT),
        ("</think>", Phase.CONTENT),
        ("\n<think></think>", Phase.CONTENT),
        ("</think><think>", Phase.REASONING),
        ("<think>so far", Phase.REASONING),
    ],
)
def test_the_last_marker_of_the_tail_decides(tail: str, phase: Phase) -> None:
    assert Turn(prompt_tail=tail).phase("<think>", "</think>") is phase


def test_any_spelling_of_a_marker_counts() -> None:
    assert Turn(prompt_tail="B").phase(("A", "B"), ("C", "D")) is Phase.REASONING
    assert Turn(prompt_tail="B A D").phase(("A", "B"), ("C", "D")) is Phase.CONTENT


def test_markers_of_an_earlier_turn_do_not_count() -> None:
    tail = "<think>a</think>b<|im_end|>\n"
    assert Turn(prompt_tail=tail).phase("<think>", "</think>", ("<|im_end|>",)) is Phase.UNDECIDED
    assert Turn(prompt_tail=tail + "<think>").phase("<think>", "</think>", ("<|im_end|>",)) is Phase.REASONING


@pytest.mark.parametrize(
    ("continued", "tail", "phase"),
    [
        ("Hm.</think>It is", "It is", Phase.CONTENT),
        ("It is", "It is", Phase.CONTENT),
        ("<think>Hm", "", Phase.REASONING),
        ("Hm", "<think>Hm", Phase.REASONING),
        (" \n", " \n", Phase.UNDECIDED),
    ],
)
def test_what_is_continued_counts_where_the_prompt_does_not_tell(continued: str, tail: str, phase: Phase) -> None:
    assert Turn(prompt_tail=tail, continued=continued).phase("<think>", "</think>") is phase
