"""Token sequences that end an answer: the matcher, and an engine that goes by it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.deltas import FinishReason
from penstock.engine.text.stops import StopSequences
from tests.fakes import generate, ids, letter_like_before, make_core, make_request, saying, tokens

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
