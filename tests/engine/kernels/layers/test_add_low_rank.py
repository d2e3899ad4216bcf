from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import FEW_ROWS, add_low_rank

Launch = Callable[..., Any]
UNUSED = 1  # a slot that no row has: reading it shows


def make_arguments(
    num_rows: int, num_inputs: int, num_outputs: int, *, rank: int = 16, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_rows)
    slots_T = torch.randint(4, (num_rows,), generator=generator) - 1
    slots_T[slots_T == UNUSED] = -1
    down_SRI, up_SOR = torch.randn(3, rank, num_inputs, generator=generator), torch.randn(3, num_outputs, rank, generator=generator) / 8
    down_SRI[UNUSED] = up_SOR[UNUSED] = float("nan")
    return {
        "output_TO": torch.randn(num_rows, num_outputs, generator=generator).to(dtype),
        "x_TI": (torch.randn(num_rows, num_inputs, generator=generator) / num_inputs**0.5).to(dtype),
        "slots_T": slots_T,
        "down_SRI": down_SRI.to(dtype),
        "up_SOR": up_SOR.to(dtype),
    }


def expected(arguments: dict[str, Any]) -> torch.Tensor:
    output: torch.Tensor = arguments["output_TO"].clone()
    without_nan = {name: arguments[name].nan_to_num() for name in ("down_SRI", "up_SOR")}
    references.add_low_rank(**arguments | without_nan | {"output_TO": output})
    return output


@pytest.mark.parametrize(
    ("num_rows", "num_inputs", "num_outputs", "rank"), [(1, 64, 96, 16), (17, 80, 65, 16), (0, 64, 64, 16), (FEW_ROWS + 3, 96, 40, 32)]
)
def test_each_row_gets_what_its_own_adapter_adds(launch: Launch, num_rows: int, num_inputs: int, num_outputs: int, rank: int) -> None:
    arguments = make_arguments(num_rows, num_inputs, num_outputs, rank=rank)
    output = launch(add_low_rank, **arguments).arguments["output_TO"]
    torch.testing.assert_close(output, expected(arguments), atol=1e-5, rtol=1e-5)


def test_half_precision_gives_the_reference_to_rounding(launch: Launch) -> None:
    arguments = make_arguments(5, 128, 64, dtype=torch.bfloat16)
    output = launch(add_low_rank, **arguments).arguments["output_TO"]
    torch.testing.assert_close(output, expected(arguments), atol=2e-2, rtol=2e-2)


def test_rows_may_lie_apart_as_those_of_fused_layers_do(launch: Launch) -> None:
    arguments = make_arguments(6, 64, 64)
    result = expected(arguments)
    wide = torch.zeros(6, 192)
    wide[:, 64:128] = arguments["output_TO"]
    output = launch(add_low_rank, **arguments | {"output_TO": wide[:, 64:128]}).arguments["output_TO"]
    torch.testing.assert_close(output, result, atol=1e-5, rtol=1e-5)
