from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import rms_norm
from tests.engine.kernels.fused_models import with_fused_norms

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


@pytest.mark.parametrize(("name", "per_layer"), [("llama", 2), ("qwen3", 4), ("olmo2", 4), ("gpt_oss", 2), ("gemma2", 0), ("gpt2", 0)])
def test_norms_are_fused_in_models_that_mean_the_same_by_it(name: str, per_layer: int, interpreter: Any) -> None:
    num_fused, before, after = interpreter.launch(with_fused_norms, name=name).result
    assert num_fused == (3 * per_layer + 1 if per_layer else 0)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
