from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock.engine.kernels.quantized import (
    DEQUANTIZED,
    FEW_ROWS,
    MIN_SPLIT,
    ROWS_AT_ONCE,
    _outputs_at_once,
    dequantized_rows,
    float8_linear,
    grouped_float8_linear,
    grouped_linear,
    quantized_linear,
)
from penstock.engine.weights.float8 import Float8Weight, pack_float8
from penstock.engine.weights.packed import TYPES, PackedWeight, pack
from tests.engine.weights.sample_weights import ALL_TYPES, random_weight

Launch = Callable[..., Any]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def others(names: Iterable[str], quick: Collection[str]) -> list[Any]:
    """All names; the tests of those that are not `quick` are thorough."""
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name not in quick)) for name in names]


def rows(num_rows: int, num_inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def packed(name: str, num_outputs: int, num_inputs: int = 256, seed: int = 0) -> PackedWeight:
    return pack(random_weight(name, num_outputs, num_inputs, seed))


def float8_weight(num_outputs: int, num_inputs: int, scale_columns: int, seed: int = 0) -> Float8Weight:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randn(num_outputs, num_inputs, generator=generator) * torch.logspace(-3, 2, num_inputs)  # some are subnormal
    scales = torch.rand(num_outputs, -(-num_inputs // scale_columns), generator=generator)
    return pack_float8(codes.to(torch.float8_e4m3fn), scales, scale_columns)


def close(result: Tensor, x: Tensor, weight_OI: Tensor, bias: Tensor | None = None) -> None:
    """To the product by the weight in the type of the activations."""
    expected = nn.functional.linear(x.float(), weight_OI.to(x.dtype).float(), None if bias is None else bias.float())
    assert result.dtype == x.dtype
    bound = TOLERANCE[x.dtype] * float(expected.abs().max())
    torch.testing.assert_close(result.float(), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("name", others(ALL_TYPES, ("Q5_K", "IQ4_XS", "UINT4", "UINT8")))
def test_few_rows_are_multiplied_by_what_the_codes_stand_for(launch: Launch, name: str) -> None:
    weight, x, bias = packed(name, 50), rows(3, 256), torch.randn(50)
    arguments = {"blocks": [weight.blocks], "forms": [weight.weight_type], "out_features": [50]}
    close(launch(quantized_linear, x=x, bias=bias, **arguments).result, x, weight.dequantized(), bias)


@pytest.mark.parametrize("name", others(ALL_TYPES, ("Q4_1", "Q6_K", "MXFP4")))
def test_rows_of_a_weight_are_exactly_what_their_codes_stand_for(launch: Launch, name: str) -> None:
    weight, wanted = packed(name, 40), torch.tensor([39, 0, 7, 7, 16])
    result = launch(dequantized_rows, blocks_TKB=weight.blocks, form=weight.weight_type, rows_N=wanted, dtype=torch.float32).result
    torch.testing.assert_close(result, weight.dequantized()[wanted], rtol=1e-6, atol=1e-8)


def test_all_exponents_of_mxfp4_are_powers_of_two(launch: Launch) -> None:
    weight = random_weight("MXFP4", 16, 32)
    weight.scales_OG[:, 0] = torch.tensor([0, 1, 2, 3, *range(122, 130), 250, 252, 253, 254])
    wanted = torch.arange(16)
    result = launch(dequantized_rows, blocks_TKB=pack(weight).blocks, form=weight.type, rows_N=wanted, dtype=torch.float32).result
    torch.testing.assert_close(result, weight.dequantized(), rtol=0, atol=2.0**-120)


@pytest.mark.parametrize(
    ("num_rows", "dtype"), [(0, torch.float32), (1, torch.float32), (FEW_ROWS - 7, torch.bfloat16), (FEW_ROWS + 3, torch.bfloat16)]
)
def test_a_fused_layer_of_several_types_gives_each_parts_outputs(launch: Launch, num_rows: int, dtype: torch.dtype) -> None:
    parts, sizes = [packed("Q4_K", 16), packed("Q6_K", 33, seed=1)], [16, 33]
    x, bias = rows(num_rows, 256, dtype), torch.randn(49).to(dtype)
    arguments = {"blocks": [part.blocks for part in parts], "forms": [part.weight_type for part in parts], "out_features": sizes}
    result = launch(quantized_linear, x=x[None], bias=bias, **arguments).result
    assert result.shape == (1, num_rows, 49)
    if num_rows:
        close(result[0], x, torch.cat([part.dequantized() for part in parts]), bias)


def test_several_programs_may_share_the_inputs(launch: Launch) -> None:
    weight, x, bias = packed("INT4", 20, 2 * MIN_SPLIT), rows(3, 2 * MIN_SPLIT), torch.randn(20)
    arguments = {"x": x, "blocks": [weight.blocks], "forms": [weight.weight_type], "out_features": [20], "bias": bias}
    close(launch(quantized_linear, **arguments).result, x, weight.dequantized(), bias)


def test_no_more_of_a_weight_is_dequantized_at_a_time_than_its_bound() -> None:
    assert _outputs_at_once(4096) * 4096 == DEQUANTIZED
    assert _outputs_at_once(2**25) == ROWS_AT_ONCE


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("MXFP4", (3, 0, 1, 21)),
        ("UINT4", (0, 0, 0, 1)),
        pytest.param("UINT4", (3, 0, 1, 21), marks=pytest.mark.thorough),
        pytest.param("MXFP4", (70, 30, 60, 90), marks=pytest.mark.thorough),
    ],
)
def test_each_experts_rows_are_multiplied_by_its_own_weight(launch: Launch, name: str, counts: tuple[int, ...]) -> None:
    weights = [packed(name, 40, seed=expert) for expert in range(len(counts))]
    x, bias = rows(sum(counts), 256), torch.randn(len(counts), 40)
    starts = torch.tensor([0, *counts]).cumsum(0)
    arguments = {"blocks": [torch.stack([weight.blocks for weight in weights])], "forms": [TYPES[name]], "out_features": [40]}
    result = launch(grouped_linear, x_SI=x, starts_E=starts, bias_EO=bias, **arguments).result
    for expert, (first, end) in enumerate(zip(starts.tolist(), starts.tolist()[1:], strict=False)):
        if first < end:
            close(result[first:end], x[first:end], weights[expert].dequantized(), bias[expert])


@pytest.mark.parametrize(
    ("num_inputs", "scale_columns", "num_rows"),
    [(1024, 128, 2), (96, 96, 2), (150, 50, FEW_ROWS + 5), (96, 96, FEW_ROWS + 5), (64, 8, 2)],
)
def test_8_bit_floats_are_multiplied_by_their_scales(launch: Launch, num_inputs: int, scale_columns: int, num_rows: int) -> None:
    weight, x, bias = float8_weight(48, num_inputs, scale_columns), rows(num_rows, num_inputs), torch.randn(48)
    arguments = {"codes": weight.codes, "scales": weight.scales, "scale_columns": scale_columns, "out_features": 48}
    close(launch(float8_linear, x=x, bias=bias, **arguments).result, x, weight.dequantized(), bias)


def test_every_8_bit_float_is_itself(launch: Launch) -> None:
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[numbers & 127 == 127] = 0
    weight = pack_float8(numbers[None].view(torch.float8_e4m3fn), torch.ones(1, 1), 256)
    arguments = {"codes": weight.codes, "scales": weight.scales, "scale_columns": 256, "out_features": 1, "bias": None}
    result = launch(float8_linear, x=torch.eye(256), **arguments).result
    assert torch.equal(result[:, 0], numbers.view(torch.float8_e4m3fn).float())


def test_each_experts_rows_are_multiplied_by_its_own_8_bit_floats(launch: Launch) -> None:
    weights = [float8_weight(40, 128, 64, seed=expert) for expert in range(3)]
    x, starts, bias = rows(9, 128), torch.tensor([0, 4, 4, 9]), torch.randn(3, 40)
    stacked = {"codes": torch.stack([each.codes for each in weights]), "scales": torch.stack([each.scales for each in weights])}
    result = launch(grouped_float8_linear, x_SI=x, starts_E=starts, bias_EO=bias, scale_columns=64, out_features=40, **stacked).result
    close(result[:4], x[:4], weights[0].dequantized(), bias[0])
    close(result[4:], x[4:], weights[2].dequantized(), bias[2])
