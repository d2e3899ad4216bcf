import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.model.compiled_layers import decoder_layers, layer_kind
from penstock.engine.model.form import read_linear
from penstock.engine.model.fused import FusedPart, fuse_linears
from penstock.engine.native.runtime import FLAGS, SOURCE, find_compiler, processor_features
from penstock.engine.weights.linear import QuantizedLinear, can_quantize, quantize_linears, torch_linear
from penstock.engine.weights.packed import GROUP_SIZE, ROUNDED, TYPES, QuantizedWeight, pack, quantized
from tests.engine.weights.sample_weights import ALL_TYPES, kernel_result, random_weight
from tests.tiny_models import tiny_model

ENTRY = """
extern "C" void linear(void* out, void* x, const QuantizedPart* parts, int64_t num_parts, int64_t rows, int64_t groups) {
    quantized_linear(out, x, parts, num_parts, nullptr, rows, groups, false);
}
"""
needs_kernel = pytest.mark.skipif(not can_quantize(), reason="there is no C++ compiler here")


def rounded_weight(out_features: int, in_features: int, bits: int) -> QuantizedWeight:
    return quantized(torch.randn(out_features, in_features), bits)


def layer_of(weight: QuantizedWeight, bias: Tensor | None = None) -> QuantizedLinear:
    return QuantizedLinear([pack(weight)], bias)


# As in GGUF files, whose blocks of 256 weights are these bytes.
FILE_BYTES = {"Q4_0": 144, "Q4_1": 160, "Q5_0": 176, "Q5_1": 192, "Q8_0": 272}
FILE_BYTES |= {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210, "IQ4_NL": 144, "IQ4_XS": 136, "MXFP4": 136}
FILE_BYTES |= {"INT4": 132, "UINT4": 134, "UINT8": 280}  # with a byte for each zero point


@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize("out_features", [1, 16, 17, 50])
def test_packing_loses_nothing_and_takes_the_files_bytes(out_features: int, name: str) -> None:
    weight = random_weight(name, out_features, 512)
    packed = pack(weight)
    assert packed.blocks.is_contiguous()
    assert packed.blocks.numel() == -(-out_features // 16) * 16 * 2 * FILE_BYTES[name]
    assert (packed.out_features, packed.in_features) == (out_features, 512)
    again = packed.unpacked()
    assert again.type == weight.type
    for part, whole in zip(again.parts, weight.parts, strict=True):
        assert part is whole is None or (part is not None and whole is not None and torch.equal(part, whole))


@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_the_kernel_a_layer_computes_with_the_weight_that_was_given(dtype: torch.dtype, name: str) -> None:
    weight = random_weight(name, 1100, 256)
    x, bias = torch.randn(3, 5, 256, dtype=dtype), torch.randn(1100, dtype=dtype)
    expected = nn.functional.linear(x.float(), weight.dequantized(), bias.float()).to(dtype)
    result = torch_linear(x, [pack(weight).blocks], [weight.type.number], [1100], bias)
    torch.testing.assert_close(result, expected, rtol=4 * torch.finfo(dtype).eps, atol=1e-6 * float(expected.abs().max()))


@needs_kernel
@pytest.mark.parametrize("name", ALL_TYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(1, 256), (33, 1024)])
def test_a_layer_is_computed_bit_for_bit_from_the_files_numbers(out_features: int, in_features: int, name: str) -> None:
    weight, x = random_weight(name, out_features, in_features), torch.randn(20, in_features) * torch.logspace(-3, 3, 20)[:, None]
    expected = kernel_result(weight, x)
    layer = layer_of(weight)
    for num_rows in (*range(9), 20):
        assert torch.equal(layer(x[:num_rows]), expected[:num_rows])


@needs_kernel
@pytest.mark.parametrize("name", ALL_TYPES)
def test_rows_of_bfloat16_are_rounded_as_those_of_float32_however_many_groups_they_have(name: str) -> None:
    columns = TYPES[name].columns
    for num_groups in (1, 2, 3, 4, 7, 8, 13, 16):
        in_features = num_groups * GROUP_SIZE
        if in_features % columns:
            continue
        weight, x = random_weight(name, 17, in_features), torch.randn(9, in_features) * torch.logspace(-4, 4, 9)[:, None]
        x[::2, :GROUP_SIZE] = 0
        x[1::4, -GROUP_SIZE:] *= 1e-32
        x = x.bfloat16()
        assert torch.equal(layer_of(weight)(x), kernel_result(weight, x.float()).bfloat16()), num_groups


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
    weight = rounded_weight(out_features, in_features, bits)
    layer = layer_of(weight)
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
    minimums = () if bits == 8 else (torch.full((50, 3), -(2.0 ** (bits - 3))).half(),)
    weight = QuantizedWeight(ROUNDED[bits], codes, torch.full((50, 3), 0.25).half(), *minimums)
    x = torch.randint(-127, 128, (9, 96)).float()
    x[:, ::GROUP_SIZE] = 127.0
    for rows in (x, x[:1], x / 1024, torch.zeros(9, 96)):
        assert torch.equal(layer_of(weight)(rows), rows @ weight.dequantized().T)


@needs_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 5, 8])
def test_a_bias_is_added_and_types_and_shapes_are_kept(bits: int, dtype: torch.dtype) -> None:
    weight, bias = rounded_weight(50, 64, bits), torch.randn(50, dtype=dtype)
    layer = layer_of(weight, bias)
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
    monkeypatch.delattr("penstock.engine.weights.linear.torch_linear")
    layer = layer_of(rounded_weight(50, 64, 4))
    x = torch.randn(7, 64).half()
    assert torch.equal(layer(x), layer(x.float()).half())


@needs_kernel
def test_input_of_any_layout_is_taken() -> None:
    layer = layer_of(rounded_weight(50, 64, 4))
    for x in (torch.randn(64, 7).T, torch.randn(7, 128)[:, ::2], torch.randn(9, 96)[1::2, 3:67], torch.randn(64).expand(3, 64)):
        assert torch.equal(layer(x), layer(x.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("bias", [None, torch.ones(50)])
def test_compilers_are_told_the_truth_about_the_operator(bias: Tensor | None) -> None:
    packed = [pack(random_weight(name, rows, 256)) for name, rows in (("Q4_K", 16), ("Q6_K", 34))]
    operands = ([each.blocks for each in packed], [each.weight_type.number for each in packed], [16, 34])
    torch.library.opcheck(torch.ops.penstock.quantized_linear.default, (torch.randn(2, 3, 256), *operands, bias))


@needs_kernel
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("in_features", [64, 160])  # groups that are rounded one by one, and four at once
def test_what_is_not_finite_stays_in_its_row(in_features: int, dtype: torch.dtype, value: float) -> None:
    layer = layer_of(rounded_weight(50, in_features, 4))
    x = torch.randn(13, in_features, dtype=dtype)
    expected = layer(x)
    x[5, 40] = value
    result = layer(x)
    others = torch.arange(13) != 5
    assert torch.equal(result[others], expected[others])
    assert not result[5].isfinite().any()


@needs_kernel
@pytest.mark.parametrize("factor", [1e-38, 1e-25, 1e30])
def test_inputs_of_extreme_sizes_make_finite_results(factor: float) -> None:
    weight = rounded_weight(50, 64, 4)
    x = torch.randn(13, 64)
    result = layer_of(weight)(x * factor)
    assert ((result / factor - x @ weight.dequantized().T).abs() <= rounding_bound(x, weight) + (factor < 1e-30) * 1e3).all()


@needs_kernel
@pytest.mark.parametrize("scale", [6e-8, 6e4])
def test_weights_of_extreme_scales_are_computed(scale: float) -> None:
    codes = torch.randint(0, 16, (20, 64), dtype=torch.uint8)
    weight = QuantizedWeight(TYPES["Q4_1"], codes, torch.full((20, 2), scale).half(), torch.full((20, 2), -scale).half())
    x = torch.randn(5, 64)
    assert ((layer_of(weight)(x) - x @ weight.dequantized().T).abs() <= rounding_bound(x, weight)).all()


class Attention(nn.Module):
    def __init__(self, k_proj_size: int = 32, in_features: int = 64) -> None:
        super().__init__()
        self.q_proj = nn.Linear(in_features, 32, bias=False)
        self.k_proj = nn.Linear(in_features, k_proj_size, bias=False)
        self.v_proj = nn.Linear(in_features, 17, bias=False)

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


@needs_kernel
@pytest.mark.parametrize(("k_proj_size", "parts"), [(32, [("Q4_K", 64), ("Q6_K", 17)]), (24, [("Q4_K", 56), ("Q6_K", 17)])])
@pytest.mark.parametrize("num_rows", [1, 3, 70])
def test_layers_of_different_types_are_fused_as_they_are(num_rows: int, k_proj_size: int, parts: list[tuple[str, int]]) -> None:
    """As in GGUF files of type Q4_K_M, where some values have more bits than queries and keys."""
    module = Attention(k_proj_size, 256).requires_grad_(False)
    types = (("q_proj", "Q4_K", 32), ("k_proj", "Q4_K", k_proj_size), ("v_proj", "Q6_K", 17))
    for seed, (name, type_name, size) in enumerate(types):
        module.set_submodule(name, layer_of(random_weight(type_name, size, 256, seed), torch.randn(size)))
    x = torch.randn(num_rows, 256)
    expected = module(x)
    assert fuse_linears(module) == 1
    assert isinstance(module.q_proj, FusedPart)
    fused = module.q_proj.fused.linear
    assert isinstance(fused, QuantizedLinear)
    assert [(weight.type_name, weight.out_features) for weight in fused.packed] == parts
    for result, wanted in zip(module(x), expected, strict=True):
        assert torch.equal(result, wanted)
    assert read_linear(fused.bfloat16()).num_parts == 2


def test_parts_of_one_type_stay_apart_where_the_first_ends_within_a_tile() -> None:
    layers = [layer_of(random_weight("Q4_K", size, 256)) for size in (24, 16)]
    assert [weight.out_features for weight in QuantizedLinear.joined(layers).packed] == [24, 16]


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
@pytest.mark.parametrize(
    "features",
    [
        [],
        pytest.param(["-mavx2", "-mfma", "-mavxvnni"], marks=pytest.mark.thorough),
        pytest.param(["-mavx2", "-mfma", "-mf16c"], marks=pytest.mark.thorough),  # as test_instructions.py compiles all kernels
    ],
)
def test_processors_without_these_instructions_compute_the_same(features: list[str], tmp_path: Path) -> None:
    compiler = find_compiler()
    assert compiler is not None
    if not all(f" {feature.removeprefix('-m')} " in processor_features().replace("avx_vnni", "avxvnni") for feature in features):
        pytest.skip("this processor has no such instructions")
    source, library_path = tmp_path / "linear.cpp", tmp_path / "linear.so"
    source.write_text(f'#include "{SOURCE.parent / "quantized_linear.h"}"\n' + ENTRY)
    flags = ["-O0", *(flag for flag in FLAGS if flag != "-O3")]
    subprocess.run(
        [compiler, *flags, *features, "-o", str(library_path), str(source), str(SOURCE.with_name("products.cpp"))],
        check=True,
        capture_output=True,
    )
    library = ctypes.CDLL(str(library_path))
    library.linear.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3
    x = torch.randn(20, 512)
    for name in ALL_TYPES:
        weight, result = random_weight(name, 50, 512), torch.empty(20, 50)
        layer = layer_of(weight)
        parts = layer.native_parts()
        library.linear(result.data_ptr(), x.data_ptr(), ctypes.addressof(parts), 1, 20, 16)
        expected = kernel_result(weight, x)
        # Without an instruction that multiplies and adds in one rounding, there are two.
        assert torch.equal(result, expected) if "-mfma" in features else (result - expected).abs().max() < 1e-5 * expected.abs().max()
