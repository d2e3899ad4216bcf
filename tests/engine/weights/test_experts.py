"""Experts in few bits compute what their codes stand for, however rows are spread over them."""

import copy
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.loader import load_model
from penstock.engine.weights import experts as experts_module
from penstock.engine.weights.experts import (
    GroupedExperts,
    GroupedLinear,
    GroupedWeight,
    has_experts,
    pack_experts,
    quantize_experts,
)
from penstock.engine.weights.linear import QuantizedLinear, can_quantize
from penstock.engine.weights.packed import pack
from penstock.engine.weights.quantization import quantize_plain, quantized_layers
from tests.engine.weights.checkpoints import FORMATS, write_checkpoint
from tests.engine.weights.sample_weights import ALL_TYPES, random_weight
from tests.engines import core_over, run
from tests.tiny_models import tiny_model

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe")


def all_experts(model: PreTrainedModel) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, GroupedExperts) or has_experts(module)}


def dequantized(linear: object) -> Tensor:
    """[E, outputs, inputs]"""
    assert isinstance(linear, GroupedLinear)
    num_experts = len(linear.grouped[0].blocks)
    parts = [torch.stack([part.of_expert(e).unpacked().dequantized() for e in range(num_experts)]) for part in linear.grouped]
    return torch.cat(parts, dim=1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_of_every_family_compute_with_what_their_codes_stand_for(name: str, bits: int) -> None:
    plain = tiny_model(name).requires_grad_(False)
    model = copy.deepcopy(plain)
    num_layers = len(all_experts(plain))
    assert quantize_experts(model, bits) == num_layers > 0
    generator = torch.Generator().manual_seed(0)
    for path, own in all_experts(plain).items():
        quantized = model.get_submodule(path)
        assert isinstance(quantized, GroupedExperts)
        for parameter, linear in (("gate_up_proj", quantized.up), ("down_proj", quantized.down)):
            weight_EOI = dequantized(linear)
            getattr(own, parameter).copy_(weight_EOI.transpose(1, 2) if own.is_transposed else weight_EOI)
        x_TI = torch.randn(7, 64, generator=generator)
        chosen_TK = torch.stack([torch.randperm(own.num_experts, generator=generator)[:2] for _ in range(7)])
        weights_TK = torch.rand(7, 2, generator=generator)
        expected, got = own(x_TI, chosen_TK, weights_TK), quantized(x_TI, chosen_TK, weights_TK)
        assert float((got - expected).norm() / expected.norm()) < 0.03  # inputs are rounded to 8 bits
    assert not any(parameter.dim() == 3 for parameter in model.parameters())


@pytest.mark.parametrize("name", [*ALL_TYPES])
def test_a_grouped_product_is_that_of_each_expert_alone(name: str) -> None:
    """To the bit, of every type, with experts without rows and weights of two types side by side."""
    weights = [[random_weight(kind, 24, 256, seed=seed) for seed in range(4)] for kind in (name, "Q8_0")]
    packed = [[pack(weight) for weight in own] for own in weights]
    grouped = [GroupedWeight(own[0].type_name, 24, torch.stack([each.blocks for each in own])) for own in packed]
    bias_EO = torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    x_SI = torch.randn(12, 256, generator=torch.Generator().manual_seed(0))
    starts = [0, 1, 1, 8, 12]
    for dtype in (torch.float32, torch.bfloat16):
        bias, x = bias_EO.to(dtype), x_SI.to(dtype)
        got = GroupedLinear(grouped, bias)(x, torch.tensor(starts))
        for expert, (first, end) in enumerate(itertools.pairwise(starts)):
            alone = QuantizedLinear([own[expert] for own in packed], bias[expert])
            assert torch.equal(got[first:end], alone(x[first:end]))


@pytest.mark.skipif(not can_quantize(), reason="there are no native kernels")
@pytest.mark.parametrize("name", FAMILIES)
def test_experts_in_bfloat16_compute_what_transformers_computes(name: str) -> None:
    exact = tiny_model(name).requires_grad_(False)
    plain, packed = copy.deepcopy(exact).bfloat16(), copy.deepcopy(exact).bfloat16()
    assert pack_experts(packed) == len(all_experts(exact))
    assert not any(parameter.dim() == 3 for parameter in packed.parameters())
    generator = torch.Generator().manual_seed(0)
    for path, own in all_experts(exact).items():
        x_TI = torch.randn(9, 64, generator=generator)
        chosen_TK = torch.stack([torch.randperm(own.num_experts, generator=generator)[:2] for _ in range(9)])
        weights_TK = torch.rand(9, 2, generator=generator)
        expected_TI = own(x_TI, chosen_TK, weights_TK)
        theirs, ours = (
            (model.get_submodule(path)(x_TI.bfloat16(), chosen_TK, weights_TK.bfloat16()).float() - expected_TI).norm()
            for model in (plain, packed)
        )
        assert float(ours) < 1.1 * float(theirs)


def test_the_portable_code_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_EOI = torch.randn(3, 16, 64, generator=torch.Generator().manual_seed(0))
    linear = GroupedLinear([GroupedWeight.rounded(weight_EOI, 8)], None)
    x_SI, starts_E = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 2, 2, 5])
    monkeypatch.setattr(experts_module, "native_library", lambda: None)
    got = linear(x_SI, starts_E)
    expected = torch.cat([x_SI[:2] @ dequantized(linear)[0].T, x_SI[2:] @ dequantized(linear)[2].T])
    torch.testing.assert_close(got, expected)


def test_a_row_does_not_depend_on_the_others_of_a_step() -> None:
    model = tiny_model("qwen3_moe").requires_grad_(False)
    quantize_experts(model, 4)
    experts = model.get_submodule("model.layers.0.mlp.experts")
    generator = torch.Generator().manual_seed(0)
    x_TI = torch.randn(9, 64, generator=generator)
    chosen_TK = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(9)])
    weights_TK = torch.rand(9, 2, generator=generator)
    together = experts(x_TI, chosen_TK, weights_TK)
    alone = [experts(x_TI[row, None], chosen_TK[row, None], weights_TK[row, None]) for row in range(9)]
    assert torch.equal(together, torch.cat(alone))


def test_each_experts_layers_are_counted_and_uneven_ones_stay_as_they_are() -> None:
    model = tiny_model("qwen3_moe").requires_grad_(False)
    plain = tiny_model("llama").requires_grad_(False)
    quantize_plain(model, "int4")
    quantize_plain(plain, "int4")
    attention = 4 * 3
    assert quantized_layers(model)["Q4_1"] == attention + 3 * 2 * 4
    uneven = tiny_model("qwen3_moe", moe_intermediate_size=40).requires_grad_(False)
    assert quantize_experts(uneven, 4) == 0
    assert uneven.get_parameter("model.layers.0.mlp.experts.gate_up_proj").dim() == 3


TOKENS = torch.arange(3, 40)[None]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@pytest.fixture
def mxfp4_dir(tmp_path: Path) -> Path:
    write_mxfp4_experts(tmp_path)
    return tmp_path


def write_mxfp4_experts(directory: Path) -> None:
    """A directory as those of gpt-oss: each projection's codes [E, outputs, inputs / 32, 16], two in a byte, and exponents of groups."""
    tiny_model("gpt_oss").save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        shape = (num_experts, outputs, inputs // 32, 16)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (directory / "config.json").write_text(json.dumps(config))


def mxfp4_reference(directory: Path) -> PreTrainedModel:
    """The model with what the codes stand for."""
    model = tiny_model("gpt_oss").requires_grad_(False)
    tensors = load_file(directory / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        bytes_EOGB, exponents_EOG = tensors[f"{name}_blocks"].int(), tensors[f"{name}_scales"].float()
        codes_EOGS = torch.stack([bytes_EOGB & 15, bytes_EOGB >> 4], dim=-1).flatten(-2)
        weight_EOI = (E2M1[codes_EOGS] * 2.0 ** (exponents_EOG[..., None] - 127)).flatten(2)
        model.get_parameter(name).copy_(weight_EOI.transpose(1, 2))
    return model


def test_gpt_oss_in_mxfp4_is_served_from_its_codes(mxfp4_dir: Path) -> None:
    reference = mxfp4_reference(mxfp4_dir)
    tensors = load_file(mxfp4_dir / "model.safetensors")
    exact = load_model(mxfp4_dir, "float32", "cpu", quantization="none", attn_implementation="eager").model
    served = load_model(mxfp4_dir, "float32", "cpu", attn_implementation="eager").model
    with torch.inference_mode():
        expected_TV, exact_TV, served_TV = (model(TOKENS).logits[0] for model in (reference, exact, served))
    torch.testing.assert_close(exact_TV, expected_TV, rtol=0, atol=1e-5)
    deviation_T = (served_TV - expected_TV).norm(dim=-1) / (expected_TV - expected_TV.mean(-1, keepdim=True)).norm(dim=-1)
    assert float(deviation_T.median()) < 0.05  # inputs are rounded to 8 bits, and few tokens go to other experts
    assert quantized_layers(served) == {"MXFP4": 3 * 2 * 4}
    rounded = load_model(mxfp4_dir, "float32", "cpu", quantization="int8", attn_implementation="eager").model
    assert quantized_layers(rounded) == {"MXFP4": 3 * 2 * 4, "Q8_0": 3 * 4 + 1}
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if name.endswith(("_blocks", "_scales")))
    assert sum(buffer.nbytes for name, buffer in served.named_buffers() if name.endswith("blocks")) == stored


def test_gpt_oss_in_mxfp4_says_what_its_dequantized_weights_say(mxfp4_dir: Path) -> None:
    answers = []
    prompt = TOKENS[0].tolist()
    for quantization in ("none", "auto"):
        loaded = load_model(mxfp4_dir, "float32", "cpu", max_len=128, quantization=quantization)
        core = core_over(loaded)
        (result,) = run(core, [prompt], max_tokens=8, forced=range(8))
        core.runner.shutdown()
        answers.append(result.logits_TV.softmax(-1))
    assert float((answers[0] - answers[1]).abs().sum(-1).median()) < 0.1


def test_experts_that_are_not_all_there_are_refused(mxfp4_dir: Path) -> None:
    tensors = load_file(mxfp4_dir / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    for part in ("blocks", "scales"):
        tensors[f"{name}_{part}"] = tensors[f"{name}_{part}"][:3].contiguous()
    save_file(tensors, mxfp4_dir / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigurationError, match=r"model\.layers\.1\.mlp\.experts: not all of its 4 experts"):
        load_model(mxfp4_dir, "float32", "cpu")


@pytest.mark.parametrize("name", ["gptq", "awq", "gptq-order", "mxfp4", "fp8-deepseek"])
def test_a_checkpoint_with_matrices_of_each_expert_is_read(name: str, tmp_path: Path) -> None:
    plain = tiny_model("qwen3_moe", hidden_size=128, moe_intermediate_size=128, head_dim=64, num_hidden_layers=2, num_attention_heads=2)
    tensors = dict(plain.state_dict())
    for path, experts in all_experts(plain).items():
        gate_EOI, up_EOI = tensors.pop(f"{path}.gate_up_proj").chunk(2, dim=1)
        parts = {"gate_proj": gate_EOI, "up_proj": up_EOI, "down_proj": tensors.pop(f"{path}.down_proj")}
        for part, weight_EOI in parts.items():
            tensors |= {f"{path}.{expert}.{part}.weight": weight_EOI[expert].bfloat16() for expert in range(experts.num_experts)}
    stored: Any = SimpleNamespace(state_dict=lambda: tensors, config=plain.config)
    weights = write_checkpoint(tmp_path, stored, FORMATS[name])
    exact = load_model(tmp_path, "float32", "cpu", quantization="none", attn_implementation="eager").model
    served = load_model(tmp_path, "float32", "cpu", attn_implementation="eager").model
    for path, experts in all_experts(exact).items():
        for part, parameter in (("gate_proj", experts.gate_up_proj[:, :128]), ("up_proj", experts.gate_up_proj[:, 128:])):
            assert torch.equal(parameter, torch.stack([weights[f"{path}.{expert}.{part}.weight"].float() for expert in range(4)]))
        assert torch.equal(experts.down_proj[3], weights[f"{path}.3.down_proj.weight"].float())
    assert isinstance(served.get_submodule("model.layers.1.mlp.experts"), GroupedExperts) == (name != "gptq-order")
    with torch.inference_mode():
        expected_TV, served_TV = (model(TOKENS).logits[0] for model in (exact, served))
    assert float(((served_TV - expected_TV).norm(dim=-1) / expected_TV.norm(dim=-1)).median()) < 0.06
