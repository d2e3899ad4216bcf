import pytest
import torch
from torch import Tensor, nn

from penstock.engine.model.fused import FusedPart, fuse_linears
from penstock.engine.model.linear import PackedLinear, pack_linears
from tests.tiny_models import tiny_model


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(8, 12, bias=bias)
        self.k_proj = nn.Linear(8, 4, bias=bias)
        self.v_proj = nn.Linear(8, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("bias", [False, True])
def test_fused_projections_give_what_each_gave_alone(bias: bool) -> None:
    module = Attention(bias).requires_grad_(False)
    first, second = torch.randn(3, 8), torch.randn(5, 8)
    expected = [module(first), module(second)]
    assert fuse_linears(module) == 1
    for outputs, x in zip(expected, (first, second), strict=True):
        for output, wanted in zip(module(x), outputs, strict=True):
            torch.testing.assert_close(output, wanted)


def test_parts_asked_for_in_another_order_or_with_another_input_are_still_right() -> None:
    module = Attention().requires_grad_(False)
    first, second = torch.randn(3, 8), torch.randn(3, 8)
    keys, queries = module.k_proj(first), module.q_proj(second)
    fuse_linears(module)
    torch.testing.assert_close(module.k_proj(first), keys)
    torch.testing.assert_close(module.q_proj(second), queries)


def test_nothing_is_held_once_the_last_part_was_taken() -> None:
    module = Attention().requires_grad_(False)
    fuse_linears(module)
    module(torch.randn(3, 8))
    part = module.q_proj
    assert isinstance(part, FusedPart)
    assert part.fused._input is None
    assert part.fused._parts == []


def test_layers_that_disagree_on_a_bias_stay_apart() -> None:
    module = Attention()
    module.v_proj = nn.Linear(8, 4)
    assert fuse_linears(module) == 0
    assert type(module.q_proj) is nn.Linear


def test_every_projection_of_a_fused_model_is_packed() -> None:
    model = tiny_model("llama").requires_grad_(False)
    assert fuse_linears(model) == 2 * model.config.num_hidden_layers
    pack_linears(model)
    assert not any(type(module) is nn.Linear for module in model.modules())
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 4 * model.config.num_hidden_layers + 1
