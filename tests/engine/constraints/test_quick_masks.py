"""Grammars whose masks are filled on the event loop, as soon as a token is there."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from penstock.engine.constraints import masks
from penstock.engine.constraints.masks import NUM_MASKS_APART, MaskJob, allocate_bitmask
from penstock.engine.constraints.state import MAX_FORCED_TOKENS, ConstraintState
from penstock.engine.core import EngineCore
from penstock.engine.deltas import FinishReason
from tests.fakes import (
    EOS,
    LETTERS,
    content,
    drive,
    generate,
    make_core,
    make_request,
    runner_of,
    saying,
    tokens,
    undecided,
)
from tests.matchers import Grammar, Matcher, Spelling, Walk

DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 3}


def quick(make: Any) -> Grammar:
    return Grammar(make, has_quick_masks=True)


class Lettered(Matcher):
    """Every other letter is the last; those between are free. `num_asked` counts the masks."""

    def __init__(self, length: int = 20) -> None:
        super().__init__()
        self.length = length
        self.num_asked = 0

    def allowed(self, path: list[int]) -> list[int]:
        if len(path) >= self.length:
            return [EOS]
        return LETTERS[:5] if len(path) % 2 == 0 else [LETTERS[-1]]

    def fill_bitmask(self, row: Any) -> None:
        self.num_asked += 1
        super().fill_bitmask(row)


def test_what_is_forced_after_a_sampled_token_takes_no_step_of_its_own() -> None:
    num_steps = []
    for has_quick_masks in (False, True):
        core = make_core()
        deltas = generate(core, make_request(grammar=Grammar(Lettered, has_quick_masks=has_quick_masks), max_tokens=20))
        assert tokens(deltas)[1::2] == LETTERS[-1:] * 10
        assert core.stats().num_forced_tokens == 10
        num_steps.append(core.stats().num_steps)
    assert num_steps == [20, 10]


def test_masks_are_asked_for_once_and_where_nothing_is_drawn_only_after_a_token_was_refused() -> None:
    drawn = Lettered()
    core = make_core(max_num_seqs=2)
    core.add(make_request("r", grammar=quick(lambda: drawn), max_tokens=20, temperature=1.0))
    core.add(make_request("free", max_tokens=20))
    drive(core)
    assert drawn.num_asked == 10
    runner_of(core).shutdown()
    for preferred, num_asked in ((LETTERS[0], 1), (LETTERS[7], 10), (EOS, 10)):
        greedy = Lettered()
        core = make_core(lambda history, token_id=preferred: token_id)  # type: ignore[misc]
        generate(core, make_request(grammar=quick(lambda matcher=greedy: matcher), max_tokens=20))
        assert greedy.num_asked == num_asked  # the first one is asked for in any case


def test_much_that_is_forced_comes_in_portions_all_the_same() -> None:
    class Long(Spelling):
        def allowed(self, path: list[int]) -> list[int]:
            return super().allowed(path) if path else LETTERS[:5]

    core = make_core()
    deltas = generate(core, make_request(grammar=quick(lambda: Long("x" * 180, forces=True))))
    assert content(deltas)[1:] == "x" * 179
    assert all(len(delta.token_ids) <= 1 + 2 * MAX_FORCED_TOKENS for delta in deltas)
    assert len(deltas) > 1


def test_one_that_fails_ends_its_own_request_by_name() -> None:
    class Failing(Walk):
        def fill_bitmask(self, row: Any) -> None:
            if len(self.path) > 4:
                raise RuntimeError("lost")
            super().fill_bitmask(row)

    core = make_core()
    core.add(make_request("bad", grammar=quick(lambda: Failing(3, forces=False)), max_tokens=30))
    core.add(make_request("good", grammar=quick(lambda: Walk(3)), max_tokens=30))
    said = drive(core)
    last = said["bad"][-1]
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the grammar raised RuntimeError: lost")
    assert len(tokens(said["bad"])) >= 5
    assert tokens(said["good"]) == tokens(generate(make_core(), make_request(grammar=Grammar(lambda: Walk(3)), max_tokens=30)))
    core.check_integrity()
    runner_of(core).shutdown()


def count_masks_filled_at_once(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the one sequence: how many tokens it had at each mask that was filled on the loop."""
    at_once: list[int] = []
    fill_at_once = masks.MaskPool.fill_at_once

    def counted(self: Any, *args: Any, **options: Any) -> Any:
        at_once.append(core.scheduler.running[0].num_output_tokens)
        return fill_at_once(self, *args, **options)

    monkeypatch.setattr(masks.MaskPool, "fill_at_once", counted)
    return at_once


def test_one_that_turns_out_slow_is_no_longer_asked_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(Walk):
        def fill_bitmask(self, row: Any) -> None:
            ends_at = time.thread_time() + 2 * masks.SLOW
            while len(self.path) == 3 and time.thread_time() < ends_at:
                pass
            super().fill_bitmask(row)

    core = make_core()
    at_once = count_masks_filled_at_once(core, monkeypatch)
    deltas = generate(core, make_request(grammar=quick(lambda: Busy(2, forces=False)), max_tokens=30, **DRAWN))
    assert len(tokens(deltas)) == 30
    assert at_once[:3] == [1, 2, 3]
    assert all(place > NUM_MASKS_APART for place in at_once[3:])
    plain = make_request(grammar=Grammar(lambda: Walk(2, forces=False)), max_tokens=30, **DRAWN)
    assert tokens(deltas) == tokens(generate(make_core(), plain))


def test_one_that_only_waits_for_a_processor_is_not_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Preempted(Walk):
        def fill_bitmask(self, row: Any) -> None:
            time.sleep(2 * masks.SLOW)
            super().fill_bitmask(row)

    core = make_core()
    at_once = count_masks_filled_at_once(core, monkeypatch)
    generate(core, make_request(grammar=quick(lambda: Preempted(2, forces=False)), max_tokens=8, **DRAWN))
    assert at_once == [1, 2, 3, 4, 5, 6, 7]


def test_a_mask_that_its_matcher_says_will_take_long_is_filled_in_another_thread() -> None:
    threads: dict[int, str] = {}

    class Moody(Walk):
        @property
        def is_quick(self) -> bool:
            return not 5 <= len(self.path) < 8

        def fill_bitmask(self, row: Any) -> None:
            threads[len(self.path)] = threading.current_thread().name
            super().fill_bitmask(row)

    core = make_core()
    deltas = generate(core, make_request(grammar=quick(lambda: Moody(2, forces=False)), max_tokens=12, **DRAWN))
    assert [place for place in sorted(threads) if threads[place] == "mask"] == [0, 5, 6, 7]
    assert sorted(threads) == list(range(12))
    plain = make_request(grammar=Grammar(lambda: Walk(2, forces=False)), max_tokens=12, **DRAWN)
    assert tokens(deltas) == tokens(generate(make_core(), plain))


def test_drafts_are_tried_with_quick_masks() -> None:
    class Pairs(Matcher):
        def allowed(self, path: list[int]) -> list[int]:
            return LETTERS[:2] if len(path) < 60 else [EOS]

    said = []
    for has_quick_masks in (False, True):
        core = make_core(saying("ab" * 40), rows_for_weights=1000.0)
        request = make_request(prompt="ab" * 5, grammar=Grammar(Pairs, has_quick_masks=has_quick_masks), max_tokens=50)
        request = make_request(prompt="ab" * 5, grammar=Grammar(Pairs, has_quick_masks=has_quick_masks), max_tokens=50)
        said.append(tokens(generate(core, request)))
        assert core.stats().num_drafts > 0
        assert core.stats().num_steps < 50
    assert said[0] == said[1]


@pytest.mark.parametrize("params", [{}, DRAWN])
@pytest.mark.parametrize("forces", [False, True])
def test_tokens_that_are_taken_at_once_are_those_that_are_taken_one_by_one(
    forces: bool, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_at_once = 0
    at_once = ConstraintState.advance_at_once

    def said(seed: int, *, takes_at_once: bool) -> list[tuple[Any, ...]]:
        def advance(self: ConstraintState, token_id: int) -> bool:
            nonlocal num_at_once
            is_taken = takes_at_once and at_once(self, token_id)
            num_at_once += is_taken
            return is_taken

        monkeypatch.setattr(ConstraintState, "advance_at_once", advance)
        walk = Walk(seed, length=40)

        def next_token(history: Sequence[int]) -> int:
            ways = walk.allowed(list(history[3:]))
            return ways[sum(history) % len(ways)] if sum(history) % 4 else LETTERS[0]

        core = make_core(next_token, max_num_seqs=3)
        for name, max_tokens in (("a", 60), ("b", 7), ("c", 1)):
            grammar = quick(lambda: Walk(seed, length=40, forces=forces))
            core.add(make_request(name, "xy" + name, grammar=grammar, max_tokens=max_tokens, **params))
        deltas = drive(core)
        core.check_integrity()
        stats = core.stats()
        runner_of(core).shutdown()
        names = sorted(deltas)
        found = [(tokens(deltas[name]), content(deltas[name]), deltas[name][-1].finish_reason) for name in names]
        return [*found, (stats.num_generation_tokens, stats.num_forced_tokens, stats.num_steps)]

    for seed in range(20):
        assert said(seed, takes_at_once=True) == said(seed, takes_at_once=False)
    assert num_at_once > 100


def test_one_that_raises_where_it_is_asked_for_a_choice_ends_its_own_request() -> None:
    class Undecided(Walk):
        @property
        def finished(self) -> bool:
            if len(self.path) == 6:
                raise RuntimeError("cannot say")
            return super().finished

    core = make_core()
    core.add(make_request("bad", grammar=quick(lambda: Undecided(3, forces=False)), max_tokens=30))
    core.add(make_request("good", grammar=quick(lambda: Walk(3)), max_tokens=30))
    said = drive(core)
    assert said["bad"][-1].error == "reading the answer raised RuntimeError: cannot say"
    assert len(tokens(said["good"])) > 6
    core.check_integrity()
    runner_of(core).shutdown()


def test_what_a_matcher_says_once_it_is_no_longer_quick_counts_for_nothing() -> None:
    """As with one whose lexer another sequence has spent meanwhile: it takes tokens without looking at them."""
    threads: dict[int, str] = {}

    class Spent(Walk):
        is_quick = True

        def advance(self, token_id: int) -> bool:
            self.is_quick = len(self.path) != 5 or 5 in threads
            if not self.is_quick:
                self.path.append(token_id)
                return True
            return super().advance(token_id)

        def fill_bitmask(self, row: Any) -> None:
            threads[len(self.path)] = threading.current_thread().name
            super().fill_bitmask(row)

    for rows_for_weights in (None, 1000.0):
        threads.clear()
        core = make_core(rows_for_weights=rows_for_weights)
        deltas = generate(core, make_request(grammar=quick(lambda: Spent(2, forces=False)), max_tokens=12))
        assert threads[5] == "mask"
        plain = make_request(grammar=Grammar(lambda: Walk(2, forces=False)), max_tokens=12)
        assert tokens(deltas) == tokens(generate(make_core(), plain))
        core.check_integrity()


def test_a_token_sampled_first_is_the_one_that_a_mask_would_have_left() -> None:
    """Whatever the model would say next: ends, forbidden letters, draws, and with penalties."""
    for seed in range(40):
        options: dict[str, Any] = {"max_tokens": 25, "frequency_penalty": 0.5 * (seed % 2), "min_tokens": seed % 3}
        said = []
        for has_quick_masks in (False, True):
            core = make_core(undecided, rows_for_weights=1000.0 if seed % 4 == 0 else None)
            grammar = Grammar(lambda seed=seed: Walk(seed, forces=seed % 5 == 0), has_quick_masks=has_quick_masks)  # type: ignore[misc]
            deltas = generate(core, make_request(grammar=grammar, **options))
            said.append((tokens(deltas), deltas[-1].finish_reason))
        assert said[0] == said[1]


def test_what_follows_forced_tokens_is_tried_ahead_as_well() -> None:
    class Forced(Matcher):
        """Every other letter can only be b, and is taken without a step: the next step computes two tokens that are known."""

        def allowed(self, path: list[int]) -> list[int]:
            return [EOS] if len(path) >= 60 else LETTERS[1:2] if len(path) % 2 else [LETTERS[0], LETTERS[2]]

    num_steps = []
    for rows_for_weights in (None, 1000.0):
        core = make_core(saying("ab" * 40, "ab" * 5), rows_for_weights=rows_for_weights)
        request = make_request(prompt="ab" * 5, grammar=quick(Forced), max_tokens=60)
        assert content(generate(core, request)) == "ab" * 30
        num_steps.append(core.stats().num_steps)
        core.check_integrity()
    assert num_steps[0] == 30
    assert num_steps[1] < 20


def test_what_is_forced_is_spelled_as_the_grammar_does_also_behind_tokens_that_were_tried_ahead() -> None:
    class Spelled(Matcher):
        """Every other letter can only be b; d would be another spelling of it, which is taken as well, though no mask shows it."""

        def allowed(self, path: list[int]) -> list[int]:
            return [EOS] if len(path) >= 40 else LETTERS[1:2] if len(path) % 2 else [LETTERS[0], LETTERS[2]]

        def advance(self, token_id: int) -> bool:
            return super().advance(LETTERS[1] if token_id == LETTERS[3] and len(self.path) % 2 else token_id)

    core = make_core(lambda history: LETTERS[3 if history[-1] == LETTERS[0] else 0], rows_for_weights=1000.0)
    assert content(generate(core, make_request(prompt="ab" * 5, grammar=quick(Spelled), max_tokens=40))) == "ab" * 20
    assert core.stats().num_drafts > 0


def test_much_that_is_forced_is_spelled_to_its_end_as_the_grammar_does() -> None:
    class Long(Spelling):
        def allowed(self, path: list[int]) -> list[int]:
            return super().allowed(path) if path else LETTERS[:5]

        def advance(self, token_id: int) -> bool:
            if len(self.path) < len(self.spelling) and token_id == LETTERS[3]:
                self.path.append(token_id)
                return True
            return super().advance(token_id)

    core = make_core(lambda history: LETTERS[3])
    deltas = generate(core, make_request(grammar=quick(lambda: Long("x" * 180, forces=True))))
    assert content(deltas)[1:] == "x" * 179
    assert core.stats().num_forced_tokens == 179
    core.check_integrity()


def test_logits_that_are_not_finite_fail_no_sequence_whose_grammar_forbids_their_tokens() -> None:
    def odd(history: Any) -> torch.Tensor:
        logits_V = undecided(history)
        logits_V[5 if len(history) % 2 else EOS] = float("nan" if len(history) % 3 else "inf")
        return logits_V

    said = []
    for has_quick_masks in (False, True):
        grammar = Grammar(lambda: Lettered(), has_quick_masks=has_quick_masks)
        deltas = generate(make_core(odd, rows_for_weights=1000.0), make_request(grammar=grammar, max_tokens=30))
        said.append((tokens(deltas), deltas[-1].finish_reason, deltas[-1].error))
    assert said[0] == said[1]
    assert len(said[1][0]) == 20
    assert said[1][2] is None


def test_a_grammar_that_fails_at_what_it_forbids_is_shown_only_what_its_masks_leave() -> None:
    class Strict(Walk):
        def advance(self, token_id: int) -> bool:
            if token_id not in self.allowed(self.path):
                raise ValueError("not that one")
            return super().advance(token_id)

    for seed in range(10):
        for rows_for_weights in (None, 1000.0):
            core = make_core(undecided, rows_for_weights=rows_for_weights)
            deltas = generate(core, make_request(grammar=quick(lambda seed=seed: Strict(seed, forces=False)), max_tokens=25))
            plain = make_request(grammar=Grammar(lambda seed=seed: Walk(seed, forces=False)), max_tokens=25)  # type: ignore[misc]
            assert tokens(deltas) == tokens(generate(make_core(undecided), plain))
            assert deltas[-1].error is None


def test_a_mask_that_came_late_has_nothing_to_say_of_the_next_draft() -> None:
    """Its other rows are those of the draft that it was asked about, in another step's tensor."""

    class Late(Matcher):
        def allowed(self, path: list[int]) -> list[int]:
            return LETTERS[:2] if len(path) < 30 else [EOS]

    core = make_core(saying("ab" * 40), rows_for_weights=1000.0)
    core.add(make_request(prompt="ab" * 5, grammar=quick(Late), max_tokens=30))
    core.step()
    core.step()
    [sequence] = core.scheduler.running
    assert sequence.ready_proposer is not None
    assert sequence.constraint is not None
    mask = sequence.constraint.mask = MaskJob(sequence.constraint, sequence.answer, allocate_bitmask(1, core.vocab_size))
    mask.queue()
    mask.run()
    assert sequence.ready_proposer is None
    step = core.schedule()
    assert step is not None
    assert not step.drafts
    batch = core.build(step)
    core.update(step, batch, core.runner.launch(batch).collect())
    drive(core)
