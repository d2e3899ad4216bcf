import pytest
import torch

from penstock.engine.model.linear import QuantizedEmbedding, QuantizedLinear, pack, quantized, unpack, unpacked_rows


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("num_rows", [16, 33])
def test_rows_are_those_of_the_weight(bits: int, num_rows: int) -> None:
    torch.manual_seed(0)
    weight = quantized(torch.randn(num_rows, 96), bits)
    rows = torch.tensor([0, 15, num_rows - 1, 7, 7])
    found = unpacked_rows(pack(weight), rows)
    assert found.bits == unpack(pack(weight), num_rows).bits == bits
    assert torch.equal(found.codes_OI, weight.codes_OI[rows])
    assert torch.equal(found.dequantized(), weight.dequantized()[rows])


@pytest.mark.parametrize("bits", [4, 8])
def test_token_ids_of_any_shape_become_rows_of_the_type_asked_for(bits: int) -> None:
    weight = quantized(torch.randn(20, 96) * torch.logspace(-7, 4, 20)[:, None], bits)
    linear = QuantizedLinear(weight, None)
    embedding = QuantizedEmbedding(linear.blocks, torch.bfloat16)
    assert embedding.blocks is linear.blocks
    for shape in ((), (3,), (1, 0), (2, 5)):
        token_ids = torch.randint(20, shape)
        assert torch.equal(embedding(token_ids), weight.dequantized().bfloat16()[token_ids])
    assert embedding.to("meta")(torch.zeros(1, 4, dtype=torch.long, device="meta")).shape == (1, 4, 96)


def test_token_ids_may_be_of_any_integer_type_and_lie_apart() -> None:
    embedding = QuantizedEmbedding(pack(quantized(torch.randn(20, 32), 8)), torch.float32)
    token_ids = torch.arange(20)
    assert torch.equal(embedding(token_ids[::2]), embedding(token_ids)[::2])
    assert torch.equal(embedding(token_ids.int()), embedding(token_ids))
