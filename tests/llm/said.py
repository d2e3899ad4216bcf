"""A logits processor that decides what a model says, so that its answers have a form."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.text.tokenizer import Tokenizer


def saying(directory: Path) -> Any:
    """A factory: `text` is what a sequence says, and then what ends it. The prompt is what the first call is given."""
    tokenizer = Tokenizer.load(directory)

    def factory(text: str) -> Any:
        said = [*tokenizer.encode(text, add_special_tokens=False), min(tokenizer.eos_token_ids)]
        start: list[int] = []

        def process(token_ids: list[int], logits: Tensor) -> Tensor:
            start.append(len(token_ids))
            forced = torch.full_like(logits, -torch.inf)
            forced[said[min(len(token_ids) - start[0], len(said) - 1)]] = 0.0
            return forced

        return process

    return factory
