"""A model of two processes says what one process says, to every kind of request, and ends with either of them."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import LLM, BeamSearchParams, EngineUnavailable, InvalidRequest, SamplingParams, StructuredOutputsParams
from penstock.llm.adapters import LoRARequest
from tests.llm.model_directory import SETTINGS, write_model
from tests.tiny_adapters import write_adapter
from tests.tiny_models import tiny_model

LONG = "the quick brown fox jumps over the lazy dog and then it goes home to sleep "  # more tokens than a step may have
# Prompts are computed in chunks, and the KV cache is too small for all sequences, of which some are preempted.
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 32,
    "max_num_seqs": 8,
    "max_model_len": 160,
    "kv_cache_memory": 16 * 24 * 2 * 2 * 16 * 4 * 3,
    "enable_lora": True,
    "enable_prompt_embeds": True,
}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 20, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **{**SETTINGS, **OPTIONS}) as llm:
        yield admitting(llm)


def admitting(llm: LLM) -> LLM:
    """The same, with an engine that admits what fits now, so that sequences are preempted."""
    llm._model.rest.awake().scheduler.lengths = None
    return llm


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[LLM]:
    settings = {**SETTINGS, **OPTIONS, "kv_cache_memory": OPTIONS["kv_cache_memory"] // 2}  # of each rank
    with LLM(str(model_dir), tensor_parallel_size=2, **settings) as llm:
        yield admitting(llm)


def said(llm: LLM, prompts: Any, params: SamplingParams, **others: Any) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False, **others)
    return [[list(each.token_ids) for each in output.outputs] for output in outputs]


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        {**GREEDY, "n": 3, "temperature": 0.8, "seed": 7},
        {**GREEDY, "repetition_penalty": 1.2, "min_tokens": 4},
        {"temperature": 0, "max_tokens": 30, "structured_outputs": StructuredOutputsParams(json=SCHEMA)},
    ],
    ids=["greedy", "n", "penalties", "schema"],
)
def test_requests_are_answered_as_by_one_process(one: LLM, two: LLM, params: dict[str, Any]) -> None:
    prompts = [LONG, LONG + "again", "hello", "a", LONG[5:] + LONG[:20], *(f"{number} pens" for number in range(6))]
    assert said(two, prompts, SamplingParams(**params)) == said(one, prompts, SamplingParams(**params))
    cores = [llm._model.rest.awake() for llm in (one, two)]
    assert {core.scheduler.pool.num_blocks for core in cores} == {24}
    for core in cores:
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


def test_beams_are_those_of_one_process(one: LLM, two: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
    mine, theirs = (llm.beam_search(["the rain"], params) for llm in (two, one))
    assert [each.tokens for each in mine[0].sequences] == [each.tokens for each in theirs[0].sequences]


def test_adapters_change_what_they_change_in_one_process(one: LLM, two: LLM, model_dir: Path, tmp_path: Path) -> None:
    directories = [write_adapter(tiny_model("qwen3", vocab_size=262), tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    requests = [None, *(LoRARequest(f"a{number}", number, str(directory)) for number, directory in enumerate(directories, 1))]
    prompts = ["hello", "hello", "hello"]
    answers = [said(llm, prompts, SamplingParams(**GREEDY), lora_request=requests) for llm in (two, one)]
    assert answers[0] == answers[1]
    assert len({str(answer) for answer in answers[0]}) == 3


def test_prompts_of_vectors_are_answered_as_by_one_process(one: LLM, two: LLM) -> None:
    vectors = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
    prompts = [{"prompt_embeds": rows} for rows in vectors]
    answers = [said(llm, [*prompts, "hello"], SamplingParams(**GREEDY)) for llm in (two, one)]
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][1]


def test_a_model_of_two_processes_does_not_sleep(two: LLM) -> None:
    with pytest.raises(InvalidRequest, match="several ranks"):
        two.sleep()
    with pytest.raises(InvalidRequest, match="over 2 ranks"):
        two._model.generating.engine.sleeper.check_can_sleep()


def test_the_end_of_a_rank_ends_every_request_and_the_engine(two: LLM) -> None:
    group: Any = two._model.rest.awake().runner.group
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(two.generate, [LONG] * 4, SamplingParams(**{**GREEDY, "max_tokens": 70}), use_tqdm=False)
        os.kill(group._processes[1].pid, signal.SIGKILL)
        assert {output.outputs[0].finish_reason for output in running.result(timeout=60)} == {"error"}
    assert group._reason == "rank 1: its process has ended by signal 9"
    with pytest.raises(EngineUnavailable, match="the engine has failed"):
        two.generate("hello", SamplingParams(**GREEDY), use_tqdm=False)
