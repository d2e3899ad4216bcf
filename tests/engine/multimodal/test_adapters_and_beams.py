"""Prompts with images in beam search, and with LoRA adapters."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.adapters.checkpoint import AdapterReader
from penstock.engine.adapters.registry import Adapter
from penstock.engine.core import EngineCore
from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import PromptEmbeds, PromptImage, runs_of
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.text.tokenizer import Tokenizer
from tests.engine.multimodal.test_image_equivalence import (
    CLEAR_MARGIN,
    NUM_NEW_TOKENS,
    PROMPTS,
    Reference,
    engine,
    logits_of,
    processed_prompts,
    reference,
    subject,
)
from tests.engines import core_over, loaded_multimodal
from tests.fakes import beam_request, drive, make_request, tokens
from tests.tiny_adapters import adapted_model, write_adapter
from tests.tiny_multimodal import FAMILIES, LIKE_OTHERS, byte_backend, tiny_multimodal_model, tiny_processor

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


@pytest.mark.parametrize("family", ["llava", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("gemma3", "qwen3_5"))])
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


@dataclass(frozen=True)
class Adapted:
    """A model with an adapter that peft has made of the whole, and what peft's own model says of the prompts at `PLACES`."""

    family: str
    seed: int
    directory: Path
    answers: list[Reference]


PLACES = (2, 5, 6)  # one image, two images, none
SUFFIXES = ["q_proj", "v_proj", "o_proj", "up_proj"]
# An adapter of all linear layers would change some that are refused: experts, which peft finds by the names of MLPs, and recurrent layers.
WITH_EXPERTS = ("glm4v_moe",)
WITH_OTHER_LAYERS = (*WITH_EXPERTS, "qwen3_5", "qwen3_5_moe")


def outside(whole: Any) -> str:
    """A pattern for the modules that are not in the language model."""
    base = getattr(whole, whole.base_model_prefix)
    return f".*({'|'.join(name for name, module in base.named_children() if module is not whole.get_decoder())}).*"


def decoder_path(whole: Any) -> str:
    path: str = next(path for path, module in whole.named_modules() if module is whole.get_decoder())
    return path


def targets(family: str, kind: str) -> dict[str, Any]:
    """Of peft's config: what is changed, said in one of the ways that there are."""
    whole = tiny_multimodal_model(family)
    if kind == "pattern":
        return {"target_modules": rf"{decoder_path(whole)}\.layers\.[12]\..*\.(q_proj|o_proj|down_proj)"}
    suffixes = SUFFIXES[:-1] if family in WITH_EXPERTS else SUFFIXES
    return {"target_modules": "all-linear" if kind == "all-linear" else suffixes, "exclude_modules": outside(whole)}


def adapted(family: str, kind: str, directory: Path) -> Adapted:
    """Of the first weights with which the choices are clear, so that rounding cannot change them."""
    path = decoder_path(tiny_multimodal_model(family))
    settings: dict[str, Any] = {"rank_pattern": {rf"{path}\.layers\.1\..*q_proj": 2}, "alpha_pattern": {"layers.1.self_attn.o_proj": 5}}
    for seed in range(100):
        write_adapter(tiny_multimodal_model(family, seed), directory, **settings, **targets(family, kind))
        whole, processor = adapted_model(tiny_multimodal_model(family, seed), directory), tiny_processor(family)
        answers = [reference(whole, processor, *PROMPTS[place]) for place in PLACES]
        if all(is_clear(answer) for answer in answers):
            return Adapted(family, seed, directory, answers)
    raise AssertionError("every model hesitates")


def is_clear(answer: Reference) -> bool:
    """Whether no choice is close, and no token is an image's, after which transformers would ask for an image."""
    return answer.margin >= CLEAR_MARGIN and len(answer.token_ids) == NUM_NEW_TOKENS


@contextmanager
def engine_with_adapters(family: str, seed: int = 0) -> Iterator[tuple[EngineCore, AdapterReader]]:
    loaded = loaded_multimodal(tiny_multimodal_model(family, seed))
    core = core_over(loaded, Tokenizer(byte_backend(), {}, {}), block_size=8, enable_lora=True)
    assert core.runner.adapted is not None
    try:
        yield core, core.runner.adapted.reader
    finally:
        core.runner.shutdown()


KINDS = ("names", "pattern", "all-linear")
CASES = [
    pytest.param(family, kind, marks=[pytest.mark.thorough] * (family in LIKE_OTHERS or (kind != "names" and family != "gemma3")))
    for family in FAMILIES
    for kind in KINDS
    if kind == "names" or family not in (WITH_EXPERTS if kind == "pattern" else WITH_OTHER_LAYERS)
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_images_are_read_with_the_adapter_of_their_request(family: str, kind: str, tmp_path: Path) -> None:
    subject = adapted(family, kind, tmp_path)
    plain = [reference(tiny_multimodal_model(family, subject.seed), tiny_processor(family), *PROMPTS[place]) for place in PLACES]
    assert [answer.token_ids for answer in plain] != [answer.token_ids for answer in subject.answers]
    prompts = processed_prompts(family)
    with engine_with_adapters(family, subject.seed) as (core, reader):
        adapter = reader.read("adapter", subject.directory)
        for _ in range(2):  # the second time from the prefix cache
            for name, chosen in (("none", None), ("adapter", adapter)):
                for number, place in enumerate(PLACES):
                    prompt = prompts[place]
                    settings: dict[str, Any] = {"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True}
                    core.add(make_request(f"{name} {number}", prompt.token_ids, adapter=chosen, embeds=prompt.embeds, **settings))
            said = drive(core)
            for number, answer in enumerate(subject.answers):
                assert tokens(said[f"adapter {number}"]) == answer.token_ids
            for number, answer in enumerate(plain):
                assert not is_clear(answer) or tokens(said[f"none {number}"]) == answer.token_ids


def renamed(directory: Path, name: Callable[[str], str]) -> None:
    file = directory / "adapter_model.safetensors"
    save_file({name(key): tensor for key, tensor in load_file(file).items()}, file)


def test_names_of_older_models_are_those_of_the_same_layers(tmp_path: Path) -> None:
    """Until transformers 4.52, the language model with its head was a part of the whole, and Qwen2-VL's decoder was named as one alone."""
    settings: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "exclude_modules": outside(tiny_multimodal_model("llava"))}
    write_adapter(tiny_multimodal_model("llava"), tmp_path, rank_pattern={r"language_model\..*\.1\..*": 2}, **settings)
    with engine_with_adapters("llava") as (_, reader):
        digest = reader.read("new", tmp_path).digest
        renamed(tmp_path, lambda key: key.replace("model.language_model.layers", "language_model.model.layers"))
        assert "base_model.model.language_model.model.layers.1.mlp.down_proj.lora_A.weight" in load_file(
            tmp_path / "adapter_model.safetensors"
        )
        assert reader.read("old", tmp_path).digest == digest
    write_adapter(tiny_multimodal_model("qwen2_vl"), tmp_path, target_modules=["q_proj", "down_proj"], exclude_modules=r".*visual.*")
    with engine_with_adapters("qwen2_vl") as (_, reader):
        digest = reader.read("new", tmp_path).digest
        renamed(tmp_path, lambda key: key.replace("model.language_model.layers", "model.layers"))
        assert reader.read("old", tmp_path).digest == digest


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in WITH_OTHER_LAYERS])
def test_an_adapter_of_the_vision_tower_is_refused_with_what_to_do_about_it(family: str, tmp_path: Path) -> None:
    write_adapter(tiny_multimodal_model(family), tmp_path, target_modules="all-linear")
    with engine_with_adapters(family) as (_, reader):
        with pytest.raises(InvalidRequest, match=r"only layers of the language model can be changed: .*`exclude_modules='.*'`") as refusal:
            reader.read("adapter", tmp_path)
        (pattern,) = re.findall(r"exclude_modules='(.*)'", str(refusal.value))
        write_adapter(tiny_multimodal_model(family), tmp_path, target_modules="all-linear", exclude_modules=pattern)
        assert reader.read("adapter", tmp_path).updates.keys() == reader.sizes.keys()


def test_a_tower_that_is_named_and_has_no_weights_is_left_as_it_is(tmp_path: Path) -> None:
    write_adapter(tiny_multimodal_model("llava"), tmp_path, target_modules=SUFFIXES)
    file = tmp_path / "adapter_model.safetensors"
    with engine_with_adapters("llava") as (_, reader):
        with pytest.raises(InvalidRequest, match=r"it changes 'model\.vision_tower\.encoder\.layers\.0\.self_attn\.q_proj'"):
            reader.read("adapter", tmp_path)
        save_file({key: tensor for key, tensor in load_file(file).items() if "vision_tower" not in key}, file)
        assert len(reader.read("adapter", tmp_path).updates) == 3 * len(SUFFIXES)


def test_weights_of_another_size_are_refused_by_any_name(tmp_path: Path) -> None:
    write_adapter(tiny_multimodal_model("llava", intermediate_size=80), tmp_path, target_modules=["gate_proj"])
    with engine_with_adapters("llava") as (_, reader):
        for new, old in (("", ""), ("model.language_model", "language_model.model"), ("language_model.model", "model")):
            renamed(tmp_path, lambda key, new=new, old=old: key.replace(f"{new}.layers", f"{old}.layers"))  # type: ignore[misc]
            with pytest.raises(InvalidRequest, match=r"have the shapes \[\(4, 64\), \(80, 4\)\]"):
                reader.read("adapter", tmp_path)


def test_what_attends_in_both_directions_stays_an_images_tokens_behind_a_tuned_prompt() -> None:
    prompt = processed_prompts("gemma3")[5]
    tuned = Adapter("tuned", "", prompt=PromptEmbeds(range(9), b"tuned", torch.zeros(9, 64)))
    _, *images = make_request("r", prompt.token_ids, embeds=prompt.embeds, adapter=tuned).expanded().embeds
    assert len(images) == len(prompt.embeds) > 1
    for image, alone in zip(images, prompt.embeds, strict=True):
        assert isinstance(image, PromptImage)
        assert image.spans == runs_of(image.positions) == runs_of([position + 9 for position in alone.positions])
