"""Admission by what the running sequences are expected to need."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core import EngineCore
from penstock.engine.scheduling.admission import FIRST_LENGTH, NUM_REMEMBERED, OutputLengths
from tests.fakes import LETTERS, letter_after, make_core, make_request


def test_before_an_answer_has_ended_a_length_is_assumed() -> None:
    lengths = OutputLengths()
    assert lengths.expected(0) == FIRST_LENGTH
    assert lengths.expected(FIRST_LENGTH + 10) == 2 * (FIRST_LENGTH + 10)


@given(st.lists(st.integers(0, 5000), min_size=NUM_REMEMBERED, max_size=NUM_REMEMBERED + 50), st.integers(0, 6000))
def test_an_answer_is_expected_to_be_as_long_as_those_that_were_longer_than_it_is(ended: list[int], num_said: int) -> None:
    lengths = OutputLengths()
    for length in ended:
        lengths.add(length)
    longer = [length for length in ended[-NUM_REMEMBERED:] if length > num_said]
    expected = sum(longer) / len(longer) if longer else 2 * num_said
    assert expected <= lengths.expected(num_said) < expected + 1


def overloaded(*, reserves: bool, caches: bool = True) -> tuple[int, EngineCore]:
    """Computes three times what the cache holds, and counts the tokens that are computed."""
    core = make_core(
        letter_after, num_blocks=64, max_num_seqs=16, max_num_batched_tokens=64, enable_prefix_caching=caches, reserves=reserves
    )
    for number in range(12):
        core.add(make_request(str(number), [LETTERS[number % 7], *LETTERS[:19]], max_tokens=40, ignore_eos=True))
    num_computed = 0
    while (step := core.schedule()) is not None:
        num_computed += sum(step.num_tokens.values())
        batch = core.build(step)
        core.update(step, batch, core.runner.launch(batch).collect())
        core.check_integrity()
    core.runner.shutdown()
    return num_computed, core


@pytest.mark.parametrize("caches", [True, False])
def test_what_is_admitted_is_hardly_ever_computed_twice(caches: bool) -> None:
    num_needed = 12 * (20 + 40 - 1)
    num_computed, core = overloaded(reserves=True, caches=caches)
    assert num_computed <= 1.1 * num_needed
    greedy, thrashing = overloaded(reserves=False, caches=caches)
    assert greedy > 1.2 * num_needed
    assert core.stats().num_preemptions < thrashing.stats().num_preemptions


def test_a_sequence_is_admitted_alone_whatever_is_expected_of_it() -> None:
    core = make_core(num_blocks=50, max_model_len=200, reserves=True)
    core.add(make_request("one", LETTERS * 12, max_tokens=8))
    step = core.schedule()
    assert step is not None
    assert len(core.scheduler.running) == 1


def test_a_request_that_was_refused_is_looked_at_again_once_blocks_are_given_up() -> None:
    core = make_core(num_blocks=50, max_model_len=200, enable_prefix_caching=False, reserves=True)
    for name, length in (("first", 10), ("second", 150)):
        core.add(make_request(name, (LETTERS * 12)[:100], max_tokens=length))
    core.schedule()
    assert [sequence.request.request_id for sequence in core.scheduler.running] == ["first"]
    core.abort("first")
    assert core.schedule() is not None
    assert [sequence.request.request_id for sequence in core.scheduler.running] == ["second"]


def test_sequences_admitted_in_one_step_are_counted_once() -> None:
    core = make_core(num_blocks=50, max_num_seqs=8, max_num_batched_tokens=200, enable_prefix_caching=False, reserves=True)
    for number in range(8):
        core.add(make_request(str(number), LETTERS[:12], max_tokens=11))
    core.schedule()
    assert len(core.scheduler.running) == 8  # each needs 3 blocks now and 3 later
