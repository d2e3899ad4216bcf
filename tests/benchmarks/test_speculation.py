"""The replay of recorded answers: it takes the steps that an engine would."""

import random

import pytest

from benchmarks.speculation import PROPOSERS, Exchange, compare, natural_scenarios, num_known_tokens, replay


def exchanges_of(seed: int, *, repeats: bool) -> list[Exchange]:
    rng = random.Random(seed)
    exchanges: list[Exchange] = []
    answer = [rng.randrange(1000) for _ in range(40)]
    for _ in range(6):
        prompt = [rng.randrange(1000) for _ in range(20)]
        own = answer if repeats else [rng.randrange(1000) for _ in range(40)]
        exchanges.append(Exchange(prompt, own, num_known_tokens(prompt, exchanges)))
    return exchanges


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("num_streams", [1, 4])
def test_every_token_is_replayed(name: str, num_streams: int) -> None:
    done = replay(exchanges_of(1, repeats=True), PROPOSERS[name](), num_streams)
    assert done.num_tokens == 6 * 39  # the first comes from the prompt
    assert done.num_steps + done.num_accepted == done.num_tokens
    assert done.num_accepted <= done.num_drafted


def test_answers_that_come_again_are_proposed_by_suffixes_alone() -> None:
    compared = compare(exchanges_of(1, repeats=True), 1, 1)
    assert compared["none"]["tokens_per_step"] == 1.0
    assert compared["ngram"]["tokens_per_step"] < 1.1
    assert compared["suffix"]["tokens_per_step"] > 3.0
    assert compare(exchanges_of(1, repeats=False), 1, 1)["suffix"]["tokens_per_step"] < 1.1


def test_what_an_earlier_text_has_in_whole_blocks_is_known() -> None:
    earlier = [Exchange(list(range(20)), list(range(20, 40)), 0)]
    assert num_known_tokens([*range(35), 7, 7], earlier) == 32
    assert num_known_tokens([5, 6], earlier) == 0


def test_scenarios_are_chosen_by_name() -> None:
    assert [scenario.name for scenario in natural_scenarios(["agent", "rag"])] == ["agent", "rag"]
    with pytest.raises(SystemExit, match="no such scenarios: prefill"):
        natural_scenarios(["prefill"])
