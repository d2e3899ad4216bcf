from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.engine.weights.matrices import CHUNK_ROWS, RowIndex, dequantized, fingerprints, is_quantized, read_blocks
from tests.engine.weights.sample_weights import GGUF_TYPES, random_tensor


def tensors(path: Path, matrices: dict[str, tuple[np.ndarray, GGMLQuantizationType]]) -> dict[str, gguf.ReaderTensor]:
    """What a reader finds in a file of these, quantized."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in matrices.items():
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def matrix(*shape: int) -> np.ndarray:
    values = np.random.default_rng(0).normal(0, 0.2, shape).astype(np.float32)
    values[0] = 0  # a scale of nothing
    return values


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_a_weight_is_what_the_file_stands_for_exactly(name: str) -> None:
    tensor = random_tensor(name, 7, 768)
    weight = read_blocks(tensor)
    assert weight.type.name == name
    assert int(weight.codes_OI.max()) < 2**weight.bits
    np.testing.assert_array_equal(weight.dequantized().numpy(), gguf.dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_codes_are_those_of_the_file_bit_for_bit(name: str, tmp_path: Path) -> None:
    tensor = tensors(tmp_path / "one.gguf", {"one": (matrix(2, 32), GGMLQuantizationType[name])})["one"]
    weight = read_blocks(tensor)
    data = torch.from_numpy(tensor.data.copy())
    if name == "Q8_0":
        assert torch.equal(weight.codes_OI, (data[:, 2:].view(torch.int8).short() + 128).to(torch.uint8))
    elif name in ("Q5_0", "Q5_1"):
        fifth_bits = torch.from_numpy(np.unpackbits(tensor.data[:, -20:-16], axis=1, bitorder="little"))
        assert torch.equal(weight.codes_OI, torch.cat([data[:, -16:] % 16, data[:, -16:] // 16], dim=1) + 16 * fifth_bits)
    else:
        halves = data[:, -16:]
        assert torch.equal(weight.codes_OI, torch.cat([halves % 16, halves // 16], dim=1))
    assert torch.equal(weight.scales_OG, data[:, :2].view(torch.float16))
    if weight.minimums_OG is not None:
        assert torch.equal(weight.minimums_OG, data[:, 2:4].view(torch.float16))


def test_q3_k_is_exactly_served_as_q6_k() -> None:
    tensor = random_tensor("Q3_K", 7, 768)
    weight = read_blocks(tensor)
    assert weight.type.name == "Q6_K"
    assert int(weight.codes_OI.max()) < 2**6
    np.testing.assert_array_equal(weight.dequantized().numpy(), gguf.dequantize(tensor.data, tensor.tensor_type))


@pytest.mark.parametrize("name", ["IQ3_S", "Q2_K"])
def test_other_types_are_rounded_to_8_bits(name: str) -> None:
    tensor = random_tensor(name, 5, 768)
    weight = read_blocks(tensor)
    assert weight.type.name == "Q8_0"
    exact = dequantized(tensor)
    largest = exact.unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=1)  # type: ignore[no-untyped-call]
    assert ((weight.dequantized() - exact).abs() <= largest / 250).all()


def test_plain_matrices_and_what_is_no_matrix_are_not_quantized(tmp_path: Path) -> None:
    Q8_0, Q5_1, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.F32
    found = tensors(tmp_path / "x.gguf", {"row": (matrix(32), Q8_0), "five": (matrix(2, 32), Q5_1), "plain": (matrix(2, 32), F32)})
    assert [is_quantized(tensor) for tensor in found.values()] == [False, True, False]


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
