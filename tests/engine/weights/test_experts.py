"""Experts in few bits compute what their codes stand for, however rows are spread over them."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.engine.weights import experts as experts_module
from penstock.engine.weights.experts import GroupedLinear, GroupedWeight, QuantizedExperts, has_experts, quantize_experts
from penstock.engine.weights.linear import QuantizedLinear
from penstock.engine.weights.packed import pack
from penstock.engine.weights.quantization import quantize_plain, quantized_layers
from tests.tiny_models import tiny_model
from tests.weights import ALL_TYPES, random_weight

FAMILIES = ("qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3", "gpt_oss", "granitemoe")


def all_experts(model: PreTrainedModel) -> dict[str, Any]:
    return {path: module for path, module in model.named_modules() if isinstance(module, QuantizedExperts) or has_experts(module)}


def dequantized(linear: GroupedLinear) -> Tensor:
    """[E, outputs, inputs]"""
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
        assert isinstance(quantized, QuantizedExperts)
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
    assert uneven.get_submodule("model.layers.0.mlp.experts").gate_up_proj.dim() == 3  # type: ignore[union-attr]
