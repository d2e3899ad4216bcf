import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import SpecialText, Text
from penstock.engine.deltas import FinishReason
from penstock.engine.text.streaming import StopSequences, StopStrings
from tests.fakes import generate, ids, letter_like_before, make_core, make_request, saying, tokens

HIDDEN = SpecialText("<|x|>", is_hidden=True)
SHOWN = SpecialText("ab>", is_hidden=False)

some_stops = st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4)
some_pieces = st.lists(st.one_of(st.text("abcd", min_size=1, max_size=6), st.just(HIDDEN)), max_size=8)


def read(stops: StopStrings, pieces: list[str]) -> list[str]:
    events: list[Text] = [event for piece in pieces for event in stops.feed(piece)]
    return [event.text for event in events + stops.finish()]


def cut_by_hand(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Tries every end from the left, and the longest stop string first."""
    for end in range(len(text) + 1):
        for candidate in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(candidate):
                return text[: end if include else end - len(candidate)], candidate
    return text, None


@given(stop=some_stops, pieces=some_pieces, include=st.booleans())
def test_the_first_stop_string_to_be_complete_ends_the_text(stop: list[str], pieces: list[str], include: bool) -> None:
    stops = StopStrings(stop, include)
    shown = "".join(piece for piece in read(stops, pieces) if piece != HIDDEN)
    text = "".join(piece for piece in pieces if piece != HIDDEN)
    assert (shown, stops.match) == cut_by_hand(text, stop, include)


@given(stop=some_stops, text=st.text("abcd", max_size=12), include=st.booleans(), data=st.data())
def test_any_cut_gives_the_same_text_and_match(stop: list[str], text: str, include: bool, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    whole, cut = StopStrings(stop, include), StopStrings(stop, include)
    assert "".join(read(whole, [text])) == "".join(read(cut, pieces))
    assert whole.match == cut.match


@given(stop=some_stops, pieces=some_pieces)
def test_only_a_possible_stop_string_is_held_back(stop: list[str], pieces: list[str]) -> None:
    stops = StopStrings(stop)
    fed = given_out = ""
    for piece in pieces:
        given_out += "".join(event.text for event in stops.feed(piece))
        fed += piece
        if stops.match is None:
            held = fed.removeprefix(given_out).replace(HIDDEN, "")
            assert not held or any(candidate.startswith(held) for candidate in stop)


@given(pieces=some_pieces)
def test_a_hidden_token_keeps_its_place_when_nothing_matches(pieces: list[str]) -> None:
    assert "".join(read(StopStrings(["bcz", "abz"]), pieces)) == "".join(pieces)


def test_a_stop_string_lies_across_a_hidden_token_that_is_skipped() -> None:
    stops = StopStrings(["stop"])
    assert read(stops, ["a", HIDDEN, "st", HIDDEN, "op", "b"]) == ["a", HIDDEN]
    assert stops.match == "stop"


def test_a_special_token_is_text_when_special_tokens_are_not_skipped() -> None:
    stops = StopStrings(["|x|"], skip_special_tokens=False)
    assert read(stops, ["a", HIDDEN, "b"]) == ["a", "<"]
    stops = StopStrings(["stop"], skip_special_tokens=False)
    assert read(stops, ["st", HIDDEN, "op"]) == ["st", HIDDEN, "op"]


def test_an_added_token_is_given_out_whole_though_its_end_may_begin_a_stop_string() -> None:
    stops = StopStrings([">\n"])
    assert list(stops.feed(SHOWN)) == []
    released = read(stops, ["c"])
    assert released == [SHOWN, "c"]
    assert isinstance(released[0], SpecialText)


def test_a_stop_string_may_begin_inside_an_added_token() -> None:
    assert read(StopStrings([">\n"]), ["x", SHOWN, "\ny"]) == ["x", "ab"]
    assert read(StopStrings([">\n"], include_in_output=True), ["x", SHOWN, "\ny"]) == ["x", SHOWN, "\n"]


def test_nothing_comes_out_after_a_match() -> None:
    stops = StopStrings(["b"])
    assert read(stops, ["abab", HIDDEN, "a"]) == ["a"]
    assert stops.feed("a") == []


def test_a_stop_string_completed_while_unarmed_is_text() -> None:
    stops = StopStrings(["ab"])
    stops.is_armed = False
    before = [event.text for event in stops.feed("xaba")]
    stops.is_armed = True
    assert "".join([*before, *read(stops, ["bc"])]) == "xab"
    assert stops.match == "ab"


def test_a_stop_string_completed_while_unarmed_is_held_no_longer_unless_another_may_follow() -> None:
    stops = StopStrings(["ab", "abcd", "bcx"])
    stops.is_armed = False
    assert [event.text for event in stops.feed("ab")] == []
    assert "".join(event.text for event in stops.feed("cd")) == "abcd"


token_lists = st.lists(st.integers(0, 2), max_size=12)
sequences = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4)


@given(output=token_lists, stops=sequences, min_tokens=st.integers(0, 5))
def test_an_output_ends_where_it_first_ends_with_a_sequence(output: list[int], stops: list[list[int]], min_tokens: int) -> None:
    def longest(end: int) -> tuple[int, ...] | None:
        found = [stop for stop in stops if end >= max(len(stop), min_tokens) and output[end - len(stop) : end] == stop]
        longest_first: list[list[int]] = sorted(found, key=len, reverse=True)
        return tuple(longest_first[0]) if found else None

    matcher = StopSequences(stops, min_tokens)
    for end, token_id in enumerate(output, 1):
        matcher.append(token_id)
        assert matcher.match == longest(end)
        if matcher.match is not None:
            break


@given(output=token_lists, stops=sequences)
def test_no_token_before_the_pending_ones_belongs_to_a_sequence_to_come(output: list[int], stops: list[list[int]]) -> None:
    matcher = StopSequences(stops)
    certain = 0
    for end, token_id in enumerate(output, 1):
        matcher.append(token_id)
        if matcher.match is not None:
            assert end - len(matcher.match) >= certain
            break
        assert end - matcher.num_pending >= certain
        certain = end - matcher.num_pending


def test_a_copy_goes_on_by_itself() -> None:
    matcher = StopSequences([[1, 2]])
    matcher.append(1)
    other = matcher.copy()
    other.append(2)
    assert other.match == (1, 2)
    assert matcher.match is None
    assert matcher.num_pending == 1


@pytest.mark.parametrize("rows_for_weights", [None, 64.0])
def test_the_engine_ends_at_a_sequence_also_within_a_draft(rows_for_weights: float | None) -> None:
    core = make_core(letter_like_before, rows_for_weights=rows_for_weights)
    whole = tokens(generate(core, make_request("whole", "abcabcabc", max_tokens=40)))
    end = next(end for end in range(20, 40) if tuple(whole[end - 3 : end]) not in {tuple(whole[at - 3 : at]) for at in range(3, end)})
    deltas = generate(core, make_request("cut", "abcabcabc", max_tokens=40, stop_sequences=(tuple(whole[end - 3 : end]),)))
    assert tokens(deltas) == whole[:end]
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert isinstance(deltas[-1].stop_reason, str)


def test_a_sequence_in_the_prompt_ends_nothing_and_one_before_min_tokens_neither() -> None:
    core = make_core(saying("ababab", prompt="ab"))
    request = make_request("r", "ab", max_tokens=8, min_tokens=3, stop_sequences=(tuple(ids("ab")),))
    assert tokens(generate(core, request)) == ids("abab")


def test_bad_sequences_do_not_occur() -> None:
    core = make_core(saying("abab"))
    said = tokens(generate(core, make_request(max_tokens=4, bad_sequences=(tuple(ids("ab")),))))
    assert tuple(ids("ab")) not in set(itertools.pairwise(said))
    assert said[0] == ids("a")[0]
