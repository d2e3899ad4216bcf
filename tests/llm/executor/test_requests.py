"""What each field of a request does, and what is said of those that cannot be honoured."""

import itertools
import math
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock import LogitsRow, per_row, per_sequence
from penstock.engine.sampling.params import SamplingParams
from penstock.llm.executor.preparing import OF_REQUESTS, OF_SAMPLING, beam_params, sampling_params
from penstock.llm.executor.requests import (
    AdditionalModelOutput,
    ExternalDraftTokensConfig,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    LogitsProcessorConfig,
    OutputConfig,
    Request,
    RequestType,
    SamplingConfig,
    TokenRangeRetentionConfig,
)
from penstock.llm.executor.responses import FinishReason, Response
from tests.fakes import EOS, VOCAB_SIZE, ids, letter_after, make_core, saying
from tests.llm.executors import OUTPUT_ALONE, ask, error_of, executor_over, make_executor, output, result_of, whole


def params_of(**sampling: Any) -> SamplingParams:
    return sampling_params(ask(sampling_config=SamplingConfig(**sampling)))


@pytest.mark.parametrize("given", [{}, {"temperature": 0.0}, {"top_k": 1, "temperature": 2.0}, {"top_p": 0.0}, {"seed": 3}])
def test_tokens_are_the_most_probable_ones_unless_something_is_given_to_draw_by(given: dict[str, Any]) -> None:
    assert params_of(**given).is_greedy


@pytest.mark.parametrize("given", [{"temperature": 0.5}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 0}])
def test_what_is_given_to_draw_by_is_used_and_the_rest_changes_nothing(given: dict[str, Any]) -> None:
    params = params_of(**given)
    assert not params.is_greedy
    assert params == SamplingParams(max_tokens=8, **given)


def test_penalties_seed_and_lengths_reach_the_engine() -> None:
    given: dict[str, Any] = {"seed": 3, "min_tokens": 2, "repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    assert params_of(top_k=3, num_return_sequences=4, **given) == SamplingParams(n=4, top_k=3, max_tokens=8, **given)


@pytest.mark.parametrize(("given", "expected"), [(None, True), (1, True), (0, False), (2, "never")])
def test_beams_are_searched_for_in_the_originals_terms(given: int | None, expected: bool | str) -> None:
    config = SamplingConfig(3, early_stopping=given, length_penalty=None if given is None else 2.0)
    request = ask(sampling_config=config)
    beam = beam_params(request)
    assert beam is not None
    assert (beam.beam_width, beam.early_stopping, beam.length_penalty) == (3, expected, 0.0 if given is None else 2.0)
    assert sampling_params(request).n == 3
    assert beam_params(ask(sampling_config=SamplingConfig(early_stopping=given))) is None


def test_the_models_end_token_ends_an_answer_and_is_no_part_of_it() -> None:
    with make_executor(saying("hi")) as executor:
        result = result_of(executor, ask())
        assert (result.output_token_ids, result.finish_reasons) == ([ids("hi")], [FinishReason.END_ID])
        assert output(whole(executor, ask(streaming=True))) == ids("hi")


def test_another_end_id_or_none_is_in_its_place() -> None:
    with make_executor(saying("a<b")) as executor:
        result = result_of(executor, ask(end_id=ids("<")[0]))
        assert (result.output_token_ids, result.finish_reasons) == ([ids("a")], [FinishReason.END_ID])
        result = result_of(executor, ask(end_id=-1, max_tokens=5))
        assert (result.output_token_ids, result.finish_reasons) == ([[*ids("a<b"), EOS, EOS]], [FinishReason.LENGTH])


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_stop_word_of_ids_ends_an_answer_and_is_no_part_of_it(streaming: bool, is_async: bool) -> None:
    with make_executor(saying("aabcabd"), is_async=is_async) as executor:
        responses = whole(executor, ask(streaming=streaming, stop_words=[ids("abd"), ids("xyz")]))
        assert output(responses) == ids("aabc")
        assert responses[-1].result.finish_reasons == [FinishReason.STOP_WORDS]
        for response in responses:  # nothing was shown that could still have become a part of it
            assert len(response.result.output_token_ids[0]) < 4 or not streaming


def test_the_beginning_of_a_stop_word_is_shown_once_the_answer_has_ended() -> None:
    with make_executor(saying("aab")) as executor:
        responses = whole(executor, ask(streaming=True, stop_words=[ids("abc")]))
        assert output(responses) == ids("aab")
        assert responses[-1].result.finish_reasons == [FinishReason.END_ID]
        assert output(whole(executor, ask(streaming=True, max_tokens=2, stop_words=[ids("abc")]))) == ids("aa")


def test_a_stop_word_of_text_ends_an_answer_with_the_token_that_completes_it() -> None:
    with make_executor(saying("some text")) as executor:
        result = result_of(executor, ask(stop_words=["e t"]))
        assert (result.output_token_ids, result.finish_reasons) == ([ids("some t")], [FinishReason.STOP_WORDS])


def test_a_stop_word_before_min_tokens_ends_nothing() -> None:
    with make_executor(saying("abab")) as executor:
        for streaming in (False, True):
            request = ask(streaming=streaming, stop_words=[ids("ab")], sampling_config=SamplingConfig(min_tokens=3))
            assert output(whole(executor, request)) == ids("ab")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("word", [ids("b"), ids("ab"), "ab"])
def test_bad_words_do_not_occur(word: list[int] | str, is_async: bool) -> None:
    with make_executor(saying("ab"), is_async=is_async) as executor:
        [tokens] = result_of(executor, ask(max_tokens=2, bad_words=[word])).output_token_ids
        assert tokens[0] == ids("a")[0]
        assert tokens[1] != ids("b")[0]


def test_the_bias_is_added_to_the_logits() -> None:
    with make_executor() as executor:
        bias = torch.zeros(VOCAB_SIZE)
        bias[ids("z")[0]] = 1000.0
        assert result_of(executor, ask(max_tokens=3, embedding_bias=bias)).output_token_ids == [ids("zzz")]


@pytest.mark.parametrize("bias", [torch.zeros(3), torch.zeros(VOCAB_SIZE, dtype=torch.int64), [0.0], torch.full((VOCAB_SIZE,), math.nan)])
def test_a_bias_that_cannot_be_is_an_error(bias: Any) -> None:
    with make_executor() as executor:
        assert "`embedding_bias`" in error_of(executor, ask(embedding_bias=bias))


def test_ngrams_do_not_come_twice() -> None:
    with make_executor(saying("abababab")) as executor:
        config = SamplingConfig(no_repeat_ngram_size=2)
        [tokens] = result_of(executor, ask(sampling_config=config)).output_token_ids
        pairs = list(itertools.pairwise(tokens))
        assert len(pairs) == len(set(pairs))
        unbounded = SamplingConfig(no_repeat_ngram_size=2**30)
        assert result_of(executor, ask(sampling_config=unbounded)).output_token_ids == [ids("abababab")]
        assert "`size`" in error_of(executor, ask(sampling_config=SamplingConfig(no_repeat_ngram_size=1)))


def test_logits_processors_are_named_with_their_arguments_and_told_whose_row_it_is() -> None:
    seen: list[tuple[str, int, Any]] = []

    def preferring(letter: str) -> Any:
        def process(token_ids: list[int], logits: Tensor) -> Tensor:
            logits[ids(letter)[0]] += 500.0
            return logits

        return process

    def looking(row: LogitsRow, logits: Tensor) -> None:
        seen.append((row.request_id, len(row.token_ids), row.client_id))

    def broken(row: LogitsRow, logits: Tensor) -> Tensor:
        raise RuntimeError("broken")

    processors = {"preferring": per_sequence(preferring), "looking": per_row(looking), "broken": per_row(broken)}
    with make_executor(processors=processors) as executor:
        chosen = [LogitsProcessorConfig("preferring", {"letter": "z"}), "looking"]
        request_id = executor.enqueue_request(ask("?!", 2, logits_processors=chosen, client_id="me"))
        assert result_of(executor, request_id).output_token_ids == [ids("zz")]
        assert seen == [(str(request_id), 2, "me"), (str(request_id), 3, "me")]
        assert len(whole(executor, ask(logits_post_processor_name="looking", logits_processors="looking"))) == 1
        both = executor.enqueue_requests([ask(logits_processors="broken"), ask("hello", 3)])
        assert "broken" in str(whole(executor, both[0])[0].error_msg)
        assert not whole(executor, both[1])[0].has_error()
        assert "no logits processor 'absent'" in error_of(executor, ask(logits_processors="absent"))
        assert "refused its arguments" in error_of(executor, ask(logits_processors=["preferring"]))


def test_a_request_may_bring_a_logits_processor_of_its_own() -> None:
    def only_z(row: LogitsRow, logits: Tensor) -> None:
        logits[ids("z")[0]] += 500.0

    with make_executor() as executor:
        first, second = executor.enqueue_requests([ask(max_tokens=3, logits_post_processor=per_row(only_z)), ask(max_tokens=3)])
        assert result_of(executor, first).output_token_ids == [ids("zzz")]
        assert result_of(executor, second).output_token_ids == [_said("?", 3)]
        assert "`logits_post_processor`" in error_of(executor, ask(logits_post_processor=3))


@pytest.mark.parametrize(
    ("kind", "guide", "matches"),
    [
        (GuideType.JSON, None, "{}"),
        (GuideType.JSON_SCHEMA, '{"const": 12}', "12"),
        (GuideType.REGEX, "b{3}", "bbb"),
        (GuideType.EBNF_GRAMMAR, 'root ::= "c" d\nd ::= "dd"', "cdd"),
    ],
)
def test_answers_keep_to_their_guide(kind: GuideType, guide: str | None, matches: str) -> None:
    with make_executor(saying("{}zzzzzzzz")) as executor:
        result = result_of(executor, ask(max_tokens=30, guided_decoding_params=GuidedDecodingParams(kind, guide)))
        assert result.output_token_ids == [ids(matches)]
        assert result.finish_reasons == [FinishReason.END_ID]


def test_a_schema_is_read_as_the_executor_was_told() -> None:
    guide = GuidedDecodingParams(GuideType.JSON_SCHEMA, '{"properties": {"a": {}}}')
    spec = guide.spec("closed")
    assert spec.text == '{"properties": {"a": {}}, "additionalProperties": false}'
    assert spec.as_written == guide.spec("open")


def test_a_batch_may_bring_more_guides_than_the_compiler_lets_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.constraints.queue.MAX_PENDING_OF_CLIENT", 16)
    with make_executor() as executor:
        guides = [GuidedDecodingParams(GuideType.REGEX, f"{number:03d}") for number in range(40)]
        request_ids = executor.enqueue_requests([ask(guided_decoding_params=guide) for guide in guides])
        for number, request_id in enumerate(request_ids):
            assert result_of(executor, request_id).output_token_ids == [ids(f"{number:03d}")]


def test_answers_keep_to_a_structural_tag() -> None:
    tag = '{"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}'
    with make_executor() as executor:
        guide = GuidedDecodingParams(GuideType.STRUCTURAL_TAG, tag)
        assert result_of(executor, ask(guided_decoding_params=guide)).output_token_ids == [ids("yes")]


@pytest.mark.parametrize(
    ("kind", "guide"),
    [
        (GuideType.JSON, "{}"),
        (GuideType.JSON_SCHEMA, None),
        (GuideType.JSON_SCHEMA, "{"),
        (GuideType.JSON_SCHEMA, "3"),
        (GuideType.REGEX, "("),
        (GuideType.REGEX, "a" * 10**6),
        (GuideType.EBNF_GRAMMAR, "root ::= unknown"),
        (GuideType.STRUCTURAL_TAG, "{}"),
    ],
)
def test_a_guide_that_cannot_be_kept_to_is_an_error_and_disturbs_no_other(kind: GuideType, guide: str | None) -> None:
    with make_executor() as executor:
        bad, good = executor.enqueue_requests([ask(guided_decoding_params=GuidedDecodingParams(kind, guide)), ask("hello", 3)])
        assert whole(executor, bad)[0].has_error()
        assert not whole(executor, good)[0].has_error()


@pytest.mark.parametrize("allotted", [0, 0.02, timedelta(milliseconds=20)])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_ends_when_its_time_is_over(allotted: float | timedelta, streaming: bool) -> None:
    core = make_core(num_blocks=3000, max_model_len=10000)
    with executor_over(core) as executor:
        sampling = SamplingConfig(num_return_sequences=2)
        responses = whole(executor, ask("hello", 9000, streaming=streaming, allotted_time=allotted, sampling_config=sampling))
        final = [response.result for response in responses if response.result.is_sequence_final]
        assert [result.finish_reasons for result in final] == [[FinishReason.TIMED_OUT]] * 2
        assert [result.is_final for result in final] == [False, True]
        assert output(responses) == _said("hello", len(output(responses)))


@pytest.mark.parametrize("allotted", [0, 0.02])
def test_beams_end_when_their_time_is_over_with_the_best_there_are(allotted: float) -> None:
    with make_executor(num_blocks=4000, max_model_len=5000) as executor:
        [response] = whole(executor, ask("hello", 4000, allotted_time=allotted, sampling_config=SamplingConfig(3, num_return_sequences=2)))
        assert response.result.finish_reasons == [FinishReason.TIMED_OUT] * 2
        assert all(len(beam) < 4000 for beam in response.result.output_token_ids)


def test_a_request_may_be_changed_and_used_again() -> None:
    with make_executor(max_num_seqs=1) as executor:
        request = ask("hello", 3)
        request_ids = []
        for length in range(1, 6):
            request.max_tokens = length
            request_ids.append(executor.enqueue_request(request))
        assert [len(result_of(executor, request_id).output_token_ids[0]) for request_id in request_ids] == [1, 2, 3, 4, 5]


def test_configs_that_are_none_are_the_default_ones() -> None:
    none: Any = None
    request = Request([1], 1, sampling_config=none, output_config=none)
    assert (request.sampling_config, request.output_config) == (SamplingConfig(), OutputConfig())


def test_a_request_that_was_changed_into_nonsense_has_an_error_and_its_batch_is_served() -> None:
    nonsense: Any = 3
    with make_executor() as executor:
        changed = ask("hello", 3)
        changed.output_config = changed.stop_words = changed.sampling_config = nonsense
        bad, good = executor.enqueue_requests([changed, ask("hello", 3)])
        assert result_of(executor, good).finish_reasons == [FinishReason.LENGTH]
        [response] = executor.await_responses(bad)
        assert isinstance(response, Response)
        assert response.has_error()
        assert response.is_final


def _said(prompt: str, num_tokens: int) -> list[int]:
    tokens = ids(prompt)
    for _ in range(num_tokens):
        tokens.append(letter_after(tokens))
    return tokens[len(ids(prompt)) :]


def test_retained_blocks_stay_longer() -> None:
    with make_executor(num_blocks=16, max_model_len=60) as executor:
        kept = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, None, 90, 1e6)], decode_retention_priority=0)
        result_of(executor, ask("x" * 16, 1, kv_cache_retention_config=kept))
        for number in range(8):
            result_of(executor, ask(str(number) * 30, 2))
        metrics = result_of(executor, ask("x" * 16 + "y", 1, output_config=OutputConfig(return_perf_metrics=True))).request_perf_metrics
        assert metrics is not None
        assert metrics.kv_cache_metrics.num_reused_blocks == 4
        assert metrics.kv_cache_metrics.kv_cache_hit_rate == 4 / 5


def test_draft_tokens_of_the_callers_own_are_checked_and_change_nothing() -> None:
    with make_executor() as executor:
        expected = result_of(executor, ask("hello", 30)).output_token_ids
    steps = []
    for wrong_from in (30, 10, 0):
        drafts = [token_id if place < wrong_from else EOS for place, token_id in enumerate(_said("hello", 30))]
        core = make_core(rows_for_weights=100.0)
        with executor_over(core) as executor:
            config = ExternalDraftTokensConfig(drafts)
            assert result_of(executor, ask("hello", 30, external_draft_tokens_config=config)).output_token_ids == expected
        steps.append(core.stats().num_steps)
    assert steps[0] < 8
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize(
    ("config", "fields", "speculates", "what"),
    [
        (ExternalDraftTokensConfig([1], acceptance_threshold=0.5), {}, True, "`acceptance_threshold` is not supported"),
        (ExternalDraftTokensConfig([1], torch.zeros(1, 4)), {}, True, "`logits` is not supported"),
        (ExternalDraftTokensConfig([1], fast_logits=True), {}, True, "`fast_logits` is not supported"),
        (ExternalDraftTokensConfig([1, VOCAB_SIZE]), {}, True, "`tokens` must be from 0 to"),
        (ExternalDraftTokensConfig([1]), {}, False, "no speculative decoding"),
        (ExternalDraftTokensConfig([1]), {"sampling_config": SamplingConfig(2)}, True, "beams have no draft tokens"),
    ],
)
def test_draft_tokens_that_cannot_be_checked_are_refused(
    config: ExternalDraftTokensConfig, fields: dict[str, Any], speculates: bool, what: str
) -> None:
    with executor_over(make_core(rows_for_weights=100.0 if speculates else None)) as executor:
        assert what in error_of(executor, ask(external_draft_tokens_config=config, **fields))


@pytest.mark.parametrize("name", OF_REQUESTS)
def test_a_field_that_is_not_supported_is_named(name: str) -> None:
    with make_executor() as executor:
        fields: dict[str, Any] = {name: object()}
        assert f"`{name}` is not supported" in error_of(executor, ask(**fields))


@pytest.mark.parametrize("name", OF_SAMPLING)
def test_a_way_of_sampling_that_is_not_supported_is_named(name: str) -> None:
    with make_executor() as executor:
        fields: dict[str, Any] = {name: 0.5}
        assert f"`{name}` is not supported" in error_of(executor, ask(sampling_config=SamplingConfig(**fields)))


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"type": RequestType.CONTEXT_ONLY}, "`type`"),
        ({"output_config": OutputConfig(return_encoder_output=True)}, "`return_encoder_output`"),
        ({"sampling_config": SamplingConfig(0)}, "`beam_width`"),
        ({"sampling_config": SamplingConfig(100)}, "`beam_width` must be at most 8"),
        ({"sampling_config": SamplingConfig(2, top_p=0.5)}, "`top_p`"),
        ({"sampling_config": SamplingConfig(2, num_return_sequences=3)}, "`num_return_sequences`"),
        ({"sampling_config": SamplingConfig(temperature=-1.0)}, "`temperature`"),
        ({"sampling_config": SamplingConfig(min_tokens=9)}, "`min_tokens`"),
        ({"sampling_config": SamplingConfig(num_return_sequences=2), "num_return_sequences": 3}, "`num_return_sequences`"),
        ({"num_return_sequences": 0}, "`num_return_sequences`"),
        ({"num_return_sequences": 100}, "`num_return_sequences` must be at most 8"),
        ({"priority": 1.5}, "`priority`"),
        ({"end_id": -2}, "`end_id`"),
        ({"end_id": 100_000}, "`end_id`"),
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"allotted_time": -1}, "`allotted_time`"),
        ({"allotted_time": math.nan}, "`allotted_time`"),
        ({"stop_words": [[]]}, "`stop_words[0]`"),
        ({"stop_words": [[1], [100_000]]}, "`stop_words`"),
        ({"bad_words": [[-1]]}, "`bad_words`"),
        ({"bad_words": [""]}, "`bad_words`"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"prompt": "x" * 500}, "500 tokens"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_it(fields: dict[str, Any], what: str) -> None:
    with make_executor() as executor:
        assert what in error_of(executor, ask(**fields))
        assert result_of(executor, ask("hello", 3)).finish_reasons == [FinishReason.LENGTH]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_token_ids": "text"},
        {"input_token_ids": [1.5]},
        {"input_token_ids": [None]},
        {"input_token_ids": 3},
        {"max_tokens": None},
        {"max_tokens": "8"},
        {"max_tokens": True},
        {"streaming": 1},
        {"sampling_config": {}},
        {"output_config": {}},
        {"stop_words": "stop"},
        {"stop_words": [1]},
        {"bad_words": [[None]]},
        {"priority": None},
        {"client_id": 1.5},
        {"allotted_time": "1"},
        {"guided_decoding_params": "json"},
        {"kv_cache_retention_config": 100},
        {"logits_processors": 3},
        {"logits_processors": [3]},
        {"logits_processors": [LogitsProcessorConfig("any", [3])]},  # type: ignore[arg-type]
        {"unknown": 1},
    ],
)
def test_what_is_of_the_wrong_type_is_refused_where_it_is_written(fields: dict[str, Any]) -> None:
    given: dict[str, Any] = {"input_token_ids": [1], "max_tokens": 1} | fields
    with pytest.raises(TypeError):
        Request(**given)


def test_attributes_of_configs_may_be_set_and_are_those_of_the_moment() -> None:
    sampling, output = SamplingConfig(), OutputConfig()
    output.exclude_input_from_output, output.return_log_probs = True, True
    sampling.beam_width = 2
    with make_executor() as executor:
        request = ask(max_tokens=3, output_config=output, sampling_config=sampling)
        request_id = executor.enqueue_request(request)
        output.exclude_input_from_output, sampling.beam_width = False, 1  # of the next one
        assert len(result_of(executor, request_id).output_token_ids) == 2
        result = result_of(executor, request)
        assert result.output_token_ids == [[*ids("?"), *_said("?", 3)]]
        assert result.log_probs is not None
        output.return_log_probs = "yes"  # type: ignore[assignment]
        assert "`return_log_probs` must be True or False" in error_of(executor, request)
        output.return_log_probs = False
        sampling.top_k = 1.5  # type: ignore[assignment]
        assert "`top_k` must be an integer" in error_of(executor, request)


def test_configs_refuse_what_is_of_the_wrong_type() -> None:
    wrong: list[Any] = [
        lambda: SamplingConfig(top_k="3"),  # type: ignore[arg-type]
        lambda: SamplingConfig(temperature="hot"),  # type: ignore[arg-type]
        lambda: SamplingConfig(seed=True),
        lambda: OutputConfig(return_log_probs=1),  # type: ignore[arg-type]
        lambda: OutputConfig(additional_model_outputs=["logits"]),  # type: ignore[list-item]
        lambda: GuidedDecodingParams("regex", "a"),  # type: ignore[arg-type]
        lambda: GuidedDecodingParams(GuideType.REGEX, 3),  # type: ignore[arg-type]
        lambda: KvCacheRetentionConfig([(0, 1)]),  # type: ignore[list-item]
        lambda: TokenRangeRetentionConfig(0, duration_ms="1"),  # type: ignore[arg-type]
        lambda: ExternalDraftTokensConfig("12"),  # type: ignore[arg-type]
        lambda: ask(external_draft_tokens_config=[1]),
    ]
    for make in wrong:
        with pytest.raises(TypeError):
            make()
    for make in (lambda: TokenRangeRetentionConfig(0, priority=101), lambda: TokenRangeRetentionConfig(3, 3)):
        with pytest.raises(ValueError, match=r"priority|token_end"):
            make()


def test_tensors_and_arrays_are_token_ids_too() -> None:
    assert Request(torch.tensor([1, 2]), 3).input_token_ids == (1, 2)  # type: ignore[arg-type]
    assert Request([1], 3, stop_words=[torch.tensor([4, 5]), "x"]).stop_words == ((4, 5), "x")  # type: ignore[list-item]


def test_outputs_that_are_asked_for_twice_are_computed_once() -> None:
    config = OutputConfig(
        return_context_logits=True, additional_model_outputs=[AdditionalModelOutput("logits"), AdditionalModelOutput("hidden_states.last")]
    )
    assert config.wanted == ("logits", "hidden_states.last")
    assert config.wants_context
    assert not OUTPUT_ALONE.wants_context
