"""A call of `choose_on_device` that can be sent to another process."""

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.rows import SamplingState, TokenRules, choose_on_device


def choose(logits_BV: Tensor, settings: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    states = [
        SamplingState(
            params,
            [1],
            vocab_size=logits_BV.shape[1],
            stop_token_ids=frozenset(),
            rules=TokenRules.of(params, [], logits_BV.shape[1]).on(logits_BV.device),
            processors=[],
            seed_offset=0,
        )
        for params in (SamplingParams(**kinds) for kinds in settings)
    ]
    token_ids_B, is_possible_B = choose_on_device(logits_BV, states, random.Random(0))
    return token_ids_B.tolist(), is_possible_B.bool().tolist()
