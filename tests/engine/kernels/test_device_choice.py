from collections.abc import Callable
from typing import Any

import torch

from tests.engine.kernels.device_choice_case import choose

Launch = Callable[..., Any]


def test_rows_of_every_kind_get_what_they_ask_for(launch: Launch) -> None:
    logits_BV = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    logits_BV[4] = -torch.inf
    settings = [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}, {"seed": 3, "min_p": 1.0}, {}]
    token_ids, is_possible = launch(choose, logits_BV=logits_BV, settings=settings).result
    assert is_possible == [True, True, True, True, False]
    assert token_ids[:4] == logits_BV[:4].argmax(-1).tolist()
