"""Numbers as they go over the wire."""

import base64
from typing import Any

from torch import Tensor

from penstock.api.pooling.pooling_protocol import EncodingFormat

MANY_NUMBERS = 2**14  # writing fewer takes a few milliseconds


def written(data: Tensor, encoding: EncodingFormat | None) -> Any:
    """Nested lists of the tensor's shape, or base64 of its float32 numbers, little-endian and row after row."""
    if encoding != "base64":
        return data.tolist()
    return base64.b64encode(data.numpy().astype("<f4", copy=False).tobytes()).decode("ascii")
