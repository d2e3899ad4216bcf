"""Prompts with images say what transformers says, however they are batched, cut, cached, preempted or forked."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

from penstock.engine.core import EngineCore
from penstock.engine.model.loader import LoadedModel
from penstock.engine.multimodal.inputs import LoadedImage, ProcessedPrompt
from penstock.engine.multimodal.processor import PretrainedImageProcessor
from penstock.engine.multimodal.vision import BIDIRECTIONAL_FAMILIES, EncoderCache
from penstock.engine.recurrent.layout import is_recurrent
from penstock.engine.text.tokenizer import Tokenizer
from tests.engines import Run, core_over, loaded_multimodal, run
from tests.tiny_multimodal import (
    FAMILIES,
    LIKE_OTHERS,
    VOCAB_SIZE,
    byte_backend,
    picture,
    placeholder_id,
    tiny_multimodal_model,
    tiny_processor,
)

NUM_NEW_TOKENS = 12
TOLERANCE = 5e-5
RECURRENT_TOLERANCE = 2e-4  # transformers computes a prompt's states in chunks, and the same in one more step after another
CLEAR_MARGIN = 20 * TOLERANCE
BLOCK_SIZE = 8
PROMPTS: list[tuple[str, list[Image.Image]]] = [
    ("<image>", [picture(0)]),
    ("See <image>", [picture(0)]),  # no token after the image
    ("See <image>: what?", [picture(0)]),
    ("See <image>: what?", [picture(1)]),
    ("See <image>: what?", [picture(2, 16, 40)]),
    ("See <image>, then <image>: what?", [picture(0), picture(1)]),
    ("See nothing: what?", []),
]


@dataclass(frozen=True)
class Reference:
    """What transformers does with one prompt: the prompt as it makes it, greedy tokens, the logits of each, and the least clear choice.

    `tolerance` is how much logits may differ from these.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]
    logits_TV: Tensor
    margin: float
    tolerance: float


def reference(model: Any, processor: Any, text: str, images: list[Image.Image]) -> Reference:
    # Not by `generate`, which counts on from the last token: where that is an image's and positions have three parts, the model's own
    # `forward` over the whole text has others.
    inputs = dict(processor(text=[text], images=images or None, return_tensors="pt"))
    prompt: list[int] = inputs["input_ids"][0].tolist()
    said: list[int] = []
    rows = []
    while len(said) < NUM_NEW_TOKENS and model.config.image_token_id not in said:  # for which it would ask for an image
        rows.append(logits_of(model, inputs, [said])[0, -1])
        said.append(int(rows[-1].argmax()))
    logits_TV = torch.stack(rows)
    best_T2 = logits_TV.topk(2).values
    tolerance = RECURRENT_TOLERANCE if is_recurrent(model.config.get_text_config()) else TOLERANCE
    return Reference(prompt, said, logits_TV, float((best_T2[:, 0] - best_T2[:, 1]).min()), tolerance)


def logits_of(model: Any, inputs: dict[str, Any], answers: list[list[int]]) -> Tensor:
    """The logits of all tokens of a prompt, as the processor gives it, and its answers so far."""
    said_FT = torch.tensor(answers, dtype=torch.int64)
    whole = inputs | {"input_ids": torch.cat([inputs["input_ids"], said_FT], 1)}
    whole["attention_mask"] = torch.ones_like(whole["input_ids"])
    for name in inputs.keys() & {"mm_token_type_ids", "token_type_ids"}:
        whole[name] = torch.cat([inputs[name], torch.zeros_like(said_FT)], 1)
    with torch.inference_mode():
        logits: Tensor = model(**whole).logits
    return logits


@dataclass(frozen=True)
class Subject:
    """A model in the engine's hands, the prompts as its processor makes them, and what transformers does with them."""

    loaded: LoadedModel
    prompts: list[ProcessedPrompt]
    references: list[Reference]
    seed: int


@functools.cache
def subject(family: str) -> Subject:
    """With the first weights whose greedy choices are clear, so that rounding cannot change them, and are no image tokens."""
    processor = tiny_processor(family)
    for seed in range(100):
        model = tiny_multimodal_model(family, seed)
        references = []
        for prompt in PROMPTS:
            references.append(reference(model, processor, *prompt))
            if references[-1].margin < CLEAR_MARGIN or len(references[-1].token_ids) < NUM_NEW_TOKENS:
                break
        else:
            return Subject(loaded_multimodal(model), processed_prompts(family), references, seed)
    raise AssertionError("every model hesitates")


def processed_prompts(family: str) -> list[ProcessedPrompt]:
    processor = tiny_processor(family)
    merge_size = getattr(processor.image_processor, "merge_size", None)
    own = PretrainedImageProcessor(processor, placeholder_id(family), merge_size, is_bidirectional=family in BIDIRECTIONAL_FAMILIES)
    encode = processor.tokenizer.encode
    return [own.prepare(encode(text), [LoadedImage.of(image) for image in images]) for text, images in PROMPTS]


@contextmanager
def engine(subject: Subject, **settings: Any) -> Iterator[EngineCore]:
    core = core_over(subject.loaded, Tokenizer(byte_backend(), {}, {}), **{"block_size": BLOCK_SIZE} | settings)
    try:
        yield core
    finally:
        core.runner.embedder.cache.check_integrity()
        core.runner.shutdown()


def run_all(core: EngineCore, subject: Subject, **params: Any) -> list[Run]:
    return run(core, subject.prompts, max_tokens=NUM_NEW_TOKENS, **params)


def assert_same(runs: list[Run], references: list[Reference]) -> None:
    for result, expected in zip(runs, references, strict=True):
        assert result.token_ids == expected.token_ids
        torch.testing.assert_close(result.logits_TV, expected.logits_TV[:, : result.logits_TV.shape[1]], rtol=0, atol=expected.tolerance)


SMALL_BUDGET = {"gemma3": 20}  # which computes the 16 tokens of an image in one step, beside 4 sequences

FAMILIES_APART = [pytest.param(family, marks=[pytest.mark.thorough] * (family in LIKE_OTHERS)) for family in FAMILIES]
every_family_apart = pytest.mark.parametrize("family", FAMILIES_APART)


@every_family_apart
def test_a_prompt_has_the_tokens_that_transformers_gives_it(family: str) -> None:
    model = subject(family)
    assert [prompt.token_ids for prompt in model.prompts] == [expected.prompt_token_ids for expected in model.references]


@every_family_apart
@pytest.mark.parametrize("is_cut", [False, True])
def test_images_in_a_batch_and_in_chunks_are_those_of_their_own_prompts(family: str, is_cut: bool) -> None:
    model = subject(family)
    budget = SMALL_BUDGET.get(family, 7) if is_cut else 256
    with engine(model, max_num_seqs=4, max_num_batched_tokens=budget, enable_prefix_caching=False) as core:
        assert_same(run_all(core, model, stagger=1), model.references)


@every_family_apart
def test_equal_images_share_blocks_and_others_do_not(family: str) -> None:
    model = subject(family)
    with engine(model) as core:
        assert_same(run_all(core, model, stagger=1), model.references)
        again = run_all(core, model)
        assert_same(again, model.references)
        for result, prompt in zip(again, model.prompts, strict=True):
            assert result.num_cached_tokens == (len(prompt.token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
    with engine(model) as core:
        places = (2, 3, 5, 1)
        first, other, longer, shorter = prompts = [model.prompts[place] for place in places]
        assert first.token_ids == other.token_ids
        runs = run(core, prompts, stagger=30, max_tokens=NUM_NEW_TOKENS)
        assert_same(runs, [model.references[place] for place in places])
        _, found, also_found, last_found = runs
        assert found.num_cached_tokens < first.embeds[0].positions[0] + 1
        if not model.loaded.recurrent_layers:  # whose states are kept where prompts part, from the second one on
            assert also_found.num_cached_tokens > longer.embeds[0].positions[-1] - BLOCK_SIZE
        assert last_found.num_cached_tokens > shorter.embeds[0].positions[-1] - BLOCK_SIZE


@every_family_apart
def test_a_preempted_prompt_with_images_resumes_as_if_nothing_had_happened(family: str) -> None:
    model = subject(family)
    num_blocks = 12 if family == "gemma3" else 18  # as much memory makes three times as many blocks for its three groups of layers
    settings: dict[str, Any] = {"num_blocks": num_blocks, "max_num_batched_tokens": 30, "max_num_seqs": 8}
    for enable_prefix_caching in (True, False) if family == "llava" else (True,):
        with engine(model, enable_prefix_caching=enable_prefix_caching, **settings) as core:
            assert_same(run_all(core, model), model.references)
            assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("family", ["idefics3", "qwen3_vl"])
def test_an_image_whose_features_were_dropped_is_encoded_again(family: str) -> None:
    model = subject(family)
    with engine(model, max_num_batched_tokens=7, enable_prefix_caching=False) as core:
        core.runner.embedder.cache = EncoderCache(0)
        assert_same(run_all(core, model), model.references)


@every_family_apart
def test_forks_see_the_image_of_their_prompt(family: str) -> None:
    model = subject(family)
    whole: Any = tiny_multimodal_model(family, model.seed)
    with engine(model) as core:
        runs = run_all(core, model, n=2, temperature=1.0, seed=6, logit_bias={placeholder_id(family): -100.0})  # else it has no image
    for number, (text, images) in enumerate(PROMPTS):
        forks = runs[2 * number : 2 * number + 2]
        twice: list[Any] = images * 2 if family == "llava_onevision" else [images] * 2  # whose images of one text are not cut into tiles
        inputs = dict(tiny_processor(family)(text=[text] * 2, images=twice if images else None, return_tensors="pt"))
        expected_FTV = logits_of(whole, inputs, [fork.token_ids[:-1] for fork in forks])[:, inputs["input_ids"].shape[1] - 1 :, :VOCAB_SIZE]
        tolerance = model.references[number].tolerance
        torch.testing.assert_close(torch.stack([fork.logits_TV for fork in forks]), expected_FTV, rtol=0, atol=tolerance)
        assert forks[0].token_ids != forks[1].token_ids
