from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import ACTIVATIONS, gated

Launch = Callable[..., Any]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 3, 1500), (7,), (2, 0, 64)])
def test_halves_of_a_fused_projection_give_the_reference(
    launch: Launch, shape: tuple[int, ...], dtype: torch.dtype, activation: str
) -> None:
    both = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(0)).to(dtype) * 5
    gate, up = both.chunk(2, dim=-1)
    result = launch(gated, gate=gate, up=up, activation=activation).result
    assert result.is_contiguous()
    expected = references.gated(gate, up, activation)
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=max(1e-5, torch.finfo(dtype).eps))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_open_and_close_and_a_failing_model_shows(launch: Launch, activation: str) -> None:
    gate, up = torch.tensor([[1e30, -1e30, torch.nan, 1.0]]), torch.tensor([[2.0, 2.0, 2.0, torch.nan]])
    result = launch(gated, gate=gate, up=up, activation=activation).result
    torch.testing.assert_close(result, torch.tensor([[2e30, 0.0, torch.nan, torch.nan]]), equal_nan=True)
