import pytest
import torch

from penstock.engine.model.quantization import CHUNK_ROWS, RowIndex, fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_matrix_is_found_in_any_order_of_its_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    matrices = {str(index): torch.randn(40, 32).to(dtype) for index in range(5)}
    index = RowIndex(matrices.items())
    for name, matrix in matrices.items():
        for order in (torch.arange(40), torch.randperm(40)):
            found = index.find(matrix[order])
            assert found is not None
            assert found[0] == name
            assert torch.equal(found[1], order)


def test_rows_that_are_equal_may_stand_for_each_other() -> None:
    matrix = torch.randn(3, 32)[[0, 1, 0, 2, 0]]
    shuffled = matrix[[4, 1, 3, 0, 2]]
    found = RowIndex([("one", matrix)]).find(shuffled)
    assert found is not None
    assert torch.equal(matrix[found[1]], shuffled)


def test_other_rows_other_shapes_and_other_values_are_not_found() -> None:
    matrix = torch.randn(4, 32)
    index = RowIndex([("one", matrix)])
    changed = matrix.clone()
    changed[3, 31] *= 1.0001
    assert [index.find(other) for other in (changed, matrix[:3], matrix.T.contiguous(), matrix[[0, 1, 2, 2]])] == [None] * 4


def test_a_negative_zero_is_a_zero() -> None:
    zeros = torch.zeros(1, 32)
    assert torch.equal(fingerprints(zeros), fingerprints(-zeros))


def test_rows_beyond_a_chunk_are_looked_at() -> None:
    rows = torch.arange(CHUNK_ROWS + 2).float()[:, None].expand(-1, 32)
    assert len(fingerprints(rows).unique()) == CHUNK_ROWS + 2  # type: ignore[no-untyped-call]
