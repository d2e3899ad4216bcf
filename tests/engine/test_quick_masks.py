"""Grammars whose masks are filled on the event loop, as soon as a token is there."""

import threading
import time
from typing import Any

import pytest

from penstock.engine import mask_filler
from penstock.engine.grammar_gate import MAX_FORCED_TOKENS
from penstock.engine.mask_filler import NUM_MASKS_APART
from penstock.engine.outputs import FinishReason
from tests.fakes import EOS, LETTERS, content, drive, generate, make_core, make_request, runner_of, saying, tokens, undecided
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


def test_one_that_turns_out_slow_is_no_longer_asked_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once: list[int] = []
    fill_at_once = mask_filler.MaskFiller.fill_at_once

    def counted(self: Any, sequence: Any, vocab_size: int, **options: Any) -> Any:
        at_once.append(sequence.num_output_tokens)
        return fill_at_once(self, sequence, vocab_size, **options)

    class Busy(Walk):
        def fill_bitmask(self, row: Any) -> None:
            if len(self.path) == 3:
                time.sleep(2 * mask_filler.SLOW)
            super().fill_bitmask(row)

    monkeypatch.setattr(mask_filler.MaskFiller, "fill_at_once", counted)
    core = make_core()
    deltas = generate(core, make_request(grammar=quick(lambda: Busy(2, forces=False)), max_tokens=30, **DRAWN))
    assert len(tokens(deltas)) == 30
    assert at_once[:3] == [1, 2, 3]
    assert all(place > NUM_MASKS_APART for place in at_once[3:])
    plain = make_request(grammar=Grammar(lambda: Walk(2, forces=False)), max_tokens=30, **DRAWN)
    assert tokens(deltas) == tokens(generate(make_core(), plain))


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
        assert sum(core.stats().accepted_lengths) > 0
        assert core.stats().num_steps < 50
    assert said[0] == said[1]


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
