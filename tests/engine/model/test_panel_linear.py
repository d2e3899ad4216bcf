import pytest
import torch

from penstock.engine.model.linear import can_panel, panel_linear, panels

pytestmark = pytest.mark.skipif(not can_panel(torch.zeros(16, 2, dtype=torch.bfloat16)), reason="this processor does not multiply bfloat16")


@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 12, 13, 24, 191, 200, 400])
@pytest.mark.parametrize(("outputs", "inputs"), [(16, 2), (32, 64), (48, 30), (576, 1536), (960, 576)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layer_in_panels_computes_what_its_weight_says(num_rows: int, outputs: int, inputs: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight_OI = torch.randn(outputs, inputs, dtype=torch.bfloat16)
    bias = torch.randn(outputs, dtype=torch.bfloat16) if has_bias else None
    x = torch.randn(2, num_rows, inputs, dtype=torch.bfloat16)
    result = panel_linear(x[1], panels(weight_OI), bias, outputs)
    expected = torch.nn.functional.linear(x[1].float(), weight_OI.float(), None if bias is None else bias.float())
    torch.testing.assert_close(result.float(), expected, rtol=1e-2, atol=1e-2 * inputs**0.5)


def test_a_rows_result_does_not_depend_on_the_other_rows() -> None:
    torch.manual_seed(0)
    weight = panels(torch.randn(64, 96, dtype=torch.bfloat16))
    x = torch.randn(40, 96, dtype=torch.bfloat16)
    whole = panel_linear(x, weight, None, 64)
    for first, count in [(0, 1), (3, 5), (11, 12), (20, 20)]:
        assert torch.equal(panel_linear(x[first : first + count], weight, None, 64), whole[first : first + count])


def test_other_types_and_sizes_are_told() -> None:
    assert not can_panel(torch.zeros(16, 2))
    assert not can_panel(torch.zeros(17, 2, dtype=torch.bfloat16))
    assert not can_panel(torch.zeros(16, 3, dtype=torch.bfloat16))


@pytest.mark.parametrize("x", [torch.zeros(1, 64), torch.zeros(1, 32, dtype=torch.bfloat16)])
def test_inputs_that_are_not_the_weights_are_not_read(x: torch.Tensor) -> None:
    with pytest.raises(AssertionError):
        panel_linear(x, panels(torch.zeros(16, 64, dtype=torch.bfloat16)), None, 16)
