import copy
import math
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.contracts.logits_processor import ChosenProcessor, per_sequence
from penstock.engine.sampling import logprobs
from penstock.engine.sampling import sampler as sampler_module
from penstock.engine.sampling.logprobs import token_logprobs
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.sampling.rows import CounterRng, SamplingState, TokenRules
from penstock.engine.sampling.sampler import Sampler, SamplerOutput
from tests.fakes import RowFunction, prompt_logprobs

VOCAB = 40
STOP_IDS = frozenset({3, 7})


def reference_distribution(
    logits: list[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    legal: frozenset[int] | None = None,
) -> list[float]:
    """What one row should be drawn from, step by step as one would write it down. `legal` is what a grammar allows."""
    for token in range(len(logits)):
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            logits[token] = -math.inf
        logits[token] += params.logit_bias.get(token, 0)
        if token in prompt or token in output:
            logits[token] *= 1 / params.repetition_penalty if logits[token] > 0 else params.repetition_penalty
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
    for word in bad_words:
        before = list(word[:-1])
        if list(output[len(output) - len(before) :]) == before:
            logits[word[-1]] = -math.inf
    if legal is None and len(output) < params.min_tokens:
        logits = [-math.inf if token in STOP_IDS else logit for token, logit in enumerate(logits)]
    if legal is not None:
        logits = [logit if token in legal else -math.inf for token, logit in enumerate(logits)]
    if params.is_greedy:
        best = logits.index(max(logits))
        return [float(token == best) for token in range(len(logits))]
    logits = [logit / params.temperature for logit in logits]
    if params.top_k > 0:
        kth = sorted(logits, reverse=True)[: params.top_k][-1]
        logits = [logit if logit >= kth else -math.inf for logit in logits]
    probs = normalized([math.exp(logit - max(logits)) for logit in logits])
    nucleus = [sum(other for other in probs if other > prob) < params.top_p for prob in probs]
    probs = normalized([prob if kept else 0.0 for prob, kept in zip(probs, nucleus, strict=True)])
    return normalized([prob if prob >= params.min_p * max(probs) * (1 - 1e-6) else 0.0 for prob in probs])


def normalized(weights: list[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def _same(process: RowFunction) -> RowFunction:
    return process


def make_state(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    *,
    bad_words: Sequence[list[int]] = (),
    processors: Sequence[RowFunction] = (),
    seed_offset: int = 0,
    vocab_size: int = VOCAB,
) -> SamplingState:
    state = SamplingState(
        params,
        prompt,
        vocab_size=vocab_size,
        stop_token_ids=STOP_IDS,
        rules=TokenRules.of(params, bad_words, vocab_size),
        processors=[ChosenProcessor(per_sequence(partial(_same, process)), {}) for process in processors],
        seed_offset=seed_offset,
    )
    for token_id in output:
        state.append(token_id)
    return state


def some_logits(rows: int = 1, vocab_size: int = VOCAB, seed: int = 0) -> Tensor:
    """Steps of an eighth, as bfloat16 gives: ties are frequent."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab_size, generator=generator).mul(12).round().div(8)


def pack(legal: frozenset[int], vocab_size: int = VOCAB) -> Tensor:
    words = [0] * -(-vocab_size // 32)
    for token in legal:
        words[token // 32] |= 1 << token % 32
    return torch.tensor([word - 2**32 if word >= 2**31 else word for word in words], dtype=torch.int32)


def assert_drawn_from(
    expected: list[float], state: SamplingState, logits_V: Tensor, bitmask_W: Tensor | None = None, draws: int = 4000
) -> None:
    """A chi-square test, and nothing outside the support. Rows differ in the place of their random numbers."""
    sampler = Sampler(len(logits_V), "cpu")
    states = [state]
    while len(states) < draws:
        states.append(copy.copy(state))
        assert state.rng is not None
        states[-1].rng = CounterRng(11, len(states))
    bitmask_BW = None if bitmask_W is None else bitmask_W.expand(draws, -1).contiguous()
    output = sampler.sample(logits_V.expand(draws, -1), states, bitmask_BW)
    assert not output.failures
    counts = Counter(output.token_ids)
    assert all(expected[token] > 0 for token in counts)
    common = [token for token, prob in enumerate(expected) if prob * draws >= 5]
    observed = [*(counts[token] for token in common), draws - sum(counts[token] for token in common)]
    predicted = [*(expected[token] * draws for token in common), draws * (1 - sum(expected[token] for token in common))]
    chi_square = sum((seen - due) ** 2 / max(due, 5) for seen, due in zip(observed, predicted, strict=True))
    assert chi_square < len(common) + 5 * math.sqrt(2 * len(common)) + 1


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 0.3},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": VOCAB + 5},
        {"top_p": 0.013},
        {"top_p": 0.51},
        {"top_p": 0.97},
        {"min_p": 0.17},
        {"min_p": 1.0},
        {"top_k": 9, "top_p": 0.83, "min_p": 0.06, "temperature": 1.4},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": -0.9},
        {"presence_penalty": -1.0, "frequency_penalty": 0.7, "repetition_penalty": 1.3, "top_p": 0.9},
        {"logit_bias": {0: 3.5, 7: -100.0, 12: 1.25}},
        {"allowed_token_ids": (1, 3, 30, 31)},
        {"allowed_token_ids": (1, 3), "logit_bias": {5: 100.0}},
        {"min_tokens": 7},
        {"min_tokens": 6},
    ],
    ids=str,
)
def test_each_parameter_gives_the_distribution_of_the_plain_reference(fields: dict[str, Any]) -> None:
    params = SamplingParams(seed=11, **fields)
    prompt, output = [1, 2, 2, 30, VOCAB + 3], [5, 5, 2, 9, 5, 30]
    logits = some_logits()[0]
    expected = reference_distribution(logits.tolist(), params, prompt, output)
    assert_drawn_from(expected, make_state(params, prompt, output), logits)


FIELDS = st.fixed_dictionaries(
    {"seed": st.integers(-(2**63), 2**63 - 1)},
    optional={
        "temperature": st.sampled_from([0.0, 0.2, 0.7, 1.0, 1.9]),
        "top_k": st.integers(-1, VOCAB + 1),
        "top_p": st.sampled_from([0.0137, 0.31, 0.617, 0.9, 0.957]),
        "min_p": st.sampled_from([0.0, 0.013, 0.23]),
        "presence_penalty": st.sampled_from([-1.3, 0.4]),
        "frequency_penalty": st.sampled_from([-0.35, 0.9]),
        "repetition_penalty": st.sampled_from([0.7, 1.35]),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.125, 2.75]), max_size=3),
        "allowed_token_ids": st.lists(st.integers(8, VOCAB - 1)).map(lambda ids: (8, *ids)),
        "min_tokens": st.integers(0, 4),
    },
)
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=8)


@settings(max_examples=40, derandomize=True)  # a statistical test: of many random draws some would miss its bound
@given(FIELDS, TOKENS, TOKENS, st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]))
def test_any_combination_gives_the_distribution_of_the_plain_reference(
    fields: dict[str, Any], prompt: list[int], output: list[int], seed: int, dtype: torch.dtype
) -> None:
    params = SamplingParams(**fields)
    logits = some_logits(seed=seed)[0].to(dtype)
    bad_words = [[11], [*output[-1:], 12]]
    expected = reference_distribution(logits.tolist(), params, prompt, output, bad_words)
    assert_drawn_from(expected, make_state(params, prompt, output, bad_words=bad_words), logits, draws=600)


def test_a_vocabulary_of_many_blocks_gives_the_distribution_of_the_plain_reference() -> None:
    logits = some_logits(vocab_size=1000)[0]
    for params in (
        SamplingParams(seed=5, temperature=0.5),
        SamplingParams(seed=5, top_p=0.6),
        SamplingParams(seed=5, top_k=300, top_p=0.9),
    ):
        expected = reference_distribution(logits.tolist(), params)
        assert_drawn_from(expected, make_state(params, vocab_size=1000), logits, draws=8000)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_constrained_row_takes_legal_tokens_only_and_may_stop_before_min_tokens(temperature: float) -> None:
    params = SamplingParams(seed=1, min_tokens=10, temperature=temperature)
    legal = frozenset({3, 8, 31, 32, 39})
    logits = some_logits()[0]
    state = make_state(params)
    state.is_constrained = True
    expected = reference_distribution(logits.tolist(), params, legal=legal)
    assert_drawn_from(expected, state, logits, pack(legal))


def mixed_states(first_seed: int = 0) -> list[SamplingState]:
    """One of everything, each seeded, so that what each draws can be compared."""
    fields: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_p": 0.5, "temperature": 1.5},
        {"top_k": 3},
        {"top_k": 30, "top_p": 0.8},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "frequency_penalty": 0.4},
        {"temperature": 0.0, "presence_penalty": 2.0, "logprobs": 3},
        {"logit_bias": {4: 9.0}, "logprobs": 0},
        {"allowed_token_ids": (1, 2, 3, 4)},
        {"min_tokens": 3, "top_p": 0.9, "logprobs": 20},
    ]
    return [make_state(SamplingParams(seed=first_seed + row, **one), [row, 1, 2], bad_words=[[4, 5]]) for row, one in enumerate(fields)]


def test_rows_give_the_same_tokens_and_logprobs_alone_and_in_any_batch() -> None:
    sampler = Sampler(VOCAB, "cpu")
    together, alone, reversed_batch = mixed_states(), mixed_states(), mixed_states()
    bitmask_BW = torch.full((len(together), 2), -1, dtype=torch.int32)
    bitmask_BW[2] = pack(frozenset(range(0, VOCAB, 2)))
    for step in range(30):
        logits_BV = some_logits(len(together), seed=step)
        batch = sampler.sample(logits_BV, together, bitmask_BW)
        backwards = sampler.sample(logits_BV.flip(0), reversed_batch[::-1], bitmask_BW.flip(0))
        singles = [sampler.sample(logits_BV[row : row + 1], [alone[row]], bitmask_BW[row : row + 1]) for row in range(len(alone))]
        assert batch.token_ids == backwards.token_ids[::-1] == [single.token_ids[0] for single in singles]
        assert batch.logprobs == backwards.logprobs[::-1] == [single.logprobs[0] for single in singles]
        for states in (together, alone, reversed_batch):
            for state, token_id in zip(states, batch.token_ids, strict=True):
                state.append(token_id)


def draw_some(state: SamplingState) -> list[int]:
    sampler = Sampler(VOCAB, "cpu")
    return [sampler.sample(some_logits(seed=step), [state], None).token_ids[0] for step in range(20)]


def test_seed_repeats_itself_and_sequences_of_one_request_differ() -> None:
    params = SamplingParams(seed=-4, temperature=2.0)
    assert draw_some(make_state(params)) == draw_some(make_state(params))
    assert draw_some(make_state(params)) != draw_some(make_state(params, seed_offset=1))
    assert draw_some(make_state(params)) != draw_some(make_state(SamplingParams(seed=4, temperature=2.0)))


def test_unseeded_rows_do_not_repeat_themselves() -> None:
    params = SamplingParams(temperature=2.0)
    assert draw_some(make_state(params)) != draw_some(make_state(params))


def test_columns_beyond_the_vocabulary_are_never_chosen_and_the_input_is_left_alone() -> None:
    logits_BV = some_logits(2, VOCAB + 24)
    logits_BV[:, VOCAB:] = 50
    before = logits_BV.clone()
    states = [make_state(SamplingParams(temperature=0, logprobs=1)), make_state(SamplingParams(repetition_penalty=2.0, logprobs=1), [1, 2])]
    output = Sampler(VOCAB, "cpu").sample(logits_BV, states, None)
    assert all(token_id < VOCAB for token_id in output.token_ids)
    assert output.logprobs[0] is not None
    assert output.logprobs[0].top[0][0] == output.token_ids[0]
    assert output.logprobs[0].logprob == pytest.approx(logits_BV[0, :VOCAB].log_softmax(-1).max().item())
    assert torch.equal(logits_BV, before)


def test_logprobs_come_from_raw_logits() -> None:
    logits_BV = some_logits()
    params = SamplingParams(temperature=0.1, top_k=2, logit_bias={9: 100.0}, logprobs=2, seed=0)
    entry = Sampler(VOCAB, "cpu").sample(logits_BV, [make_state(params)], pack(frozenset({9}))[None]).logprobs[0]
    assert entry is not None
    assert entry.token_id == 9
    assert entry.logprob == pytest.approx(logits_BV[0].log_softmax(-1)[9].item())
    assert entry.rank == 1 + sum(logit > logits_BV[0, 9].item() for logit in logits_BV[0].tolist())


def sample_with_neighbours(bad_row_V: Tensor, state: SamplingState, bitmask_W: Tensor | None = None) -> SamplerOutput:
    """The row in the middle of a healthy batch, whose tokens must be what they are without it."""
    neighbours, logits_BV = mixed_states(), some_logits(11, seed=3)
    expected = Sampler(VOCAB, "cpu").sample(logits_BV, mixed_states(), None)
    bitmask_BW = torch.full((12, 2), -1, dtype=torch.int32)
    if bitmask_W is not None:
        bitmask_BW[5] = bitmask_W
    batch_BV = torch.cat((logits_BV[:5], bad_row_V[None], logits_BV[5:]))
    output = Sampler(VOCAB, "cpu").sample(batch_BV, [*neighbours[:5], state, *neighbours[5:]], bitmask_BW)
    assert output.token_ids[:5] + output.token_ids[6:] == expected.token_ids
    assert output.logprobs[:5] + output.logprobs[6:] == expected.logprobs
    assert set(output.failures) == {5}
    assert output.logprobs[5] is None
    return output


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_not_finite_fail_their_row_alone(value: float, temperature: float) -> None:
    row = some_logits()[0]
    row[17] = value
    output = sample_with_neighbours(row, make_state(SamplingParams(temperature=temperature, top_p=0.9, top_k=5, logprobs=2)))
    assert "model" in output.failures[5]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_row_without_a_legal_token_fails_alone(temperature: float) -> None:
    state = make_state(SamplingParams(temperature=temperature, allowed_token_ids=(1,), logprobs=0))
    output = sample_with_neighbours(some_logits()[0], state, pack(frozenset({2})))
    assert "no token is left" in output.failures[5]


def test_infinite_masks_of_the_model_are_no_failure() -> None:
    logits_BV = torch.full((2, VOCAB), -torch.inf)
    logits_BV[:, 6] = 0
    states = [make_state(SamplingParams(temperature=0)), make_state(SamplingParams(top_p=0.5, top_k=4))]
    assert Sampler(VOCAB, "cpu").sample(logits_BV, states, None).token_ids == [6, 6]


def broken(token_ids: list[int], logits: Tensor) -> Tensor:
    raise ValueError("of no use")


def of_wrong_shape(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits[:3]


def of_no_tensor(token_ids: list[int], logits: Tensor) -> Any:
    return None


def of_nan(token_ids: list[int], logits: Tensor) -> Tensor:
    return logits * math.nan


@pytest.mark.parametrize(
    ("processor", "reason"),
    [(broken, "ValueError: of no use"), (of_wrong_shape, "(3,)"), (of_no_tensor, "NoneType"), (of_nan, "processors")],
)
def test_processor_that_fails_ends_its_row_alone(processor: RowFunction, reason: str) -> None:
    output = sample_with_neighbours(some_logits()[0], make_state(SamplingParams(), processors=[processor]))
    assert reason in output.failures[5]


def test_processors_run_in_order_before_everything_else_and_see_prompt_and_output() -> None:
    seen: list[list[int]] = []

    def boost_in_place(token_ids: list[int], logits: Tensor) -> Tensor:
        seen.append(list(token_ids))
        logits[10] = 1000
        return logits

    def move(token_ids: list[int], logits: Tensor) -> Tensor:
        assert logits.dtype == torch.float32
        return logits.double().roll(1)

    state = make_state(SamplingParams(temperature=0), [1, VOCAB + 2], processors=[boost_in_place, move])
    sampler = Sampler(VOCAB, "cpu")
    for _ in range(2):
        (token_id,) = sampler.sample(some_logits().bfloat16(), [state], None).token_ids
        assert token_id == 11
        state.append(token_id)
    assert seen == [[1, VOCAB + 2], [1, VOCAB + 2, 11]]
    biased = make_state(SamplingParams(temperature=0, allowed_token_ids=(2, 4)), processors=[boost_in_place])
    assert sampler.sample(some_logits(), [biased], None).token_ids[0] in (2, 4)


def test_states_outlive_changes_of_the_batch() -> None:
    """Joins and leaves at random: every sequence's tokens are those it has alone."""
    rng = random.Random(0)
    sampler = Sampler(VOCAB, "cpu")
    together, alone = mixed_states(50), mixed_states(50)
    for step in range(40):
        running = rng.sample(range(len(together)), rng.randint(1, len(together)))
        logits_BV = some_logits(len(running), seed=100 + step)
        batch = sampler.sample(logits_BV, [together[row] for row in running], None)
        for index, row in enumerate(running):
            assert sampler.sample(logits_BV[index : index + 1], [alone[row]], None).token_ids == [batch.token_ids[index]]
            together[row].append(batch.token_ids[index])
            alone[row].append(batch.token_ids[index])


def test_batches_of_several_passes_keep_their_rows_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = some_logits(11, seed=2)
    logits_BV[1, 0] = math.nan
    bitmask_BW = torch.full((11, 2), -1, dtype=torch.int32)
    bitmask_BW[7] = pack(frozenset({5}))
    whole = Sampler(VOCAB, "cpu").sample(logits_BV, mixed_states(), bitmask_BW)
    monkeypatch.setattr(sampler_module, "CPU_PASS_ELEMENTS", 1000)
    assert Sampler(VOCAB, "cpu").sample(logits_BV, mixed_states(), bitmask_BW) == whole
    assert set(whole.failures) == {1}
    assert whole.token_ids[7] == 5


def test_empty_batch_gives_nothing() -> None:
    assert Sampler(VOCAB, "cpu").sample(torch.empty(0, VOCAB), [], None) == SamplerOutput([], [])


def tied_logits(rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randint(-6, 6, (rows, vocab_size), generator=torch.Generator().manual_seed(seed)).float()


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 20), min_size=1, max_size=6), st.sampled_from([torch.float32, torch.bfloat16]))
def test_entries_equal_a_plain_log_softmax_with_ties_by_id(seed: int, num_top: list[int], dtype: torch.dtype) -> None:
    vocab_size = 30
    logits_TV = tied_logits(len(num_top), vocab_size, seed).to(dtype)
    tokens = [seed % (row + 7) for row in range(len(num_top))]
    for row, entry in enumerate(token_logprobs(logits_TV, tokens, num_top)):
        logits = logits_TV[row].tolist()
        total = math.log(sum(math.exp(logit) for logit in logits))
        assert entry.token_id == tokens[row]
        assert entry.logprob == pytest.approx(logits[tokens[row]] - total, abs=1e-5)
        assert entry.rank == 1 + sum(logit > logits[tokens[row]] for logit in logits)
        order = sorted(range(vocab_size), key=lambda token: (-logits[token], token))
        assert [token for token, _ in entry.top] == order[: num_top[row]]
        assert [logprob for _, logprob in entry.top] == pytest.approx([logits[token] - total for token in order[: num_top[row]]], abs=1e-5)


def test_more_alternatives_than_tokens_give_every_token() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, 1.0, 1.0]]), [0], [20])
    assert [token for token, _ in entry.top] == [1, 2, 0]
    assert entry.rank == 3


def test_impossible_token_has_logprob_minus_infinity() -> None:
    (entry,) = token_logprobs(torch.tensor([[0.0, -math.inf, -math.inf, 1.0]]), [2], [3])
    assert (entry.logprob, entry.rank) == (-math.inf, 3)
    assert [token for token, _ in entry.top] == [3, 0, 1]


def test_chunks_of_a_long_prompt_give_what_the_whole_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    logits_TV = tied_logits(11, 50, 3)
    tokens = list(range(11))
    whole = token_logprobs(logits_TV, tokens, [4] * 11)
    for elements in (1, 150, 10_000):
        monkeypatch.setattr(logprobs, "LOGPROBS_CHUNK_ELEMENTS", elements)
        assert prompt_logprobs(logits_TV, tokens, 4) == whole


def test_nothing_asked_gives_nothing() -> None:
    assert prompt_logprobs(torch.zeros(0, 5), [], 3) == []


def test_input_is_left_alone() -> None:
    logits_TV = tied_logits(3, 20, 1)
    before = logits_TV.clone()
    prompt_logprobs(logits_TV, [1, 2, 3], 5)
    assert torch.equal(logits_TV, before)
