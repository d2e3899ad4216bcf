"""`LLM`: what it gives against transformers, in what order, and what it refuses before anything runs."""

import asyncio
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock import (
    LLM,
    BeamSearchParams,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
    per_sequence,
)
from penstock.engine.native.runtime import native_library
from penstock.llm.preparing import Prompt
from tests.engine.weights.checkpoints import FORMATS, write_checkpoint
from tests.llm.model_directory import SETTINGS, write_model

PROMPTS = ["hello", "the rain in Spain stays mainly in the plain", "a", "one two three four five six seven"]
BAD_PROMPTS: list[tuple[Any, str]] = [
    ([999_999], "outside the vocabulary"),
    ([], "no tokens"),
    ("b" * 300, "maximum context length"),
    ({"text": "x"}, "key 'text'"),
    ({}, "needs `prompt` or `prompt_token_ids`"),
    ({"prompt_token_ids": []}, "no tokens"),
    ({"prompt_token_ids": [1, None]}, r"got a list with None at \[1\]"),
    ({"role": "user", "content": "x"}, "conversations are for `chat`"),
    (b"abc", "got bytes"),
    ([3, 1.5], r"got a list with 1.5 at \[1\]"),
    (np.array([1, 2]), "got ndarray"),
    (None, "must be a string"),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3, prompt_logprobs=2)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def scores(reference: Any, token_ids: list[int]) -> Tensor:
    """Log probabilities [T, V] of what follows each token."""
    logprobs: Tensor = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs


@pytest.fixture(scope="module")
def outputs(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, GREEDY, use_tqdm=False)


def test_outputs_are_in_the_prompts_order_and_greedy_tokens_are_transformers(outputs: list[RequestOutput], reference: Any) -> None:
    assert [output.prompt for output in outputs] == PROMPTS
    for output in outputs:
        prompt = torch.tensor([output.prompt_token_ids])
        expected = reference.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=12, eos_token_id=None)
        assert output.outputs[0].token_ids == expected[0, prompt.shape[1] :].tolist()
        assert output.finished
        assert output.outputs[0].finish_reason == "length"


def test_logprobs_and_ranks_are_transformers(outputs: list[RequestOutput], reference: Any) -> None:
    for output in outputs:
        answer = output.outputs[0]
        expected_TV = scores(reference, output.prompt_token_ids + answer.token_ids)[len(output.prompt_token_ids) - 1 :]
        assert answer.logprobs is not None
        for token_id, place, expected_V in zip(answer.token_ids, answer.logprobs, expected_TV, strict=False):
            top = expected_V.topk(3).indices.tolist()
            assert next(iter(place)) == token_id
            assert list(place) == list(dict.fromkeys([token_id, *top]))
            for other, found in place.items():
                assert found.logprob == pytest.approx(float(expected_V[other]), abs=1e-4)
                assert found.rank == 1 + int((expected_V > expected_V[other]).sum())
        total = sum(place[token_id].logprob for token_id, place in zip(answer.token_ids, answer.logprobs, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total)


def test_prompt_logprobs_are_transformers(outputs: list[RequestOutput], reference: Any) -> None:
    for output in outputs:
        expected_TV = scores(reference, output.prompt_token_ids)
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for index, place in enumerate(output.prompt_logprobs[1:], start=1):
            token_id, expected_V = output.prompt_token_ids[index], expected_TV[index - 1]
            assert place is not None
            assert set(place) == {token_id, *expected_V.topk(2).indices.tolist()}
            assert place[token_id].logprob == pytest.approx(float(expected_V[token_id]), abs=1e-4)
            assert place[token_id].rank == 1 + int((expected_V > expected_V[token_id]).sum())


def test_every_form_of_a_prompt_means_the_same(llm: LLM) -> None:
    text = "same"
    ids = llm.get_tokenizer().encode(text)
    forms: list[Any] = [text, ids, {"prompt": text}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "shown"}]
    outputs = llm.generate(forms, SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == [text, None, text, None, "shown"]
    assert [len(llm.generate(form, SamplingParams(max_tokens=1), use_tqdm=False)) for form in forms] == [1] * 5
    assert llm.generate([], use_tqdm=False) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=count, n=count, ignore_eos=True) for count in (1, 2, 3)]
    outputs = llm.generate(["a", "b", "c"], params, use_tqdm=False, priority=[2, 1, 0])
    assert [[len(answer.token_ids) for answer in output.outputs] for output in outputs] == [[1], [2, 2], [3, 3, 3]]
    assert [[answer.index for answer in output.outputs] for output in outputs] == [[0], [0, 1], [0, 1, 2]]
    with pytest.raises(InvalidRequest, match="3 prompts and 2 sampling_params"):
        llm.generate(["a", "b", "c"], params[:2])
    with pytest.raises(InvalidRequest, match="1 prompts and 2 priorities"):
        llm.generate("a", priority=[1, 2])


def test_a_seed_makes_an_answer_repeat_itself(llm: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=8, temperature=1.5, ignore_eos=True)
    first, second = (llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids for _ in range(2))
    assert first == second
    assert first != llm.generate("x", SamplingParams(seed=8, max_tokens=8, temperature=1.5), use_tqdm=False)[0].outputs[0].token_ids


def test_a_prompt_seen_before_is_cached_until_the_cache_is_reset(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1)
    prompt = "a prompt of more than one block of the cache, which has sixteen tokens"
    llm.generate(prompt, params, use_tqdm=False)
    again = llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens
    assert again is not None
    assert again >= 16
    assert llm.reset_prefix_cache()
    assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 0


def test_one_bad_prompt_is_named_and_nothing_runs(llm: LLM) -> None:
    before = counter(llm, "penstock:prompt_tokens")
    for bad, message in BAD_PROMPTS:
        prompts: Any = ["a", "b", "c", bad]
        with pytest.raises(InvalidRequest, match=message) as refused:
            llm.generate(prompts, SamplingParams(max_tokens=2))
        assert refused.value.param is not None
        assert refused.value.param.startswith("prompts[3]")
        assert "prompts[3]" in refused.value.message
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: "):
        llm.generate(["a", "b"], [SamplingParams(), SamplingParams(stop_token_ids=[5000])])
    with pytest.raises(InvalidRequest, match=r"prompts\[0\]: .*at most 64"):
        llm.generate(["a", "b"], SamplingParams(n=100))
    assert counter(llm, "penstock:prompt_tokens") == before
    assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished


@pytest.mark.parametrize(
    ("given", "path"),
    [("high", "priority"), (1.5, "priority"), (True, "priority"), (float("nan"), "priority"), ([0, "x"], "priority[1]"), ([0], "priority")],
)
def test_a_priority_that_cannot_be_compared_reaches_no_queue(llm: LLM, given: Any, path: str) -> None:
    """There it would fail the comparison with other requests', and with it the engine."""
    calls: list[tuple[Any, Any]] = [(llm.generate, ["a", "b"]), (llm.chat, [[{"role": "user", "content": text}] for text in "ab"])]
    for call, what in calls:
        with pytest.raises(InvalidRequest) as refused:
            call(what, SamplingParams(max_tokens=1), priority=given)
        assert refused.value.param == path


def test_parameters_of_the_wrong_kind_are_counted_out(llm: LLM) -> None:
    wrong: Any = [SamplingParams(max_tokens=1), {"max_tokens": 1}]
    with pytest.raises(InvalidRequest, match=r"`sampling_params\[1\]` must be SamplingParams, got dict"):
        llm.generate(["a", "b"], wrong)
    wrong = {"max_tokens": 1}
    with pytest.raises(InvalidRequest, match="must be SamplingParams, or a list of them, got dict"):
        llm.generate("a", wrong)


def counter(llm: LLM, name: str) -> float:
    return sum(getattr(metric, "value", 0.0) for metric in llm.get_metrics() if metric.name == name)


def test_an_answer_longer_than_the_context_ends_there(llm: LLM) -> None:
    output = llm.generate("b" * 250, SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"choice": ["yes", "no"]}, r"yes|no"),
        ({"regex": "[0-9]{3}"}, r"[0-9]{3}"),
        ({"json": {"type": "boolean"}}, r"true|false"),
        ({"grammar": {"definition": 'start: "a" "b"+', "syntax": "lark"}}, r"ab+"),
    ],
)
def test_constraints_hold(llm: LLM, constraint: dict[str, Any], pattern: str) -> None:
    params = StructuredOutputsParams(**constraint)
    for field in ("structured_outputs", "guided_decoding"):
        sampling: Any = {field: params}
        output = llm.generate("x", SamplingParams(max_tokens=20, **sampling), use_tqdm=False)[0]
        assert re.fullmatch(pattern, output.outputs[0].text)


def test_exactly_sampled_answers_say_how_they_came(llm: LLM) -> None:
    outputs = StructuredOutputsParams(choice=["a", "bc", "bd"], sampling="exact")
    [output] = llm.generate("x", SamplingParams(n=5, max_tokens=8, seed=3, structured_outputs=outputs), use_tqdm=False)
    assert {answer.text for answer in output.outputs} <= {"a", "bc", "bd"}
    assert all(answer.finish_reason == "stop" and answer.exact is not None for answer in output.outputs)
    assert {answer.exact.fallback for answer in output.outputs if answer.exact is not None} == {None}
    [again] = llm.generate("x", SamplingParams(n=5, max_tokens=8, seed=3, structured_outputs=outputs), use_tqdm=False)
    assert [answer.token_ids for answer in again.outputs] == [answer.token_ids for answer in output.outputs]
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.generate("x", SamplingParams(temperature=0, structured_outputs=outputs), use_tqdm=False)


def test_a_constraint_that_cannot_be_read_names_its_prompt(llm: LLM) -> None:
    params = [SamplingParams(), SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))]
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: "):
        llm.generate(["a", "b"], params)


def test_text_stops_at_a_string(llm: LLM) -> None:
    whole = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), use_tqdm=False)[0].outputs[0].text
    stop = next(character for character in whole[3:] if character.isprintable() and character != "\ufffd")
    answer = llm.generate("hello", SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=stop), use_tqdm=False)[0].outputs[0]
    assert answer.text == whole[: whole.index(stop)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    silent = llm.generate("hello", SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False), use_tqdm=False)[
        0
    ].outputs[0]
    assert silent.text == ""
    assert len(silent.token_ids) == 3


def test_times_follow_each_other(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        metrics = output.metrics
        times = [
            metrics.arrival_time,
            metrics.first_scheduled_time,
            metrics.first_token_time,
            metrics.last_token_time,
            metrics.finished_time,
        ]
        assert all(time is not None for time in times)
        assert times == sorted(times, key=lambda time: time or 0.0)
        assert metrics.num_generation_tokens == 12
        assert metrics.mean_time_per_token is not None
        assert metrics.mean_time_per_token > 0


def test_a_model_that_sleeps_refuses_and_says_the_same_when_awake(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = llm.generate(PROMPTS, params, use_tqdm=False)
    assert not llm.is_sleeping
    for level in (1, 2):
        llm.sleep(level)
        assert llm.is_sleeping
        for call in (lambda: llm.generate("a"), llm.reset_prefix_cache):
            with pytest.raises(EngineUnavailable, match="wake_up"):
                call()
        llm.get_metrics()
        llm.wake_up()
        after = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in after] == [output.outputs[0].token_ids for output in before]
    with pytest.raises(InvalidRequest, match="level"):
        llm.sleep(3)


def test_sleep_gives_the_kv_cache_back_and_then_the_weights(model_dir: Path) -> None:
    with LLM(model_dir, **SETTINGS) as llm:
        core = llm._model.rest.awake()
        cache, weights = weakref.ref(core.runner.cache.keys[0]), weakref.ref(core.runner.loaded.model)
        del core
        llm.sleep(1)
        assert cache() is None
        assert weights() is not None
        llm.sleep(2)
        assert weights() is None


@pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")
def test_keys_and_values_may_have_8_bits(tmp_path: Path) -> None:
    settings = SETTINGS | {"dtype": "bfloat16", "kv_cache_dtype": "int8", "kv_cache_memory": "1MiB"}
    with LLM(write_model(tmp_path, head_dim=64, hidden_size=64), **settings) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        before = llm.generate(PROMPTS, params, use_tqdm=False)
        llm.sleep(1)
        llm.wake_up()
        after = llm.generate(PROMPTS, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in after] == [output.outputs[0].token_ids for output in before]
        assert llm._model.rest.awake().runner.cache.dtype is torch.int8


def test_a_processor_given_at_construction_is_chosen_by_name(model_dir: Path) -> None:
    def only(token_id: int) -> Any:
        def process(token_ids: list[int], logits: Tensor) -> Tensor:
            forced = torch.full_like(logits, -torch.inf)
            forced[token_id] = 0.0
            return forced

        return process

    def broken() -> Any:
        def process(token_ids: list[int], logits: Tensor) -> Tensor:
            raise RuntimeError("no")

        return process

    with LLM(model_dir, logits_processors={"only": per_sequence(only), "broken": per_sequence(broken)}, **SETTINGS) as llm:
        params = [
            SamplingParams(max_tokens=3, logits_processors=[{"name": "only", "arguments": {"token_id": 65}}]),
            SamplingParams(max_tokens=3, logits_processors=["broken"]),
            SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
        ]
        forced, failed, plain = (output.outputs[0] for output in llm.generate(["a", "b", "c"], params, use_tqdm=False))
        assert forced.token_ids == [65, 65, 65]
        assert failed.finish_reason == "error"
        assert failed.error
        assert len(plain.token_ids) == 3
        with pytest.raises(InvalidRequest, match="there are no_repeat_ngram, only, broken"):
            llm.generate("a", SamplingParams(logits_processors=["other"]))


def test_it_works_where_a_loop_runs_and_from_many_threads(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    expected = llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids

    async def cell() -> list[int]:
        return llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids

    assert asyncio.run(cell()) == expected
    found: list[list[int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_a_bar_counts_prompts_and_tokens(llm: LLM) -> None:
    bars: list[Any] = []

    class Bar:
        def __init__(self, **options: Any) -> None:
            self.options, self.num_updates, self.is_closed, self.postfix = options, 0, False, options["postfix"]
            bars.append(self)

        def update(self, n: int = 1) -> None:
            self.num_updates += n

        def close(self) -> None:
            self.is_closed = True

    llm.generate(["a", "b"], SamplingParams(max_tokens=2), use_tqdm=Bar)
    assert bars[0].options["total"] == bars[0].num_updates == 2
    assert bars[0].is_closed
    assert "est. speed input: " in bars[0].postfix


def test_an_interrupted_call_leaves_nothing_running(llm: LLM) -> None:
    class Bar:
        def __init__(self, **options: Any) -> None:
            """It is called as tqdm is."""

        def update(self, n: int = 1) -> None:
            raise KeyboardInterrupt

        def close(self) -> None:
            """There is nothing to close."""

    params = [SamplingParams(max_tokens=1), SamplingParams(max_tokens=200, ignore_eos=True)]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], params, use_tqdm=Bar)
    stats = llm._model.generating.engine.stats()
    assert stats.num_running == stats.num_waiting == 0


def test_a_bound_on_waiting_requests_refuses_the_whole_batch(model_dir: Path) -> None:
    with LLM(model_dir, max_waiting_requests=1, max_num_seqs=1, **SETTINGS) as llm:
        with pytest.raises(QueueFull):
            llm.generate(["a"] * 20, SamplingParams(max_tokens=200, ignore_eos=True), use_tqdm=False)
        assert llm.generate("a", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].finished


def test_what_is_not_supported_is_refused_by_name(llm: LLM) -> None:
    assert llm.generate("a", SamplingParams(max_tokens=1), lora_request=None, use_tqdm=False)[0].finished
    assert llm.get_tokenizer(lora_request=None) is llm.get_tokenizer()
    with pytest.raises(InvalidRequest, match="profile"):
        llm.start_profile()


def test_a_closed_model_says_so(model_dir: Path) -> None:
    llm = LLM(model_dir, **SETTINGS)
    llm.close()
    llm.close()
    with pytest.raises(EngineUnavailable, match="closed"):
        llm.generate("a")


def test_loading_leaves_the_callers_threads_alone(model_dir: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with LLM(model_dir, **SETTINGS):
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_beams_are_transformers(llm: LLM, reference: Any) -> None:
    found = llm.beam_search(["hello", "one two"], BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True))
    for text, output in zip(("hello", "one two"), found, strict=True):
        prompt = torch.tensor([llm.get_tokenizer().encode(text)])
        expected = reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=6,
            do_sample=False,
            eos_token_id=None,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert [sequence.tokens for sequence in output.sequences] == expected.sequences.tolist()
        for sequence, score in zip(output.sequences, expected.sequences_scores.tolist(), strict=True):
            assert sequence.score == pytest.approx(score, abs=1e-4)
            assert sequence.cum_logprob == pytest.approx(score * 6, abs=1e-3)
            assert sequence.text.startswith(text)


def test_a_search_says_what_kind_of_parameters_it_takes(llm: LLM) -> None:
    for wrong in (SamplingParams(), 3):
        given: Any = wrong
        with pytest.raises(InvalidRequest, match="`params` must be BeamSearchParams"):
            llm.beam_search("a", given)
    with pytest.raises(InvalidRequest, match="there are 1 prompts and 2 params"):
        llm.beam_search("a", [BeamSearchParams(2), BeamSearchParams(2)])
    with pytest.raises(InvalidRequest, match="`concurrency_limit` must be a positive integer"):
        llm.beam_search("a", concurrency_limit=0)


def test_a_search_has_defaults_and_takes_parameters_for_each_prompt(llm: LLM) -> None:
    assert BeamSearchParams().beam_width == 4
    each = [BeamSearchParams(2, 3, ignore_eos=True), BeamSearchParams(3, 4, ignore_eos=True, stop=["zz"])]
    prompts: list[Prompt] = ["hello", {"prompt": "one"}]
    found = llm.beam_search(prompts, each, None, False, 1)
    assert [len(output.sequences) for output in found] == [2, 3]
    alone = [llm.beam_search(prompt, own)[0] for prompt, own in zip(["hello", "one"], each, strict=True)]
    assert [[answer.tokens for answer in output.sequences] for output in found] == [
        [answer.tokens for answer in output.sequences] for output in alone
    ]
    assert len(llm.beam_search("hello")[0].sequences) == 4


def test_named_outputs_of_prompt_and_answer_are_transformers(llm: LLM, reference: Any) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, additional_outputs=["hidden_states.last", "logits"], additional_context_outputs=True
    )
    output = llm.generate("a prompt that is not cached yet", params, use_tqdm=False)[0]
    answer, num_prompt = output.outputs[0], len(output.prompt_token_ids)
    with torch.inference_mode():
        expected = reference(torch.tensor([output.prompt_token_ids + answer.token_ids[:-1]]), output_hidden_states=True)
    hidden_TH, logits_TV = expected.hidden_states[-1][0], expected.logits[0]
    assert output.first_prompt_output == 0
    torch.testing.assert_close(output.prompt_outputs["hidden_states.last"], hidden_TH[:num_prompt], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(answer.additional_outputs["hidden_states.last"], hidden_TH[num_prompt - 1 :], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(answer.additional_outputs["logits"], logits_TV[num_prompt - 1 :], atol=1e-4, rtol=1e-4)
    assert "logits=<[4, 262]>" in repr(answer)
    with pytest.raises(InvalidRequest, match="hidden_states"):
        llm.generate("a", SamplingParams(additional_outputs=["hidden_states.99"]))


def test_a_directory_of_blocks_outlives_the_engine(model_dir: Path, tmp_path: Path) -> None:
    prompt, params = "the rain in Spain stays mainly in the plain", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    said = []
    for num_cached in (0, 32):
        with LLM(model_dir, **SETTINGS, kv_cache_dir=str(tmp_path), kv_cache_dir_size="1MiB") as llm:
            [output] = llm.generate(prompt, params, use_tqdm=False)
            assert output.num_cached_tokens == num_cached
            said.append(output.outputs[0].token_ids)
            llm.sleep()
            llm.wake_up()
            assert llm.generate(prompt, params, use_tqdm=False)[0].num_cached_tokens == 32
    assert said[0] == said[1]


@pytest.mark.parametrize(("name", "quantization"), [("awq", "none"), ("gptq-int8", "auto"), ("fp8-deepseek", "auto")])
def test_a_quantized_checkpoint_says_what_its_dequantized_weights_say(name: str, quantization: str, tmp_path: Path) -> None:
    write_model(tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    model.load_state_dict(write_checkpoint(tmp_path, model, FORMATS[name]))
    with LLM(tmp_path, quantization=quantization, **SETTINGS) as llm:
        answers = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    for answer in answers:
        prompt, said = list(answer.prompt_token_ids), list(answer.outputs[0].token_ids)
        expected = scores(model, [*prompt, *said])[len(prompt) - 1 : -1].argmax(-1)
        assert said == expected.tolist()
