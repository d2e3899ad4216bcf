"""How long the queue takes is measured, bounds what is added to it, and says when to try again."""

from contextlib import suppress
from typing import Never

import pytest

from penstock.engine.core import EngineCore
from penstock.engine.errors import QueueFull
from penstock.engine.request import BACKGROUND
from penstock.engine.sequence import Sequence
from tests.fakes import LETTERS, make_core, make_request


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Server:
    """A core whose steps take `seconds` each."""

    def __init__(self, seconds: float, **settings: object) -> None:
        self.clock = Clock()
        self.seconds = seconds
        self.num_added = 0
        self.core: EngineCore = make_core(clock=self.clock, **settings)  # type: ignore[arg-type]

    def add(self, count: int, prompt: list[int] | str = "ab", *, max_tokens: int) -> None:
        for _ in range(count):
            self.num_added += 1
            self.core.add(make_request(str(self.num_added), prompt, ignore_eos=True, max_tokens=max_tokens))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.core.step()
            self.clock.now += self.seconds

    def refusal(self) -> QueueFull:
        with pytest.raises(QueueFull) as caught:
            self.core.scheduler.waiting.check_admission()
        return caught.value


@pytest.mark.parametrize(("num_waiting", "retry_after"), [(1, 1), (16, 1), (17, 2), (160, 19), (1024, 60)])
def test_in_a_cold_burst_a_refusal_asks_for_a_second_for_each_time_that_the_places_are_taken(num_waiting: int, retry_after: int) -> None:
    """Eight of them run as soon as the first step begins."""
    server = Server(1, max_num_seqs=8, max_waiting=num_waiting)
    server.add(num_waiting, max_tokens=1)
    assert server.refusal().retry_after == retry_after


def test_in_a_cold_burst_long_prompts_count_by_the_steps_that_compute_them() -> None:
    server = Server(1, max_num_seqs=8, max_waiting=8, max_num_batched_tokens=16, num_blocks=400)
    server.add(8, LETTERS[:1] * 64, max_tokens=1)
    assert server.refusal().retry_after == 8 * 64 / 16


def test_what_is_assumed_of_the_pace_gives_way_to_what_is_measured() -> None:
    """Answers take four seconds, of which the first is taken to be one."""
    server = Server(0.25, max_num_seqs=1, max_waiting=4)
    server.add(4, max_tokens=16)
    server.step()
    server.add(1, max_tokens=16)
    asked_for = []
    for _ in range(5):
        asked_for.append(server.refusal().retry_after)
        server.step()
    assert asked_for[0] == 4
    assert asked_for == sorted(asked_for)
    server.step(60)
    server.add(4 - len(server.core.scheduler.waiting), max_tokens=16)
    assert server.refusal().retry_after >= 12


def test_the_assumed_pace_refuses_nothing() -> None:
    server = Server(1, max_num_seqs=1, max_queue_time=2)
    server.add(100, max_tokens=1)


@pytest.mark.parametrize(("seconds", "retry_after"), [(0.1, 2), (0.5, 8), (2.0, 30), (10.0, 60)])
def test_a_refusal_says_how_long_the_queue_takes(seconds: float, retry_after: int) -> None:
    """One sequence runs at a time, for four steps: with 4 free places to be counted, of 4 that wait each takes as long."""
    server = Server(seconds, max_num_seqs=1, max_waiting=4)
    server.add(4, max_tokens=4)
    server.step()
    server.add(1, max_tokens=4)
    while server.num_added < 12:
        server.step()
        while len(server.core.scheduler.waiting) < 4:
            server.add(1, max_tokens=4)
    refusal = server.refusal()
    assert abs(refusal.retry_after - retry_after) <= 0.15 * retry_after
    assert f"try again in {refusal.retry_after} s" in str(refusal)


def test_requests_are_refused_once_the_queue_takes_longer_than_it_may() -> None:
    """Each place is free again after four seconds."""
    server = Server(1, max_num_seqs=2, max_queue_time=10)
    server.add(6, max_tokens=4)
    server.step(9)
    assert len(server.core.scheduler.waiting) == 0
    server.add(6, max_tokens=4)
    with pytest.raises(QueueFull, match="the queue takes 1"):
        server.add(6, max_tokens=4)
    assert 4 <= len(server.core.scheduler.waiting) <= 8


def test_a_burst_at_a_server_with_free_places_is_not_refused_for_what_was_measured_without_any() -> None:
    server = Server(1, max_num_seqs=8, max_queue_time=3)
    server.add(12, max_tokens=20)
    server.step(60)
    assert not server.core.has_work
    server.add(8, max_tokens=20)


def test_long_prompts_are_counted_by_their_tokens() -> None:
    """A step computes 16 tokens of prompts, so that places are free while prompts wait."""
    server = Server(1, max_num_seqs=8, max_num_batched_tokens=16, max_queue_time=10, num_blocks=400, enable_prefix_caching=False)
    server.add(4, LETTERS[:1] * 64, max_tokens=1)
    server.step(12)
    with pytest.raises(QueueFull, match="the queue takes"):
        server.add(100, LETTERS[:1] * 64, max_tokens=1)
    assert 2 <= len(server.core.scheduler.waiting) <= 6


def test_a_flood_is_refused_before_the_first_answer_has_ended() -> None:
    server = Server(1, max_num_seqs=2, max_queue_time=3)
    server.add(3, max_tokens=100)
    server.step(3)
    with pytest.raises(QueueFull, match="the queue takes"):
        server.add(100, max_tokens=100)
    assert len(server.core.scheduler.waiting) == 2


def test_what_was_measured_counts_for_little_after_a_while() -> None:
    """Answers of a hundred steps, and then, a minute later, of one step."""
    server = Server(1, max_num_seqs=1, max_queue_time=8)
    server.add(2, max_tokens=100)
    server.step(300)
    assert not server.core.has_work
    server.clock.now += 60
    for _ in range(12):
        server.add(2 - len(server.core.scheduler.waiting), max_tokens=1)
        server.step()
    server.add(4, max_tokens=1)


def test_an_idle_server_refuses_nothing() -> None:
    server = Server(1, max_num_seqs=1, max_queue_time=0.001)
    server.add(3, max_tokens=4)
    server.step(20)
    server.core.scheduler.waiting.check_admission()


def test_what_waits_behind_a_more_urgent_request_does_not_have_it_refused_up_to_twice_the_bound() -> None:
    server = Server(1, max_num_seqs=1, max_waiting=3)

    def add(priority: int) -> None:
        server.num_added += 1
        server.core.add(make_request(str(server.num_added), "ab", priority=priority, max_tokens=1))

    for _ in range(3):
        add(5)
    for priority in (5, 6):
        with pytest.raises(QueueFull):
            add(priority)
    for _ in range(3):
        add(0)
    for priority in (0, -1):
        with pytest.raises(QueueFull, match="6 sequences" if priority else "[36] sequences"):
            add(priority)
    server.core.scheduler.waiting.check_admission(BACKGROUND)
    server.core.check_integrity()


class Untouched(list[Sequence]):
    """Raises where one of the sequences is looked at."""

    def __getitem__(self, place: object) -> Never:
        raise AssertionError("a refusal looks at no sequence")

    def __iter__(self) -> Never:
        raise AssertionError("a refusal looks at no sequence")


@pytest.mark.parametrize("last_priority", [0, 7])
def test_a_refusal_takes_no_longer_the_more_sequences_wait(last_priority: int) -> None:
    """Also where a less urgent one waits behind all others."""
    server = Server(1, max_num_seqs=1, max_waiting=20)
    for number in range(20):
        server.core.add(make_request(str(number), "ab", max_tokens=1, priority=last_priority if number == 19 else number % 3))
    queue = server.core.scheduler.waiting
    sequences, queue._sequences = queue._sequences, Untouched(queue._sequences)
    for priority in (0, 1, 2, 9):
        with suppress(QueueFull):
            queue.check_admission(priority)
    with pytest.raises(QueueFull):
        queue.check_admission(9)
    queue._sequences = sequences
    queue.check_integrity()


def test_sequences_that_age_count_before_all_others() -> None:
    server = Server(1, max_num_seqs=1, max_waiting=3, aging_seconds=10)
    for number in range(4):
        server.core.add(make_request(str(number), "ab" * (number + 1), max_tokens=30, priority=5))
        server.core.step()
    server.clock.now = 11.0
    server.core.step()
    server.core.check_integrity()
    with pytest.raises(QueueFull):
        server.core.scheduler.waiting.check_admission(0)
