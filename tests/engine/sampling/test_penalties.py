import math
from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.state import Penalties, TokenCounts, apply_penalties

VOCAB = 200
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=150)
PENALTIES = st.builds(Penalties, st.sampled_from([0.5, 1.0, 1.8]), st.sampled_from([-2.0, 0.0, 1.5]), st.sampled_from([-0.5, 0.0, 2.0]))


def counted(prompt: list[int], output: list[int]) -> TokenCounts:
    counts = TokenCounts(prompt)
    for token_id in output:
        counts.append(token_id)
    return counts


@settings(max_examples=50)
@given(TOKENS, TOKENS)
def test_counts_hold_every_token_once_with_its_occurrences_in_the_output(prompt: list[int], output: list[int]) -> None:
    counts = counted(prompt, output)
    pairs = list(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True))
    assert len(pairs) == len({token for token, _ in pairs})
    assert dict(pairs) == {token: Counter(output)[token] for token in [*prompt, *output]}


@settings(max_examples=50)
@given(st.lists(st.tuples(TOKENS, TOKENS, PENALTIES), min_size=1, max_size=4), st.integers(0, 1000))
def test_penalties_equal_the_plain_formula_and_leave_other_rows_alone(
    sequences: list[tuple[list[int], list[int], Penalties]], seed: int
) -> None:
    logits_BV = torch.randn(2 * len(sequences), VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = logits_BV.tolist()
    rows = [2 * index + 1 for index in range(len(sequences))]
    for row, (prompt, output, penalties) in zip(rows, sequences, strict=True):
        for token in {*prompt, *output}:
            logit = expected[row][token]
            logit = logit / penalties.repetition if logit > 0 else logit * penalties.repetition
            expected[row][token] = logit - penalties.frequency * output.count(token) - penalties.presence * (token in output)
    apply_penalties(logits_BV, rows, [counted(prompt, output) for prompt, output, _ in sequences], [one for _, _, one in sequences])
    torch.testing.assert_close(logits_BV, torch.tensor(expected))


def test_forbidden_token_stays_forbidden() -> None:
    logits_BV = torch.full((1, VOCAB), -math.inf)
    apply_penalties(logits_BV, [0], [counted([1], [1, 2])], [Penalties(0.5, -2.0, -2.0)])
    assert logits_BV.isneginf().all()


def test_no_penalised_row_changes_nothing() -> None:
    logits_BV = torch.ones(1, VOCAB)
    apply_penalties(logits_BV, [], [], [])
    assert (logits_BV == 1).all()


@settings(max_examples=50)
@given(st.lists(st.tuples(TOKENS, TOKENS, PENALTIES, st.integers(-1, VOCAB - 1)), min_size=1, max_size=4), st.integers(0, 1000))
def test_a_pending_token_is_penalised_as_one_that_is_known(sequences: list[tuple[list[int], list[int], Penalties, int]], seed: int) -> None:
    logits_BV = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(seed))
    expected_BV = logits_BV.clone()
    rows, penalties = list(range(len(sequences))), [one for _, _, one, _ in sequences]
    known = [counted(prompt, [*output, pending] if pending >= 0 else output) for prompt, output, _, pending in sequences]
    apply_penalties(expected_BV, rows, known, penalties)
    pending_R = torch.tensor([pending for _, _, _, pending in sequences])
    apply_penalties(logits_BV, rows, [counted(prompt, output) for prompt, output, _, _ in sequences], penalties, pending_R)
    torch.testing.assert_close(logits_BV, expected_BV)
