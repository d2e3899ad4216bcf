"""A model of two processes says what one process says, to every kind of request, and ends with either of them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, InvalidRequest, SamplingParams, StructuredOutputsParams
from penstock.llm.adapters import LoRARequest
from tests.llm.model_directory import SETTINGS, write_model
from tests.llm.parallel import both
from tests.llm.parallel.both import (
    GREEDY,
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
from tests.tiny_adapters import write_adapter
from tests.tiny_models import tiny_model

# The KV cache is too small for all sequences, of which some are preempted.
OPTIONS: dict[str, Any] = {**both.OPTIONS, "kv_cache_memory": 16 * 24 * 2 * 2 * 16 * 4 * 3, "enable_lora": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def one(model_dir: Path) -> Iterator[LLM]:
    with LLM(str(model_dir), **{**SETTINGS, **OPTIONS}) as llm:
        yield admitting(llm)


@pytest.fixture(scope="module")
def two(model_dir: Path) -> Iterator[LLM]:
    settings = {**SETTINGS, **OPTIONS, "kv_cache_memory": OPTIONS["kv_cache_memory"] // 2}  # of each rank
    with LLM(str(model_dir), tensor_parallel_size=2, **settings) as llm:
        yield admitting(llm)


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
    assert said(two, PROMPTS, SamplingParams(**params)) == said(one, PROMPTS, SamplingParams(**params))
    cores = [llm._model.rest.awake() for llm in (one, two)]
    assert {core.scheduler.pool.num_blocks for core in cores} == {24}
    for core in cores:
        core.check_integrity()


def test_the_requests_before_have_hit_the_prefix_cache_been_preempted_and_speculated(one: LLM, two: LLM) -> None:
    check_what_has_happened(one, two)


def test_logprobs_are_those_of_one_process(one: LLM, two: LLM) -> None:
    check_logprobs(one, two)


def test_beams_are_those_of_one_process(one: LLM, two: LLM) -> None:
    check_beams(one, two)


def test_adapters_change_what_they_change_in_one_process(one: LLM, two: LLM, model_dir: Path, tmp_path: Path) -> None:
    directories = [write_adapter(tiny_model("qwen3", vocab_size=262), tmp_path / str(seed), seed=seed) for seed in (1, 2)]
    requests = [None, *(LoRARequest(f"a{number}", number, str(directory)) for number, directory in enumerate(directories, 1))]
    prompts = ["hello", "hello", "hello"]
    answers = [said(llm, prompts, SamplingParams(**GREEDY), lora_request=requests) for llm in (two, one)]
    assert answers[0] == answers[1]
    assert len({str(answer) for answer in answers[0]}) == 3


def test_prompts_of_vectors_are_answered_as_by_one_process(one: LLM, two: LLM) -> None:
    check_vectors(one, two)


def test_a_model_of_two_processes_does_not_sleep(two: LLM) -> None:
    with pytest.raises(InvalidRequest, match="several ranks"):
        two.sleep()
    with pytest.raises(InvalidRequest, match="over 2 ranks"):
        two._model.generating.engine.sleeper.check_can_sleep()


def test_the_end_of_a_rank_ends_every_request_and_the_engine(two: LLM) -> None:
    check_end_of_a_rank(two)
