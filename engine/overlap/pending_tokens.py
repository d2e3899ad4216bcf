"""Tokens that a step reads and the step before it samples. Nobody has to know them in between: they stay where the model computes."""

from collections.abc import Sequence

import torch
from torch import Tensor


def placeholder(row: int) -> int:
    """What stands among the input ids for the token that the step before samples in this row. No token has such an id."""
    return -1 - row


class PendingTokens:
    """What the last step sampled, for the one after it. Belongs to the thread that runs the model."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._token_ids: Sequence[int] | Tensor | None = None

    def clear(self) -> None:
        """A step begins, which may fail."""
        self._token_ids = None

    def keep(self, token_ids: Sequence[int] | Tensor) -> None:
        """One for each row. Where sampling failed, it is any number; its row is computed for nothing, but has to have a token."""
        self._token_ids = token_ids

    def fill_in(self, input_ids_1T: Tensor) -> None:
        """Puts them where their placeholders are. Never waits for the device. Raises `RuntimeError` where the last step failed."""
        if self._token_ids is None:
            raise RuntimeError("the step before this one failed, which was to sample its tokens")
        token_ids_B = torch.as_tensor(self._token_ids, dtype=torch.long, device=self._device).clamp(0, self._vocab_size - 1)
        sampled_1T = token_ids_B[(-1 - input_ids_1T).clamp(min=0)]
        input_ids_1T.copy_(torch.where(input_ids_1T < 0, sampled_1T, input_ids_1T))
