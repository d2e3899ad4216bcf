from typing import Any

import pytest
import torch

from tests.engine.kernels.layers.fused_models import with_fused, with_fused_oddities

NUM_LAYERS = 3


@pytest.mark.parametrize(
    ("name", "norms_per_layer", "unfused"),
    [
        ("llama", 2, ()),
        pytest.param("qwen3", 4, (), marks=pytest.mark.thorough),
        ("qwen3_moe", 4, ("gates",)),
        ("gemma2", 4, ()),
        pytest.param("gemma3_text", 6, (), marks=pytest.mark.thorough),
        pytest.param("granite", 2, (), marks=pytest.mark.thorough),
        ("phi3", 2, ()),
        ("olmo2", 4, ()),
        ("glm4", 4, ()),
        ("gpt_oss", 2, ("gates",)),
        ("cohere2", 0, ("norms", "residuals")),
        ("gpt2", 0, ("norms", "residuals", "gates", "rotary")),
    ],
)
def test_what_means_the_same_is_fused_and_gives_the_same(
    name: str, norms_per_layer: int, unfused: tuple[str, ...], interpreter: Any
) -> None:
    num_fused, before, after = interpreter.launch(with_fused, name=name).result
    expected = {"norms": NUM_LAYERS * norms_per_layer + 1} | dict.fromkeys(("residuals", "gates", "rotary"), NUM_LAYERS)
    assert num_fused == expected | dict.fromkeys(unfused, 0)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)


def test_layers_and_gates_that_only_look_alike_stay_as_they_are(interpreter: Any) -> None:
    num_fused, before, after = interpreter.launch(with_fused_oddities, name="llama").result
    assert (num_fused["residuals"], num_fused["gates"]) == (0, 0)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
