import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.contracts.parsing import SpecialText, Text
from penstock.engine.text.stops import StopStrings

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
