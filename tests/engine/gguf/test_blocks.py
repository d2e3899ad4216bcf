from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from penstock.engine.gguf.blocks import TYPES, read_blocks


def tensors(path: Path, matrices: dict[str, tuple[np.ndarray, GGMLQuantizationType]]) -> dict[str, gguf.ReaderTensor]:
    """What a reader finds in a file of these."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, (matrix, kind) in matrices.items():
        writer.add_tensor(name, gguf.quantize(matrix, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def matrix(*shape: int) -> np.ndarray:
    values = np.random.default_rng(0).normal(0, 0.2, shape).astype(np.float32)
    values[0] = 0  # a scale of nothing
    return values


@pytest.mark.parametrize("name", TYPES)
def test_a_weight_is_what_the_file_stands_for_exactly(name: str, tmp_path: Path) -> None:
    kind = GGMLQuantizationType[name]
    tensor = tensors(tmp_path / "one.gguf", {"one": (matrix(7, 96), kind)})["one"]
    weight = read_blocks(tensor)
    assert weight is not None
    assert weight.bits == (8 if name == "Q8_0" else 4)
    assert int(weight.codes_OI.max()) < 2**weight.bits
    np.testing.assert_array_equal(weight.dequantized().numpy(), gguf.dequantize(tensor.data, kind))


def test_codes_are_those_of_the_file_bit_for_bit(tmp_path: Path) -> None:
    kinds = {name: (matrix(2, 32), GGMLQuantizationType[name]) for name in TYPES}
    for name, tensor in tensors(tmp_path / "all.gguf", kinds).items():
        weight = read_blocks(tensor)
        assert weight is not None
        data = torch.from_numpy(tensor.data.copy())
        if name == "Q8_0":
            assert torch.equal(weight.codes_OI, (data[:, 2:].view(torch.int8).short() + 128).to(torch.uint8))
        else:
            nibbles = data[:, -16:]
            assert torch.equal(weight.codes_OI, torch.cat([nibbles % 16, nibbles // 16], dim=1))
        assert torch.equal(weight.scales_OG, data[:, :2].view(torch.float16))
        if name == "Q4_1":
            assert torch.equal(weight.minimums_OG, data[:, 2:4].view(torch.float16))


def test_other_types_and_what_is_no_matrix_are_not_read(tmp_path: Path) -> None:
    Q8_0, Q5_1, F32 = GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q5_1, GGMLQuantizationType.F32
    found = tensors(tmp_path / "x.gguf", {"row": (matrix(32), Q8_0), "five": (matrix(2, 32), Q5_1), "plain": (matrix(2, 32), F32)})
    assert [read_blocks(tensor) for tensor in found.values()] == [None, None, None]
