import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels import references
from penstock.engine.kernels.recurrent import gated_delta_update, state_space_update

Launch = Callable[..., Any]
SLOTS = torch.tensor([4, 0, 2])


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def states(*shape: int) -> Tensor:
    """As they lie beside those of other layers; slots that no row has are NaN."""
    whole = torch.full((5, 3 + torch.Size(shape).numel()), torch.nan)
    whole[SLOTS, 3:] = random(3, torch.Size(shape).numel())
    return whole[:, 3:].view(5, *shape)


def check(launch: Launch, function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    expected = copy.deepcopy(arguments)
    result = getattr(references, function.__name__)(**expected)
    launched = launch(function, **arguments)
    bound = 1e-5 if result.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(launched.result, result, atol=bound, rtol=bound)
    torch.testing.assert_close(launched.arguments[name], expected[name], atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.mark.parametrize(("num_heads", "key_size", "value_size"), [(2, 16, 16), (4, 24, 40)])
@pytest.mark.parametrize(("dtype", "is_normalized"), [(torch.float32, True), (torch.bfloat16, False)])
def test_the_gated_delta_rule_gives_the_reference(
    launch: Launch, num_heads: int, key_size: int, value_size: int, dtype: torch.dtype, is_normalized: bool
) -> None:
    whole = random(3, 4 * key_size, dtype=dtype)
    arguments = {
        "states_SHKV": states(num_heads, key_size, value_size),
        "slots_N": SLOTS,
        "query_NGK": whole[:, : 2 * key_size].view(3, 2, key_size),
        "key_NGK": whole[:, 2 * key_size :].view(3, 2, key_size),
        "value_NHV": random(3, num_heads, value_size, dtype=dtype),
        "decay_NH": -random(3, num_heads).abs(),
        "beta_NH": random(3, num_heads, dtype=dtype).sigmoid(),
        "is_normalized": is_normalized,
    }
    check(launch, gated_delta_update, arguments, "states_SHKV")


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize(("num_groups", "head_size", "state_size"), [(1, 16, 16), (2, 40, 24)])
def test_the_recurrence_of_mamba_2_gives_the_reference(
    launch: Launch, num_groups: int, head_size: int, state_size: int, has_gate: bool
) -> None:
    arguments = {
        "states_SHDN": states(4, head_size, state_size),
        "slots_R": SLOTS,
        "x_RHD": random(3, 4, head_size),
        "steps_RH": random(3, 4) * 20,
        "decay_H": -random(4).exp(),
        "inputs_RGN": random(3, num_groups, state_size),
        "outputs_RGN": random(3, num_groups, state_size).flip(0),
        "skip_H": random(4) if has_gate else None,
        "step_bias_H": random(1).expand(4) if has_gate else None,
        "gate_RHD": random(3, 4, head_size).flip(0) if has_gate else None,
    }
    check(launch, state_space_update, arguments, "states_SHDN")
