"""What a model computes while transformers loads another one in the same process: that changes torch's default type for a moment."""

from collections.abc import Iterator

import pytest
import torch

from penstock.engine.sampling.rows import Penalties, TokenCounts, apply_penalties
from penstock.engine.sampling.sampler import _drop_below_min_p
from penstock.engine.weights.linear import QuantizedEmbedding
from penstock.engine.weights.packed import pack, quantized


@pytest.fixture
def default_bfloat16() -> Iterator[None]:
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(usual)


@pytest.mark.usefixtures("default_bfloat16")
def test_rows_of_a_quantized_embedding_are_float32() -> None:
    weight = quantized(torch.randn(20, 64, dtype=torch.float32), 8)
    rows = QuantizedEmbedding(pack(weight), torch.float32)(torch.tensor([3, 7]))
    assert torch.equal(rows, weight.rows(torch.tensor([3, 7])).dequantized())


@pytest.mark.usefixtures("default_bfloat16")
def test_min_p_is_not_rounded() -> None:
    probs = torch.tensor([[0.5, 0.0499, 0.4501]], dtype=torch.float32)
    _drop_below_min_p(probs, [0.0999])  # 0.09961 in bfloat16, of which the bound is 0.0498
    assert probs[0, 1] == 0


@pytest.mark.usefixtures("default_bfloat16")
def test_a_pending_token_is_penalised() -> None:
    logits = torch.ones(1, 4, dtype=torch.float32)
    counted = TokenCounts([2])
    apply_penalties(logits, [0], [counted], [Penalties(2.0, 0.0, 0.0)], torch.tensor([3]))
    assert logits.tolist() == [[1.0, 1.0, 0.5, 0.5]]
