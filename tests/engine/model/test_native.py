"""A whole forward pass in native code: which models it takes, and that it says what their own code says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.build import load
from penstock.engine.config import EngineConfig, QuantizationMode
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model import form, native
from penstock.engine.model.form import UnsuitableModel
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder, install_native_decoder
from penstock.engine.model.outputs import StepStates
from penstock.engine.native.runtime import native_library
from penstock.engine.weights.experts import quantize_experts
from penstock.engine.weights.linear import QuantizedEmbedding, quantize_linears
from penstock.engine.weights.quantization import quantize_plain
from tests.engines import core_over, loaded_model, run
from tests.tiny_models import ARCHITECTURES, tiny_model

OF_THIS_FORM = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "granite", "phi3", "olmo2", "olmo3", "smollm3"),
    *("qwen3_moe", "gpt_oss", "glm4"),
)
RELATIVES = ("mixtral", "olmoe", "granitemoe")
WITH_EXPERTS = ("qwen3_moe", "gpt_oss", *RELATIVES)
PROMPTS = [[7, 8, 9], list(range(40, 90)), [5], list(range(100, 117))]


def has_kernels() -> bool:
    library = native_library()
    return library is not None and bool(library.penstock_instructions())


needs_kernels = pytest.mark.skipif(not has_kernels(), reason="there is no C++ compiler here")


def wide_model(name: str) -> PreTrainedModel:
    """In bfloat16, with heads of 64 numbers. OLMoE's heads have as many together as its layers are wide."""
    return tiny_model(name, head_dim=64, hidden_size=256 if name == "olmoe" else 64).bfloat16()


def bfloat16_model(name: str) -> LoadedModel:
    return loaded_model(wide_model(name))


def cache_for(loaded: LoadedModel) -> KVCache:
    cache = KVCache(loaded.kv_layout, 8, 16, loaded.dtype, loaded.device)
    cache.attach(loaded.model)
    return cache


@needs_kernels
@pytest.mark.parametrize("name", [*OF_THIS_FORM, *RELATIVES])
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
    has_windows_in_part = name in ("qwen2", "gemma2", "gemma3_text", "olmo3", "gpt_oss")  # in two layers of three
    assert len(core.runner.cache.groups) == (3 if has_windows_in_part else 1)
    for each, ids in zip(expected, said, strict=True):
        (result,) = run(core, [PROMPTS[said.index(ids)]], max_tokens=8, forced=ids)
        error_TV = result.logits_TV - each.logits_TV
        deviation = error_TV.norm() / each.logits_TV.norm()
        if name in WITH_EXPERTS:  # where two experts are nearly equally good, rounding decides between them
            deviation = (error_TV.norm(dim=1) / each.logits_TV.norm(dim=1)).median()
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
@pytest.mark.parametrize("name", [*OF_THIS_FORM, *RELATIVES])
def test_layers_of_few_bits_are_taken_too(name: str, bits: int) -> None:
    model = wide_model(name)
    fuse_linears(model)
    quantize_experts(model, bits)
    quantize_linears(model, bits)
    loaded = loaded_model(model)
    assert install_native_decoder(loaded, cache_for(loaded))


@needs_kernels
@pytest.mark.parametrize("name", [*OF_THIS_FORM, *RELATIVES])
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


@needs_kernels
@pytest.mark.parametrize("bits", [4, 16])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
@torch.inference_mode()
def test_a_row_is_computed_to_the_bit_alike_whatever_rows_its_experts_have_beside(name: str, bits: int) -> None:
    sizes: dict[str, Any] = {"num_experts": 8, "num_local_experts": 8, "intermediate_size": 256, "moe_intermediate_size": 256}
    model = tiny_model(name, head_dim=64, hidden_size=256, num_experts_per_tok=3, **sizes).bfloat16()
    if bits < 16:
        fuse_linears(model)
        quantize_experts(model, bits)
        quantize_linears(model, bits)
    loaded = loaded_model(model)
    cache = cache_for(loaded)
    decoder, num_groups, count = NativeDecoder(loaded, cache), len(cache.groups), 7

    def states(first: int, stop: int) -> Tensor:
        """Of sequences of one token each, so many at once."""
        num = stop - first
        tables_PN = torch.arange(num, dtype=torch.int32)[:, None].contiguous()
        slots = [16 * place for place in range(num)] * num_groups
        metadata = AttentionMetadata.pack(
            slots, list(range(num + 1)), [1] * num, [*range(num)] * num_groups, tables_PN, num_decodes=num, num_groups=num_groups
        )
        ids_1T = torch.arange(first, stop)[None] * 7 % 300
        return decoder.hidden(ids_1T, torch.zeros(1, num, dtype=torch.long), metadata, torch.arange(num))

    alone = torch.cat([states(each, each + 1) for each in range(count)])
    assert torch.equal(states(0, count), alone)
    assert torch.equal(states(2, count), alone[2:])


@needs_kernels
@torch.inference_mode()
def test_tokens_of_an_image_attend_in_both_directions() -> None:
    loaded = bfloat16_model("gemma3_text")
    cache = cache_for(loaded)
    decoder = NativeDecoder(loaded, cache)
    num_tokens, groups = 20, len(cache.groups)
    starts, tables = [0, num_tokens], torch.tensor([[0, 1]], dtype=torch.int32)
    ids_1T, positions_1T = torch.arange(num_tokens)[None] * 7 % 300, torch.arange(num_tokens)[None]

    def logits(stops: dict[int, int]) -> tuple[Tensor, Tensor]:
        metadata = AttentionMetadata.pack(
            [*range(num_tokens)] * groups, starts, [num_tokens], [0] * groups, tables, num_decodes=0, num_groups=groups, key_stops=stops
        )
        _, _, own_TV = native._own_pass(decoder.form.modules, loaded.model, ids_1T, positions_1T, metadata)
        given = decoder(ids_1T, position_ids=positions_1T, attention_metadata=metadata)
        return given.logits[0].float(), own_TV.float()

    (causal, _), (given, own) = logits({}), logits(dict.fromkeys(range(4, 12), 12))
    assert (given - own).norm() / own.norm() < 3e-2
    assert (given - causal)[4:].norm() / own.norm() > 0.1


@needs_kernels
def test_a_quantized_embedding_is_scaled_as_the_models_own_is() -> None:
    model = tiny_model("gemma3_text", head_dim=64, hidden_size=64, tie_word_embeddings=True).bfloat16()
    ids, own = torch.arange(40), model.get_input_embeddings()
    quantize_plain(model, "int8")
    embedding = model.get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    expected = own(ids).float()
    assert (embedding(ids).float() - expected).norm() / expected.norm() < 1e-2
    fuse_linears(model)
    loaded = loaded_model(model)
    assert install_native_decoder(loaded, cache_for(loaded))


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
@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("llama", "model.layers.1.mlp"),
        ("llama", "model.layers.2.input_layernorm"),
        ("llama", "model.norm"),
        ("llama", "model.layers.0.self_attn.o_proj"),
        ("qwen3_moe", "model.layers.1.mlp.experts"),
    ],
)
def test_a_part_that_computes_something_else_under_its_name_is_found_out(name: str, part: str, caplog: pytest.LogCaptureFixture) -> None:
    loaded = bfloat16_model(name)
    loaded.model.get_submodule(part).register_forward_hook(lambda _module, _args, output: output * 1.2)
    caplog.set_level("INFO", logger=native.__name__)
    assert not install_native_decoder(loaded, cache_for(loaded))
    assert "gives something else" in caplog.text


@needs_kernels
@pytest.mark.parametrize("is_taken", [True, False])
def test_large_numbers_hide_nothing_of_what_a_layer_does(is_taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = bfloat16_model("smollm3")
    if not is_taken:
        monkeypatch.setattr(form, "NO_ROPE", 0)  # its second layer is then rotated, too
    loaded.model.get_input_embeddings().get_parameter("weight").mul_(300)
    assert install_native_decoder(loaded, cache_for(loaded)) is is_taken


@needs_kernels
@pytest.mark.parametrize(("beta", "is_taken"), [(0.0, True), (0.05, False), (0.5, False)])
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


def scaled(router: Any) -> None:
    own = router.forward

    def forward(x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_TE, weights_TK, chosen_TK = own(x_TH)
        return logits_TE, weights_TK * 1.2, chosen_TK

    router.forward = forward


def biased(router: Any) -> None:
    router.register_buffer("e_score_correction_bias", torch.zeros(4))


def returns_two(router: Any) -> None:
    router.forward = lambda x_TH: (x_TH, x_TH)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (scaled, "its router weighs or chooses experts in another way"),
        (biased, "its router is of another kind"),
        (returns_two, "its router is of another kind"),
    ],
)
def test_routers_of_other_kinds_run_as_they_are(change: Callable[[Any], None], reason: str) -> None:
    loaded = bfloat16_model("qwen3_moe")
    change(loaded.model.get_submodule("model.layers.1.mlp.gate"))
    with pytest.raises(UnsuitableModel, match=reason):
        form.read_form(loaded.model, 3)


@pytest.mark.parametrize("normalizes", [True, False])
def test_whether_the_weights_of_experts_add_up_to_one_is_read_from_the_router(normalizes: bool) -> None:
    loaded = loaded_model(tiny_model("qwen3_moe", norm_topk_prob=normalizes, head_dim=64, hidden_size=64).bfloat16())
    assert {layer.mixture.normalizes for layer in form.read_form(loaded.model, 3).layers if layer.mixture} == {normalizes}
    assert install_native_decoder(loaded, cache_for(loaded))


def test_experts_with_a_gate_of_their_own_run_as_they_are() -> None:
    loaded = bfloat16_model("qwen3_moe")
    experts: Any = loaded.model.get_submodule("model.layers.1.mlp.experts")

    class Clamped(type(experts.own)):  # type: ignore[misc]
        def _apply_gate(self, gate_up: Tensor) -> Tensor:
            gate, up = gate_up.clamp(-7, 7).chunk(2, dim=-1)
            return nn.functional.silu(gate) * up

    experts.own.__class__ = Clamped
    with pytest.raises(UnsuitableModel, match="its experts have a gate of another kind"):
        form.read_form(loaded.model, 3)


@pytest.mark.parametrize("name", ["starcoder2", "arcee", "nanochat"])
def test_models_whose_mlp_has_no_gate_run_as_they_are(name: str) -> None:
    settings = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model(name, **settings, head_dim=64, vocab_size=320)
    loaded = loaded_model(AutoModelForCausalLM.from_config(config).bfloat16().eval())  # type: ignore[no-untyped-call]
    with pytest.raises(UnsuitableModel):
        form.read_form(loaded.model, 2)
    assert not install_native_decoder(loaded, cache_for(loaded))


@needs_kernels
def test_some_layers_may_have_experts_and_others_none() -> None:
    loaded = loaded_model(tiny_model("qwen3_moe", mlp_only_layers=[1], head_dim=64, hidden_size=64).bfloat16())
    assert install_native_decoder(loaded, cache_for(loaded))
    assert [layer.mixture is None for layer in form.read_form(loaded.model, 3).layers] == [False, True, False]


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
