from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import Event, SpecialText, Text
from penstock.plugins.markers import MarkerBuffer, StepBuffer, join_pieces, text_into

MARKERS = ("<a>", "<ab>", "b<a", "aa<", "<<")


def take_all(buffer: MarkerBuffer, pieces: list[str], *markers: str) -> list[tuple[str, bool]]:
    """Text and markers in order; text joined, so that it does not depend on the pieces."""
    taken: list[tuple[str, bool]] = []

    def add(text: str, is_marker: bool) -> None:
        if taken and not taken[-1][1] and not is_marker:
            text = taken.pop()[0] + text
        taken.append((text, is_marker))

    for piece in pieces:
        buffer.feed(piece)
        marker: str | None = ""
        while marker is not None:
            texts, marker = buffer.take_until(*markers)
            for text in texts:
                add(text, False)
            if marker is not None:
                add(marker, True)
    for text in buffer.finish():
        add(text, False)
    return taken


def expected(text: str, markers: tuple[str, ...]) -> list[tuple[str, bool]]:
    """The rule, written down as plainly as it can be: the marker that is complete first, and the longest of those that end there."""
    taken: list[tuple[str, bool]] = []
    start = 0
    end = 0
    while end < len(text):
        end += 1
        found = [marker for marker in markers if text[start:end].endswith(marker)]
        if found:
            marker = max(found, key=len)
            before = text[start : end - len(marker)]
            taken.extend([(before, False)] if before else [])
            taken.append((marker, True))
            start = end
    return [*taken, (text[start:], False)] if text[start:] else taken


@given(st.text("<a>b", max_size=30), st.lists(st.integers(0, 30), max_size=6), st.sets(st.sampled_from(MARKERS)))
def test_markers_are_found_however_the_text_is_cut(text: str, cuts: list[int], markers: set[str]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in pairwise(places)]
    chosen = tuple(sorted(markers))
    assert take_all(MarkerBuffer(), pieces, *chosen) == expected(text, chosen)
    assert take_all(MarkerBuffer(), list(text), *chosen) == expected(text, chosen)


@given(st.text("<a>b", max_size=30), st.sets(st.sampled_from(MARKERS), min_size=1))
def test_at_most_a_partial_marker_is_held_back(text: str, markers: set[str]) -> None:
    buffer = MarkerBuffer()
    num_given = 0
    for number, char in enumerate(text, start=1):
        buffer.feed(char)
        marker: str | None = ""
        while marker is not None:
            pieces, marker = buffer.take_until(*markers)
            num_given += len("".join(pieces)) + len(marker or "")
        held = text[num_given:number]
        assert not held or any(marker.startswith(held) and marker != held for marker in markers)


def test_a_marker_that_is_an_added_token_matches_only_the_token() -> None:
    buffer = MarkerBuffer(frozenset({"<a>"}))
    assert take_all(buffer, ["x<a>y", SpecialText("<a>"), "z"], "<a>") == [("x<a>y", False), ("<a>", True), ("z", False)]


def test_a_marker_that_is_no_added_token_does_not_match_a_token() -> None:
    assert take_all(MarkerBuffer(), [SpecialText("<a>")], "<a>") == [("<a>", False)]


def test_a_marker_of_several_tokens_needs_them_as_tokens() -> None:
    added = frozenset({"<|open|>", "<|sep|>"})
    marker = "<|open|>think<|sep|>"
    pieces = [SpecialText("<|open|>"), "thi", "nk", SpecialText("<|sep|>"), "x"]
    assert take_all(MarkerBuffer(added), pieces, marker) == [(marker, True), ("x", False)]
    assert take_all(MarkerBuffer(added), [marker], marker) == [(marker, False)]


def test_tokens_that_turn_out_to_be_no_marker_come_out_as_pieces_in_order() -> None:
    added = frozenset({"<|open|>", "<|sep|>"})
    buffer = MarkerBuffer(added)
    pieces = ["a", SpecialText("<|open|>"), "thin", SpecialText("<|open|>"), "think"]
    for piece in pieces:
        buffer.feed(piece)
    taken, marker = buffer.take_until("<|open|>think<|sep|>")
    rest = buffer.finish()
    assert marker is None
    assert [*taken, *rest] == pieces
    assert [isinstance(piece, SpecialText) for piece in [*taken, *rest]] == [False, True, False, True, False]


def test_an_added_token_taken_as_a_marker_keeps_its_flag() -> None:
    buffer = MarkerBuffer(frozenset({"<a>"}))
    buffer.feed(SpecialText("<a>", is_hidden=False))
    _, marker = buffer.take_until("<a>")
    assert isinstance(marker, SpecialText)
    assert not marker.is_hidden


def test_other_markers_are_looked_for_in_what_was_held_back() -> None:
    buffer = MarkerBuffer()
    buffer.feed("x<a")
    assert buffer.take_until("<a>") == (["x"], None)
    buffer.feed("b>y")
    assert buffer.take_until("<ab>") == ([], "<ab>")
    assert buffer.take_until("<ab>") == (["y"], None)


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("<a>x", ([], "<a>")),
        (" \n<a>x", ([" \n"], "<a>")),
        (" x<a>", ([" "], None)),
        ("<b", ([], None)),
        (" <a", None),
        (" \n", None),
        ("", None),
    ],
)
def test_a_marker_at_the_start_is_told_from_anything_else(text: str, start: tuple[list[str], str | None] | None) -> None:
    whole, by_character = MarkerBuffer(), MarkerBuffer()
    whole.feed(text)
    assert whole.take_start("<a>") == start
    answer = None
    for char in text:
        by_character.feed(char)
        answer = answer or by_character.take_start("<a>")
    assert answer == start
    used = "" if start is None else "".join(start[0]) + (start[1] or "")
    assert "".join(whole.finish()) == "".join(by_character.finish()) == text.removeprefix(used)


def test_pieces_are_joined_but_added_tokens_are_not() -> None:
    special = SpecialText("b")
    assert join_pieces(["a", "a", special, special, "c", "c"]) == ["aa", "b", "b", "cc"]


def test_a_marker_of_several_tokens_can_be_given_back_as_it_came() -> None:
    buffer = MarkerBuffer(frozenset({"｜DSML｜"}))
    for piece in ("why <", SpecialText("｜DSML｜", is_hidden=False), "calls> on"):
        buffer.feed(piece)
    assert buffer.take_until("<｜DSML｜calls>") == (["why "], "<｜DSML｜calls>")
    assert buffer.marker_pieces == ["<", "｜DSML｜", "calls>"]
    assert isinstance(buffer.marker_pieces[1], SpecialText)
    assert not buffer.marker_pieces[1].is_hidden
    assert buffer.finish() == [" on"]


def test_a_step_that_needs_more_text_gives_what_is_certain_and_is_taken_again() -> None:
    buffer = StepBuffer()
    marks: list[str] = []

    def step(events: list[Event]) -> None:
        marks.append(buffer.until(text_into(events), "<a>"))

    found: list[list[Event]] = []
    for piece in ("x<", "a>y<a", "b"):
        buffer.feed(piece)
        found.append(buffer.run(step))
    assert found == [[Text("x")], [Text("y")], [Text("<ab")]]
    assert marks == ["<a>"]
