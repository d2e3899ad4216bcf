"""What one request asks for changes no token of the requests that share steps, slots and blocks with it."""

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.engine.deltas import SequenceDelta
from penstock.engine.loop import Engine
from penstock.plugins.reasoning.formats import FORMATS
from tests.engine.running import run, running
from tests.fakes import EOS, LETTERS, ids, letter_after, make_core, make_request, tokens
from tests.matchers import Grammar, Walk

MAX_TOKENS = 12


def said_alone(prompt: Sequence[int]) -> list[int]:
    """By the model's own rule, without an engine."""
    token_ids = list(prompt)
    for _ in range(MAX_TOKENS):
        token_ids.append(letter_after(token_ids))
    return token_ids[len(prompt) :]


def another_kind(rng: random.Random) -> dict[str, Any]:
    """A request that changes logits, or how its own tokens are taken."""
    seed = rng.randrange(99)
    kinds: tuple[dict[str, Any], ...] = (
        {"allowed_token_ids": tuple(LETTERS[:3])},
        {"grammar": Grammar(lambda: Walk(seed), has_quick_masks=rng.random() < 0.5)},
        {"logit_bias": {LETTERS[1]: 100.0}},
        {"repetition_penalty": 1.9, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        {"temperature": 1.5, "seed": 3, "top_p": 0.5},
        {"n": 3, "temperature": 1.0},
        {"max_tokens": 5, "min_tokens": 3, "stop_token_ids": tuple(LETTERS)},
        {"bad_sequences": ((LETTERS[0],), (LETTERS[1], LETTERS[2]))},
        {"logits_processors": [lambda: lambda token_ids, logits: logits * 0]},
        {"parser": FORMATS["deepseek_r1"], "thinking_token_budget": rng.randint(1, 5)},
        {"parser": FORMATS["deepseek_r1"], "tail": "<think>", "thinking_token_budget": rng.randint(1, 5), "n": 2},
    )
    return {"max_tokens": rng.randint(1, 9), **rng.choice(kinds)}


async def ask(engine: Engine, number: int, rng: random.Random, gone: float) -> None:
    """A plain request, whose answer is compared, or one of another kind, whose client may go before its end."""
    prompt = ids(f"{rng.randrange(40)}?" + "x" * rng.randrange(20))
    if number % 2:
        deltas: list[SequenceDelta] = [
            delta async for delta in engine.generate(make_request(f"plain{number}", prompt, max_tokens=MAX_TOKENS))
        ]
        assert tokens(deltas) == said_alone(prompt)
        return
    stream = engine.generate(make_request(f"other{number}", prompt, **another_kind(rng)))
    async for _ in stream:
        if rng.random() < gone:
            await stream.aclose()
            return


@pytest.mark.parametrize("is_async", [False, True], ids=["in turn", "ahead"])
@pytest.mark.parametrize("count", [150, pytest.param(1500, marks=pytest.mark.thorough)])
def test_plain_requests_among_all_others_say_what_they_say_alone(count: int, is_async: bool) -> None:
    """Few slots and few blocks, so that each is taken over many times, sequences are preempted, and batches are reordered."""
    core = make_core(
        letter_after, max_num_seqs=4, num_blocks=52, max_num_batched_tokens=24, max_waiting=10**6, is_async=is_async, rows_for_weights=20.0
    )
    assert EOS not in LETTERS

    async def test() -> None:
        async with running(core) as engine:
            limit = asyncio.Semaphore(16)

            async def limited(number: int) -> None:
                async with limit:
                    await ask(engine, number, random.Random(f"{is_async}-{number}"), gone=0.1)

            await asyncio.gather(*(limited(number) for number in range(count)))

    run(test)
