"""Exact sampling in an engine whose model is known: the distribution of its answers, and what it does with blocks, seeds and failures."""

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import InvalidRequest
from penstock.engine.exact.group import LOW_ACCEPTANCE, NO_VALID_ANSWER, TIME_PASSED, WINDOW
from penstock.engine.request import Request
from tests.fakes import EOS, VOCAB_SIZE, content, drive, generate, ids, make_core, make_request, runner_of, tokens
from tests.matchers import Grammar, Matcher

LETTERS = ids("abcde")
PROMPT = "say any"

Path = tuple[int, ...]


@cache
def logits_after(text: Path) -> Tensor:
    """Float32 [V]: some letters and the end are likely, all else has about a third of the probability."""
    random = np.random.default_rng(zlib.crc32(repr(text[len(PROMPT) :]).encode()))
    logits_V = torch.full((VOCAB_SIZE,), -2.0)
    logits_V[[*LETTERS, EOS]] = torch.from_numpy(random.normal(2.0, 1.5, len(LETTERS) + 1)).float()
    return logits_V


def next_token(history: Sequence[int]) -> Tensor:
    return logits_after(tuple(history))


class Words(Matcher):
    """Words of two to four of the letters, of which the first decides on the others."""

    def allowed(self, path: list[int]) -> list[int]:
        if len(path) == 4:
            return [EOS]
        start = 0 if not path else LETTERS.index(path[0])
        ways = {LETTERS[(start + step) % len(LETTERS)] for step in range(1, 4)}
        return sorted(ways | ({EOS} if len(path) >= 2 else set()))


def answers(path: Path = (), probability: float = 1.0, *, max_tokens: int = 9, temperature: float = 1.0) -> Iterator[tuple[Path, float]]:
    """All valid answers with their probabilities, stop tokens included."""
    probs_V = (logits_after((*ids(PROMPT), *path)) / temperature).double().softmax(-1)
    for token_id in Words().allowed(list(path)):
        after = (*path, token_id)
        if token_id == EOS:
            yield after, probability * float(probs_V[EOS])
        elif len(after) < max_tokens:
            yield from answers(after, probability * float(probs_V[token_id]), max_tokens=max_tokens, temperature=temperature)


def exact_request(request_id: str = "r", **options: Any) -> Request:
    given: dict[str, Any] = {"temperature": 1.0, "grammar": Grammar(lambda: Words(forces=False)), "seed": 0} | options
    return replace(make_request(request_id, PROMPT, **given), exact=True)


def said(deltas: list[SequenceDelta], n: int) -> list[Path]:
    return [tuple(tokens(deltas, index)) for index in range(n)]


def sample(core: EngineCore, num_requests: int, n: int, **options: Any) -> list[Path]:
    """Answers of so many requests, each with a seed of its own."""
    found: list[Path] = []
    for number in range(num_requests):
        found += said(generate(core, exact_request(f"r{number}", n=n, **({"seed": 1000 * number} | options))), n)
    return found


def p_value(found: list[Path], expected: dict[Path, float]) -> float:
    """Of the chi-square test, answers that are rarer than five in the sample taken together."""
    total, counts = sum(expected.values()), Counter(found)
    assert counts.keys() <= expected.keys()
    shares = {answer: probability / total * len(found) for answer, probability in expected.items()}
    frequent = [answer for answer, share in shares.items() if share >= 5]
    observed = np.array([*(counts[answer] for answer in frequent), len(found) - sum(counts[answer] for answer in frequent)])
    wanted = np.array([*(shares[answer] for answer in frequent), len(found) - sum(shares[answer] for answer in frequent)])
    assert wanted[-1] > 1
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return float(torch.special.gammaincc(torch.tensor((len(wanted) - 1) / 2), torch.tensor(statistic / 2)))


def core_of(**options: Any) -> EngineCore:
    return make_core(next_token, **options)


@pytest.mark.parametrize(("num_requests", "n"), [(80, 1), (40, 8)])
def test_answers_have_the_models_distribution_given_that_they_are_valid(num_requests: int, n: int) -> None:
    found = sample(core_of(), num_requests, n)
    assert p_value(found, dict(answers())) > 0.01


def test_masking_has_another_distribution() -> None:
    core = core_of()
    found: list[Path] = []
    for number in range(50):
        deltas = generate(core, replace(exact_request(f"r{number}", n=8, seed=1000 * number), exact=False))
        found += [(*path, EOS) if path[-1] != EOS else path for path in said(deltas, 8)]
    assert p_value(found, dict(answers())) < 1e-6


def masked_answers(path: Path = (), share: float = 1.0, *, temperature: float) -> Iterator[tuple[Path, float]]:
    """All valid answers with the probabilities that masks give them."""
    probs_V = (logits_after((*ids(PROMPT), *path)) / temperature).double().softmax(-1)
    allowed = Words().allowed(list(path))
    for token_id in allowed:
        own = share * float(probs_V[token_id] / probs_V[allowed].sum())
        if token_id == EOS:
            yield (*path, token_id), own
        else:
            yield from masked_answers((*path, token_id), own, temperature=temperature)


@pytest.mark.thorough
def test_twenty_thousand_answers_are_within_a_hundredth_of_their_distribution_and_masks_a_third_away() -> None:
    core = core_of(max_num_seqs=128, num_blocks=1000)
    found: list[Path] = []
    for number in range(157):  # each with a trie of its own, so that many draws see one that still learns
        core.add(exact_request(f"r{number}", n=128, seed=10**6 * number, temperature=0.7))
        while core.has_work:
            for deltas in core.step().values():
                found += [tuple(delta.token_ids) for delta in sorted(deltas, key=lambda delta: delta.index)]
    expected, masked = dict(answers(temperature=0.7)), dict(masked_answers(temperature=0.7))
    counts, total = Counter(found), sum(expected.values())

    def distance(shares: dict[Path, float]) -> float:
        return sum(abs(shares.get(answer, 0.0) - probability / total) for answer, probability in expected.items()) / 2

    assert distance({answer: count / len(found) for answer, count in counts.items()}) < 0.01  # 0.0075 is the mean of a perfect sampler
    assert p_value(found, expected) > 0.01
    assert distance(masked) > 0.33


def test_temperature_and_the_length_limit_are_a_part_of_the_distribution() -> None:
    found = sample(core_of(), 25, 8, temperature=1.6, max_tokens=4)
    assert p_value(found, dict(answers(max_tokens=4, temperature=1.6))) > 0.01


def test_an_answer_comes_whole_with_its_text_its_end_and_its_draws() -> None:
    (delta, *others) = generate(core_of(), exact_request())
    assert not others
    assert delta.token_ids[-1] == EOS
    assert ids(content([delta])) == delta.token_ids[:-1]
    assert delta.finish_reason is FinishReason.STOP
    assert delta.prompt is not None
    assert delta.exact is not None
    assert delta.exact.fallback is None
    assert delta.exact.num_draws >= 1


def test_a_seed_gives_the_same_answers_alone_and_among_others_and_after_preemption() -> None:
    alone = said(generate(core_of(), exact_request(n=6)), 6)
    core = core_of(max_num_batched_tokens=16, num_blocks=50)
    core.add(make_request("other", "??", max_tokens=60, ignore_eos=True))
    core.step()
    core.add(exact_request(n=6))
    core.add(exact_request("more", n=2, seed=7))
    by_request: dict[str, list[SequenceDelta]] = {}
    for number in range(300):
        if not core.has_work:
            break
        for request_id, deltas in core.step().items():
            by_request.setdefault(request_id, []).extend(deltas)
        core.check_integrity()
        lanes = [sequence for sequence in core.scheduler.running if sequence.request.request_id == "r"]
        if lanes and number in (4, 7):
            core.scheduler._preempt(lanes[-1])
            core.check_integrity()
    assert said(by_request["r"], 6) == alone
    assert core.scheduler.num_preemptions > 0


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_lanes_share_their_beginnings_and_no_history_is_wrong(windows: tuple[int | None, ...]) -> None:
    # The runner asserts that what is sampled from is the sequence's own, in small blocks that lanes leave and come back to.
    core = core_of(block_size=2, num_blocks=200, windows=windows)
    generate(core, exact_request(n=8))
    runner = runner_of(core)
    num_nodes = len({answer[:length] for answer, _ in answers() for length in range(len(answer))})
    assert sum(runner.num_tokens_per_step) < len(PROMPT) + 3 * num_nodes


def test_blocks_that_lanes_leave_are_found_by_what_is_in_them() -> None:
    core = core_of(block_size=2, num_blocks=200)
    generate(core, exact_request(n=8, temperature=1.5))
    num_cached = 0
    for number, (answer, _) in enumerate(answers()):
        # The runner asserts that the blocks that are reused hold these tokens.
        (delta, *_) = generate(core, make_request(f"again{number}", [*ids(PROMPT), *answer[:-1], *LETTERS], max_tokens=1))
        assert delta.prompt is not None
        num_cached += delta.prompt.num_cached_tokens > len(PROMPT)
    assert num_cached > 0


def test_answers_that_the_trie_knows_cost_no_tokens() -> None:
    core = core_of(max_num_seqs=128, num_blocks=2000)
    deltas = generate(core, exact_request(n=128))
    num_tokens = sum(runner_of(core).num_tokens_per_step)
    assert num_tokens < 0.6 * sum(len(delta.token_ids) for delta in deltas)


class Unlikely(Matcher):
    """Thirty letters of which the model hardly ever says any: so many words that each draw comes to a new one."""

    def allowed(self, path: list[int]) -> list[int]:
        return ids("mnopqrstuvwxyz") if len(path) < 30 else [EOS]


def test_where_hardly_any_draw_is_accepted_answers_are_masked_and_say_so() -> None:
    core = core_of()
    deltas = generate(core, exact_request(grammar=Grammar(lambda: Unlikely(forces=False)), n=2, max_tokens=60))
    assert {delta.finish_reason for delta in deltas} == {FinishReason.STOP}
    for delta in deltas:
        assert delta.exact is not None
        assert delta.exact.fallback == LOW_ACCEPTANCE
    draws = [delta.exact.num_draws for delta in deltas if delta.exact is not None]
    assert WINDOW <= sum(draws) < 2 * WINDOW


def test_where_no_valid_answer_fits_answers_are_masked_and_cut() -> None:
    (delta,) = generate(core_of(), exact_request(max_tokens=2))
    assert delta.finish_reason is FinishReason.LENGTH
    assert len(delta.token_ids) == 2
    assert delta.exact is not None
    assert delta.exact.fallback == NO_VALID_ANSWER


def test_a_grammar_that_fails_ends_all_answers() -> None:
    class Failing(Words):
        def allowed(self, path: list[int]) -> list[int]:
            if len(path) == 2:
                raise RuntimeError("gone")
            return super().allowed(path)

    deltas = generate(core_of(), exact_request(grammar=Grammar(lambda: Failing(forces=False)), n=3))
    assert {delta.finish_reason for delta in deltas} == {FinishReason.ERROR}
    assert {delta.index for delta in deltas} == {0, 1, 2}


def test_aborting_and_timing_out_free_the_lanes() -> None:
    core = core_of()
    core.add(exact_request("a", n=8))
    core.add(replace(exact_request("b", n=8), deadline=0.0))
    core.scheduler.max_num_seqs = 16
    for _ in range(2):
        core.step()
    core.abort("a")
    drive(core)


def test_answers_that_are_not_there_at_the_time_limit_say_so() -> None:
    core = core_of()
    core.add(exact_request("a", n=40))
    deltas: list[SequenceDelta] = []
    while not deltas:
        deltas += core.step().get("a", [])
    assert {delta.exact.fallback for delta in deltas if delta.exact} == {None}
    core.deadlines.add("a", 0.0)
    missing = core.expire()["a"]
    assert sorted(delta.index for delta in deltas + missing) == list(range(40))
    assert missing
    for delta in missing:
        assert (delta.token_ids, delta.finish_reason) == ([], FinishReason.TIMED_OUT)
        assert delta.exact is not None
        assert delta.exact.num_draws >= 1
        assert delta.exact.fallback == TIME_PASSED
    assert not core.has_work


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"grammar": None}, "structured_outputs.sampling"),
        ({"temperature": 0.0}, "temperature"),
        ({"top_k": 1}, "top_k"),
        ({"stop": ("x",)}, "stop"),
        ({"stop_token_ids": (5,)}, "stop_token_ids"),
        ({"logprobs": 1}, "logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"prediction": (1, 2)}, "prediction"),
        ({"logits_processors": [lambda: lambda token_ids, logits: logits]}, "logits_processors"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(options: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        core_of().add(exact_request(**options))
    assert refusal.value.param == named


def test_a_model_with_recurrent_layers_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="recurrent"):
        core_of(num_slots=30).add(exact_request())
