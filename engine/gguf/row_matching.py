"""Finds a matrix again among others, whatever order its rows are in.

Conversions of checkpoints rename matrices and, for rotary embeddings, put rows in another order. Which do what is not asked here: a matrix
is known by its contents.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

# How many rows are looked at at a time, which bounds the memory that it takes.
CHUNK_ROWS = 4096
_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def fingerprints(rows_OI: Tensor) -> Tensor:
    """Int64 [O]: equal for equal rows, and otherwise different but for one chance in 2**64."""
    generator = torch.Generator().manual_seed(0)
    factors_I = torch.randint(-(2**62), 2**62, (rows_OI.shape[1],), generator=generator)
    # Adding zero makes negative zeros positive ones. The sums wrap around.
    chunks = (((chunk + 0.0).view(_INTEGERS[rows_OI.dtype]).long() * factors_I).sum(1) for chunk in rows_OI.split(CHUNK_ROWS))  # type: ignore[no-untyped-call]
    return torch.cat(list(chunks))


class RowIndex:
    """Matrices by what is in their rows."""

    def __init__(self, matrices: Iterable[tuple[str, Tensor]]) -> None:
        self._fingerprints: dict[tuple[torch.Size, int], tuple[str, Tensor]] = {}
        for name, matrix_OI in matrices:
            rows_O = fingerprints(matrix_OI)
            self._fingerprints[matrix_OI.shape, int(rows_O.sum())] = (name, rows_O)

    def find(self, matrix_OI: Tensor) -> tuple[str, Tensor] | None:
        """The name of the matrix that has the same rows, and int64 [O]: which row of it each row here is."""
        rows_O = fingerprints(matrix_OI)
        found = self._fingerprints.get((matrix_OI.shape, int(rows_O.sum())))
        if found is None:
            return None
        name, their_rows_O = found
        if torch.equal(rows_O, their_rows_O):
            return name, torch.arange(len(rows_O))
        order_O = torch.empty_like(rows_O)
        order_O[rows_O.argsort()] = their_rows_O.argsort()
        return name, order_O
