"""Prompts with images in beam search, and with LoRA adapters."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from penstock.engine.adapters.registry import Adapter
from penstock.engine.multimodal.inputs import PromptEmbeds, PromptImage, runs_of
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.multimodal.test_image_equivalence import (
    CLEAR_MARGIN,
    NUM_NEW_TOKENS,
    PROMPTS,
    TOLERANCE,
    engine,
    logits_of,
    processed_prompts,
    reference,
    subject,
)
from tests.engines import core_over, loaded_multimodal
from tests.fakes import beam_request, drive, make_request, tokens
from tests.tiny_adapters import adapted_model, write_adapter
from tests.tiny_multimodal import byte_backend, tiny_multimodal_model, tiny_processor

WIDTH = 3


def best_beams(model: Any, inputs: dict[str, Any], length: int) -> list[list[int]] | None:
    """The best continuations, found with the whole text computed anew for each token; None where rounding may change them."""
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    for _ in range(length):
        found = []
        for total, said in beams:
            logprobs_V = logits_of(model, inputs, [said])[0, -1].log_softmax(-1)
            found += [(total + float(logprob), [*said, token_id]) for token_id, logprob in enumerate(logprobs_V)]
        found.sort(key=lambda beam: -beam[0])
        if found[WIDTH - 1][0] - found[WIDTH][0] < CLEAR_MARGIN:
            return None
        beams = found[:WIDTH]
    return [said for _, said in beams]


@pytest.mark.parametrize("family", ["llava", pytest.param("gemma3", marks=pytest.mark.thorough)])
def test_beams_of_a_prompt_with_images_are_the_best_continuations(family: str) -> None:
    model = subject(family)
    whole, processor, length = tiny_multimodal_model(family, model.seed), tiny_processor(family), 4
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=length, ignore_eos=True)
    places = (2, 5)  # of one image, and of two
    expected = []
    for place in places:
        text, images = PROMPTS[place]
        expected.append(best_beams(whole, dict(processor(text=[text], images=images, return_tensors="pt")), length))
    assert any(expected)
    with engine(model) as core:
        for place in places:
            request = beam_request(str(place), model.prompts[place].token_ids, params)
            request.embeds = model.prompts[place].embeds
            core.add(request)
        said = drive(core)
    for place, beams in zip(places, expected, strict=True):
        assert beams in (None, [tokens(said[str(place)], index) for index in range(WIDTH)])


def language_model(whole: Any) -> Any:
    """As the class that generates text, whose decoder is that of `whole`."""
    decoder = whole.get_decoder()
    with torch.device("meta"):
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder.config)]
        model = model_class(decoder.config)
    setattr(model, model.base_model_prefix, decoder)
    model.set_output_embeddings(whole.get_output_embeddings())
    return model


def test_images_are_read_with_the_adapter_of_their_request(tmp_path: Path) -> None:
    family, places = "llava", (2, 3, 6)
    directory = write_adapter(language_model(tiny_multimodal_model(family)), tmp_path / "adapter")
    adapted = tiny_multimodal_model(family)
    adapted_model(language_model(adapted), directory)  # which changes the decoder of both
    answers = {
        name: [reference(model, tiny_processor(family), *PROMPTS[place]) for place in places]
        for name, model in (("none", tiny_multimodal_model(family)), ("adapter", adapted))
    }
    assert answers["none"][0].token_ids != answers["adapter"][0].token_ids
    prompts = processed_prompts(family)
    core = core_over(loaded_multimodal(tiny_multimodal_model(family)), Tokenizer(byte_backend(), {}, {}), block_size=8, enable_lora=True)
    assert core.runner.adapted is not None
    adapter = core.runner.adapted.reader.read("adapter", directory)
    for _ in range(2):  # the second time from the prefix cache
        for name, chosen in (("none", None), ("adapter", adapter)):
            for number, place in enumerate(places):
                prompt = prompts[place]
                settings: dict[str, Any] = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
                core.add(make_request(f"{name} {number}", prompt.token_ids, adapter=chosen, embeds=prompt.embeds, **settings))
        said = drive(core)
        for name, expected in answers.items():
            for number, answer in enumerate(expected):
                assert answer.margin < 20 * TOLERANCE or tokens(said[f"{name} {number}"]) == answer.token_ids
    core.runner.shutdown()


def test_what_attends_in_both_directions_stays_an_images_tokens_behind_a_tuned_prompt() -> None:
    prompt = processed_prompts("gemma3")[5]
    tuned = Adapter("tuned", "", prompt=PromptEmbeds(range(9), b"tuned", torch.zeros(9, 64)))
    _, *images = make_request("r", prompt.token_ids, embeds=prompt.embeds, adapter=tuned).expanded().embeds
    assert len(images) == len(prompt.embeds) > 1
    for image, alone in zip(images, prompt.embeds, strict=True):
        assert isinstance(image, PromptImage)
        assert image.spans == runs_of(image.positions) == runs_of([position + 9 for position in alone.positions])
