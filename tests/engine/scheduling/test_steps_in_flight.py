"""Several steps in flight, as of a model in stages: each of other sequences, with the answers of one step at a time."""

import asyncio
import random
from typing import Any

import pytest

from penstock.engine.batch import Batch
from penstock.engine.core import DeltasByRequest, EngineCore
from penstock.engine.deltas import FinishReason
from penstock.engine.loop import STEP_FAILED
from penstock.engine.request import Request
from penstock.engine.runner import StepOutput
from penstock.engine.scheduling.step import Step
from tests.engine.running import InFlight, collect, ends, run, running, until
from tests.fakes import LETTERS, generate, make_core, make_request, tokens


def requests(seed: int) -> list[Request]:
    chance = random.Random(seed)
    beginnings = [[chance.choice(LETTERS) for _ in range(chance.randint(1, 40))] for _ in range(4)]
    return [
        make_request(
            str(number),
            [*chance.choice(beginnings), *(chance.choice(LETTERS) for _ in range(chance.randint(1, 30)))],
            max_tokens=chance.randint(1, 25),
            ignore_eos=True,
            n=chance.choice([1, 1, 2]),
            temperature=chance.choice([0.0, 1.0]),
            seed=number,
        )
        for number in range(14)
    ]


def told(deltas: list[Any]) -> list[list[int]]:
    return [tokens([delta for delta in deltas if delta.index == index]) for index in range(2)]


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 56}, {"rows_for_weights": 6.0}, {"windows": (None, 9), "num_blocks": 120}],
    ids=["plain", "preempted", "drafts", "windows"],
)
def test_the_answers_are_those_of_one_step_at_a_time(stages: int, options: dict[str, Any]) -> None:
    expected = [told(generate(make_core(num_blocks=200), request)) for request in requests(stages)]
    settings: dict[str, Any] = {"max_num_batched_tokens": 16, "max_model_len": 120, "num_blocks": 200}
    core = make_core(max_in_flight=stages, **settings | options)
    core.observer = in_flight = InFlight()

    async def test() -> None:
        async with running(core) as engine:
            answers = await asyncio.gather(*(collect(engine, request) for request in requests(stages)))
            assert [told(deltas) for deltas in answers] == expected

    run(test)
    assert in_flight.most == stages
    assert not in_flight.steps
    assert (core.stats().num_preemptions > 0) == ("num_blocks" in options and "windows" not in options)


def test_running_sequences_are_decoded_in_as_many_parts_as_there_are_stages() -> None:
    core = make_core(max_in_flight=2)
    sizes: list[int] = []

    class Sizes(InFlight):
        def begin(self, step: Step) -> None:
            super().begin(step)
            sizes.append(len(step.num_tokens))

    core.observer = Sizes()

    async def test() -> None:
        async with running(core) as engine:
            await asyncio.gather(*(collect(engine, make_request(str(number), max_tokens=20, ignore_eos=True)) for number in range(6)))

    run(test)
    assert sizes.count(3) > 30


@pytest.mark.parametrize("number", [1, 4, 5])
def test_a_step_that_fails_ends_its_own_requests_and_the_others_are_computed_anew(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    core, update = make_core(max_in_flight=3), EngineCore.update
    calls: list[set[str]] = []

    def failing(own: EngineCore, step: Step, batch: Batch, output: StepOutput) -> DeltasByRequest:
        calls.append({sequence.request.request_id for sequence in step.num_tokens})
        if len(calls) == number:
            raise RuntimeError("a defect")
        return update(own, step, batch, output)

    monkeypatch.setattr(EngineCore, "update", failing)

    async def test() -> None:
        async with running(core) as engine:
            asked = [make_request(str(place), LETTERS[: 5 + place], max_tokens=12, ignore_eos=True) for place in range(7)]
            answers = await asyncio.gather(*(collect(engine, request) for request in asked))
            failed = calls[number - 1]
            for request, deltas in zip(asked, answers, strict=True):
                if request.request_id in failed:
                    assert ends(deltas) == [(0, FinishReason.ERROR)]
                    assert deltas[-1].error == STEP_FAILED
                else:
                    assert told(deltas) == told(generate(make_core(), request))
            assert 0 < len(failed) <= 7

    run(test)


def test_a_pause_waits_for_all_steps_in_flight() -> None:
    core = make_core(max_in_flight=2)
    core.observer = in_flight = InFlight()

    async def test() -> None:
        async with running(core) as engine:
            answers = asyncio.gather(*(collect(engine, make_request(str(number), max_tokens=30, ignore_eos=True)) for number in range(4)))
            await until(lambda: in_flight.most == 2)
            await engine.pause()
            assert not in_flight.steps
            engine.resume()
            assert all(len(tokens(deltas)) == 30 for deltas in await answers)

    run(test)
