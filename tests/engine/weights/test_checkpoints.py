"""Checkpoints of quantization tools: read exactly, computed from their codes, and refused by the name of what is not served."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from penstock.engine.build import load
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.loader import LoadedModel, load_model
from penstock.engine.model.native import NativeDecoder
from penstock.engine.model.prepared import PreparedFiles
from penstock.engine.system.cache import cache_directory
from penstock.engine.weights.float8 import Float8Linear, pack_float8
from penstock.engine.weights.linear import QuantizedLinear, can_quantize
from penstock.engine.weights.quantization import quantized_layers
from tests.engine.weights.checkpoints import (
    DYNAMIC,
    FORMATS,
    Tensors,
    change_config,
    change_tensors,
    compressed_tensors,
    int_weights,
    pack_quantized,
    write_checkpoint,
)
from tests.engines import Run, core_over, run
from tests.tiny_models import tiny_model
from tests.tiny_multimodal import write_multimodal_model

PROMPTS = [[7, 8, 9], list(range(40, 90))]
SAID = list(range(200, 208))
LAYER = "model.layers.0.self_attn.q_proj"
needs_kernels = pytest.mark.skipif(not can_quantize(), reason="there is no C++ compiler here")


def small_model(name: str = "llama", **settings: Any) -> PreTrainedModel:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    return tiny_model(name, **(sizes | {"num_hidden_layers": 2} | settings)).bfloat16()


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_is_dequantized_exactly(name: str, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path, small_model(), FORMATS[name])
    model = load_model(tmp_path, "float32", "cpu", quantization="none", attn_implementation="eager").model
    assert quantized_layers(model) == {}
    for each, expected in weights.items():
        assert torch.equal(model.get_parameter(each), expected.float()), each


@pytest.mark.parametrize("name", ["gptq-int8-asymmetric", "pack-int8-asymmetric", "w8a8-asymmetric", "gptq-asymmetric", "awq"])
@pytest.mark.parametrize("sign", [1, -1])
def test_zero_points_at_either_end_of_the_codes_are_exact(sign: int, name: str, tmp_path: Path) -> None:
    """0 and 255 of 8 bits, of groups without any negative or any positive weights."""
    model = small_model(num_hidden_layers=1)
    model.load_state_dict({each: sign * weight.abs() for each, weight in model.state_dict().items()})
    weights = write_checkpoint(tmp_path, model, FORMATS[name])
    layer = load_model(tmp_path, "float32", "cpu").model.get_submodule(LAYER)
    assert isinstance(layer, QuantizedLinear)
    assert torch.equal(layer.packed[0].dequantized(), weights[f"{LAYER}.weight"].float())


CONFIG = EngineConfig(kv_cache_memory=2**20, dtype="bfloat16")


def answers(loaded: LoadedModel, forced: Sequence[int] = ()) -> list[Run]:
    core = core_over(loaded, enable_prefix_caching=False)
    assert isinstance(loaded.model.forward, NativeDecoder)
    runs = run(core, PROMPTS, max_tokens=8, temperature=0.0, forced=forced)
    core.runner.shutdown()
    return runs


@needs_kernels
@pytest.mark.parametrize("name", ["gptq", "gptq-order", "awq", "w8a8", "w8a8-asymmetric", "mxfp4", "fp8-deepseek", "fp8-static"])
def test_a_checkpoint_computes_what_its_dequantized_weights_do(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored, plain = FORMATS[name], small_model()
    plain.load_state_dict(write_checkpoint(tmp_path / "few_bits", plain, stored))
    plain.save_pretrained(tmp_path / "plain")
    with caplog.at_level(logging.INFO):
        loaded = load(tmp_path / "few_bits", CONFIG)
    assert tuple(quantized_layers(loaded.model)) == stored.types
    assert "14 quantized matrices: 14 " in caplog.text
    assert "UNEXPECTED" not in caplog.text
    expected = answers(load(tmp_path / "plain", CONFIG), SAID)
    for given, wanted in zip(answers(loaded, SAID), expected, strict=True):
        # The median of the tokens: of random weights, a few attend elsewhere.
        deviation = ((given.logits_TV - wanted.logits_TV).norm(dim=-1) / wanted.logits_TV.norm(dim=-1)).median()
        assert deviation == 0 if "FP8" in stored.types else deviation < 0.06  # inputs are rounded to 8 bits


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fp8-static", "(input_scale, k_scale, v_scale) are not used: "),
        ("fp8-static-inv", "(activation_scale) are not used: "),
        ("fp8-static-tensor", "(input_scale, k_scale, v_scale) are not used: "),
        ("w8a8-static", "(input_scale, input_zero_point) are not used: "),
    ],
)
def test_one_line_of_the_log_says_that_scales_of_a_calibration_are_not_used(
    name: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, small_model(), FORMATS[name])
    with caplog.at_level(logging.INFO):
        load_model(tmp_path, "float32", "cpu")
    assert caplog.text.count("scales of activations and of the KV cache") == 1
    assert said in caplog.text
    assert "UNEXPECTED" not in caplog.text


@pytest.mark.parametrize("place", ["self_attn.k_scale", "self_attn.k_proj.k_scale", "self_attn.k_proj.output_scale"])
@pytest.mark.parametrize("shape", [(), (1,), (2, 1, 1)])
def test_scales_of_keys_may_be_wherever_tools_write_them(
    place: str, shape: tuple[int, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), FORMATS["fp8-tensor"])
    change_tensors(tmp_path, lambda tensors: tensors.update({f"model.layers.0.{place}": torch.ones(shape)}))
    load_model(tmp_path, "float32", "cpu")
    assert "UNEXPECTED" not in caplog.text


@needs_kernels
@pytest.mark.parametrize("scale_columns", [64, 128, 320])
def test_a_row_in_fp8_does_not_depend_on_the_others(scale_columns: int) -> None:
    torch.manual_seed(0)
    codes = torch.randn(80, 320).to(torch.float8_e4m3fn)
    layer = Float8Linear(pack_float8(codes, torch.rand(80, -(-320 // scale_columns)), scale_columns), torch.randn(80).bfloat16())
    x = torch.randn(40, 320).bfloat16()
    whole = layer(x)
    for num_rows in (0, 1, 2, 3, 4, 13):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])


@needs_kernels
@pytest.mark.parametrize("name", ["gptq-order", "pack-order"])
def test_layers_of_one_input_share_an_order_and_are_fused(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), FORMATS[name])
    loaded = load(tmp_path, CONFIG)
    fused = [module for path, module in loaded.model.named_modules() if path.endswith("q_proj.fused.linear")]
    assert len(fused) == 2
    assert all(isinstance(layer, QuantizedLinear) and layer.order is not None for layer in fused)


@needs_kernels
@pytest.mark.parametrize("name", ["gptq-order", "awq", "fp8-deepseek"])
def test_a_prepared_checkpoint_computes_the_same_to_the_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, cache = tmp_path / "model", tmp_path / "cache"
    cache.mkdir()
    (cache / "native").symlink_to(cache_directory() / "native")
    monkeypatch.setenv("PENSTOCK_CACHE", str(cache))
    write_checkpoint(directory, small_model(), FORMATS[name])
    loaded = load(directory, CONFIG)
    expected = answers(loaded)
    files = PreparedFiles.of(directory, CONFIG)
    assert files is not None
    files.write(loaded, {})
    description = files.read()
    assert description is not None
    prepared = files.load(description)
    assert prepared is not None
    for given, wanted in zip(answers(prepared), expected, strict=True):
        assert torch.equal(given.logits_TV, wanted.logits_TV)


def test_stored_weights_of_more_bits_are_rounded_where_fewer_are_asked_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), FORMATS["fp8-deepseek"])
    assert quantized_layers(load_model(tmp_path, "float32", "cpu", quantization="int4").model) == {"Q4_1": 14, "Q8_0": 1}
    assert quantized_layers(load_model(tmp_path, "float32", "cpu", quantization="int8").model) == {"FP8": 14, "Q8_0": 1}


def test_an_output_layer_and_layers_of_another_group_may_be_quantized_too(tmp_path: Path) -> None:
    """As llm-compressor writes where some layers have more bits than others."""
    eight, four = FORMATS["pack-int8"], FORMATS["pack"]
    weights = write_checkpoint(tmp_path, small_model(), four)
    packed, expected = eight.pack(weights["lm_head.weight"].float(), torch.zeros(128).long())

    def quantize_head(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{part}": tensor for part, tensor in packed.items()})

    def describe_head(config: dict[str, Any]) -> None:
        given = config["quantization_config"]
        given["ignore"] = []
        given["config_groups"]["group_1"] = {**eight.config["config_groups"]["group_0"], "targets": ["re:.*lm_head"]}

    change_tensors(tmp_path, quantize_head)
    change_config(tmp_path, describe_head)
    model = load_model(tmp_path, "float32", "cpu", quantization="auto").model
    assert quantized_layers(model) == {"Q4_0": 14, "Q8_0": 1}
    head = model.get_submodule("lm_head")
    assert isinstance(head, QuantizedLinear)
    assert torch.equal(head.packed[0].dequantized(), expected)


def test_a_bias_of_zeros_is_ignored_where_the_layer_has_none_and_another_is_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, small_model(), FORMATS["gptq"])
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.zeros(128).half()}))
    load_model(tmp_path, "float32", "cpu")
    change_tensors(tmp_path, lambda tensors: tensors.update({f"{LAYER}.bias": torch.ones(128).half()}))
    with pytest.raises(ConfigurationError, match=f"{LAYER}.bias: there is a bias for a layer without one"):
        load_model(tmp_path, "float32", "cpu")


@pytest.mark.parametrize("name", ["gptq", "fp8-rows"])
def test_biases_of_a_models_own_are_kept(name: str, tmp_path: Path) -> None:
    weights = write_checkpoint(tmp_path, small_model("qwen2", num_hidden_layers=3), FORMATS[name])
    model = load_model(tmp_path, "float32", "cpu").model
    assert torch.equal(model.get_parameter(f"{LAYER}.bias"), weights[f"{LAYER}.bias"].float())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava", "qwen3_5"])
def test_weights_that_the_model_calls_otherwise_find_their_places(family: str, tmp_path: Path) -> None:
    """As of multimodal models, whose language model older files have under another name."""
    write_multimodal_model(tmp_path, family)
    expected: Tensors = {}

    def quantize(tensors: Tensors) -> None:
        if family == "qwen3_5":
            packed, _ = pack_quantized(4, 32, False)(torch.zeros(64, 64), torch.zeros(0))
            tensors.update({f"mtp.layers.0.self_attn.o_proj.{part}": tensor for part, tensor in packed.items()})
        for name in [name for name in tensors if name.endswith("_proj.weight") and "vis" not in name]:
            weight = tensors.pop(name)
            packed, expected[name.rpartition("layers.")[2]] = pack_quantized(4, 32, False)(weight.float(), torch.zeros(0))
            tensors.update({f"{name.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()})

    change_tensors(tmp_path, quantize)
    config = compressed_tensors("pack-quantized", int_weights(4, 32, False))
    change_config(tmp_path, lambda content: content.update(quantization_config=config))
    loaded = load_model(tmp_path, "float32", "cpu")
    assert loaded.vision is not None
    assert quantized_layers(loaded.model) == {"Q5_0": len(expected)}
    for name, weight in expected.items():
        layer = loaded.model.get_submodule(f"model.layers.{name.removesuffix('.weight')}")
        assert isinstance(layer, QuantizedLinear)
        assert torch.equal(layer.packed[0].dequantized(), weight)


@needs_kernels
@pytest.mark.parametrize(("stored", "name"), [("fp8-deepseek", "deepseek_v3"), ("fp8-static", "mixtral"), ("gptq-int8", "qwen3_moe")])
def test_experts_are_computed_from_their_codes(stored: str, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    few_bits, plain = tmp_path / "few_bits", tmp_path / "plain"
    heads: dict[str, Any] = {} if name == "deepseek_v3" else {"head_dim": 64}  # of which native code computes all layers
    for directory in (few_bits, plain):
        tiny_model(name, moe_intermediate_size=64, **heads).bfloat16().save_pretrained(directory)
    expected: Tensors = {}

    def quantize(tensors: Tensors) -> None:
        for each in [each for each in tensors if each.endswith("_proj.weight") or ".experts." in each]:
            packed, weight = FORMATS[stored].pack(tensors.pop(each).float(), torch.zeros(64))
            tensors.update({f"{each.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()})
            expected[each] = weight.bfloat16()

    change_tensors(few_bits, quantize)
    change_tensors(plain, lambda tensors: tensors.update(expected))
    change_config(few_bits, lambda content: content.update(quantization_config=FORMATS[stored].config))
    runs = []
    for directory in (few_bits, plain):
        loaded = load(directory, CONFIG)
        assert tuple(quantized_layers(loaded.model)) == (FORMATS[stored].types if directory == few_bits else ())
        core = core_over(loaded, enable_prefix_caching=False)
        assert isinstance(loaded.model.forward, NativeDecoder) == bool(heads)
        runs.append(run(core, PROMPTS, max_tokens=8, temperature=0.0, forced=SAID))
        core.runner.shutdown()
    assert "UNEXPECTED" not in caplog.text
    for given, wanted in zip(*runs, strict=True):
        deviation = ((given.logits_TV - wanted.logits_TV).norm(dim=-1) / wanted.logits_TV.norm(dim=-1)).median()
        assert deviation == 0 if "FP8" in FORMATS[stored].types else deviation < 0.06


@pytest.mark.parametrize("stored", ["awq", "fp8-rows"])
@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            {"gate_proj": (64, 128), "up_proj": (192, 128)},
            r"experts\.0\.gate_proj\.weight: there is a quantized weight of shape \(64, 128\)",
        ),
        ({"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}, r"gate_proj\.weight: .* of shape \(128, 256\)"),
        ({"down_proj": (128, 256)}, r"experts\.0\.down_proj\.weight: .* of shape \(128, 256\) for an expert's of shape \(128, 128\)"),
    ],
)
def test_experts_of_another_size_than_the_models_are_refused_by_name(
    stored: str, sizes: dict[str, tuple[int, int]], said: str, tmp_path: Path
) -> None:
    small_model("qwen3_moe", num_hidden_layers=1, moe_intermediate_size=128).save_pretrained(tmp_path)

    def quantize(tensors: Tensors) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            whole = tensors.pop(name)
            weight = torch.ones(sizes.get(name.split(".")[-2], whole.shape))
            packed, _ = FORMATS[stored].pack(weight, torch.zeros(weight.shape[1]))
            tensors.update({f"{name.removesuffix('weight')}{part}": tensor for part, tensor in packed.items()})

    change_tensors(tmp_path, quantize)
    change_config(tmp_path, lambda content: content.update(quantization_config=FORMATS[stored].config))
    with pytest.raises(ConfigurationError, match=said):
        load_model(tmp_path, "float32", "cpu")


def field(name: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"].update({name: value})


def part_of_group(part: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda config: config["quantization_config"]["config_groups"]["group_0"].update({part: value})


REFUSED_FIELDS = [
    ("gptq", field("quant_method", "bitsandbytes"), "quant_method is 'bitsandbytes'"),
    ("gptq", field("quant_method", ["gptq"]), "quant_method is"),
    ("gptq", field("quant_method", None), "quant_method is None"),
    ("gptq", field("bits", 3), "bits is 3"),
    ("gptq", field("group_size", 0), "group_size is 0"),
    ("gptq", field("group_size", "128"), "group_size is '128'"),
    ("gptq", field("checkpoint_format", "marlin"), "checkpoint_format is 'marlin'"),
    ("gptq", field("dynamic", {"+:.*": {"bits": 8}}), "dynamic"),
    ("awq", field("version", "gemv"), "version is 'gemv'"),
    ("awq", field("zero_point", False), "zero_point is False"),
    ("awq", field("modules_to_not_convert", ["q_proj"]), f"{LAYER} is quantized, and quantization_config leaves it out"),
    ("fp8-deepseek", field("activation_scheme", "sometimes"), "activation_scheme is 'sometimes'"),
    ("fp8-deepseek", field("fmt", "e5m2"), "fmt is 'e5m2'"),
    ("fp8-deepseek", field("weight_block_size", [128]), "weight_block_size is"),
    ("pack", field("sparsity_config", {"format": "sparse-24-bitmask"}), "sparsity_config.format is 'sparse-24-bitmask'"),
    ("pack", field("format", "nvfp4-pack-quantized"), "format is 'nvfp4-pack-quantized'"),
    ("pack", field("config_groups", {}), "leaves it out"),
    ("w8a8", part_of_group("input_activations", {**DYNAMIC, "dynamic": "global"}), "input_activations.dynamic is 'global'"),
    ("w8a8", part_of_group("output_activations", {"dynamic": 0}), "output_activations.dynamic is 0"),
    ("pack", part_of_group("targets", ["re:("]), "config.json|missing"),
    ("pack", lambda config: config.update(quantization_config=None, compression_config="awq"), "quantization_config is 'awq'"),
]


@pytest.mark.parametrize(("name", "change", "said"), REFUSED_FIELDS)
def test_what_is_not_served_is_refused_by_its_field(
    name: str, change: Callable[[dict[str, Any]], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), FORMATS[name])
    change_config(tmp_path, change)
    monkeypatch.delattr("penstock.engine.model.loader.load_pretrained")  # which reads weights
    with pytest.raises(ConfigurationError, match=said):
        load_model(tmp_path, "float32", "cpu")


def replaced(part: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Tensors], None]:
    def apply(tensors: Tensors) -> None:
        changed = change(tensors.pop(f"{LAYER}.{part}", torch.zeros(1)))
        if changed is not None:
            tensors[f"{LAYER}.{part}"] = changed

    return apply


BROKEN_TENSORS = [
    ("gptq", replaced("scales", lambda _: None), f"{LAYER}.scales is missing"),
    ("gptq", replaced("qzeros", lambda zeros: zeros[:, 1:]), f"{LAYER}.qzeros is I32 of shape"),
    ("gptq", replaced("qweight", lambda codes: codes.float()), f"{LAYER}.qweight is F32"),
    ("gptq", replaced("qweight", lambda codes: codes[1:]), f"{LAYER}: 120 inputs"),
    ("gptq", replaced("g_idx", lambda groups: groups[1:]), f"{LAYER}.g_idx is I32 of shape"),
    ("gptq", replaced("lora_a", lambda _: torch.ones(1)), f"{LAYER}.lora_a is a tensor"),
    ("gptq-order", replaced("g_idx", lambda _: None), f"{LAYER}.g_idx is missing"),
    ("gptq-rows", replaced("qweight", lambda codes: codes[:0]), f"{LAYER}: 0 inputs"),
    ("pack-order", replaced("weight_g_idx", lambda _: None), f"{LAYER}.weight_g_idx is missing"),
    ("pack-int8", replaced("weight_packed", lambda codes: codes[:, :0]), f"{LAYER}: 0 inputs"),
    ("w8a8", replaced("weight", lambda codes: codes.float()), f"{LAYER}.weight_scale is of a quantized weight"),
    ("fp8-rows", replaced("weight", lambda codes: codes.bfloat16()), f"{LAYER}.weight_scale is of a quantized weight"),
    ("awq", replaced("scales", lambda scales: scales.T), f"{LAYER}.scales is F16 of shape"),
    ("w8a8", replaced("input_scale", lambda _: torch.ones(1)), f"{LAYER}.input_scale is a tensor"),
    ("fp8-static", replaced("input_scale", lambda _: torch.ones(128)), f"{LAYER}.input_scale is F32 of shape"),
    ("fp8-static", replaced("input_scale", lambda _: torch.ones(1).int()), f"{LAYER}.input_scale is I32"),
    ("fp8-static", replaced("other_scale", lambda _: torch.ones(1)), f"{LAYER}.other_scale is a tensor"),
    ("fp8-static", replaced("k_scale", lambda _: torch.ones(2, 64)), f"{LAYER}.k_scale is F32 of shape"),
    ("fp8-static", replaced("k_scale", lambda _: torch.ones(1).int()), f"{LAYER}.k_scale is I32"),
    ("fp8-deepseek", replaced("weight_scale_inv", lambda scales: scales.repeat(2, 1)), f"{LAYER}.weight_scale_inv is F32 of shape"),
    ("fp8-rows", replaced("weight", lambda codes: codes.to(torch.float8_e5m2)), f"{LAYER}.weight is F8_E5M2"),
]
BROKEN_NUMBERS = [
    ("gptq", replaced("scales", lambda scales: scales * torch.nan), f"{LAYER} cannot be read: there are scales"),
    ("gptq", replaced("qzeros", lambda zeros: zeros * 0), f"{LAYER} cannot be read: the config calls the weights symmetric"),
    ("gptq-order", replaced("g_idx", lambda groups: groups.clamp(max=2)), f"{LAYER} cannot be read: its groups do not have 32 columns"),
    ("pack", replaced("weight_shape", lambda shape: shape.flip(0) * 2), f"{LAYER} cannot be read: weight_shape"),
    ("mxfp4", replaced("weight_scale", lambda scales: scales | 255), f"{LAYER} cannot be read: there are scales"),
    ("fp8-rows", replaced("weight", lambda codes: (codes.view(torch.uint8) | 127).view(codes.dtype)), f"{LAYER} cannot be read: there are"),
]


@pytest.mark.parametrize(("name", "change", "said"), BROKEN_TENSORS)
def test_a_tensor_that_is_not_what_the_config_says_is_named_before_weights_are_read(
    name: str, change: Callable[[Tensors], None], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), FORMATS[name])
    change_tensors(tmp_path, change)
    monkeypatch.delattr("penstock.engine.model.loader.load_pretrained")
    with pytest.raises(ConfigurationError, match=said):
        load_model(tmp_path, "float32", "cpu")


@pytest.mark.parametrize(("name", "change", "said"), BROKEN_NUMBERS)
def test_numbers_that_cannot_be_are_refused_with_their_layers_name(
    name: str, change: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, small_model(num_hidden_layers=1), FORMATS[name])
    change_tensors(tmp_path, change)
    with pytest.raises(ConfigurationError, match=said):
        load_model(tmp_path, "float32", "cpu")
