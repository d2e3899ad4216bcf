from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import add_rms_norm, rms_norm

Launch = Callable[..., Any]


def make_arguments(*shape: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(shape[-1])
    states = torch.randn(*shape, generator=generator) * 3
    return {"states": states.to(dtype), "weight": torch.rand(shape[-1], generator=generator).to(dtype), "epsilon": 1e-5}


@pytest.mark.parametrize("shape", [(64,), (3, 80), (1, 4, 96), (1, 3, 2, 16), (2, 0, 64)])
def test_any_shape_gives_the_reference(launch: Launch, shape: tuple[int, ...]) -> None:
    arguments = make_arguments(*shape)
    result = launch(rms_norm, **arguments).result
    torch.testing.assert_close(result, references.rms_norm(**arguments), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_the_reference_to_rounding(launch: Launch, dtype: torch.dtype) -> None:
    arguments = make_arguments(1, 5, 128, dtype=dtype)
    result = launch(rms_norm, **arguments).result
    assert result.dtype == dtype
    torch.testing.assert_close(result, references.rms_norm(**arguments), atol=0, rtol=2 * torch.finfo(dtype).eps)


def test_heads_may_lie_apart(launch: Launch) -> None:
    arguments = make_arguments(1, 4, 2, 16)
    fused = torch.zeros(1, 4, 5, 16)
    fused[:, :, 1:3] = arguments["states"]
    expected = references.rms_norm(**arguments)
    result = launch(rms_norm, **arguments | {"states": fused[:, :, 1:3]}).result
    assert result.is_contiguous()
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_weights_may_lack_a_one(launch: Launch) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        arguments = make_arguments(1, 5, 96, dtype=dtype) | {"adds_one": True}
        result = launch(rms_norm, **arguments).result
        torch.testing.assert_close(result, references.rms_norm(**arguments), atol=0, rtol=max(1e-5, torch.finfo(dtype).eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("is_before", "is_after", "options"),
    [(False, True, {}), (True, True, {"adds_one": True}), (True, False, {}), (False, True, {"scale": 0.3})],
    ids=["llama", "gemma", "olmo", "granite"],
)
def test_a_residual_connection_gives_the_reference(
    launch: Launch, is_before: bool, is_after: bool, options: dict[str, Any], dtype: torch.dtype
) -> None:
    residual, before, after = (make_arguments(1, 3, size, dtype=dtype) for size in (80, 80, 80))
    arguments = options | {
        "residual": residual["states"],
        "states": before["states"].flip(-1),
        "before": (before["weight"], 1e-5) if is_before else None,
        "after": (after["weight"].flip(-1), 1e-6) if is_after else None,
    }
    results = launch(add_rms_norm, **arguments).result
    bound = 1e-5 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps  # the interpreter truncates
    for result, expected in zip(results, references.add_rms_norm(**arguments), strict=True):
        torch.testing.assert_close(result, expected, atol=bound, rtol=bound)
    assert (results[1] is not None) == is_after
