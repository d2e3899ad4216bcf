"""The matrices of a model directory that are kept in few bits, in a file beside the model's other weights.

It holds for each matrix `NAME`, by its parameter's name, the tensors of a `QuantizedWeight`: `NAME.codes`, `NAME.scales` and
`NAME.minimums`. Codes are uint8 [O, I], or [O, I / 2] where two of 4 bits share a byte, the first of them in its lower half. Minimums are
left out where all they do is make the codes signed: where they are -8 scales for 4 bits, -128 scales for 8.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.engine.errors import ConfigurationError
from penstock.engine.layers.quantized import GROUP_SIZE, QuantizedWeight

FILE_NAME = "quantized.safetensors"
_CODES = ".codes"


def write_quantized(directory: Path, weights: Mapping[str, QuantizedWeight]) -> None:
    """Writes the file that the other functions read."""
    save_file(
        {f"{name}.{part}": tensor for name, weight in weights.items() for part, tensor in encoded(weight).items()}, directory / FILE_NAME
    )


def quantized_names(directory: Path) -> list[str]:
    """What is kept in few bits there; nothing where all weights are plain. Raises `ConfigurationError` where the file is broken."""
    path = directory / FILE_NAME
    if not path.is_file():
        return []
    try:
        with safe_open(path, "pt") as file:
            return [name.removesuffix(_CODES) for name in list(file.keys()) if name.endswith(_CODES)]
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def read_quantized(directory: Path, device: torch.device) -> Iterator[tuple[str, QuantizedWeight]]:
    """The matrices one by one, as tensors of their own; on the meta device with their shapes and nothing in them.

    Raises `ConfigurationError` where the file is broken.
    """
    names = quantized_names(directory)
    if not names:
        return
    try:
        with safe_open(directory / FILE_NAME, "pt") as file:
            stored = set(file.keys())
            for name in names:
                keys = {part: f"{name}.{part}" for part in ("codes", "scales", "minimums") if f"{name}.{part}" in stored}
                if device.type == "meta":
                    yield name, decoded({part: _empty(file.get_slice(key)) for part, key in keys.items()})
                else:
                    yield name, decoded({part: file.get_tensor(key) for part, key in keys.items()})
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise ConfigurationError(f"{directory / FILE_NAME} cannot be read: {error}") from error


def encoded(weight: QuantizedWeight) -> dict[str, Tensor]:
    """The parts of a weight as they are stored."""
    codes_OI = weight.codes_OI
    parts = {"codes": codes_OI if weight.bits == 8 else codes_OI[:, ::2] | codes_OI[:, 1::2] << 4, "scales": weight.scales_OG}
    if weight.bits == 4 and not torch.equal(weight.minimums_OG, _signing_minimums(weight.bits, weight.scales_OG)):
        parts["minimums"] = weight.minimums_OG
    return {part: tensor.contiguous() for part, tensor in parts.items()}


def decoded(parts: Mapping[str, Tensor]) -> QuantizedWeight:
    """The weight that `encoded` took apart. Raises `ValueError` where the parts do not fit each other."""
    codes, scales_OG = parts["codes"], parts["scales"]
    if codes.ndim != 2 or scales_OG.ndim != 2 or codes.dtype != torch.uint8 or scales_OG.dtype != torch.float16:
        raise ValueError("codes are a matrix of uint8, and scales one of float16")
    in_features = scales_OG.shape[1] * GROUP_SIZE
    bits = 8 if codes.shape[1] == in_features else 4
    if codes.shape != (scales_OG.shape[0], in_features * bits // 8):
        raise ValueError(f"codes of shape {tuple(codes.shape)} do not go with scales of shape {tuple(scales_OG.shape)}")
    codes_OI = codes if bits == 8 else torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    minimums_OG = parts.get("minimums", _signing_minimums(bits, scales_OG))
    if minimums_OG.shape != scales_OG.shape or minimums_OG.dtype != torch.float16 or (bits == 8 and "minimums" in parts):
        raise ValueError("minimums are for codes of 4 bits, and of float16 like scales")
    return QuantizedWeight(bits, codes_OI, scales_OG, minimums_OG)


def _signing_minimums(bits: int, scales_OG: Tensor) -> Tensor:
    return scales_OG * float(-(2 ** (bits - 1)))


def _empty(stored: Any) -> Tensor:
    dtype = {"U8": torch.uint8, "F16": torch.float16}.get(stored.get_dtype(), torch.float32)
    return torch.empty(stored.get_shape(), dtype=dtype, device="meta")
