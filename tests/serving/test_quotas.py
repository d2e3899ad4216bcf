"""What an API key has used: buckets that fill up again, open requests, and what is said of both."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from penstock.engine.errors import RateLimitExceeded
from penstock.serving.limits import ApiKey, KeyCollector, KeyLimits, KeyUsage, Ledger, TokenBucket, duration


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Timer:
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    summary: str = ""
    model: str | None = None

    @property
    def fields(self) -> dict[str, Any]:
        return {}


def key_with(name: str = "alice", **limits: int) -> ApiKey:
    return ApiKey(name, name, (name.encode(),), KeyLimits(**limits))  # type: ignore[arg-type]


def refusal_of(act: Callable[[], object]) -> RateLimitExceeded:
    with pytest.raises(RateLimitExceeded) as caught:
        act()
    return caught.value


def test_a_bucket_may_be_emptied_at_once_and_fills_up_steadily() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    assert (bucket.level, bucket.seconds_until(1), bucket.seconds_until(60)) == (0, 1, 60)
    clock.now = 10
    assert bucket.level == 10
    clock.now = 10_000
    assert bucket.level == 60


def test_what_is_taken_beyond_a_bucket_is_paid_back_first() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(180)
    assert bucket.seconds_until(1) == 121
    clock.now = 119
    assert bucket.level < 0


@pytest.mark.parametrize(("per_minute", "level"), [(100, 90), (5, -5)])
def test_a_limit_that_changes_forgets_nothing(per_minute: int, level: int) -> None:
    clock = Clock()
    usage = KeyUsage(key_with(requests_per_minute=20), clock)
    for _ in range(10):
        usage.open(0).close()
    usage.set_limits(key_with(requests_per_minute=per_minute))
    assert usage.requests is not None
    assert usage.requests.level == level


def test_requests_beyond_a_minutes_are_refused_until_one_is_due() -> None:
    clock = Clock()
    usage = KeyUsage(key_with(requests_per_minute=2), clock)
    for _ in range(2):
        usage.open(0).close()
    refusal = refusal_of(lambda: usage.open(0))
    assert (refusal.retry_after, str(refusal)) == (30, "the API key alice may send 2 requests per minute; try again in 30s")
    clock.now = 30
    usage.open(0)


def test_tokens_are_taken_as_they_are_generated_and_estimated_before_the_prompt_is_known() -> None:
    clock, timer = Clock(), Timer()
    usage = KeyUsage(key_with(tokens_per_minute=120), clock)
    opened = usage.open(100)
    opened.timer = timer
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "20"
    timer.num_prompt_tokens = 50
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "70"
    timer.num_generation_tokens = 75
    assert refusal_of(lambda: usage.open(0)).retry_after == 3
    opened.close()
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "0"
    opened.close()
    assert (usage.num_prompt_tokens, usage.num_generation_tokens) == (50, 75)
    clock.now = 3
    usage.open(0)


def test_a_request_that_came_to_no_prompt_has_used_no_tokens() -> None:
    usage = KeyUsage(key_with(tokens_per_minute=1000), Clock())
    opened = usage.open(1000)
    refusal_of(lambda: usage.open(0))
    opened.timer = Timer()
    opened.close()
    assert usage.headers()["x-ratelimit-remaining-tokens"] == "1000"


def test_open_requests_are_bounded() -> None:
    usage = KeyUsage(key_with(max_concurrent_requests=2), Clock())
    first, _ = usage.open(0), usage.open(0)
    assert "2 requests at the same time" in str(refusal_of(lambda: usage.open(0)))
    first.close()
    usage.open(0)


def test_a_batch_is_counted_and_not_refused() -> None:
    usage = KeyUsage(key_with(max_concurrent_requests=1, requests_per_minute=1), Clock())
    for _ in range(3):
        usage.open(0, is_limited=False)
    usage.hold(is_limited=False)
    assert (usage.num_requests, usage.requests and usage.requests.level) == (3, 1)


def test_a_batch_leaves_the_places_of_its_key_to_other_requests() -> None:
    usage = KeyUsage(key_with(max_concurrent_requests=1), Clock())
    usage.open(0, is_limited=False)
    usage.hold(is_limited=False)
    other = usage.open(0)
    refusal_of(lambda: usage.open(0))
    usage.open(0, is_limited=False)
    other.close()
    usage.open(0)


def test_headers_are_those_of_the_limits_there_are() -> None:
    clock = Clock()
    usage = KeyUsage(key_with(requests_per_minute=60, tokens_per_minute=100), clock)
    usage.open(50).close()
    clock.now = 0.5
    assert usage.headers() == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "500ms",
        "x-ratelimit-limit-tokens": "100",
        "x-ratelimit-remaining-tokens": "100",
        "x-ratelimit-reset-tokens": "0ms",
    }
    assert KeyUsage(key_with(), clock).headers() == {}


@pytest.mark.parametrize(("seconds", "text"), [(0, "0ms"), (0.1201, "121ms"), (8.64, "8.64s"), (60, "1m0s"), (361.5, "6m1.5s")])
def test_durations_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_metrics_have_a_label_for_each_key_that_is_accepted_and_no_others() -> None:
    ledger = Ledger([key_with("alice", requests_per_minute=1), key_with("bob")], Clock())
    alice, bob = ledger
    alice.open(0).close()
    refusal_of(lambda: alice.open(0))
    bob.open(0).timer = Timer()

    def samples() -> dict[str, float]:
        collector = KeyCollector(lambda: ledger, "m")
        return {
            " ".join((sample.name.removeprefix("penstock:key_"), *list(sample.labels.values())[1:])): sample.value
            for metric in collector.collect()
            for sample in metric.samples
        }

    shown = samples()
    assert (shown["requests_total alice"], shown["refused_requests_total alice requests"], shown["open_requests bob"]) == (1, 1, 1)
    ledger.update([key_with("bob")])
    assert all("alice" not in name for name in samples())
    assert samples()["requests_total bob"] == 1
