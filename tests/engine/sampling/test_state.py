import copy
import math
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.rows import (
    MAX_LOGIT_BIAS,
    CounterRng,
    Penalties,
    SamplingState,
    TokenCounts,
    TokenRules,
    apply_penalties,
)

VOCAB = 50


def make_state(
    prompt: list[int] | None = None,
    bad_words: list[list[int]] | None = None,
    seed_offset: int = 0,
    placeholders: frozenset[int] = frozenset(),
    **fields: Any,
) -> SamplingState:
    params = SamplingParams(**fields)
    return SamplingState(
        params,
        prompt or [],
        vocab_size=VOCAB,
        stop_token_ids=frozenset({7, 3, VOCAB + 1}),
        rules=TokenRules.of(params, bad_words or [], VOCAB),
        processors=[],
        seed_offset=seed_offset,
        placeholders=placeholders,
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
    images = make_state([1, 5, 5, 2], placeholders=frozenset({1, 2}), repetition_penalty=2)
    assert images.counts is not None
    assert images.counts.ids.tolist() == [1, 2], "nothing is said by the ids in the places of images"
    assert repetition.penalties == Penalties(repetition=2, presence=0, frequency=0)


def test_logit_bias_is_held_to_its_range() -> None:
    assert make_state(logit_bias={1: 1e300, 2: -1e300, 3: 1.5}).biases.tolist() == [MAX_LOGIT_BIAS, -MAX_LOGIT_BIAS, 1.5]


@pytest.mark.parametrize(("top_k", "limit"), [(-1, None), (0, None), (1, 1), (VOCAB - 1, VOCAB - 1), (VOCAB, None), (10**30, None)])
def test_top_k_counts_only_where_it_takes_something_away(top_k: int, limit: int | None) -> None:
    assert make_state(top_k=top_k).top_k == limit


def first_number(seed: int | None, seed_offset: int = 0) -> float | None:
    generator = make_state(seed=seed, seed_offset=seed_offset).rng
    return None if generator is None else generator.random()


@given(output=st.lists(st.integers(0, 9), max_size=8), ahead=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_a_state_ahead_is_what_the_state_becomes(output: list[int], ahead: list[int]) -> None:
    params: dict[str, Any] = {"min_tokens": 5, "seed": 3, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    words = [[1, 2], [3], [4, 4, 5]]

    def seen(state: SamplingState) -> list[Any]:
        assert state.counts is not None
        assert state.rng is not None
        counts = dict(zip(state.counts.ids.tolist(), state.counts.counts.tolist(), strict=True))
        return [sorted(state.masked_ids()), counts, copy.copy(state.rng).random(), state.num_output_tokens]

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


PENALIZED_VOCAB = 200
TOKENS = st.lists(st.integers(0, PENALIZED_VOCAB - 1), max_size=150)
PENALTIES = st.builds(Penalties, st.sampled_from([0.5, 1.0, 1.8]), st.sampled_from([-2.0, 0.0, 1.5]), st.sampled_from([-0.5, 0.0, 2.0]))


def counted(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.append(token_id)
    return counts


@settings(max_examples=50)
@given(TOKENS, TOKENS)
def test_counts_hold_every_token_once_with_its_occurrences_in_the_output(prompt: list[int], output: list[int]) -> None:
    counts = counted(prompt, output)
    pairs = list(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(pairs) == len({token for token, _ in pairs})
    assert dict(pairs) == {token: Counter(output)[token] for token in [*prompt, *output]}


@settings(max_examples=50)
@given(st.lists(st.tuples(TOKENS, TOKENS, PENALTIES), min_size=1, max_size=4), st.integers(0, 1000))
def test_penalties_equal_the_plain_formula_and_leave_other_rows_alone(
    sequences: list[tuple[list[int], list[int], Penalties]], seed: int
) -> None:
    logits_BV = torch.randn(2 * len(sequences), PENALIZED_VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = logits_BV.tolist()
    rows = [2 * index + 1 for index in range(len(sequences))]
    for row, (prompt, output, penalties) in zip(rows, sequences, strict=True):
        for token in {*prompt, *output}:
            logit = expected[row][token]
            logit = logit / penalties.repetition if logit > 0 else logit * penalties.repetition
            expected[row][token] = logit - penalties.frequency * output.count(token) - penalties.presence * (token in output)
    apply_penalties(logits_BV, rows, [counted(prompt, output) for prompt, output, _ in sequences], [one for _, _, one in sequences])
    torch.testing.assert_close(logits_BV, torch.tensor(expected))


def test_forbidden_token_stays_forbidden() -> None:
    logits_BV = torch.full((1, PENALIZED_VOCAB), -math.inf)
    apply_penalties(logits_BV, [0], [counted([1], [1, 2])], [Penalties(0.5, -2.0, -2.0)])
    assert logits_BV.isneginf().all()


def test_no_penalised_row_changes_nothing() -> None:
    logits_BV = torch.ones(1, PENALIZED_VOCAB)
    apply_penalties(logits_BV, [], [], [])
    assert (logits_BV == 1).all()


@settings(max_examples=50)
@given(st.lists(st.tuples(TOKENS, TOKENS, PENALTIES, st.integers(-1, PENALIZED_VOCAB - 1)), min_size=1, max_size=4), st.integers(0, 1000))
def test_a_pending_token_is_penalised_as_one_that_is_known(sequences: list[tuple[list[int], list[int], Penalties, int]], seed: int) -> None:
    logits_BV = torch.randn(len(sequences), PENALIZED_VOCAB, generator=torch.Generator().manual_seed(seed))
    expected_BV = logits_BV.clone()
    rows, penalties = list(range(len(sequences))), [one for _, _, one, _ in sequences]
    known = [counted(prompt, [*output, pending] if pending >= 0 else output) for prompt, output, _, pending in sequences]
    apply_penalties(expected_BV, rows, known, penalties)
    pending_R = torch.tensor([pending for _, _, _, pending in sequences])
    apply_penalties(logits_BV, rows, [counted(prompt, output) for prompt, output, _, _ in sequences], penalties, pending_R)
    torch.testing.assert_close(logits_BV, expected_BV)


TOKEN = st.integers(0, 3)


def numbers(seed: int, place: int, count: int = 3) -> list[float]:
    generator = CounterRng(seed, place)
    return [generator.random() for _ in range(count)]


@given(st.integers(-(2**63), 2**63), st.integers(0, 2**40))
def test_numbers_depend_on_seed_place_and_order_alone(seed: int, place: int) -> None:
    assert numbers(seed, place) == numbers(seed, place)
    everything = [*numbers(seed, place), *numbers(seed + 1, place), *numbers(seed, place + 1)]
    assert len(set(everything)) == 9
    assert all(0 <= number < 1 for number in everything)


def test_a_place_does_not_depend_on_what_was_drawn_before() -> None:
    drawn, fresh = CounterRng(7), CounterRng(7)
    drawn.random()
    assert drawn.at_next_position().random() == fresh.at_next_position().random() == CounterRng(7, 1).random()


def test_numbers_are_spread_evenly() -> None:
    found = [CounterRng(seed, place).random() for seed in range(40) for place in range(100)]
    shares = [sum(low / 10 <= number < (low + 1) / 10 for number in found) for low in range(10)]
    assert all(330 < share < 470 for share in shares)
    assert abs(sum(found) / len(found) - 0.5) < 0.02
    pairs = sum(first < second for first, second in zip(found, islice(found, 1, None), strict=False))
    assert abs(pairs / len(found) - 0.5) < 0.03
