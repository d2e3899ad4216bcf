from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels import references
from penstock.engine.kernels.launch import sample

Launch = Callable[..., Any]

NUM_DRAWS = 64
VOCAB_SIZE = 40


def make_arguments(
    logits_BV: Tensor, temperature: float = 1.0, top_p: float = 1.0, min_p: float = 0.0, top_k: int | None = None
) -> dict[str, Any]:
    """The same parameters for all rows, and a seed of its own for each."""
    num_rows = len(logits_BV)
    arguments: dict[str, Any] = {
        "logits_BV": logits_BV,
        "temperatures_B": torch.full((num_rows,), temperature),
        "top_ps_B": torch.full((num_rows,), top_p),
        "min_ps_B": torch.full((num_rows,), min_p),
        "seeds_B": torch.arange(num_rows) * 7919 + 2**40,
    }
    if top_k is not None:
        arguments |= {"top_ks_B": torch.full((num_rows,), top_k), "max_top_k": top_k if top_k < logits_BV.shape[1] else 0}
    return arguments


def random_logits(num_rows: int, vocab_size: int = VOCAB_SIZE, spread: float = 2.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * spread


def distribution(arguments: dict[str, Any]) -> Tensor:
    names = ("logits_BV", "temperatures_B", "top_ps_B", "min_ps_B", "top_ks_B")
    return references.sampling_distribution(**{name: arguments[name] for name in names if name in arguments})


@pytest.mark.parametrize("settings", [{"temperature": 0.5}, {"top_p": 0.6, "min_p": 0.1, "top_k": 8}])
def test_draws_follow_the_distribution(launch: Launch, settings: dict[str, Any]) -> None:
    arguments = make_arguments(random_logits(1).expand(NUM_DRAWS, -1).contiguous(), **settings)
    token_ids, is_possible = launch(sample, **arguments).result
    assert is_possible.all()
    expected = distribution(arguments)[0] * NUM_DRAWS
    counts = torch.bincount(token_ids, minlength=VOCAB_SIZE)
    assert counts[expected == 0].sum() == 0
    is_likely = expected > 5
    statistic = ((counts - expected) ** 2 / expected.clamp_min(1e-9))[is_likely].sum()
    degrees = max(1, int(is_likely.sum()))
    assert statistic < degrees + 4 * (2 * degrees) ** 0.5  # the seeds are fixed: it holds or it does not


@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 3},
        {"top_k": 7, "top_p": 0.5},
        {"top_p": 0.3, "min_p": 0.05, "temperature": 1.7},
        {"top_k": 1},
        {"top_k": 10**6, "top_p": 0.9},
    ],
)
@pytest.mark.parametrize("vocab_size", [3, 129, 20_000])
def test_no_draw_lies_outside_what_the_parameters_leave(launch: Launch, settings: dict[str, Any], vocab_size: int) -> None:
    logits_BV = random_logits(4, vocab_size).mul(4).round().div(4)  # with many ties
    arguments = make_arguments(logits_BV, **settings | {"top_k": min(settings.get("top_k", vocab_size), vocab_size)})
    token_ids, is_possible = launch(sample, **arguments).result
    assert is_possible.all()
    assert (distribution(arguments).gather(1, token_ids[:, None]) > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_at_temperature_0_it_is_the_first_of_the_most_probable(launch: Launch, dtype: torch.dtype) -> None:
    logits_BV = random_logits(3, 10_000).to(dtype)
    logits_BV[0, [7, 9000]] = 50.0
    logits_BV[1, 9999] = 50.0
    token_ids, is_possible = launch(sample, **make_arguments(logits_BV, temperature=0.0)).result
    assert token_ids.tolist() == logits_BV.argmax(-1).tolist()
    assert token_ids.tolist()[:2] == [7, 9999]
    assert is_possible.all()


def test_rows_without_a_token_are_told_and_harm_no_other(launch: Launch) -> None:
    logits_BV = random_logits(6)
    logits_BV[1] = -torch.inf
    logits_BV[2, 3] = torch.nan
    logits_BV[3, 3] = torch.inf
    logits_BV[4] = -torch.inf
    logits_BV[4, 11] = 0.0
    alone = launch(sample, **make_arguments(random_logits(6), top_p=0.9)).result[0]
    token_ids, is_possible = launch(sample, **make_arguments(logits_BV, top_p=0.9)).result
    assert is_possible.tolist() == [True, False, False, False, True, True]
    assert token_ids[[0, 5]].tolist() == alone[[0, 5]].tolist()
    assert token_ids[4] == 11


def test_each_row_has_parameters_of_its_own_and_the_same_seed_gives_the_same_token(launch: Launch) -> None:
    arguments = make_arguments(random_logits(4, spread=0.5))
    arguments["temperatures_B"] = torch.tensor([0.0, 1.0, 1.0, 1.0])
    arguments |= {"top_ks_B": torch.tensor([VOCAB_SIZE, 1, VOCAB_SIZE, VOCAB_SIZE]), "max_top_k": 1}
    arguments["seeds_B"] = torch.tensor([1, 2, 3, 3])
    arguments["logits_BV"][3] = arguments["logits_BV"][2]
    token_ids = launch(sample, **arguments).result[0].tolist()
    assert token_ids[:2] == arguments["logits_BV"][:2].argmax(-1).tolist()
    assert token_ids[2] == token_ids[3]


def test_no_rows_launch_nothing(launch: Launch) -> None:
    token_ids, is_possible = launch(sample, **make_arguments(random_logits(0))).result
    assert token_ids.shape == is_possible.shape == (0,)
