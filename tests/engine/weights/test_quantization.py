import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engine.config import QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.model.compiled_layers import decoder_layers, layer_kind
from penstock.engine.model.fused import fuse_linears
from penstock.engine.model.layer_compiler import build_skeleton
from penstock.engine.model.loader import LoadedModel, load_model
from penstock.engine.weights.linear import QuantizedEmbedding, QuantizedLinear, pack_linears
from penstock.engine.weights.packed import PackedWeight, QuantizedWeight, pack, quantized
from penstock.engine.weights.quantization import (
    FILE_NAME,
    StoredWeight,
    describe_served,
    quantize_plain,
    quantized_layers,
    quantized_names,
    read_quantized,
    resolve_quantization,
    write_quantized,
)
from tests.engine.weights.sample_weights import random_weight
from tests.engines import core_over, loaded_model, run
from tests.tiny_models import FORMS, tiny_model

TOKENS = torch.arange(3, 40)[None]


def logits(model: PreTrainedModel) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(TOKENS).logits
    return result


def deviation(model: PreTrainedModel, other: PreTrainedModel) -> float:
    """Of a token's logits, relative to how much they differ: the median over tokens, since a few may go to other experts."""
    expected = logits(other)
    return float(((logits(model) - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)).median())


def inflated(model: PreTrainedModel) -> PreTrainedModel:
    """The model with plain layers again, of the weights that its codes stand for."""
    model = copy.deepcopy(model)
    for path, module in list(model.named_modules()):
        replacement: nn.Module
        if isinstance(module, QuantizedLinear):
            replacement = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            replacement.register_parameter("bias", module.bias)
            replacement.weight = nn.Parameter(torch.cat([weight.unpacked().dequantized() for weight in module.packed]))
        elif isinstance(module, QuantizedEmbedding):
            replacement = nn.Embedding.from_pretrained(module.weight.unpacked().dequantized() * module.scale)  # type: ignore[no-untyped-call]
        else:
            continue
        model.set_submodule(path, replacement)
    return model


@pytest.mark.parametrize("mode", ["int4", pytest.param("int8", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", FORMS)
def test_every_architecture_computes_with_what_its_codes_stand_for(name: str, mode: QuantizationMode) -> None:
    model = tiny_model(name).requires_grad_(False)
    quantize_plain(model, mode)
    assert quantized_layers(model)
    assert deviation(model, inflated(model)) < 0.06  # inputs are rounded to 8 bits
    core = core_over(loaded_model(model))
    (result,) = run(core, [TOKENS[0].tolist()], max_tokens=4)
    core.runner.shutdown()
    assert len(result.token_ids) == 4


def test_more_bits_are_nearer_to_the_model_as_it_was() -> None:
    plain = tiny_model("llama").requires_grad_(False)
    models = {mode: copy.deepcopy(plain) for mode in ("int4", "int8")}
    for mode, model in models.items():
        quantize_plain(model, mode)  # type: ignore[arg-type]
    assert deviation(models["int8"], plain) < 0.05
    assert deviation(models["int8"], plain) < deviation(models["int4"], plain) / 4


def test_an_embedding_shares_the_rows_of_the_output_layer_that_it_is_tied_to() -> None:
    model = tiny_model("llama", tie_word_embeddings=True).requires_grad_(False)
    quantize_plain(model, "int4")
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(embedding, QuantizedEmbedding)
    assert isinstance(output, QuantizedLinear)
    assert output.packed == [embedding.weight]
    assert quantized_layers(model) == {"Q4_1": 21, "Q8_0": 1}


def test_an_embedding_on_its_own_and_layers_of_uneven_inputs_stay_as_they_are() -> None:
    model = tiny_model("llama", tie_word_embeddings=False, intermediate_size=80).requires_grad_(False)
    quantize_plain(model, "int8")
    assert type(model.get_input_embeddings()) is nn.Embedding
    for layer in model.get_submodule("model.layers").children():
        assert type(layer.get_submodule("mlp.down_proj")) is nn.Linear
        assert isinstance(layer.get_submodule("mlp.up_proj"), QuantizedLinear)


def stored(weight: QuantizedWeight) -> StoredWeight:
    return StoredWeight(pack(weight), weight.type.name)


def save_stored(directory: Path, model: PreTrainedModel, bits: dict[str, int]) -> dict[str, StoredWeight]:
    """Writes the model with these of its weights in few bits, as conversion does, and gives those back."""
    weights = {name: stored(quantized(model.get_parameter(name).detach(), number)) for name, number in bits.items()}
    left_out = {model.get_parameter(name).data_ptr() for name in weights}
    model.save_pretrained(directory, state_dict={name: t for name, t in model.state_dict().items() if t.data_ptr() not in left_out})
    write_quantized(directory, weights)
    return weights


STORED = {
    "model.embed_tokens.weight": 8,
    "model.layers.0.self_attn.q_proj.weight": 4,
    "model.layers.0.self_attn.k_proj.weight": 4,
    "model.layers.0.self_attn.v_proj.weight": 4,
    "model.layers.1.mlp.gate_proj.weight": 8,
}


@pytest.fixture
def stored_dir(tmp_path: Path) -> Path:
    save_stored(tmp_path, tiny_model("qwen2", tie_word_embeddings=True), STORED)
    return tmp_path


def load(directory: Path, quantization: QuantizationMode, **settings: Any) -> LoadedModel:
    return load_model(directory, "float32", "cpu", quantization=quantization, attn_implementation="eager", **settings)


def test_stored_weights_are_served_as_they_are_or_inflated(stored_dir: Path) -> None:
    plain, few_bits = load(stored_dir, "none").model, load(stored_dir, "auto").model
    assert quantized_layers(plain) == {}
    assert plain.get_parameter("lm_head.weight") is plain.get_parameter("model.embed_tokens.weight")
    assert quantized_layers(few_bits) == {"Q4_1": 3, "Q8_0": 2}
    for name, number in STORED.items():
        module = few_bits.get_submodule(name.removesuffix(".weight"))
        assert isinstance(module, QuantizedEmbedding if "embed" in name else QuantizedLinear)
        packed = module.weight if isinstance(module, QuantizedEmbedding) else module.packed[0]
        assert packed.weight_type.bits == number
        assert torch.equal(packed.unpacked().dequantized(), plain.get_parameter(name))
    assert few_bits.get_submodule("lm_head").packed == [few_bits.get_submodule("model.embed_tokens").weight]
    assert deviation(few_bits, plain) < 0.03
    assert not hasattr(plain.config, "quantization_config")


def test_biases_beside_stored_weights_are_those_of_the_file(stored_dir: Path) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    for mode in ("auto", "none", "int4"):
        assert torch.equal(load(stored_dir, mode).model.get_parameter(name), tiny_model("qwen2").get_parameter(name))


@pytest.mark.parametrize(("mode", "expected"), [("int8", {"Q4_1": 3, "Q8_0": 19}), ("int4", {"Q4_1": 21, "Q8_0": 1})])
def test_stored_weights_of_more_bits_than_were_asked_for_are_rounded(
    stored_dir: Path, mode: QuantizationMode, expected: dict[str, int]
) -> None:
    assert quantized_layers(load(stored_dir, mode).model) == expected


def test_an_embedding_that_scales_its_rows_keeps_its_bits(tmp_path: Path) -> None:
    """Gemma's does."""
    save_stored(tmp_path, tiny_model("gemma3_text", tie_word_embeddings=True), {"model.embed_tokens.weight": 8})
    plain, few_bits = load(tmp_path, "none").model, load(tmp_path, "auto").model
    embedding, ids = few_bits.get_input_embeddings(), torch.arange(9)
    assert isinstance(embedding, QuantizedEmbedding)
    assert isinstance(few_bits.get_output_embeddings(), QuantizedLinear)  # type: ignore[no-untyped-call]
    assert embedding.scale == plain.get_buffer("model.embed_tokens.embed_scale") == 8.0
    assert torch.equal(embedding(ids), plain.get_input_embeddings()(ids))
    assert deviation(few_bits, plain) < 0.03


def test_a_missing_weight_is_still_an_error(stored_dir: Path) -> None:
    names = [name for name in STORED if "q_proj" not in name]
    model = tiny_model("qwen2", tie_word_embeddings=True)
    write_quantized(stored_dir, {name: stored(quantized(model.get_parameter(name).detach(), 8)) for name in names})
    with pytest.raises(ConfigurationError, match=r"lacks 1 of the model's weights: model\.layers\.0\.self_attn\.q_proj\.weight"):
        load(stored_dir, "auto")


@pytest.mark.parametrize("name", ["model.layers.9.odd.weight", "model.norm.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_a_stored_weight_that_the_model_has_no_place_for_is_an_error(stored_dir: Path, name: str) -> None:
    write_quantized(stored_dir, {name: stored(quantized(torch.zeros(2, 32), 8))})
    with pytest.raises(ConfigurationError, match=re.escape(name)):
        load(stored_dir, "auto")


@pytest.mark.parametrize("mode", ["auto", "none"])
@pytest.mark.parametrize("rows", [16, 512])
def test_a_stored_weight_of_another_shape_than_its_layer_is_an_error(stored_dir: Path, mode: QuantizationMode, rows: int) -> None:
    weights = dict(read_quantized(stored_dir, torch.device("cpu")))
    write_quantized(stored_dir, weights | {"model.embed_tokens.weight": stored(quantized(torch.zeros(rows, 64), 8))})
    with pytest.raises(ConfigurationError, match="shape"):
        load(stored_dir, mode)


@pytest.mark.parametrize("mode", ["auto", "none", "int4", "int8"])
def test_a_skeleton_has_the_layers_of_the_loaded_model(stored_dir: Path, mode: QuantizationMode) -> None:
    loaded = load_model(stored_dir, "float32", "cpu", quantization=mode)
    fuse_linears(loaded.model)
    pack_linears(loaded.model)
    core = core_over(loaded)
    skeleton = build_skeleton(stored_dir, torch.float32, mode, 16, False)
    kinds = [[layer_kind(layer) for layer in decoder_layers(model, 3)] for model in (loaded.model, skeleton)]
    assert kinds[0] == kinds[1]
    core.runner.shutdown()


def test_compiled_code_is_told_apart_by_the_bits_of_its_layers(stored_dir: Path) -> None:
    kinds = [
        layer_kind(decoder_layers(build_skeleton(stored_dir, torch.float32, mode, 16, False), 3)[2]) for mode in ("none", "int4", "int8")
    ]
    assert len(set(kinds)) == 3


def test_a_model_without_a_layer_to_round_is_refused(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 2, "head_dim": 12}
    tiny_model("llama", **settings).save_pretrained(tmp_path)
    assert quantized_layers(load(tmp_path, "auto").model) == {}
    with pytest.raises(ConfigurationError, match=r"--quantization int4: this model has no layers"):
        load(tmp_path, "int4")


def test_a_gpu_refuses_to_round_by_name_and_takes_codes_by_default() -> None:
    gpu = torch.device("cuda")
    for mode in ("int4", "int8"):
        with pytest.raises(ConfigurationError, match=f"--quantization {mode} is for models on the CPU"):
            resolve_quantization(mode, gpu)
    assert resolve_quantization("auto", gpu) == "auto"
    assert resolve_quantization("none", gpu) == "none"


def test_without_kernels_few_bits_have_to_be_asked_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("penstock.engine.weights.quantization.can_quantize", lambda: False)
    assert resolve_quantization("auto", torch.device("cpu")) == "none"
    assert caplog.records == []
    assert resolve_quantization("int8", torch.device("cpu")) == "int8"
    assert "slow" in caplog.text


CPU, META = torch.device("cpu"), torch.device("meta")


def weights() -> dict[str, StoredWeight]:
    torch.manual_seed(0)
    names = {"a.weight": "Q4_K", "b.c.weight": "Q8_0"}
    return {name: StoredWeight(pack(random_weight(kind, 5, 256)), kind) for name, kind in names.items()}


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    write_quantized(tmp_path, weights())
    assert quantized_names(tmp_path) == ["a.weight", "b.c.weight"]
    for name, found in read_quantized(tmp_path, CPU):
        assert (found.source, found.shape) == (weights()[name].source, (5, 256))
        expected = weights()[name].packed
        assert isinstance(found.packed, PackedWeight)
        assert isinstance(expected, PackedWeight)
        assert found.packed.type_name == found.source
        assert torch.equal(found.packed.blocks, expected.blocks)
        assert found.packed.blocks.data_ptr() % 64 == 0  # which the kernels read fastest


def test_a_file_holds_no_more_than_its_bits(tmp_path: Path) -> None:
    write_quantized(tmp_path, weights())
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / FILE_NAME).items()}
    assert shapes == {"a.weight": (1, 1, 16 * 144), "b.c.weight": (1, 8, 16 * 34)}


def test_shapes_can_be_read_alone(tmp_path: Path) -> None:
    write_quantized(tmp_path, weights())
    for name, found in read_quantized(tmp_path, META):
        whole = weights()[name].packed
        assert (found.packed.type_name, found.packed.out_features) == (whole.type_name, 5)
        assert (found.packed.blocks.device, found.packed.blocks.dtype, found.packed.blocks.shape) == (META, torch.uint8, whole.blocks.shape)


def test_a_directory_of_plain_weights_has_none(tmp_path: Path) -> None:
    assert quantized_names(tmp_path) == []
    assert list(read_quantized(tmp_path, CPU)) == []


def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"broken")
    with pytest.raises(ConfigurationError, match=FILE_NAME):
        quantized_names(tmp_path)


BLOCKS = torch.zeros(2, 1, 16 * 144, dtype=torch.uint8)


@pytest.mark.parametrize("device", [CPU, META])
@pytest.mark.parametrize(
    ("description", "blocks"),
    [
        (None, BLOCKS),
        ("Q4_K 20", BLOCKS),
        ("Q4_K many Q4_K", BLOCKS),
        ("Q3_K 20 Q3_K", BLOCKS),
        ("Q5_K 20 Q5_K", BLOCKS),
        ("Q4_K 33 Q4_K", BLOCKS),
        ("Q4_K 16 Q4_K", BLOCKS),
        ("Q4_K 20 Q4_K", BLOCKS[0]),
        ("Q4_K 20 Q4_K", BLOCKS.half()),
    ],
)
def test_blocks_that_are_not_what_the_file_says_are_an_error(
    tmp_path: Path, description: str | None, blocks: Tensor, device: torch.device
) -> None:
    save_file({"a": blocks.clone()}, tmp_path / FILE_NAME, None if description is None else {"a": description})
    with pytest.raises(ConfigurationError, match=FILE_NAME):
        list(read_quantized(tmp_path, device))


def test_one_line_says_in_which_type_each_is_served(stored_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "penstock.engine.weights.quantization"):
        load(stored_dir, "auto")
        load(stored_dir, "none")
    assert caplog.messages == [
        "5 quantized matrices: 3 Q4_1 as they are (5 bits per weight), 2 Q8_0 as they are (8.5 bits per weight)",
        "5 quantized matrices: 3 Q4_1 as float32 (dequantized), 2 Q8_0 as float32 (dequantized)",
    ]


def test_a_type_that_is_rounded_is_named() -> None:
    served = {("Q2_K", "Q8_0"): 7, ("Q6_K", "Q6_K"): 1, ("Q4_K", "Q4_K"): 160}
    assert describe_served(served) == (
        "168 quantized matrices: 160 Q4_K as they are (4.5 bits per weight), 7 Q2_K as Q8_0 (8.5 bits per weight), "
        "1 Q6_K as it is (6.562 bits per weight)"
    )
