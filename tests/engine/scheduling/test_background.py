"""Requests in the background: computed while there are no others, and never in the way of those."""

from collections.abc import Callable, Iterator

import pytest

from penstock.engine.batch import Batch
from penstock.engine.core import EngineCore
from penstock.engine.errors import QueueFull
from penstock.engine.request import BACKGROUND
from penstock.engine.runner import StepHandle
from penstock.engine.scheduling.step import Step
from tests.fakes import LETTERS, drive, generate, letter_like_before, make_core, make_request, tokens

PROMPT = LETTERS[:1] * 12


def add_background(core: EngineCore, count: int, max_tokens: int = 20) -> None:
    for number in range(count):
        core.add(make_request(f"background {number}", [*PROMPT, LETTERS[number]], max_tokens=max_tokens, priority=BACKGROUND))


def scheduled_in(step: Step) -> set[str]:
    return {sequence.request.request_id.partition(" ")[0] for sequence in step.num_tokens}


def steps(core: EngineCore) -> Iterator[set[str]]:
    """What each step computes; computed one after the other, or with the next one scheduled ahead where the core does that."""
    flight: tuple[Step, Batch, StepHandle] | None = None

    def launch(step: Step | None) -> tuple[Step, Batch, StepHandle] | None:
        if step is None:
            return None
        batch = core.build(step)
        return step, batch, core.runner.launch(batch)

    while core.has_work:
        flight = flight or launch(core.schedule())
        assert flight is not None
        step, batch, handle = flight
        yield scheduled_in(step)
        flight = launch(core.schedule_ahead(step, batch))
        core.update(step, batch, handle.collect())
        core.check_integrity()


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("reserves", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: make_core(letter_like_before, **options),
        lambda **options: make_core(letter_like_before, max_num_seqs=3, **options),  # no place is left
        lambda **options: make_core(letter_like_before, num_blocks=18, max_model_len=60, **options),  # and here no block
        lambda **options: make_core(letter_like_before, windows=(None, 8), **options),
        lambda **options: make_core(letter_like_before, rows_for_weights=4.0, **options),
    ],
    ids=["room", "no place", "no block", "windows", "drafts"],
)
def test_another_request_waits_for_the_step_in_flight_and_for_no_more(
    make: Callable[..., EngineCore], is_async: bool, reserves: bool
) -> None:
    alone = make(is_async=is_async, reserves=reserves)
    alone.add(make_request("other 1", LETTERS[5:] * 2, max_tokens=8))
    num_alone = len(list(steps(alone)))
    core = make(is_async=is_async, reserves=reserves)
    add_background(core, 3)
    seen: list[set[str]] = []
    for number, computed in enumerate(steps(core)):
        if number == 6:
            core.add(make_request("other 1", LETTERS[5:] * 2, max_tokens=8))
        if number > 6:
            seen.append(computed)
    first = seen.index({"other"})
    assert first <= is_async, "a step that was scheduled before may be in flight"
    assert seen[first : first + num_alone] == [{"other"}] * num_alone
    assert {"other"} not in seen[first + num_alone :]
    assert {"background"} in seen[first + num_alone :], "then they go on"


def test_answers_in_the_background_are_the_same_however_often_they_are_paused_and_preempted() -> None:
    alone = {
        number: tokens(
            generate(make_core(letter_like_before), make_request(f"background {number}", [*PROMPT, LETTERS[number]], max_tokens=20))
        )
        for number in range(3)
    }
    core = make_core(letter_like_before, max_num_seqs=3, num_blocks=20, max_model_len=60)
    add_background(core, 3)
    said: dict[str, list[int]] = {}
    for number in range(200):
        if number % 7 == 3 and number < 60:
            core.add(make_request(f"other {number}", LETTERS[4:] * 2, max_tokens=4))
        for request_id, deltas in core.step().items():
            said.setdefault(request_id, []).extend(tokens(deltas))
        core.check_integrity()
    assert core.scheduler.num_preemptions > 0
    assert {number: said[f"background {number}"] for number in range(3)} == alone


def test_a_prompt_waits_for_none_of_the_blocks_that_a_paused_one_would_compute() -> None:
    core = make_core(letter_like_before, max_num_batched_tokens=8)
    core.add(make_request("background", LETTERS * 3, max_tokens=2, priority=BACKGROUND))
    core.step()
    core.add(make_request("other", LETTERS * 3, max_tokens=2))
    assert set(drive(core)) == {"background", "other"}


def test_a_prompt_has_the_whole_budget_although_others_wait_in_the_background() -> None:
    core = make_core(letter_like_before, max_num_batched_tokens=512, num_blocks=400, max_model_len=800)
    add_background(core, 4)
    core.add(make_request("other", LETTERS[:1] * 500, max_tokens=1))
    step = core.schedule()
    assert step is not None
    assert list(step.num_tokens.values()) == [500]


def test_background_requests_do_not_age() -> None:
    now = 0.0
    core = make_core(letter_like_before, max_num_seqs=1, aging_seconds=10, clock=lambda: now)
    add_background(core, 1)
    core.add(make_request("other 1", max_tokens=2))
    core.add(make_request("other 2", max_tokens=2))
    now = 100.0
    ended = [request_id for _ in range(40) for request_id, deltas in core.step().items() if deltas[-1].finish_reason is not None]
    assert ended == ["other 1", "other 2", "background 0"]


def test_waiting_background_requests_have_no_other_request_refused() -> None:
    core = make_core(letter_like_before, max_waiting=2)
    add_background(core, 2)
    with pytest.raises(QueueFull):
        core.add(make_request("background 3", priority=BACKGROUND))
    core.add(make_request("other 1"))
    core.add(make_request("other 2"))
    with pytest.raises(QueueFull):
        core.add(make_request("other 3"))
    core.check_integrity()
