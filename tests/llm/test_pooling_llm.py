"""`LLM.encode`, `embed`, `classify` and `score` over tiny models: transformers' own numbers, in vLLM's shapes."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import (
    LLM,
    AsyncLLM,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    InvalidRequest,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
    ScoringRequestOutput,
)
from tests import encoders
from tests.api.pooling.server import Reference
from tests.api.pooling.test_score import DOCUMENTS, QUERY, cross_scores

TEXTS = ["Paris", "The cat sat on the mat.", "é" * 20, "a"]
QUIET: dict[str, Any] = {"use_tqdm": False}


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.embedding_directory(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def reference(embedder: Path) -> Reference:
    return Reference.of(embedder)


@pytest.fixture(scope="module")
def embedding_llm(embedder: Path) -> Iterator[LLM]:
    with LLM(embedder, threads=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return encoders.cross_encoder_directory(tmp_path_factory.mktemp("cross-encoder"))


@pytest.fixture(scope="module")
def scoring_llm(cross_encoder: Path) -> Iterator[LLM]:
    with LLM(cross_encoder, threads=1) as llm:
        yield llm


def test_prompts_of_every_form_are_embedded_in_their_order(embedding_llm: LLM, reference: Reference) -> None:
    ids = reference.tokenizer.encode("Hi", add_special_tokens=False)
    prompts: list[Any] = [*TEXTS, ids, {"prompt": "Hi"}, {"prompt_token_ids": ids}]
    outputs = embedding_llm.embed(prompts, **QUIET)
    expected: list[str | list[int]] = [*TEXTS, ids, "Hi", ids]
    for output, prompt in zip(outputs, expected, strict=True):
        assert isinstance(output, EmbeddingRequestOutput)
        assert output.finished
        assert output.outputs.hidden_size == 32
        torch.testing.assert_close(torch.tensor(output.outputs.embedding), reference.embedding(prompt), atol=1e-5, rtol=0)
    assert outputs[0].prompt_token_ids == reference.tokenizer.encode("Paris", add_special_tokens=True)
    assert len({output.request_id for output in outputs}) == len(outputs)


def test_encode_gives_tensors_of_the_task_asked_for(embedding_llm: LLM, reference: Reference) -> None:
    (own,) = embedding_llm.encode("Hi", **QUIET)
    assert isinstance(own, PoolingRequestOutput)
    torch.testing.assert_close(own.outputs.data, reference.embedding("Hi"), atol=1e-5, rtol=0)
    assert own.outputs.embedding == own.outputs.data.tolist()
    plain = PoolingParams(normalize=False)
    (tokens,) = embedding_llm.encode("Hi", plain, pooling_task="token_embed", **QUIET)
    torch.testing.assert_close(tokens.outputs.data, reference.vectors(tokens.prompt_token_ids), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="no one vector"):
        _ = tokens.outputs.embedding
    both = embedding_llm.encode(["Hi", "Hi"], [plain, PoolingParams(task="token_embed")], **QUIET)
    assert [output.outputs.data.shape for output in both] == [(32,), (4, 32)]


def test_prompts_may_have_a_priority_each(embedding_llm: LLM) -> None:
    texts = ["Hi", "there", "you"]
    alike = embedding_llm.embed(texts, **QUIET)
    ordered = embedding_llm.embed(texts, priority=[2, 0, 1], lora_request=None, **QUIET)
    assert [output.prompt_token_ids for output in ordered] == [output.prompt_token_ids for output in alike]
    with pytest.raises(InvalidRequest, match="there are 3 prompts and 2 priorities"):
        embedding_llm.encode(texts, priority=[1, 2], **QUIET)
    with pytest.raises(InvalidRequest, match=r"`priority\[1\]` must be an integer"):
        embedding_llm.encode(texts, priority=[1, None, 2], **QUIET)  # type: ignore[list-item]


def test_pairs_are_scored_by_a_cross_encoder(scoring_llm: LLM, cross_encoder: Path) -> None:
    expected = cross_scores(cross_encoder, [(QUERY, document) for document in DOCUMENTS])
    outputs = scoring_llm.score(QUERY, DOCUMENTS, **QUIET)
    assert all(isinstance(output, ScoringRequestOutput) for output in outputs)
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    each = scoring_llm.score([QUERY] * 3, DOCUMENTS, **QUIET)
    assert [output.outputs.score for output in each] == pytest.approx(expected, abs=1e-5)
    (one,) = scoring_llm.score(QUERY, DOCUMENTS[0], **QUIET)
    assert one.outputs.score == pytest.approx(expected[0], abs=1e-5)
    assert len(one.prompt_token_ids) == len(QUERY) + len(DOCUMENTS[0]) + 3


def test_pairs_are_scored_by_the_cosine_of_an_embedding_models_vectors(embedding_llm: LLM, reference: Reference) -> None:
    expected = [float(reference.embedding(QUERY) @ reference.embedding(document)) for document in DOCUMENTS]
    outputs = embedding_llm.score(QUERY, DOCUMENTS, **QUIET)
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)


def test_classes_come_with_their_labels(tmp_path: Path) -> None:
    with LLM(encoders.classifier_directory(tmp_path), runner="pooling", threads=1) as llm:
        for output in llm.classify(TEXTS, **QUIET):
            assert isinstance(output, ClassificationRequestOutput)
            assert output.outputs.num_classes == 3
            assert sum(output.outputs.probs) == pytest.approx(1)
            assert output.outputs.label == encoders.LABELS[output.outputs.probs.index(max(output.outputs.probs))]
        with pytest.raises(InvalidRequest, match="is a classifier with 3 labels; it is served by classify, encode"):
            llm.embed("Hi")


def test_what_is_wrong_is_named(embedding_llm: LLM) -> None:
    def path_of(call: Any, *given: Any, **options: Any) -> str | None:
        with pytest.raises(InvalidRequest) as caught:
            call(*given, **QUIET, **options)
        return caught.value.param

    assert path_of(embedding_llm.embed, ["a", ""]) == "prompts[1]"
    assert path_of(embedding_llm.embed, ["a", "x" * 100]) == "prompts[1]"
    assert path_of(embedding_llm.embed, ["a", [999]]) == "prompts[1]"
    assert path_of(embedding_llm.embed, ["a", "\ud800"]) == "prompts[1]"
    assert path_of(embedding_llm.embed, "a", PoolingParams(dimensions=8)) == "dimensions"
    assert path_of(embedding_llm.embed, "a", PoolingParams(task="token_embed")) == "pooling_params"
    assert path_of(embedding_llm.embed, ["a", "b"], [PoolingParams()]) == "pooling_params"
    assert path_of(embedding_llm.embed, "a", prompt_name="query") == "prompt_name"
    assert path_of(embedding_llm.score, ["a", "b"], ["c"]) == "text_1"
    assert path_of(embedding_llm.score, "a", ["b", ""]) == "text_2[1]"
    assert path_of(embedding_llm.score, "a", [1]) == "text_2[0]"
    assert path_of(embedding_llm.score, "a", b"b") == "text_2"
    assert path_of(embedding_llm.embed, "a", priority="x") == "priority"
    assert path_of(embedding_llm.score, "a", "b", priority=[1]) == "priority"
    assert path_of(embedding_llm.embed, "a", prompt_name=3) == "prompt_name"
    assert path_of(embedding_llm.embed, ["a", "b"], [PoolingParams(), SamplingParams()]) == "pooling_params[1]"
    assert path_of(embedding_llm.embed, "a", SamplingParams()) == "pooling_params"
    for limit in (0, -2, 2.5, "5", True):
        assert path_of(embedding_llm.embed, "a", truncate_prompt_tokens=limit) == "truncate_prompt_tokens"
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: the text is empty"):
        embedding_llm.embed(["a", ""], **QUIET)
    with pytest.raises(InvalidRequest, match=r"text_2\[1\]: the text is empty"):
        embedding_llm.score("a", ["b", ""], **QUIET)
    (cut,) = embedding_llm.embed("x" * 100, truncate_prompt_tokens=-1, **QUIET)
    assert len(cut.prompt_token_ids) == encoders.MAX_LEN


@pytest.mark.parametrize("given", [{"task": "nope"}, {"dimensions": "8"}, {"dimensions": True}, {"normalize": "no"}])
def test_pooling_parameters_of_the_wrong_type_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refused:
        PoolingParams(**given)
    assert refused.value.param == next(iter(given))


def test_a_call_for_another_kind_of_model_says_what_this_one_is(embedding_llm: LLM, scoring_llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="is an embedding model; it is served by embed, score, encode"):
        embedding_llm.generate("Hi", SamplingParams(max_tokens=1))
    with pytest.raises(InvalidRequest, match="is an embedding model; it is served by embed, score, encode"):
        embedding_llm.classify("Hi")
    with pytest.raises(InvalidRequest, match="its tasks are embed, token_embed"):
        embedding_llm.encode("Hi", pooling_task="classify")
    with pytest.raises(InvalidRequest, match="is a cross-encoder, which scores pairs of texts; it is served by score, encode, classify"):
        scoring_llm.embed("Hi")


def test_a_model_that_generates_says_so(llm: LLM) -> None:
    for call in (llm.embed, llm.encode, llm.classify, lambda text: llm.score(text, text)):
        with pytest.raises(InvalidRequest, match="is a model that generates text; it is served by generate, chat, beam_search"):
            call("Hi")


def test_inputs_are_counted_and_shown_as_they_come(embedding_llm: LLM) -> None:
    shown: list[int] = []

    class Bar:
        def __init__(self, **settings: Any) -> None:
            shown.append(settings["total"])

        def update(self, n: int = 1) -> None:
            shown.append(n)

        def close(self) -> None:
            shown.append(0)

    def finished() -> float:
        return sum(metric.value for metric in embedding_llm.get_metrics() if metric.name == "penstock:request_success")  # type: ignore[attr-defined]

    before = finished()
    embedding_llm.embed(["a", "b"], use_tqdm=Bar)
    assert shown == [2, 1, 1, 0]
    assert finished() == before + 2


def test_coroutines_encode_side_by_side(embedder: Path, reference: Reference) -> None:
    async def run() -> None:
        async with AsyncLLM(embedder, threads=1) as llm:

            async def encode(text: str) -> torch.Tensor:
                (output,) = [output async for output in llm.encode(text, request_id=text)]
                assert output.request_id == text
                return output.outputs.data

            for text, vector in zip(TEXTS, await asyncio.gather(*map(encode, TEXTS)), strict=True):
                torch.testing.assert_close(vector, reference.embedding(text), atol=1e-5, rtol=0)

    asyncio.run(run())
