"""An executor over a model on the disk."""

from pathlib import Path

import pytest
from torch import Tensor

from penstock import LLM, ConfigurationError, Executor, InvalidRequest, OutputConfig, Request, SamplingConfig, SamplingParams, per_sequence
from tests import encoders
from tests.llm.executors import result_of
from tests.llm.model_directory import SETTINGS


def test_it_says_what_an_llm_over_the_same_model_says(model_dir: Path, llm: LLM) -> None:
    [expected] = llm.generate(["hello"], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False)
    config = OutputConfig(exclude_input_from_output=True)
    with Executor(model_dir, **SETTINGS) as executor:
        prompt = executor.tokenizer.encode("hello", add_special_tokens=True)
        assert prompt == expected.prompt_token_ids
        result = result_of(executor, Request(prompt, 12, end_id=-1, output_config=config))
        assert result.output_token_ids == [list(expected.outputs[0].token_ids)]
        drawn = [Request(prompt, 12, end_id=-1, output_config=config, sampling_config=SamplingConfig(seed=7, top_k=9)) for _ in range(2)]
        one, other = (result_of(executor, request_id) for request_id in executor.enqueue_requests(drawn))
        assert one.output_token_ids == other.output_token_ids != result.output_token_ids


def test_more_requests_may_wait_than_a_server_would_let(model_dir: Path) -> None:
    with Executor(model_dir, **SETTINGS | {"max_model_len": 16}) as executor:
        request_ids = executor.enqueue_requests([Request([65 + number % 26], 1) for number in range(1100)])
        assert not any(response.has_error() for responses in executor.await_responses(request_ids) for response in responses)


def test_a_model_that_generates_nothing_is_refused(tmp_path: Path) -> None:
    directory = encoders.embedding_directory(tmp_path)
    with pytest.raises(InvalidRequest, match="embed"):
        Executor(directory, threads=1)


def test_a_logits_processor_may_not_take_anothers_name(model_dir: Path) -> None:
    def process(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits

    with pytest.raises(ConfigurationError, match="no_repeat_ngram"):
        Executor(model_dir, logits_processors={"no_repeat_ngram": per_sequence(lambda: process)}, **SETTINGS)
