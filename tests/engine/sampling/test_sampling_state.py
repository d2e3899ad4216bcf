import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.state import MAX_LOGIT_BIAS, Penalties, SamplingState

VOCAB = 50


def make_state(
    prompt: list[int] | None = None, bad_words: list[list[int]] | None = None, seed_offset: int = 0, **fields: Any
) -> SamplingState:
    return SamplingState(
        SamplingParams(**fields),
        prompt or [],
        vocab_size=VOCAB,
        stop_token_ids=frozenset({7, 3, VOCAB + 1}),
        bad_words_ids=bad_words or [],
        processors=[],
        seed_offset=seed_offset,
        device="cpu",
    )


def append_all(state: SamplingState, output: list[int]) -> SamplingState:
    for token_id in output:
        state.append(token_id)
    return state


def test_stop_ids_are_masked_until_min_tokens() -> None:
    state = make_state(min_tokens=2)
    for masked in ([3, 7], [3, 7], [], []):
        assert state.masked_ids() == masked
        state.append(0)


def test_constrained_sequence_may_stop_before_min_tokens() -> None:
    state = make_state(min_tokens=2)
    state.is_constrained = True
    assert state.masked_ids() == []


@pytest.mark.parametrize("is_constrained", [False, True])
def test_blocked_stop_ids_return_after_the_next_token(is_constrained: bool) -> None:
    state = make_state()
    state.is_constrained = is_constrained
    state.block_stop = True
    assert state.masked_ids() == [3, 7]
    state.append(0)
    assert state.masked_ids() == []


def test_bad_word_is_masked_only_where_the_output_ends_with_its_beginning() -> None:
    words = [[1, 2, 20], [9], [1, VOCAB + 1]]
    assert sorted(append_all(make_state(bad_words=words), [1, 2]).masked_ids()) == [9, 20]
    assert append_all(make_state(bad_words=words), [2, 1]).masked_ids() == [9]
    assert append_all(make_state([1], words), [2]).masked_ids() == [9]


def test_counts_exist_only_where_a_penalty_needs_them() -> None:
    assert make_state([1, 2]).counts is None
    presence = append_all(make_state([1, 2], presence_penalty=1), [4, VOCAB + 1])
    assert presence.counts is not None
    assert presence.counts.ids.tolist() == [4]
    repetition = append_all(make_state([1, 2, VOCAB, -1], repetition_penalty=2), [4])
    assert repetition.counts is not None
    assert repetition.counts.ids.tolist() == [1, 2, 4]
    assert repetition.penalties == Penalties(repetition=2, presence=0, frequency=0)


def test_logit_bias_is_held_to_its_range() -> None:
    assert make_state(logit_bias={1: 1e300, 2: -1e300, 3: 1.5}).biases.tolist() == [MAX_LOGIT_BIAS, -MAX_LOGIT_BIAS, 1.5]


@pytest.mark.parametrize(("top_k", "limit"), [(-1, None), (0, None), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, None), (10**30, None)])
def test_top_k_counts_only_where_it_takes_something_away(top_k: int, limit: int | None) -> None:
    assert make_state(top_k=top_k).top_k == limit


def first_number(seed: int | None, seed_offset: int = 0) -> float | None:
    generator = make_state(seed=seed, seed_offset=seed_offset).generator
    return None if generator is None else generator.random()


@given(output=st.lists(st.integers(0, 9), max_size=8), ahead=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_a_state_ahead_is_what_the_state_becomes(output: list[int], ahead: list[int]) -> None:
    params: dict[str, Any] = {"min_tokens": 5, "seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    words = [[1, 2], [3], [4, 4, 5]]

    def seen(state: SamplingState) -> list[Any]:
        assert state.counts is not None
        assert state.generator is not None
        counts = dict(zip(state.counts.ids.tolist(), state.counts.counts.tolist(), strict=True))
        return [sorted(state.masked_ids()), counts, copy.copy(state.generator).random(), state.num_output_tokens]

    state = append_all(make_state([1, 5], words, **params), output)
    before = seen(state)
    tried = state
    for token_id in ahead:
        tried = tried.after(token_id)
    assert seen(tried) == seen(append_all(make_state([1, 5], words, **params), output + ahead))
    assert seen(state) == before


def test_seeds_and_offsets_give_numbers_of_their_own_and_no_seed_gives_none() -> None:
    assert first_number(None) is None
    assert first_number(5) == first_number(5)
    seeds = [(5, 0), (5, 1), (-5, 0), (-(2**63), 0), (2**63 - 1, 127)]
    assert len({first_number(seed, offset) for seed, offset in seeds}) == len(seeds)
