import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.model.fused import FusedPart, fuse_linears
from penstock.engine.model.layers import decoder_layers, layer_kind
from penstock.engine.model.linear import (
    GROUP_SIZE,
    QuantizedLinear,
    QuantizedWeight,
    can_quantize,
    pack,
    quantize_linears,
    quantized,
    signing_minimums,
    torch_linear,
    unpack,
)
from penstock.engine.model.native import read_linear
from penstock.engine.native.library import FLAGS, SOURCE, find_compiler, processor_features
from tests.tiny_models import tiny_model

ENTRY = """
extern "C" void linear(void* out, void* x, uint8_t* blocks, void* bias, int64_t rows, int64_t groups, int64_t outputs, int64_t bits) {
    quantized_linear_of(bits)(out, x, blocks, bias, rows, groups, outputs, false);
}
"""
needs_kernel = pytest.mark.skipif(not can_quantize(), reason="there is no C++ compiler here")


def random_weight(out_features: int, in_features: int, bits: int) -> QuantizedWeight:
    return quantized(torch.randn(out_features, in_features), bits)


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (16, 64), (17, 32), (50, 96)])
def test_packing_loses_nothing(out_features: int, in_features: int, bits: int) -> None:
    weight = random_weight(out_features, in_features, bits)
    blocks = pack(weight)
    assert blocks.is_contiguous()
    assert blocks.shape == (-(-out_features // 16), in_features // 32, {4: 256 + 64, 5: 320 + 64, 8: 512 + 32}[bits])
    again = unpack(blocks, out_features)
    assert again.bits == bits
    assert torch.equal(again.codes_OI, weight.codes_OI)
    assert torch.equal(again.scales_OG, weight.scales_OG)
    assert torch.equal(again.minimums_OG, weight.minimums_OG)


@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_kernel_a_layer_computes_with_the_weight_that_was_given(dtype: torch.dtype, bits: int) -> None:
    weight = random_weight(2000, 64, bits)
    x, bias = torch.randn(3, 5, 64, dtype=dtype), torch.randn(2000, dtype=dtype)
    expected = nn.functional.linear(x.float(), weight.dequantized(), bias.float()).to(dtype)
    result = torch_linear(x, pack(weight), bias, 2000)
    torch.testing.assert_close(result, expected)


def rounding_bound(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """How far off a result may be because each group of the input has 127 steps to its largest value, and sums are of floats."""
    half_steps_MG = x.unflatten(-1, (-1, GROUP_SIZE)).abs().amax(-1) / 127 / 2  # type: ignore[no-untyped-call]
    sizes_GO = weight.dequantized().unflatten(1, (-1, GROUP_SIZE)).abs().sum(-1).T  # type: ignore[no-untyped-call]
    bound: Tensor = half_steps_MG @ sizes_GO * 1.001 + 1e-5 * (x.abs() @ weight.dequantized().abs().T)
    return bound


@needs_kernel
@pytest.mark.parametrize("bits", [4, 5, 8])
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 32), (16, 64), (33, 96), (70, 576), (130, 32)])
def test_any_number_of_rows_is_computed_as_exactly_as_bytes_allow(out_features: int, in_features: int, bits: int) -> None:
    weight = random_weight(out_features, in_features, bits)
    layer = QuantizedLinear(weight, None)
    x = torch.randn(70, in_features) * torch.logspace(-3, 3, 70)[:, None]
    expected, bound = x @ weight.dequantized().T, rounding_bound(x, weight)
    whole = layer(x)
    assert ((whole - expected).abs() <= bound).all()
    for num_rows in range(71):
        assert torch.equal(layer(x[:num_rows]), whole[:num_rows])
        assert torch.equal(layer(x[70 - num_rows :]), whole[70 - num_rows :])


@needs_kernel
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_what_bytes_represent_is_computed_without_error(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (50, 96), dtype=torch.uint8)
    weight = QuantizedWeight(bits, codes, torch.full((50, 3), 0.25).half(), torch.full((50, 3), -(2.0 ** (bits - 3))).half())
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, ::GROUP_SIZE] = 127.0
    for rows in (x, x[:1], x / 1024, torch.zeros(9, 96)):
        assert torch.equal(QuantizedLinear(weight, None)(rows), rows @ weight.dequantized().T)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_a_bias_is_added_and_types_and_shapes_are_kept(bits: int, dtype: torch.dtype) -> None:
    weight, bias = random_weight(50, 64, bits), torch.randn(50, dtype=dtype)
    layer = QuantizedLinear(weight, bias)
    for shape in [(), (0,), (1,), (2, 7), (1, 0), (3, 1, 2)]:
        x = torch.randn(*shape, 64, dtype=dtype)
        expected = x.float() @ weight.dequantized().T + bias.float()
        result = layer(x)
        assert result.dtype == dtype
        assert result.shape == (*shape, 50)
        bound = rounding_bound(x.float().flatten(0, -2) if shape else x.float()[None], weight).reshape(expected.shape)
        rounding = torch.finfo(dtype).eps / 2
        assert ((result.float() - expected).abs() <= bound + rounding * expected.abs() + 1e-4).all()


@needs_kernel
def test_half_precision_takes_the_kernel_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("penstock.engine.model.linear.torch_linear")
    layer = QuantizedLinear(random_weight(50, 64, 4), None)
    x = torch.randn(7, 64).half()
    assert torch.equal(layer(x), layer(x.float()).half())


@needs_kernel
def test_input_of_any_layout_is_taken() -> None:
    layer = QuantizedLinear(random_weight(50, 64, 4), None)
    for x in (torch.randn(64, 7).T, torch.randn(7, 128)[:, ::2], torch.randn(9, 96)[1::2, 3:67], torch.randn(64).expand(3, 64)):
        assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("bias", [None, torch.ones(50)])
def test_compilers_are_told_the_truth_about_the_operator(bias: Tensor | None) -> None:
    blocks = pack(random_weight(50, 64, 4))
    torch.library.opcheck(torch.ops.penstock.quantized_linear.default, (torch.randn(2, 3, 64), blocks, bias, 50))


@needs_kernel
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_in_its_row(dtype: torch.dtype, value: float) -> None:
    layer = QuantizedLinear(random_weight(50, 64, 4), None)
    x = torch.randn(13, 64, dtype=dtype)
    expected = layer(x)
    x[5, 40] = value
    result = layer(x)
    others = torch.arange(13) != 5
    assert torch.equal(result[others], expected[others])
    assert not result[5].isfinite().any()


@needs_kernel
@pytest.mark.parametrize("factor", [1e-38, 1e-25, 1e30])
def test_inputs_of_extreme_sizes_make_finite_results(factor: float) -> None:
    weight = random_weight(50, 64, 4)
    x = torch.randn(13, 64)
    result = QuantizedLinear(weight, None)(x * factor)
    assert ((result / factor - x @ weight.dequantized().T).abs() <= rounding_bound(x, weight) + (factor < 1e-30) * 1e3).all()


@needs_kernel
@pytest.mark.parametrize("scale", [6e-8, 6e4])
def test_weights_of_extreme_scales_are_computed(scale: float) -> None:
    codes = torch.randint(0, 16, (20, 64), dtype=torch.uint8)
    weight = QuantizedWeight(4, codes, torch.full((20, 2), scale).half(), torch.full((20, 2), -scale).half())
    x = torch.randn(5, 64)
    assert ((QuantizedLinear(weight, None)(x) - x @ weight.dequantized().T).abs() <= rounding_bound(x, weight)).all()


class Attention(nn.Module):
    def __init__(self, k_proj_size: int = 32) -> None:
        super().__init__()
        self.q_proj = nn.Linear(64, 32, bias=False)
        self.k_proj = nn.Linear(64, k_proj_size, bias=False)
        self.v_proj = nn.Linear(64, 17, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("bits", [4, 5, 8])
def test_quantized_layers_are_fused_and_compute_what_they_did(bits: int) -> None:
    module = Attention().requires_grad_(False)
    assert quantize_linears(module, bits) == 3
    x = torch.randn(3, 64)
    expected = module(x)
    assert fuse_linears(module) == 1
    assert isinstance(module.q_proj, FusedPart)
    for result, wanted in zip(module(x), expected, strict=True):
        assert torch.equal(result, wanted)


def test_layers_of_different_bits_are_fused_with_the_most_of_them() -> None:
    """As in GGUF files of type Q4_K_M, where some values have more bits than queries and keys."""
    module = Attention().requires_grad_(False)
    quantize_linears(module, 4, skip=["v_proj"])
    quantize_linears(module, 8)
    x = torch.randn(3, 64)
    *expected, values = module(x)
    assert fuse_linears(module) == 1
    assert read_linear(module.q_proj.fused.linear).bits == 8  # type: ignore[union-attr, arg-type]
    *results, fused_values = module(x)
    assert torch.equal(fused_values, values)
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0.02)


@pytest.mark.parametrize("bits", [4, 5])
def test_a_weight_of_signed_codes_is_exactly_the_same_in_more_bits(bits: int) -> None:
    codes, scales = torch.randint(0, 2**bits, (50, 96), dtype=torch.uint8), torch.rand(50, 3).half()
    weight = QuantizedWeight(bits, codes, scales, signing_minimums(bits, scales))
    wide = QuantizedLinear(weight, None).in_bits(8)
    assert wide.bits == 8
    assert torch.equal(unpack(wide.blocks, 50).dequantized(), weight.dequantized())


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


@needs_kernel
@pytest.mark.parametrize("features", [[], ["-mavx2", "-mfma", "-mf16c"], ["-mavx2", "-mavxvnni"]])
def test_processors_without_these_instructions_compute_the_same(features: list[str], tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    if not all(f" {feature.removeprefix('-m')} " in processor_features().replace("avx_vnni", "avxvnni") for feature in features):
        pytest.skip("this processor has no such instructions")
    source, library_path = tmp_path / "linear.cpp", tmp_path / "linear.so"
    source.write_text(f'#include "{SOURCE.parent / "quantized_linear.h"}"\n' + ENTRY)
    flags = ["-O0", *(flag for flag in FLAGS if flag != "-O3")]
    subprocess.run([compiler, *flags, *features, "-o", str(library_path), str(source)], check=True, capture_output=True)
    library = ctypes.CDLL(str(library_path))
    library.linear.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4
    for bits in (4, 5, 8):
        layer, x = QuantizedLinear(random_weight(50, 96, bits), torch.randn(50)), torch.randn(20, 96)
        result = torch.empty(20, 50)
        assert layer.bias is not None
        pointers = (result.data_ptr(), x.data_ptr(), layer.blocks.data_ptr(), layer.bias.data_ptr())
        library.linear(*pointers, 20, 3, 50, bits)
        torch.testing.assert_close(result, layer(x), rtol=1e-5, atol=1e-5)
