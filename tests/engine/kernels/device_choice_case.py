"""A call of `choose_on_device` that can be sent to another process."""

import random
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from penstock.engine.sampling.choice import choose_on_device
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.state import SamplingState


def choose(logits_BV: Tensor, settings: Sequence[dict[str, Any]]) -> tuple[list[int], list[bool]]:
    states = [
        SamplingState(
            SamplingParams(**kinds),
            [1],
            vocab_size=logits_BV.shape[1],
            stop_token_ids=frozenset(),
            bad_words_ids=[],
            processors=[],
            seed_offset=0,
            device=logits_BV.device,
        )
        for kinds in settings
    ]
    token_ids_B, is_possible_B = choose_on_device(logits_BV, states, random.Random(0))
    return token_ids_B.tolist(), is_possible_B.bool().tolist()
