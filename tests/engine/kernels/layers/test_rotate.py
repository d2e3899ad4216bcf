from collections.abc import Callable
from typing import Any

import pytest
import torch

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import RotaryForm, rotate
from penstock.engine.model.fused import ROTARY_FORMS

Launch = Callable[..., Any]


def make_arguments(num_heads: int, num_kv_heads: int, num_tokens: int, size: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Queries and keys as a fused projection gives them: views, with the heads of a token side by side."""
    generator = torch.Generator().manual_seed(size)
    fused = torch.randn(1, num_tokens, num_heads + num_kv_heads, size, generator=generator).to(dtype)
    cosines, sines = torch.randn(2, 1, num_tokens, size, generator=generator).to(dtype).unbind()
    query, key = fused.split([num_heads, num_kv_heads], dim=2)  # type: ignore[no-untyped-call]
    return {"query_1HTD": query.transpose(1, 2), "key_1HTD": key.transpose(1, 2), "cosines_1TC": cosines, "sines_1TC": sines}


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "num_tokens", "size"), [(4, 2, 3, 64), (9, 3, 1, 64), (20, 1, 2, 96), (2, 2, 0, 16)])
def test_any_heads_and_sizes_give_the_reference(launch: Launch, num_heads: int, num_kv_heads: int, num_tokens: int, size: int) -> None:
    arguments = make_arguments(num_heads, num_kv_heads, num_tokens, size)
    for result, expected in zip(launch(rotate, **arguments).result, references.rotate(**arguments), strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_gives_the_reference_to_rounding(launch: Launch) -> None:
    arguments = make_arguments(4, 2, 3, 128, torch.bfloat16)
    for result, expected in zip(launch(rotate, **arguments).result, references.rotate(**arguments), strict=True):
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result, expected, atol=0, rtol=2 * torch.finfo(torch.bfloat16).eps)


@pytest.mark.parametrize("form", ROTARY_FORMS)
@pytest.mark.parametrize("num_cosines", [16, 24])
def test_any_form_and_part_of_a_head_gives_the_reference(launch: Launch, form: RotaryForm, num_cosines: int) -> None:
    arguments = make_arguments(4, 2, 3, 48) | {"form": form}
    for name in ("cosines_1TC", "sines_1TC"):
        arguments[name] = arguments[name][..., :num_cosines]
    for result, expected in zip(launch(rotate, **arguments).result, references.rotate(**arguments), strict=True):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)
