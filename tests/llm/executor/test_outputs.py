"""Log probabilities and model outputs in responses, against the model's own, and beams."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.core import EngineCore
from penstock.llm.executor import Executor
from penstock.llm.executor.requests import AdditionalModelOutput, OutputConfig, Request, SamplingConfig
from penstock.llm.executor.responses import AdditionalOutput, FinishReason, Response
from tests.engines import core_over, loaded_model
from tests.fakes import VOCAB_SIZE
from tests.llm.executors import context_over, error_of, output, result_of, whole
from tests.tiny_models import tiny_model

PROMPT = [5, 6, 7, 8, 9] * 5
WIDTH = 64
EVERYTHING = OutputConfig(
    return_log_probs=True,
    return_context_logits=True,
    return_generation_logits=True,
    exclude_input_from_output=True,
    additional_model_outputs=[AdditionalModelOutput("hidden_states.last", gather_context=True), AdditionalModelOutput("hidden_states.1")],
)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    return tiny_model("llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def core() -> EngineCore:
    return core_over(loaded_model(tiny_model("llama", vocab_size=VOCAB_SIZE)))


@pytest.fixture(scope="module")
def executor(core: EngineCore) -> Iterator[Executor]:
    with Executor(context=context_over(core)) as running:
        yield running
    core.check_integrity()


@torch.inference_mode()
def computed(model: PreTrainedModel, token_ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """Logits [T, V] and hidden states [T, D] of every layer, by transformers itself."""
    outputs = model(torch.tensor([token_ids]), output_hidden_states=True)
    return outputs.logits[0], [states[0] for states in outputs.hidden_states]


def request(max_tokens: int = 6, **fields: Any) -> Request:
    given: dict[str, Any] = {"end_id": -1, "output_config": EVERYTHING} | fields
    return Request(PROMPT, max_tokens, **given)


def by_name(outputs: list[AdditionalOutput]) -> dict[str, Tensor]:
    return {output.name: output.output for output in outputs}


def test_a_whole_result_holds_what_the_model_computed(executor: Executor, reference: PreTrainedModel) -> None:
    result = result_of(executor, request(cache_salt="whole"))
    [tokens] = result.output_token_ids
    logits, states = computed(reference, [*PROMPT, *tokens])
    assert result.context_logits is not None
    assert result.generation_logits is not None
    assert result.generation_logits.shape == (1, 6, VOCAB_SIZE)
    said = slice(len(PROMPT) - 1, -1)
    torch.testing.assert_close(result.context_logits, logits[: len(PROMPT)], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.generation_logits[0], logits[said], atol=1e-4, rtol=1e-4)
    expected = logits[said].log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert result.log_probs is not None
    assert result.cum_log_probs is not None
    torch.testing.assert_close(torch.tensor(result.log_probs[0]), expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(result.cum_log_probs, [sum(result.log_probs[0])])
    outputs = by_name(result.additional_outputs)
    assert outputs.keys() == {"context_hidden_states.last", "hidden_states.last", "hidden_states.1"}
    torch.testing.assert_close(outputs["context_hidden_states.last"], states[-1][: len(PROMPT)], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(outputs["hidden_states.last"][0], states[-1][said], atol=1e-4, rtol=1e-4)
    assert outputs["hidden_states.1"].shape == (1, 6, WIDTH)


@pytest.mark.parametrize("gives_all", [False, True])
def test_streamed_results_add_up_to_the_whole(executor: Executor, gives_all: bool) -> None:
    end = result_of(executor, request()).output_token_ids[0][-2:]
    expected = result_of(executor, request(cache_salt="expected", stop_words=[end]))
    responses = whole(executor, request(streaming=True, return_all_generated_tokens=gives_all, cache_salt=str(gives_all), stop_words=[end]))
    results = [response.result for response in responses]
    logits = [result.generation_logits for result in results if result.generation_logits is not None]
    logprobs = [result.log_probs[0] for result in results if result.log_probs is not None]
    assert len(logits) == len(logprobs) == len(results)
    for result, rows, scores in zip(results, logits, logprobs, strict=True):
        assert rows.shape[:2] == (1, len(scores)) or not scores
        assert len(scores) == len(result.output_token_ids[0])
    assert expected.generation_logits is not None
    assert expected.log_probs is not None
    if gives_all:
        assert results[-1].output_token_ids == expected.output_token_ids
        torch.testing.assert_close(logits[-1], expected.generation_logits)
        torch.testing.assert_close(torch.tensor(logprobs[-1]), torch.tensor(expected.log_probs[0]))
    else:
        assert output(responses) == expected.output_token_ids[0]
        torch.testing.assert_close(torch.cat([rows for rows in logits if rows.numel()], 1), expected.generation_logits)
        torch.testing.assert_close([score for scores in logprobs for score in scores], expected.log_probs[0])
    torch.testing.assert_close(results[-1].cum_log_probs, [sum(expected.log_probs[0])])
    assert [result.context_logits is not None for result in results] == [True] + [False] * (len(results) - 1)


def test_what_was_reused_from_the_cache_has_no_outputs(executor: Executor, reference: PreTrainedModel) -> None:
    logits, _ = computed(reference, PROMPT)
    for first in (0, 16):
        result = result_of(executor, request(2, cache_salt="twice"))
        assert result.first_context_token == first
        assert result.context_logits is not None
        torch.testing.assert_close(result.context_logits, logits[first:], atol=1e-4, rtol=1e-4)


def test_only_requests_that_want_outputs_get_them(executor: Executor) -> None:
    result = result_of(executor, request(output_config=OutputConfig()))
    assert result.output_token_ids[0][: len(PROMPT)] == PROMPT
    given = (result.log_probs, result.cum_log_probs, result.context_logits, result.generation_logits, result.request_perf_metrics)
    assert given == (None,) * 5
    assert result.additional_outputs == []


def test_an_output_that_the_model_does_not_have_is_an_error(executor: Executor) -> None:
    config = OutputConfig(additional_model_outputs=[AdditionalModelOutput("nothing.3")])
    assert "nothing.3" in error_of(executor, request(output_config=config))


@pytest.mark.parametrize("streaming", [False, True])
def test_each_of_several_sequences_has_outputs_of_its_own(executor: Executor, reference: PreTrainedModel, streaming: bool) -> None:
    config = SamplingConfig(num_return_sequences=3, temperature=1.5, seed=4)
    responses = whole(executor, request(sampling_config=config, streaming=streaming))
    for index in range(3):
        tokens = output(responses, index)
        logits, _ = computed(reference, [*PROMPT, *tokens])
        own = [response.result.generation_logits for response in responses if response.result.sequence_index == index]
        rows = torch.cat([part for part in own if part is not None], 1)[0]
        torch.testing.assert_close(rows, logits[len(PROMPT) - 1 : -1], atol=1e-4, rtol=1e-4)


def beams(responses: list[Response]) -> list[list[int]]:
    return responses[-1].result.output_token_ids


def test_beams_of_all_widths_run_together_and_keep_to_one_index(executor: Executor) -> None:
    config = OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    widths = {1: None, 2: None, 3: 2, 4: 1}
    requests = [
        request(8, output_config=config, streaming=streaming, sampling_config=SamplingConfig(width, num_return_sequences=number))
        for width, number in widths.items()
        for streaming in (False, True)
    ]
    answers = [whole(executor, request_id) for request_id in executor.enqueue_requests(requests)]
    for place, (width, number) in enumerate(widths.items()):
        plain, streamed = answers[2 * place : 2 * place + 2]
        assert len(beams(plain)) == (number or width)
        assert {response.result.sequence_index for response in streamed} == {0}
        assert all(response.result.is_sequence_final == response.result.is_final for response in streamed)
        if width > 1:
            assert beams(streamed) == beams(plain)
            assert len(streamed) > 2
            assert all(len(response.result.output_token_ids) <= (number or width) for response in streamed)
            scores = plain[-1].result.cum_log_probs
            assert scores is not None
            assert scores == sorted(scores, reverse=True)
        else:
            assert [output(streamed)] == beams(plain)
    best = [answer[-1].result.cum_log_probs for answer in answers[0::2]]
    assert all(score is not None for score in best)
    assert answers[0][0].result.finish_reasons == [FinishReason.LENGTH]


@pytest.mark.parametrize("streaming", [False, True])
def test_beams_have_outputs_of_their_own(executor: Executor, reference: PreTrainedModel, streaming: bool) -> None:
    config = SamplingConfig(3, num_return_sequences=2)
    responses = whole(executor, request(sampling_config=config, streaming=streaming, cache_salt=f"beams {streaming}"))
    result = responses[-1].result
    assert result.generation_logits is not None
    for beam, rows in zip(result.output_token_ids, result.generation_logits, strict=True):
        logits, _ = computed(reference, [*PROMPT, *beam])
        torch.testing.assert_close(rows[: len(beam)], logits[len(PROMPT) - 1 : -1], atol=1e-4, rtol=1e-4)
    context = [response.result.context_logits for response in responses if response.result.context_logits is not None]
    assert [part.shape for part in context] == [(len(PROMPT), VOCAB_SIZE)]
    assert by_name(result.additional_outputs)["hidden_states.1"].shape == (2, max(map(len, result.output_token_ids)), WIDTH)


def test_beams_end_at_stop_words_without_them_and_with_what_there_is_when_cancelled(executor: Executor) -> None:
    config = SamplingConfig(2, num_return_sequences=1)
    plain = OutputConfig(exclude_input_from_output=True)
    [tokens] = result_of(executor, request(6, output_config=plain, sampling_config=config)).output_token_ids
    stopped = result_of(executor, request(6, output_config=plain, sampling_config=config, stop_words=[tokens[2:4]]))
    for beam, reason in zip(stopped.output_token_ids, stopped.finish_reasons, strict=True):
        assert tokens[2:4] not in [beam[start : start + 2] for start in range(len(beam) - 1)]
        assert reason in (FinishReason.STOP_WORDS, FinishReason.LENGTH)
    request_id = executor.enqueue_request(request(90, output_config=plain, streaming=True, sampling_config=config))
    [first, *_] = executor.await_responses(request_id)
    executor.cancel_request(request_id)
    rest = whole(executor, request_id)
    assert rest[-1].result.finish_reasons == [FinishReason.CANCELLED]
    assert len(beams(rest)[0]) >= len(first.result.output_token_ids[0])


@pytest.mark.parametrize(("width", "penalty", "early"), [(2, None, None), (3, 1.0, 0), (4, 2.0, 2), (3, -1.0, 1)])
def test_beams_are_those_of_transformers(
    executor: Executor, reference: PreTrainedModel, width: int, penalty: float | None, early: int | None
) -> None:
    plain = OutputConfig(return_log_probs=True, exclude_input_from_output=True)
    ending = result_of(executor, request(12, output_config=plain)).output_token_ids[0][3]
    with torch.inference_mode():
        found = reference.generate(  # type: ignore[operator]
            torch.tensor([PROMPT]),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=12,
            length_penalty=penalty or 0.0,
            early_stopping={None: True, 1: True, 0: False, 2: "never"}[early],
            eos_token_id=ending,
            pad_token_id=0,
        )
    expected = [row[len(PROMPT) :] for row in found.tolist()]
    expected = [row[: row.index(ending)] if ending in row else row for row in expected]
    config = SamplingConfig(width, length_penalty=penalty, early_stopping=early)
    result = result_of(executor, request(12, end_id=ending, output_config=plain, sampling_config=config))
    assert result.output_token_ids == expected
    reasons = [FinishReason.LENGTH if len(row) == 12 else FinishReason.END_ID for row in expected]
    assert result.finish_reasons == reasons
    assert FinishReason.END_ID in reasons or (penalty or 0.0) > 0  # which makes long answers the best
