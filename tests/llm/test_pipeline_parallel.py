"""Stages of a model in two processes, with a step in flight in each, say what one process says, and end with either of them."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, BeamSearchParams, ConfigurationError, EngineUnavailable, InvalidRequest, SamplingParams, StructuredOutputsParams
from tests.engine.running import InFlight, until
from tests.llm.model_directory import SETTINGS, write_model

LONG = "the quick brown fox jumps over the lazy dog and then it goes home to sleep "  # more tokens than a step may have
BLOCK_BYTES = 16 * 2 * 2 * 16 * 4  # of one layer
# Prompts are computed in chunks, and the KV cache is too small for all sequences, of which some are preempted.
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 160,
    "enable_prompt_embeds": True,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
PROMPTS = [LONG, LONG + "again", "hello", "a", LONG[5:] + LONG[:20], *(f"{number} pens" for number in range(6))]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **{**SETTINGS, **OPTIONS, "kv_cache_memory": BLOCK_BYTES * 3 * 16}) as llm:
        yield admitting(llm)


def admitting(llm: LLM) -> LLM:
    """The same, with an engine that admits what fits now, so that sequences are preempted."""
    llm._model.rest.awake().scheduler.lengths = None
    return llm


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[LLM]:
    settings = {**SETTINGS, **OPTIONS, "kv_cache_memory": BLOCK_BYTES * 2 * 16}  # of each rank; the second one has two of the layers
    with LLM(str(model_dir), pipeline_parallel_size=2, **settings) as llm:
        yield admitting(llm)


def said(llm: LLM, prompts: Any, params: SamplingParams, **others: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **others)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


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
    for llm in (one, two):
        said(llm, [LONG] * 2, SamplingParams(**GREEDY))
        stats = llm._model.rest.awake().stats()
        assert stats.num_prefix_cache_hits > 0
        assert stats.num_preemptions > 0
        assert stats.num_draft_tokens > 0


def test_logprobs_are_those_of_one_process(one: LLM, two: LLM) -> None:
    params = SamplingParams(**GREEDY, logprobs=3, prompt_logprobs=2)
    mine, theirs = (logprobs_of(llm.generate(LONG, params, use_tqdm=False)[0]) for llm in (two, one))
    for own, other in zip(mine, theirs, strict=True):
        assert own.keys() == other.keys()
        assert all(abs(own[token].logprob - other[token].logprob) < 1e-4 for token in own)


def logprobs_of(output: Any) -> list[Any]:
    return [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]


@pytest.mark.thorough
def test_beams_are_those_of_one_process(one: LLM, two: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    mine, theirs = (llm.beam_search(["the rain", "in Spain"], params) for llm in (two, one))
    assert [[each.tokens for each in output.sequences] for output in mine] == [
        [each.tokens for each in output.sequences] for output in theirs
    ]


@pytest.mark.thorough
def test_prompts_of_vectors_are_answered_as_by_one_process(one: LLM, two: LLM) -> None:
    vectors = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    prompts = [{"prompt_embeds": rows} for rows in vectors]
    answers = [said(llm, [*prompts, "hello"], SamplingParams(**GREEDY)) for llm in (two, one)]
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


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
    group: Any = two._model.rest.awake().runner.group
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(two.generate, [LONG] * 4, SamplingParams(**{**GREEDY, "max_tokens": 70}), use_tqdm=False)
        os.kill(group._processes[1].pid, signal.SIGKILL)
        assert {output.outputs[0].finish_reason for output in running.result(timeout=60)} == {"error"}
    assert group._reason == "rank 1: its process has ended by signal 9"
    with pytest.raises(EngineUnavailable, match="the engine has failed"):
        two.generate("hello", SamplingParams(**GREEDY), use_tqdm=False)
