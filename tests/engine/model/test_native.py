"""A whole forward pass in native code: which models it takes, and that it says what their own code says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.engine.build import load
from penstock.engine.config import EngineConfig, QuantizationMode
from penstock.engine.kv_cache.cache import KVCache
from penstock.engine.model import native
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder, install_native_decoder
from penstock.engine.model.outputs import StepStates
from penstock.engine.native.library import native_library
from penstock.engine.weights.linear import quantize_linears
from tests.engines import core_over, loaded_model, run
from tests.tiny_models import ARCHITECTURES, tiny_model

OF_THIS_FORM = ("llama", "qwen2", "qwen3", "mistral")
PROMPTS = [[7, 8, 9], list(range(40, 90)), [5], list(range(100, 117))]


def has_kernels() -> bool:
    library = native_library()
    return library is not None and bool(library.penstock_instructions())


needs_kernels = pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler here")


def bfloat16_model(name: str) -> LoadedModel:
    return loaded_model(tiny_model(name, head_dim=64, hidden_size=64).bfloat16())


def cache_for(loaded: LoadedModel) -> KVCache:
    cache = KVCache(loaded.kv_layout, 8, 16, loaded.dtype, loaded.device)
    cache.attach(loaded.model)
    return cache


@needs_kernels
@pytest.mark.parametrize("name", OF_THIS_FORM)
def test_an_engine_says_what_the_models_own_code_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bfloat16_model(name)
    with monkeypatch.context() as without:
        without.setattr("penstock.engine.build.install_native_decoder", lambda *_: False)
        core = core_over(loaded)
        expected = run(core, PROMPTS, max_tokens=8, temperature=0.0)
        core.runner.shutdown()
    said = [each.token_ids for each in expected]
    core = core_over(loaded)
    assert isinstance(loaded.model.forward, NativeDecoder)
    assert len(core.runner.cache.groups) == (3 if name == "qwen2" else 1), "of qwen2, two layers of three have a window"
    for each, ids in zip(expected, said, strict=True):
        (result,) = run(core, [PROMPTS[said.index(ids)]], max_tokens=8, forced=ids)
        deviation = (result.logits_TV - each.logits_TV).norm() / each.logits_TV.norm()
        assert deviation < 3e-2
    core.runner.shutdown()


@needs_kernels
@pytest.mark.parametrize("layers", [(0, 2), (1, 2), ()])
def test_hidden_states_are_read_on_the_way(layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bfloat16_model("llama")

    def results(*, is_native: bool, is_read: bool) -> tuple[Tensor, StepStates]:
        with monkeypatch.context() as patch:
            if not is_native:
                patch.setattr("penstock.engine.build.install_native_decoder", lambda *_: False)
            core = core_over(loaded)
        states = StepStates(layers, reads_last=True)
        if is_read:
            states.attach(loaded.model, 3)
        (result,) = run(core, [PROMPTS[1]], max_tokens=1)
        states.detach()
        core.runner.shutdown()
        return result.logits_TV, states

    plain, _ = results(is_native=True, is_read=False)
    logits, native_states = results(is_native=True, is_read=True)
    _, own_states = results(is_native=False, is_read=True)
    assert torch.equal(logits, plain)
    assert native_states.states.keys() == own_states.states.keys() == {*layers, None}
    for place, expected in own_states.states.items():
        assert expected.shape == (len(PROMPTS[1]), 64)
        assert (native_states.states[place] - expected).norm() / expected.norm() < 3e-2


@needs_kernels
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", OF_THIS_FORM)
def test_layers_of_few_bits_are_taken_too(name: str, bits: int) -> None:
    model = tiny_model(name, head_dim=64, hidden_size=64).bfloat16()
    fuse_linears(model)
    quantize_linears(model, bits)
    loaded = loaded_model(model)
    assert install_native_decoder(loaded, cache_for(loaded))


@needs_kernels
@pytest.mark.parametrize("name", OF_THIS_FORM)
def test_a_sequence_says_the_same_in_whatever_company(name: str) -> None:
    loaded = bfloat16_model(name)
    core = core_over(loaded)
    alone = [run(core, [prompt], max_tokens=6)[0] for prompt in PROMPTS]
    core.runner.shutdown()
    core = core_over(loaded)
    for single, shared in zip(alone, run(core, PROMPTS, stagger=2, max_tokens=6), strict=True):
        assert shared.token_ids == single.token_ids
        torch.testing.assert_close(shared.logits_TV, single.logits_TV, rtol=0, atol=2e-2)
    core.runner.shutdown()


@needs_kernels
@pytest.mark.parametrize("quantization", ["auto", pytest.param("none", marks=pytest.mark.thorough)])
def test_a_sequence_is_computed_to_the_bit_alike_however_many_there_are(default_model_dir: Path, quantization: QuantizationMode) -> None:
    """With a real model: in a tiny one, sums that are added up in another order seldom come to something else."""
    loaded = load(default_model_dir, EngineConfig(quantization=quantization))
    core = core_over(loaded, num_threads=2, enable_prefix_caching=False)
    assert isinstance(loaded.model.forward, NativeDecoder)
    prompt = list(range(100, 107))
    (alone,) = run(core, [prompt], max_tokens=3, temperature=0.0)
    for count in (2, 7, 8, 12):
        for shared in run(core, [prompt] * count, max_tokens=3, temperature=0.0):
            assert torch.equal(shared.logits_TV, alone.logits_TV)
    core.runner.shutdown()


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in OF_THIS_FORM])
def test_models_of_another_form_run_as_they_are(name: str) -> None:
    settings: dict[str, Any] = {} if name in ("gpt2", "deepseek_v3") else {"head_dim": 64, "hidden_size": 64}
    loaded = loaded_model(tiny_model(name, **settings).bfloat16())
    assert not install_native_decoder(loaded, cache_for(loaded))
    assert "forward" not in vars(loaded.model)


def test_other_types_run_as_they_are() -> None:
    loaded = loaded_model(tiny_model("llama"))
    assert not install_native_decoder(loaded, cache_for(loaded))


@needs_kernels
@pytest.mark.parametrize("part", ["model.layers.1.mlp", "model.layers.2.input_layernorm", "model.norm", "model.layers.0.self_attn.o_proj"])
def test_a_part_that_computes_something_else_under_its_name_is_found_out(part: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded = bfloat16_model("llama")
    loaded.model.get_submodule(part).register_forward_hook(lambda _module, _args, output: output * 1.2)
    caplog.set_level("INFO", logger=native.__name__)
    assert not install_native_decoder(loaded, cache_for(loaded))
    assert "gives something else" in caplog.text


@needs_kernels
@pytest.mark.parametrize(("name", "is_taken"), [("llama", True), ("smollm3", False)])
def test_large_numbers_hide_nothing_of_what_a_layer_does(name: str, is_taken: bool) -> None:
    loaded = bfloat16_model(name)
    loaded.model.get_input_embeddings().get_parameter("weight").mul_(300)
    assert install_native_decoder(loaded, cache_for(loaded)) is is_taken


@needs_kernels
@pytest.mark.parametrize(("beta", "is_taken"), [(0.0, True), (0.5, False)])
def test_a_model_that_treats_far_positions_in_another_way_runs_as_it_is(beta: float, is_taken: bool) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": beta}
    settings: dict[str, Any] = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("ministral3", **settings, **heads, max_position_embeddings=128, rope_parameters=rope)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.15)
    loaded = loaded_model(model.bfloat16().eval())
    assert install_native_decoder(loaded, cache_for(loaded)) is is_taken


def test_norms_without_a_weight_run_as_they_are() -> None:
    loaded = bfloat16_model("llama")
    loaded.model.get_submodule("model.layers.1.input_layernorm").weight = None  # type: ignore[assignment]
    assert not install_native_decoder(loaded, cache_for(loaded))


def test_sizes_that_do_not_fill_vectors_run_as_they_are() -> None:
    loaded = loaded_model(tiny_model("llama", head_dim=64, hidden_size=64, intermediate_size=40).bfloat16())
    assert not install_native_decoder(loaded, cache_for(loaded))


def test_layers_of_different_sizes_run_as_they_are() -> None:
    model, other = (tiny_model("llama", head_dim=64, hidden_size=64, intermediate_size=size).bfloat16() for size in (64, 256))
    model.set_submodule("model.layers.1.mlp", other.get_submodule("model.layers.1.mlp"))
    loaded = loaded_model(model)
    assert not install_native_decoder(loaded, cache_for(loaded))


@needs_kernels
def test_only_the_rows_asked_for_come_out() -> None:
    loaded = bfloat16_model("llama")
    core = core_over(loaded)
    (whole,) = run(core, [PROMPTS[1]], max_tokens=1, prompt_logprobs=1)
    (last,) = run(core_over(loaded), [PROMPTS[1]], max_tokens=1)
    torch.testing.assert_close(last.logits_TV, whole.logits_TV, rtol=0, atol=2e-2)
    assert len(whole.prompt_logprobs) == len(PROMPTS[1])
