from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.linear import QuantizedWeight, quantized
from penstock.engine.model.quantization import FILE_NAME, quantized_names, read_quantized, write_quantized

CPU, META = torch.device("cpu"), torch.device("meta")


def parts(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.codes_OI, weight.scales_OG, weight.minimums_OG


def weights() -> dict[str, QuantizedWeight]:
    torch.manual_seed(0)
    return {"a.weight": quantized(torch.randn(5, 64), 4), "b.c.weight": quantized(torch.randn(3, 32), 8)}


def test_what_was_written_is_read_bit_for_bit(tmp_path: Path) -> None:
    write_quantized(tmp_path, weights())
    assert quantized_names(tmp_path) == ["a.weight", "b.c.weight"]
    for name, weight in read_quantized(tmp_path, CPU):
        assert weight.bits == weights()[name].bits
        assert all(map(torch.equal, parts(weight), parts(weights()[name])))


def test_a_file_holds_no_more_than_its_bits(tmp_path: Path) -> None:
    write_quantized(tmp_path, weights())
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(tmp_path / FILE_NAME).items()}
    assert shapes == {
        "a.weight.codes": (5, 32),
        "a.weight.scales": (5, 2),
        "a.weight.minimums": (5, 2),
        "b.c.weight.codes": (3, 32),
        "b.c.weight.scales": (3, 1),  # its minimums are -128 scales
    }


def test_shapes_can_be_read_alone(tmp_path: Path) -> None:
    write_quantized(tmp_path, weights())
    for name, weight in read_quantized(tmp_path, META):
        assert weight.bits == weights()[name].bits
        for part, whole in zip(parts(weight), parts(weights()[name]), strict=True):
            assert (part.device, part.dtype, part.shape) == (META, whole.dtype, whole.shape)


def test_a_directory_of_plain_weights_has_none(tmp_path: Path) -> None:
    assert quantized_names(tmp_path) == []
    assert list(read_quantized(tmp_path, CPU)) == []


def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"broken")
    with pytest.raises(ConfigurationError, match=FILE_NAME):
        quantized_names(tmp_path)


CODES, SCALES = torch.zeros(4, 64, dtype=torch.uint8), torch.ones(4, 2, dtype=torch.float16)
HALF_CODES, WIDE_SCALES = CODES[:, :32].clone(), torch.ones(4, 3, dtype=torch.float16)


@pytest.mark.parametrize("device", [CPU, META])
@pytest.mark.parametrize(
    "tensors",
    [
        {"codes": CODES},
        {"codes": CODES, "scales": WIDE_SCALES},
        {"codes": CODES, "scales": SCALES.float()},
        {"codes": CODES.half(), "scales": SCALES},
        {"codes": CODES.flatten(), "scales": SCALES.flatten()},
        {"codes": CODES, "scales": SCALES, "minimums": SCALES},
        {"codes": HALF_CODES, "scales": SCALES, "minimums": WIDE_SCALES},
        {"codes": HALF_CODES, "scales": SCALES, "minimums": SCALES.float()},
    ],
)
def test_parts_that_do_not_go_together_are_an_error(tmp_path: Path, tensors: dict[str, Tensor], device: torch.device) -> None:
    save_file({f"a.{part}": tensor.clone() for part, tensor in tensors.items()}, tmp_path / FILE_NAME)
    with pytest.raises(ConfigurationError, match=FILE_NAME):
        list(read_quantized(tmp_path, device))
