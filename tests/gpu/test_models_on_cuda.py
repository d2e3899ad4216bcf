"""Kinds of models on a real GPU, in float32: they say what they say on the CPU. `gpu/test_models_on_a_gpu.py` has a fake device instead."""

from pathlib import Path

import pytest
import torch

from penstock.engine.weights.quantization import quantized_layers
from tests.engine.attention.test_latent import FAMILIES as LATENT_FAMILIES
from tests.engine.weights.checkpoints import FORMATS, write_checkpoint
from tests.engine.weights.test_checkpoints import small_model
from tests.engine.weights.test_experts import write_mxfp4_experts
from tests.engine.weights.test_quantization import STORED, save_stored
from tests.engines import loaded_model
from tests.gpu.test_models_on_a_gpu import core_of, load_checkpoint, recurrent_core, said
from tests.tiny_models import RECURRENT_ARCHITECTURES, tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU here")]


def assert_same_on_cuda(directory: Path) -> None:
    expected = said(core_of(load_checkpoint(directory, "cpu", "none"), compile="off"))
    loaded = load_checkpoint(directory, "cuda")
    assert quantized_layers(loaded.model)
    assert said(core_of(loaded)) == expected


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_computed_from_its_codes(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), FORMATS[name])
    assert_same_on_cuda(tmp_path)


def test_a_gguf_files_matrices_are_computed_from_their_codes(tmp_path: Path) -> None:
    save_stored(tmp_path, tiny_model("qwen2", tie_word_embeddings=True), STORED)
    assert_same_on_cuda(tmp_path)


def test_experts_in_mxfp4_are_computed_from_their_codes(tmp_path: Path) -> None:
    write_mxfp4_experts(tmp_path)
    assert_same_on_cuda(tmp_path)


@pytest.mark.parametrize("name", RECURRENT_ARCHITECTURES)
def test_recurrent_layers_say_the_same(name: str) -> None:
    expected = said(recurrent_core(loaded_model(tiny_model(name))))
    assert said(recurrent_core(loaded_model(torch.nn.Module.to(tiny_model(name), "cuda")))) == expected


@pytest.mark.parametrize("name", LATENT_FAMILIES)
def test_attention_over_latents_says_the_same(name: str) -> None:
    expected = said(core_of(loaded_model(tiny_model(name)), compile="off"))
    assert said(core_of(loaded_model(torch.nn.Module.to(tiny_model(name), "cuda")))) == expected
