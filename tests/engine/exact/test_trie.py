"""Exact sampling without an engine: draws over a trie against the distribution that is known by enumeration."""

import random
from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.engine.exact.trie import HEAD, NODE_BYTES, Node, Outcome, Trie
from penstock.engine.sampling.distribution import Distribution

VOCAB = 6
STOP = 0

Path = tuple[int, ...]


@cache
def model(path: Path) -> NDArray[np.float64]:
    """Probabilities after these tokens, float64 [VOCAB]: any, and quite uneven."""
    return np.random.default_rng([7, *path]).dirichlet(np.full(VOCAB, 1.0))


def allowed(path: Path) -> list[int]:
    """What a grammar might allow: some ways are short, some long, and all end."""
    if len(path) == 3:
        return [STOP]
    ways = {(3 * sum(path) + step * len(path) + step) % (VOCAB - 1) + 1 for step in range(1, 4)}
    return sorted(ways | ({STOP} if len(path) > 0 and sum(path) % 2 else set()))


def distribution(path: Path) -> Distribution:
    ids = np.array(allowed(path))
    return Distribution(ids, model(path)[ids])


def answers(path: Path = (), probability: float = 1.0, *, max_tokens: int = 9) -> Iterator[tuple[Path, float]]:
    """All valid answers with their probabilities, stop tokens included."""
    for token_id in allowed(path):
        after = (*path, token_id)
        if token_id == STOP:
            yield after, probability * float(model(path)[STOP])
        elif len(after) < max_tokens:
            yield from answers(after, probability * float(model(path)[token_id]), max_tokens=max_tokens)


def sampled(trie: Trie, count: int, rng: random.Random, *, at_once: int = 1, shuffles: bool = False) -> tuple[list[Path], int]:
    """So many answers, of `at_once` slots that take turns, slot by slot, and the number of nodes that were computed."""
    draws = [trie.begin() for _ in range(at_once)]
    num_computed = 0
    turn = 0
    # All slots give as many answers: those that come first would not be a fair sample.
    answers_of: list[list[Path]] = [[] for _ in draws]
    while open_slots := [slot for slot, own in enumerate(answers_of) if len(own) < count // at_once]:
        slot = rng.choice(open_slots) if shuffles else open_slots[turn % len(open_slots)]
        turn += 1
        draw = draws[slot]
        if draw.needs_model:
            trie.take(draw.node, distribution(tuple(draw.node.path)))
            num_computed += 1
            if shuffles:
                continue  # others move first
        outcome = trie.move(draw, rng.random)
        if outcome is Outcome.MOVED:
            continue
        if outcome is Outcome.ACCEPTED:
            answers_of[slot].append((*draw.node.path, STOP))
        draws[slot] = trie.begin()
        trie.forget_tails()
    return [answer for own in answers_of for answer in own], num_computed


def p_value(found: list[Path], expected: dict[Path, float]) -> float:
    """Of the chi-square test, answers that are rarer than five in the sample taken together."""
    total, counts = sum(expected.values()), Counter(found)
    assert counts.keys() <= expected.keys()
    shares = {answer: probability / total * len(found) for answer, probability in expected.items()}
    frequent = [answer for answer, share in shares.items() if share >= 5]
    observed, wanted = [counts[answer] for answer in frequent], [shares[answer] for answer in frequent]
    rest = len(found) - sum(wanted)
    if rest >= 5:
        observed, wanted = [*observed, len(found) - sum(observed)], [*wanted, rest]
    return chi_square(np.array(observed, float), np.array(wanted) * sum(observed) / sum(wanted))


def chi_square(observed: NDArray[np.float64], expected: NDArray[np.float64]) -> float:
    """The p-value of Pearson's test."""
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2), torch.tensor(statistic / 2)))


@pytest.mark.parametrize(("at_once", "shuffles"), [(1, False), (4, False), (10, True)])
def test_answers_have_the_distribution_of_valid_ones_with_any_number_of_draws_at_once(at_once: int, shuffles: bool) -> None:
    rng = random.Random(at_once)
    found: list[Path] = []
    for _ in range(150):  # new tries, so that most draws see one that still changes
        own, _ = sampled(trie := Trie(frozenset({STOP}), 9), 20, rng, at_once=at_once, shuffles=shuffles)
        trie.check_integrity()
        found += own
    assert p_value(found, dict(answers())) > 0.01


def test_the_first_answers_of_slots_are_independent() -> None:
    expected = dict(answers())
    total = sum(expected.values())
    rng = random.Random(5)
    pairs: list[Path] = []
    for _ in range(2000):
        (first, second), _ = sampled(Trie(frozenset({STOP}), 9), 2, rng, at_once=2, shuffles=True)
        pairs.append((*first, *second))
    both = {(*x, *y): p * q / total for x, p in expected.items() for y, q in expected.items()}
    assert p_value(pairs, both) > 0.01


def test_masking_has_another_distribution_and_the_trie_that_does_not_adapt_has_that() -> None:
    def masked(path: Path = (), probability: float = 1.0) -> Iterator[tuple[Path, float]]:
        shares = distribution(path)
        for token_id, share in zip(shares.token_ids.tolist(), (shares.probs / shares.mass).tolist(), strict=True):
            after = (*path, token_id)
            if token_id == STOP:
                yield after, probability * share
            else:
                yield from masked(after, probability * share)

    found, _ = sampled(Trie(frozenset({STOP}), 9, is_exact=False), 4000, random.Random(2))
    assert p_value(found, dict(masked())) > 0.01
    assert p_value(found, dict(answers())) < 1e-6


def test_a_length_limit_is_a_part_of_the_condition() -> None:
    rng = random.Random(3)
    found: list[Path] = []
    for _ in range(200):
        found += sampled(Trie(frozenset({STOP}), 3), 20, rng)[0]
    expected = dict(answers(max_tokens=3))
    assert set(expected) < set(dict(answers()))
    assert p_value(found, expected) > 0.01


def test_a_trie_learns_until_hardly_a_draw_is_rejected_or_needs_the_model() -> None:
    trie, rng, valid = Trie(frozenset({STOP}), 9), random.Random(4), sum(dict(answers()).values())
    sampled(trie, 2000, rng)
    assert valid <= trie.root.weight < 1.01 * valid  # of 1 at first: a draw is accepted with the probability `valid / weight`
    assert sampled(trie, 500, rng)[1] <= 3


def test_a_full_trie_stays_exact_and_within_its_bytes() -> None:
    rng = random.Random(6)
    found: list[Path] = []
    for _ in range(200):
        trie = Trie(frozenset({STOP}), 9, max_bytes=3 * NODE_BYTES)
        found += sampled(trie, 20, rng, at_once=4, shuffles=True)[0]
        trie.check_integrity()
        assert trie.num_bytes < 5 * NODE_BYTES
    assert p_value(found, dict(answers())) > 0.01


def test_tokens_that_a_node_does_not_keep_are_drawn_as_often_as_they_should() -> None:
    # Two tokens of any out of many, then the end, which half of the first ones make unlikely.
    many = 3 * HEAD
    first = np.random.default_rng(1).dirichlet(np.full(many, 1.0))

    def after(path: list[int]) -> Distribution:
        if not path:
            return Distribution(np.arange(1, many + 1), first)
        return Distribution(np.array([STOP]), np.array([0.9 if path[0] % 2 else 0.1]))

    rng, found = random.Random(8), Counter[int]()
    for _ in range(10):
        trie = Trie(frozenset({STOP}), 9)
        draws = [trie.begin() for _ in range(5)]
        num_found = [0] * 5
        while min(num_found) < 60:
            slot = rng.choice([slot for slot in range(5) if num_found[slot] < 60])
            draw = draws[slot]
            if draw.needs_model:
                trie.take(draw.node, after(draw.node.path))
            outcome = trie.move(draw, rng.random)
            if outcome is Outcome.ACCEPTED:
                found[draw.node.path[0] // 48] += 1
                num_found[slot] += 1
            if outcome is not Outcome.MOVED:
                draws[slot] = trie.begin()
                trie.forget_tails()
        trie.check_integrity()
        assert trie.root.token_ids is not None
        assert len(trie.root.token_ids) == HEAD
    weights = first * np.where(np.arange(1, many + 1) % 2, 0.9, 0.1)
    groups = np.bincount(np.arange(1, many + 1) // 48, weights / weights.sum() * found.total()).astype(np.float64)
    assert chi_square(np.array([found[group] for group in range(len(groups))], float), groups) > 0.01


class CountedChildren(dict[int, Node]):
    """Counts how often all of them are gone through."""

    num_reads = 0

    def values(self) -> Any:
        self.num_reads += 1
        return super().values()


def test_a_draw_does_not_go_through_the_thousands_of_nodes_that_others_have_made() -> None:
    # All of it is on the event loop: what grows with the number of draws for each of them would hold up every other request.
    many = 4 * HEAD
    trie, rng = Trie(frozenset({STOP}), 9), random.Random(3)
    trie.take(trie.root, Distribution(np.arange(1, many + 1), np.full(many, 1 / many)))
    trie.root.children = children = CountedChildren()
    nodes = set()
    for _ in range(1000):
        draw = trie.begin()
        while draw.node is trie.root:
            trie.move(draw, rng.random)
        nodes.add(draw.node)
    assert len(nodes) > HEAD
    assert children.num_reads == 1
    for node in nodes:
        trie.take(node, Distribution(np.array([STOP]), np.array([0.5])))
    assert children.num_reads == 1
    trie.check_integrity()


def test_a_constraint_without_a_valid_answer_is_dead() -> None:
    trie = Trie(frozenset({STOP}), 1)
    trie.take(trie.root, Distribution(np.array([3, 4]), np.array([0.5, 0.25])))
    assert trie.is_dead
