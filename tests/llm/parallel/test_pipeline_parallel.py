"""Stages of a model in two processes, with a step in flight in each, say what one process says, and end with either of them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, ConfigurationError, InvalidRequest, SamplingParams, StructuredOutputsParams
from tests.engine.running import InFlight, until
from tests.llm.model_directory import SETTINGS, write_model
from tests.llm.parallel.both import (
    GREEDY,
    OPTIONS,
    PROMPTS,
    SCHEMA,
    admitting,
    check_beams,
    check_end_of_a_rank,
    check_logprobs,
    check_vectors,
    check_what_has_happened,
    said,
)

BLOCK_BYTES = 16 * 2 * 2 * 16 * 4  # of one layer: the KV cache is too small for all sequences, of which some are preempted


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **{**SETTINGS, **OPTIONS, "kv_cache_memory": BLOCK_BYTES * 3 * 16}) as llm:
        yield admitting(llm)


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[LLM]:
    settings = {**SETTINGS, **OPTIONS, "kv_cache_memory": BLOCK_BYTES * 2 * 16}  # of each rank; the second one has two of the layers
    with LLM(str(model_dir), pipeline_parallel_size=2, **settings) as llm:
        yield admitting(llm)


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {**GREEDY, "n": 3, "temperature": 0.8, "seed": 7},
        {"temperature": 0, "max_tokens": 30, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
        pytest.param({**GREEDY, "repetition_penalty": 1.2, "min_tokens": 4}, marks=pytest.mark.thorough),
        pytest.param(
            {"temperature": 0.9, "seed": 3, "max_tokens": 30, "structured_outputs": StructuredOutputsParams(regex="[a-z]{3,20}")},
            marks=pytest.mark.thorough,
        ),
    ],
    ids=["greedy", "n", "schema", "penalties", "regex"],
)
def test_requests_are_answered_as_by_one_process(one: LLM, two: LLM, params: dict[str, Any]) -> None:
    core = two._model.rest.awake()
    core.observer = in_flight = InFlight()
    assert said(two, PROMPTS, SamplingParams(**params)) == said(one, PROMPTS, SamplingParams(**params))
    assert in_flight.most == 2
    assert not in_flight.steps
    core.observer = None
    assert core.scheduler.pool.num_blocks == 16
    core.check_integrity()


def test_the_requests_before_have_hit_the_prefix_cache_been_preempted_and_speculated(one: LLM, two: LLM) -> None:
    check_what_has_happened(one, two)


def test_logprobs_are_those_of_one_process(one: LLM, two: LLM) -> None:
    check_logprobs(one, two)


@pytest.mark.thorough
def test_beams_are_those_of_one_process(one: LLM, two: LLM) -> None:
    check_beams(one, two)


@pytest.mark.thorough
def test_prompts_of_vectors_are_answered_as_by_one_process(one: LLM, two: LLM) -> None:
    check_vectors(one, two)


def test_requests_that_are_aborted_in_flight_leave_nothing_behind(one: LLM, two: LLM) -> None:
    core, engine = two._model.rest.awake(), two._model.generating.engine

    async def abort_some() -> None:
        await until(lambda: len(core.scheduler.running) >= 4)
        for request in engine.requests()[::2]:
            engine.abort(request.id)

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(two.generate, PROMPTS, SamplingParams(**GREEDY), use_tqdm=False)
        two._loop.run(abort_some())
        reasons = [output.outputs[0].finish_reason for output in running.result(timeout=120)]
    assert {"error", "length"} <= set(reasons)
    core.check_integrity()
    assert core.scheduler.pool.num_free == core.scheduler.pool.num_blocks
    assert said(two, PROMPTS[:3], SamplingParams(**GREEDY)) == said(one, PROMPTS[:3], SamplingParams(**GREEDY))


def test_only_logits_come_out_of_the_stages(two: LLM) -> None:
    core = two._model.rest.awake()
    core.runner.outputs.check(("logits",))
    with pytest.raises(InvalidRequest, match=r"no output 'hidden_states\.1'"):
        core.runner.outputs.check(("hidden_states.1",))


def test_a_model_with_too_few_layers_is_refused_before_anything_is_started(model_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="--pipeline-parallel-size 4: Qwen3ForCausalLM cannot be cut into stages: it has 3 layers"):
        LLM(str(model_dir), pipeline_parallel_size=4, **SETTINGS)


def test_the_end_of_a_rank_ends_every_request_and_the_engine(two: LLM) -> None:
    check_end_of_a_rank(two)
