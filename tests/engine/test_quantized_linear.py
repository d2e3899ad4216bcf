import pytest
import torch
from torch import Tensor, nn

from penstock.engine.decoder_layers import decoder_layers, layer_kind
from penstock.engine.fused_linear import FusedPart, fuse_linears
from penstock.engine.quantized_linear import QuantizedLinear, pack, quantize_linears, torch_linear, unpack
from penstock.engine.quantized_weight import QuantizedWeight, quantized
from tests.tiny_models import tiny_model


def random_weight(out_features: int, in_features: int, bits: int) -> QuantizedWeight:
    return quantized(torch.randn(out_features, in_features), bits)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (16, 64), (17, 32), (50, 96)])
def test_packing_loses_nothing(out_features: int, in_features: int, bits: int) -> None:
    weight = random_weight(out_features, in_features, bits)
    blocks = pack(weight)
    assert blocks.is_contiguous()
    assert blocks.shape == (-(-out_features // 16), in_features // 32, 64 * bits + 64)
    again = unpack(blocks, out_features)
    assert again.bits == bits
    assert torch.equal(again.codes_OI, weight.codes_OI)
    assert torch.equal(again.scales_OG, weight.scales_OG)
    assert torch.equal(again.minimums_OG, weight.minimums_OG)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_kernel_a_layer_computes_with_the_weight_that_was_given(dtype: torch.dtype, bits: int) -> None:
    weight = random_weight(2000, 64, bits)
    x, bias = torch.randn(3, 5, 64, dtype=dtype), torch.randn(2000, dtype=dtype)
    expected = nn.functional.linear(x.float(), weight.dequantized(), bias.float()).to(dtype)
    result = torch_linear(x, pack(weight), bias, 2000)
    torch.testing.assert_close(result, expected)


class Attention(nn.Module):
    def __init__(self, k_proj_size: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 32, bias=False)
        self.k_proj = nn.Linear(64, k_proj_size, bias=False)
        self.v_proj = nn.Linear(64, 17, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("bits", [4, 8])
def test_quantized_layers_are_fused_and_compute_what_they_did(bits: int) -> None:
    module = Attention().requires_grad_(False)
    assert quantize_linears(module, bits) == 3
    x = torch.randn(3, 64)
    expected = module(x)
    assert fuse_linears(module) == 1
    assert isinstance(module.q_proj, FusedPart)
    for result, wanted in zip(module(x), expected, strict=True):
        assert torch.equal(result, wanted)


def test_quantized_layers_that_end_within_a_tile_stay_apart() -> None:
    module = Attention(k_proj_size=24).requires_grad_(False)
    quantize_linears(module, 4)
    assert fuse_linears(module) == 0


@pytest.mark.parametrize(("name", "bits"), [("llama", 4), ("qwen2", 8)])
def test_a_model_without_memory_takes_the_same_shape(name: str, bits: int) -> None:
    model = tiny_model(name).requires_grad_(False)
    with torch.device("meta"):
        skeleton = type(model)(model.config).train(False).requires_grad_(False)
    for each in (model, skeleton):
        fuse_linears(each)
        assert quantize_linears(each, bits) > 0
    for layers in zip(decoder_layers(model, 3), decoder_layers(skeleton, 3), strict=True):
        kinds = set(map(layer_kind, layers))
        assert len(kinds) == 1


def test_layers_to_skip_and_those_of_other_sizes_stay() -> None:
    model = nn.ModuleDict({"head": nn.Linear(64, 10), "odd": nn.Linear(33, 32), "other": nn.Linear(32, 33)})
    assert quantize_linears(model, 4, skip=["head"]) == 1
    assert [type(layer) for layer in model.values()] == [nn.Linear, nn.Linear, QuantizedLinear]
