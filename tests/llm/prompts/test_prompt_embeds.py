"""Prompts of vectors: `prompt_embeds` in `LLM`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams
from penstock.engine.errors import InvalidRequest
from penstock.llm.preparing import EmbedsPrompt, Prompt
from tests.llm.model_directory import SETTINGS

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def own(model_dir: Path) -> Iterator[LLM]:
    with LLM(model_dir, **SETTINGS, enable_prompt_embeds=True, max_num_batched_tokens=16) as running:
        yield running


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir)


def test_the_vectors_of_tokens_say_what_the_tokens_say(own: LLM, reference: Any) -> None:
    token_ids = list(b"the rain in Spain stays mainly in the plain")
    vectors = reference.get_input_embeddings()(torch.tensor(token_ids))
    prompts: list[Prompt] = [{"prompt_embeds": vectors}, token_ids]
    by_vectors, by_tokens = own.generate(prompts, GREEDY)
    assert by_vectors.outputs[0].token_ids == by_tokens.outputs[0].token_ids


def test_vectors_of_no_token_say_what_transformers_says(own: LLM, reference: Any) -> None:
    prompts = [torch.randn(length, 64, generator=torch.Generator().manual_seed(length)) * 0.15 for length in (3, 40, 41)]
    for _ in range(2):  # once more out of the cache
        outputs = own.generate([EmbedsPrompt(prompt_embeds=prompt) for prompt in prompts], GREEDY)
        for prompt, output in zip(prompts, outputs, strict=True):
            expected = reference.generate(
                inputs_embeds=prompt[None], attention_mask=torch.ones(1, len(prompt)), max_new_tokens=8, do_sample=False, eos_token_id=None
            )
            assert output.outputs[0].token_ids == expected[0].tolist()
    assert outputs[1].num_cached_tokens == 32
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 3


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (torch.zeros(3, 63), r"must have the shape \[tokens, 64\], got \[3, 63\]"),
        (torch.zeros(0, 64), r"must have the shape \[tokens, 64\]"),
        (torch.zeros(64), r"must have the shape \[tokens, 64\]"),
        (torch.zeros(3, 64, dtype=torch.int64), "must be a dense tensor of float32, float16, bfloat16"),
        (torch.zeros(3, 64).to_sparse(), "must be a dense tensor"),
        (torch.full((3, 64), torch.nan), "holds what is not a finite number"),
        ([[0.0] * 64], "must be a tensor"),
        (torch.zeros(300, 64), "maximum context length"),
    ],
)
def test_other_tensors_are_refused(own: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        own.generate({"prompt_embeds": prompt}, GREEDY)


def test_vectors_are_a_prompt_of_their_own(own: LLM) -> None:
    with pytest.raises(InvalidRequest, match="a prompt of their own"):
        own.generate({"prompt": "x", "prompt_embeds": torch.zeros(3, 64)}, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="`prompt_logprobs` are those of tokens"):
        own.generate({"prompt_embeds": torch.zeros(3, 64)}, SamplingParams(max_tokens=1, prompt_logprobs=1))


def test_vectors_are_taken_where_they_are_switched_on(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="--enable-prompt-embeds"):
        llm.generate({"prompt_embeds": torch.zeros(3, 64)}, GREEDY)
