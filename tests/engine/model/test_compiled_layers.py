"""Decoder layers as compiled code: what they say, and what happens where the code does not load."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor

from penstock.engine.build import compiled_layers
from penstock.engine.config import EngineConfig
from penstock.engine.model import compiled_layers as compiled_layers_module
from penstock.engine.model import layer_compiler
from penstock.engine.model.compiled_layers import CompiledLayer, LayerCompilation, decoder_layers, layer_kind, layer_tensors
from penstock.engine.model.loader import LoadedModel
from penstock.engine.native.runtime import find_compiler, native_library
from penstock.engine.system.cache import cache_directory
from penstock.engine.weights.quantization import quantize_plain
from tests.engines import core_over, loaded_model, run
from tests.tiny_models import tiny_model

PROMPTS = [[7, 8, 9], list(range(40)), [5]]


def uncompiled(loaded: LoadedModel, kind: str) -> Callable[[list[Tensor]], list[Tensor]]:
    """What is compiled for a kind of layer, run as it is."""
    model = layer_compiler.build_skeleton(loaded.directory, loaded.dtype, loaded.quantization, 16, False)
    layer = next(layer for layer in decoder_layers(model, model.config.num_hidden_layers) if layer_kind(layer) == kind)
    function, num_own = layer_compiler.LayerFunction(layer, *layer_compiler.capture_call(model, layer)), len(layer_tensors(layer))
    return lambda tensors: [function(tensors[:num_own], tensors[num_own:])]


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
@pytest.mark.parametrize("is_right", [True, False])
def test_layers_run_as_what_was_made_of_them_unless_that_deviates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_right: bool
) -> None:
    """With the function that is handed to the compiler in the place of the code that it makes."""
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.pick_vec_isa", lambda: None)  # runs of the C++ compiler, which change nothing here
    model = tiny_model("llama", intermediate_size=80).requires_grad_(False)
    model.config.save_pretrained(tmp_path)
    quantize_plain(model, "int8")
    loaded = replace(loaded_model(model), directory=tmp_path, quantization="int8")
    core = core_over(loaded)
    expected = run(core, PROMPTS, max_tokens=6)
    compilation = LayerCompilation(loaded)
    monkeypatch.setattr(compilation, "_directory", tmp_path / "layers")
    [kind] = compilation._kinds
    function = uncompiled(loaded, kind)
    monkeypatch.setattr(compilation, "_command", lambda kind, target: ["touch", str(target)])
    monkeypatch.setattr(compiled_layers_module, "_load", lambda package: function if is_right else lambda tensors: [-function(tensors)[0]])
    assert compilation.compile()
    assert compilation.is_cached
    core.runner.thread.submit(compilation.install).result()
    layers = decoder_layers(loaded.model, loaded.config.num_hidden_layers)
    for before, after in zip(expected, run(core, PROMPTS, max_tokens=6), strict=True):
        assert after.token_ids == before.token_ids
        torch.testing.assert_close(after.logits_TV, before.logits_TV, rtol=0, atol=1e-2)
    assert {isinstance(layer.forward, CompiledLayer) for layer in layers} == {is_right}
    assert ("A compiled decoder layer deviates" in caplog.text) is not is_right
    core.runner.shutdown()


@pytest.mark.thorough  # the compiler takes 18 seconds
@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
def test_compiled_layers_say_what_the_layers_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_library() is not None
    being_built = shutil.ignore_patterns("tmp*", "driver*")  # and what other tests compile
    # It takes seconds to build, and is tested elsewhere.
    shutil.copytree(cache_directory() / "native", tmp_path / "cache" / "native", ignore=being_built)
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    # Runs of the C++ compiler that cost seconds and change nothing here: trials of instructions, and speed of the code around the kernels.
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
    monkeypatch.setenv("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
    monkeypatch.setattr(torch._inductor.config.cpp, "vec_isa_ok", True)
    # Of each layer, one linear layer has a number of inputs that cannot be in groups of 32; the others are quantized.
    model = tiny_model("llama", intermediate_size=80).requires_grad_(False)
    model.config.save_pretrained(tmp_path)
    quantize_plain(model, "int8")
    loaded = replace(loaded_model(model), directory=tmp_path, quantization="int8")
    core = core_over(loaded)
    expected = run(core, PROMPTS, max_tokens=6)
    compilation = LayerCompilation(loaded)
    assert compilation.is_possible
    assert compilation.compile()
    assert list((tmp_path / "tmp").iterdir()) == [], "the compiler keeps files where other users could put theirs first"
    assert compilation.is_cached
    core.runner.thread.submit(compilation.install).result()
    layers = decoder_layers(loaded.model, loaded.config.num_hidden_layers)
    assert all(isinstance(layer.forward, CompiledLayer) for layer in layers)
    for before, after in zip(expected, run(core, PROMPTS, max_tokens=6), strict=True):
        assert after.token_ids == before.token_ids
        torch.testing.assert_close(after.logits_TV, before.logits_TV, rtol=0, atol=1e-2)  # a rounding of inputs may fall the other way
    assert all(isinstance(layer.forward, CompiledLayer) for layer in layers), "a layer deviated"
    core.runner.shutdown()


def test_code_that_does_not_load_leaves_the_layers_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    loaded = loaded_model(tiny_model("llama"))
    core = core_over(loaded)
    compilation = LayerCompilation(loaded)
    for kind in compilation._kinds:
        compilation._package(kind).parent.mkdir(parents=True, exist_ok=True)
        compilation._package(kind).write_bytes(b"no package")
    with pytest.raises(RuntimeError, match="what was compiled does not load"):
        core.runner.thread.submit(compilation.install).result()
    assert len(run(core, PROMPTS, max_tokens=2)) == len(PROMPTS)
    core.runner.shutdown()


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler here")
def test_an_engine_starts_beside_broken_code_and_compiles_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    loaded = loaded_model(tiny_model("llama"))
    cached = LayerCompilation(loaded)
    packages = [cached._package(kind) for kind in cached._kinds]
    for package in packages:
        package.parent.mkdir(parents=True, exist_ok=True)
        package.write_bytes(b"no package")
    compilation = compiled_layers(loaded, EngineConfig())
    assert compilation is not None
    assert not any(package.exists() for package in packages)
    assert not compilation.is_cached


def test_layers_of_several_groups_of_the_kv_cache_share_their_code() -> None:
    loaded = loaded_model(tiny_model("gemma2"))
    core = core_over(loaded)
    kinds = list(map(layer_kind, decoder_layers(loaded.model, loaded.config.num_hidden_layers)))
    assert [core.runner.cache.group_of(layer) for layer in range(3)] == [1, 0, 2]
    assert kinds[0] == kinds[2] != kinds[1]
    core.runner.shutdown()
