"""Steps that a device computes while the model's thread is at the next one. The device is a stand-in, the rest is what runs there."""

import asyncio
import functools
import random
from typing import Any

import pytest
import torch

from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta, TokenLogprobs
from penstock.engine.loop import STEP_FAILED, Engine
from penstock.engine.model.cuda_graphs import StepGraphs
from penstock.engine.model.forward import compute_logits
from penstock.engine.model.loader import LoadedModel
from penstock.engine.request import Request
from penstock.engine.runner import ModelRunner
from tests.engines import core_over, loaded_model
from tests.fakes import make_request, tokens
from tests.gpu.held_copies import HeldCopies
from tests.gpu.tape import TapeRecorder
from tests.tiny_models import tiny_model

BLOCK_SIZE = 4
MAX_LEN = 40
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama() -> LoadedModel:
    return loaded_model(tiny_model("llama"), max_model_len=MAX_LEN)


def core_on_device(loaded: LoadedModel, copies: HeldCopies | None, *, has_graphs: bool = False, **settings: Any) -> EngineCore:
    """An engine that schedules ahead, with `copies` over a device that computes on."""
    core = core_over(loaded, block_size=BLOCK_SIZE, async_scheduling=True, **settings)
    core.runner.shutdown()
    forward = functools.partial(compute_logits, loaded.model)
    cache = core.runner.cache
    graphs = StepGraphs(
        forward, TapeRecorder(), max_num_rows=4, max_num_tokens=24, block_tables_PN=cache.block_tables_PN, block_size=BLOCK_SIZE
    )
    core.runner = ModelRunner(
        loaded, cache, vocab_size=core.vocab_size, graphs=graphs if has_graphs else None, copies=copies, num_threads=1
    )
    if has_graphs:
        core.runner.optimize()
    return core


def requests(num: int) -> list[Request]:
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 7},
        {"temperature": 0.8, "seed": 3, "n": 2, "top_k": 9},
        {"min_tokens": 5, "logit_bias": {40: 2.0}},
        {"logprobs": 1},
        {"presence_penalty": 0.5},
    ]
    chance = random.Random(5)
    return [
        make_request(
            str(number),
            chance.choices(range(3, 250), k=1 + 3 * number),
            max_tokens=12 + number,
            **({"ignore_eos": True} | kinds[number % len(kinds)]),
        )
        for number in range(num)
    ]


def answers(core: EngineCore, wanted: list[Request]) -> list[list[SequenceDelta]]:
    async def collect(engine: Engine, request: Request) -> list[SequenceDelta]:
        return [delta async for delta in engine.generate(request)]

    async def serve() -> list[list[SequenceDelta]]:
        engine = Engine(core)
        await engine.start()
        try:
            return await asyncio.gather(*(collect(engine, request) for request in wanted))
        finally:
            await engine.stop()
            engine.check_integrity()

    said = asyncio.run(serve())
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    return said


def assert_same_logprobs(mine: list[SequenceDelta], theirs: list[SequenceDelta]) -> None:
    for got, expected in zip(logprobs_of(mine), logprobs_of(theirs), strict=True):
        assert (got.token_id, got.rank, [token_id for token_id, _ in got.top]) == (
            expected.token_id,
            expected.rank,
            [token_id for token_id, _ in expected.top],
        )
        assert got.logprob == pytest.approx(expected.logprob, abs=1e-4)


def logprobs_of(deltas: list[SequenceDelta]) -> list[TokenLogprobs]:
    return [entry for delta in deltas for entry in delta.logprobs]


@pytest.mark.parametrize("options", [{}, {"logprobs": 3}])
def test_the_next_step_is_computed_before_the_last_one_is_read(llama: LoadedModel, options: dict[str, Any]) -> None:
    copies = HeldCopies(is_held=True)
    core = core_on_device(llama, copies)
    core.add(make_request(prompt=[5, 6, 7], max_tokens=9, ignore_eos=True, **options))
    step = core.schedule()
    assert step is not None
    batch = core.build(step)
    handle = core.runner.launch(batch)
    follower = core.schedule_ahead(step, batch)
    assert follower is not None
    next_batch = core.build(follower)
    next_handle = core.runner.launch(next_batch)
    assert (batch.num_pending, next_batch.num_pending) == (0, 1)
    core.runner.thread.submit(int).result()  # both have been through the model's thread
    assert copies.num_begun == 2
    assert not handle.future.done()
    assert not next_handle.future.done()
    copies.release()
    said = core.update(step, batch, handle.collect())["r"] + core.update(follower, next_batch, next_handle.collect())["r"]
    core.runner.shutdown()
    core.abort("r")
    core.check_integrity()
    expected = answers(core_over(llama, block_size=BLOCK_SIZE), [make_request(prompt=[5, 6, 7], max_tokens=2, ignore_eos=True, **options)])
    assert tokens(said) == tokens(expected[0])
    assert_same_logprobs(said, expected[0])


@pytest.mark.parametrize(
    ("speculation", "has_graphs", "has_copies", "num_blocks"),
    [
        pytest.param("none", False, True, 12, marks=pytest.mark.thorough),
        ("none", True, True, 80),
        ("ngram", True, True, 12),
        pytest.param("ngram", False, False, 12, marks=pytest.mark.thorough),
    ],
)
def test_every_answer_is_what_it_is_without(
    llama: LoadedModel, speculation: str, has_graphs: bool, has_copies: bool, num_blocks: int
) -> None:
    settings: dict[str, Any] = {"speculation": speculation, "num_blocks": num_blocks, "max_num_seqs": 4}
    copies = HeldCopies() if has_copies else None
    for count in (3, 6):  # the last three ask for more than can go ahead
        expected = answers(core_over(llama, block_size=BLOCK_SIZE, async_scheduling=False, **settings), requests(count))
        got = answers(core_on_device(llama, copies, has_graphs=has_graphs, **settings), requests(count))
        for mine, theirs, request in zip(got, expected, requests(count), strict=True):
            for index in range(request.params.n):
                assert tokens(mine, index) == tokens(theirs, index)
            assert_same_logprobs(mine, theirs)
    assert copies is None or copies.num_begun > 10


def test_a_copy_that_fails_ends_its_own_step_and_what_ran_behind_it_begins_again(llama: LoadedModel) -> None:
    core = core_on_device(llama, HeldCopies(fail_at=4))
    said = answers(core, requests(3))
    reasons = {request.request_id: deltas[-1] for request, deltas in zip(requests(3), said, strict=True)}
    assert {delta.finish_reason for delta in reasons.values()} <= {FinishReason.ERROR, FinishReason.LENGTH}
    assert {delta.error for delta in reasons.values() if delta.error} == {STEP_FAILED}


def test_a_row_without_a_token_fails_alone(llama: LoadedModel) -> None:
    good, bad = requests(2)
    core = core_on_device(llama, HeldCopies())
    expected = answers(core_over(llama, block_size=BLOCK_SIZE), [good])[0]
    core = core_on_device(llama, HeldCopies())
    forward = core.runner.forward
    num_steps = 0

    def spoil(batch: Any) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        logits_KV = forward(batch)
        if num_steps == 4:
            rows = [row for row, sampler in enumerate(batch.sampler_rows) if sampler.sequence.request is bad]
            logits_KV[[batch.logits_rows[row] for row in rows]] = torch.nan
        return logits_KV

    core.runner.forward = spoil  # type: ignore[method-assign]
    mine, other = answers(core, [good, bad])
    assert tokens(mine) == tokens(expected)
    assert other[-1].finish_reason is FinishReason.ERROR
    assert other[-1].error == "the model's logits are not finite"
