"""Native code chooses the tokens that torch's passes choose from the same logits with the same random numbers."""

import random
from typing import Any

import pytest
import torch

from penstock.engine.native.runtime import native_library
from penstock.engine.sampling import sampler as module
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.rows import SamplingState, TokenRules, apply_penalties
from penstock.engine.sampling.sampler import NATIVE_DTYPES, NO_TOKEN_LEFT, NOT_FINITE, Sampler, SamplerOutput, choose_natively

pytestmark = pytest.mark.skipif(native_library() is None, reason="there is no C++ compiler here")


def state_of(rng: random.Random, vocab_size: int, **fields: Any) -> SamplingState:
    params = SamplingParams(**fields)
    words = [[rng.randrange(vocab_size)] for _ in range(rng.randrange(3))]
    prompt = [rng.randrange(vocab_size) for _ in range(rng.randrange(30))]
    rules = TokenRules.of(params, words, vocab_size)
    state = SamplingState(
        params, prompt, vocab_size=vocab_size, stop_token_ids=frozenset({1}), rules=rules, processors=[], seed_offset=rng.randrange(3)
    )
    for _ in range(rng.randrange(12)):
        state.append(rng.randrange(vocab_size))
    return state


def any_state(rng: random.Random, vocab_size: int) -> SamplingState:
    chosen = {
        "temperature": rng.choice([0.0, 0.1, 0.7, 1.0, 1.9]),
        "top_k": rng.choice([0, 0, 1, 3, 20, vocab_size]),
        "top_p": rng.choice([1.0, 1.0, 0.95, 0.5, 0.05]),
        "min_p": rng.choice([0.0, 0.0, 0.02, 0.5]),
        "repetition_penalty": rng.choice([1.0, 1.1, 0.7]),
        "presence_penalty": rng.choice([0.0, 0.5]),
        "frequency_penalty": rng.choice([0.0, -0.5, 1.0]),
        "min_tokens": rng.choice([0, 100]),
        "max_tokens": 200,
        "logprobs": rng.choice([None, None, 2]),
    }
    return state_of(rng, vocab_size, seed=rng.randrange(1000), **chosen)


def by_torch(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> SamplerOutput:
    with monkeypatch.context() as patch:
        patch.setattr(module, "choose_natively", lambda *_: {})
        patch.setattr(module, "greedy_tokens", lambda *_: None)
        return Sampler(arguments[0].shape[1], "cpu").sample(*arguments)


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("vocab_size", [5, 255, 1024, 3001])
def test_tokens_are_those_of_torch(dtype: torch.dtype, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    num_drawn = 0
    for case in range(60):
        rng = random.Random(f"{vocab_size}-{case}")
        states = [any_state(rng, vocab_size) for _ in range(rng.randint(1, 6))]
        logits_BV = torch.randn(len(states), vocab_size, generator=generator).mul_(rng.choice([0.1, 3.0, 20.0])).to(dtype)
        words = torch.randint(-(2**31), 2**31, (len(states), -(-vocab_size // 32)), dtype=torch.int64, generator=generator).int()
        bitmask_BW = rng.choice([None, words, torch.full_like(words, -1)])
        pending_ids_P = None
        if rng.random() < 0.5:
            pending_ids_P = torch.randint(-1, vocab_size, (4,), generator=generator)
            states = [state.after_any(rng.randrange(4)) for state in states]
        arguments = (logits_BV, states, bitmask_BW, pending_ids_P)
        expected = by_torch(monkeypatch, *arguments)
        found = Sampler(vocab_size, "cpu").sample(*arguments)
        num_drawn += len(choose_natively(logits_BV, vocab_size, states, bitmask_BW, pending_ids_P, rng))
        assert found == expected, case
    assert num_drawn > 100


def test_ids_that_are_no_tokens_are_ignored() -> None:
    """A config may write -1 for no stop token."""
    params = SamplingParams(temperature=0, min_tokens=5, max_tokens=9)
    rules, stop_token_ids = TokenRules.of(params, [], 3000), frozenset({-1, -(10**9), 2, 3000, 10**12})
    logits_BV = torch.zeros(1, 3000)
    logits_BV[0, 2], logits_BV[0, 2999] = 9.0, 5.0
    state = SamplingState(params, [4], vocab_size=3000, stop_token_ids=stop_token_ids, rules=rules, processors=[], seed_offset=0)
    assert state.masked_ids() == [2]
    assert Sampler(3000, "cpu").sample(logits_BV, [state], None).token_ids == [2999]


def test_what_may_not_follow_a_pending_token_is_blocked_by_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0, max_tokens=9)
    logits_BV = torch.zeros(1, 300)
    logits_BV[0, 7], logits_BV[0, 8] = 9.0, 5.0
    rules = TokenRules.of(params, [[17, 7]], 300)
    state = SamplingState(params, [4], vocab_size=300, stop_token_ids=frozenset(), rules=rules, processors=[], seed_offset=0)
    for pending, expected in ((17, 8), (18, 7), (-1, 7)):
        arguments = (logits_BV, 300, [state.after_any(0)], None, torch.tensor([pending]), random.Random(0))
        assert choose_natively(*arguments) == {0: expected}


def test_logits_that_tie_after_penalties_tie_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two that are equal, the first is taken: where a product were not rounded before it is subtracted, they would not be."""
    for occurrences in range(1, 40):
        fields: dict[str, Any] = {"temperature": 0, "frequency_penalty": 1.1, "presence_penalty": 0.3, "max_tokens": 99}
        rules = TokenRules.of(SamplingParams(**fields), [], 64)
        state = SamplingState(
            SamplingParams(**fields), [], vocab_size=64, stop_token_ids=frozenset(), rules=rules, processors=[], seed_offset=0
        )
        for _ in range(occurrences):
            state.append(10)
        logits_BV = torch.full((1, 64), -1e9)
        logits_BV[0, 10] = 5.90625
        edited_BV = logits_BV.clone()
        apply_penalties(edited_BV, [0], [state.counts], [state.penalties])  # type: ignore[list-item]
        logits_BV[0, 3] = edited_BV[0, 10]
        assert by_torch(monkeypatch, logits_BV, [state], None).token_ids == [3]
        assert Sampler(64, "cpu").sample(logits_BV, [state], None).token_ids == [3]


def test_a_narrow_nucleus_uses_up_as_many_numbers_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many tokens as probable as each other, but for one."""
    logits_BV = torch.zeros(1, 4096)
    logits_BV[0, 77] = 0.5
    for seed in range(40):
        states = [state_of(random.Random(0), 4096, seed=seed, temperature=1.0, top_p=1e-4, max_tokens=200)]
        found = Sampler(4096, "cpu").sample(logits_BV, states, None)
        assert found.token_ids == by_torch(monkeypatch, logits_BV, states, None).token_ids == [77]


@pytest.mark.parametrize("dtype", NATIVE_DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_possible_token_fail_alone(dtype: torch.dtype, temperature: float) -> None:
    logits_BV = torch.randn(5, 300).to(dtype)
    logits_BV[1, 299] = torch.nan
    logits_BV[2, 3] = torch.inf
    bitmask_BW = torch.full((5, 10), -1, dtype=torch.int32)
    bitmask_BW[3] = 0
    fields = {"temperature": temperature, "repetition_penalty": 1.1, "seed": 4, "max_tokens": 200}
    states = [state_of(random.Random(1), 300, **fields) for _ in range(5)]
    found = Sampler(300, "cpu").sample(logits_BV, states, bitmask_BW)
    assert found.failures == {1: NOT_FINITE, 2: NOT_FINITE, 3: NO_TOKEN_LEFT}
    alone = [Sampler(300, "cpu").sample(logits_BV[[row]], [states[row]], bitmask_BW[[row]]).token_ids[0] for row in (0, 4)]
    assert [found.token_ids[0], found.token_ids[4]] == alone


def test_rows_that_torch_chooses_for_lie_between_those_of_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    fields: dict[str, Any] = {"temperature": 0.9, "seed": 6, "logprobs": 1, "max_tokens": 200}
    kinds: list[dict[str, Any]] = [{}, {"logit_bias": {7: 90.0}}, {"top_p": 0.5}, {"allowed_token_ids": (8, 9)}]
    states = [state_of(rng, 500, **fields, **kind) for kind in kinds]
    logits_BV = torch.randn(4, 500)
    found = Sampler(500, "cpu").sample(logits_BV, states, None)
    assert set(choose_natively(logits_BV, 500, states, None, None, rng)) == {0, 2}
    assert found == by_torch(monkeypatch, logits_BV, states, None)
    assert found.token_ids[1] == 7
    assert found.token_ids[3] in (8, 9)
