"""Vectors in place of token ids: `prompt_tuning_config` and `multimodal_embedding`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.llm.executor import Executor, ModelType, OutputConfig, PromptTuningConfig, Request
from tests.llm.model_directory import SETTINGS
from tests.tiny_multimodal import IMAGE_TOKEN_ID, picture, tiny_multimodal_model, tiny_processor, write_multimodal_model

TEXT = list(b"the rain in Spain")
NUM_NEW_TOKENS = 8


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> Iterator[Executor]:
    with Executor(model_dir, ModelType.DECODER_ONLY, **SETTINGS) as running:
        yield running


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir)


def said(executor: Executor, ids: list[int], **fields: Any) -> Any:
    request = Request(ids, NUM_NEW_TOKENS, end_id=-1, output_config=OutputConfig(exclude_input_from_output=True), **fields)
    (response,) = executor.await_responses(executor.enqueue_request(request))
    return response


def expected(reference: Any, vectors: Tensor) -> list[int]:
    token_ids: list[int] = reference.generate(
        inputs_embeds=vectors[None], attention_mask=torch.ones(1, len(vectors)), max_new_tokens=NUM_NEW_TOKENS, eos_token_id=None
    )[0].tolist()
    return token_ids


def test_ids_beyond_the_vocabulary_are_rows_of_the_requests_table(executor: Executor, reference: Any) -> None:
    vocab_size = reference.config.vocab_size
    embedding = reference.get_input_embeddings().weight
    for seed in (0, 1, 0):
        table = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed)) * 0.15
        ids = [vocab_size + row for row in (0, 1, 2, 3, 4, 5)] + TEXT + [vocab_size + 2, vocab_size + 2] + TEXT
        vectors = torch.cat([table, embedding[TEXT], table[[2, 2]], embedding[TEXT]])
        response = said(executor, ids, prompt_tuning_config=PromptTuningConfig(table))
        assert response.result.output_token_ids == [expected(reference, vectors)]
        by_order = said(executor, ids, multimodal_embedding=torch.cat([table, table[[2, 2]]]))
        assert by_order.result.output_token_ids == response.result.output_token_ids


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt_tuning_config": PromptTuningConfig(torch.zeros(2, 64))}, "asks for vector 2, and"),
        ({"prompt_tuning_config": PromptTuningConfig(torch.zeros(3, 65))}, "must have the shape"),
        ({"multimodal_embedding": torch.zeros(3, 64)}, "has 3 vectors for 2 ids"),
        ({"multimodal_embedding": torch.full((2, 64), torch.nan)}, "not a finite number"),
        ({"prompt_tuning_config": PromptTuningConfig(torch.zeros(3, 64)), "multimodal_embedding": torch.zeros(2, 64)}, "for the same ids"),
        ({}, "outside the vocabulary"),
    ],
)
def test_what_does_not_fit_the_prompt_is_an_error(executor: Executor, reference: Any, fields: dict[str, Any], message: str) -> None:
    vocab_size = reference.config.vocab_size
    response = said(executor, [vocab_size, vocab_size + 2], **fields)
    assert response.has_error()
    assert message in response.error_msg


def test_what_is_no_tensor_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="`embedding_table` must be a tensor"):
        PromptTuningConfig([[0.0]])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`multimodal_embedding` must be a tensor"):
        Request([1], 1, multimodal_embedding=[[0.0]])  # type: ignore[arg-type]


@torch.inference_mode()
def test_vectors_of_an_image_are_seen_as_the_image(tmp_path: Path) -> None:
    inputs = tiny_processor("llava")(text=["What is <image>?"], images=[picture(0)], return_tensors="pt")
    model: Any = tiny_multimodal_model("llava")
    (vectors,) = model.get_image_features(inputs["pixel_values"]).pooler_output
    prompt, vocab_size = inputs["input_ids"][0].tolist(), model.config.text_config.vocab_size
    wanted = model.generate(**inputs, max_new_tokens=NUM_NEW_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
    ids = [vocab_size if token_id == IMAGE_TOKEN_ID else token_id for token_id in prompt]
    with Executor(write_multimodal_model(tmp_path, "llava"), ModelType.DECODER_ONLY, **SETTINGS) as executor:
        assert said(executor, ids, multimodal_embedding=vectors).result.output_token_ids == [wanted]


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("qwen2_vl", "rotary positions in three parts"),
        *(pytest.param(name, "rotary positions in three parts", marks=pytest.mark.thorough) for name in ("qwen2_5_vl", "qwen3_vl")),
        ("gemma3", "attention in both directions"),
    ],
)
def test_vectors_are_refused_where_images_have_more_than_these(family: str, reason: str, tmp_path: Path) -> None:
    model: Any = tiny_multimodal_model(family)
    vocab_size, table = model.config.text_config.vocab_size, torch.randn(2, 64, generator=torch.Generator().manual_seed(0)) * 0.15
    ids = [*TEXT, vocab_size, vocab_size + 1, *TEXT]
    with Executor(write_multimodal_model(tmp_path, family), ModelType.DECODER_ONLY, **SETTINGS) as executor:
        response = said(executor, ids, multimodal_embedding=table)
        assert f"`multimodal_embedding` is not supported: this model's images have {reason}" in response.error_msg
        tuned = said(executor, ids, prompt_tuning_config=PromptTuningConfig(table))  # virtual tokens of a text
    if family != "gemma3":  # which scales the embeddings of tokens
        text = model.get_input_embeddings().weight[TEXT]
        assert tuned.result.output_token_ids == [expected(model, torch.cat([text, table, text]))]
