"""What each API key has used: its requests and tokens of the last minute, its open requests, and counters for the metrics."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric

from penstock.engine.errors import RateLimitExceeded
from penstock.serving.limits.keys import ApiKey
from penstock.serving.metrics import LoggedTimer, StatsCollector

MINUTE = 60.0
BYTES_PER_TOKEN = 4  # what the tokens of a body are estimated by until its prompt has been tokenized
BUSY_SECONDS = 1.0  # after which a request is worth sending again where a key has too many open ones: when one ends is not known


class TokenBucket:
    """An amount for each minute, all of which may be taken at once. It is refilled steadily, and negative where more was taken."""

    __slots__ = ("_clock", "_level", "_updated", "per_minute")

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level = float(per_minute)
        self._updated = clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(float(self.per_minute), self._level + max(0.0, now - self._updated) * self.per_minute / MINUTE)
        self._updated = now
        return self._level

    def take(self, amount: float) -> None:
        self._level = min(float(self.per_minute), self.level - amount)

    def resized(self, per_minute: int) -> "TokenBucket":
        """Another amount for each minute, of which as much is used as of this one."""
        bucket = TokenBucket(per_minute, self._clock)
        bucket.take(self.per_minute - self.level)
        return bucket

    def seconds_until(self, level: float) -> float:
        return max(0.0, (level - self.level) * MINUTE / self.per_minute)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """A request that is being answered. Until its prompt is known, `estimate` is the number of its tokens.

    One that `is_limited` takes one of the places that its key has at the same time. Requests of batches do not: they run in the background.
    """

    usage: "KeyUsage"
    estimate: int
    is_limited: bool = True
    timer: LoggedTimer | None = None
    _num_taken: int = 0

    @property
    def num_tokens(self) -> int:
        known = 0 if self.timer is None else self.timer.num_prompt_tokens + self.timer.num_generation_tokens
        return known or self.estimate

    def settle(self) -> None:
        """Takes what it has used since the last time."""
        number = self.num_tokens - self._num_taken
        if number and self.usage.tokens is not None:
            self.usage.tokens.take(number)
        self._num_taken += number

    def close(self) -> None:
        """It has been answered. Where it never came to a prompt, it has used nothing."""
        usage = self.usage
        if self not in usage.open_requests:
            return
        self.estimate = 0
        self.settle()
        usage.open_requests.remove(self)
        if self.timer is not None:
            usage.num_prompt_tokens += self.timer.num_prompt_tokens
            usage.num_generation_tokens += self.timer.num_generation_tokens


@dataclass(slots=True, eq=False)
class KeyUsage:
    """What one key has used. Tokens of open requests are taken when the bucket is looked at, so that a token costs nothing more."""

    key: ApiKey
    clock: Callable[[], float] = time.monotonic
    requests: TokenBucket | None = field(init=False, default=None)
    tokens: TokenBucket | None = field(init=False, default=None)
    open_requests: set[OpenRequest] = field(init=False, default_factory=set)
    num_requests: int = field(init=False, default=0)
    num_refused: Counter[str] = field(init=False, default_factory=Counter)
    num_prompt_tokens: int = field(init=False, default=0)
    num_generation_tokens: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.set_limits(self.key)

    def set_limits(self, key: ApiKey) -> None:
        """Those of the key as it is from now on; what is used stays used."""
        self.key = key
        self.requests = self._bucket(self.requests, key.limits.requests_per_minute)
        self.tokens = self._bucket(self.tokens, key.limits.tokens_per_minute)

    def _bucket(self, old: TokenBucket | None, per_minute: int | None) -> TokenBucket | None:
        if per_minute is None:
            return None
        return TokenBucket(per_minute, self.clock) if old is None else old.resized(per_minute)

    def open(self, estimate: int, *, is_limited: bool = True) -> OpenRequest:
        """Counts a request with a prompt of about so many tokens. Raises `RateLimitExceeded` where the key may not send one now."""
        if is_limited:
            self.check()
            if self.requests is not None:
                self.requests.take(1)
        self.num_requests += 1
        request = OpenRequest(self, estimate, is_limited)
        self.open_requests.add(request)
        request.settle()
        return request

    def hold(self, *, is_limited: bool = True) -> OpenRequest:
        """Counts a request that waits for its model as open, and no more of it. Raises `RateLimitExceeded` as `open`."""
        if is_limited:
            self.check()
        request = OpenRequest(self, 0, is_limited)
        self.open_requests.add(request)
        return request

    def check(self) -> None:
        """Raises `RateLimitExceeded` where the key may not send a request now."""
        self.settle()
        most = self.key.limits.max_concurrent_requests
        if most is not None and sum(request.is_limited for request in self.open_requests) >= most:
            self._refuse("concurrency", f"{most} requests at the same time", BUSY_SECONDS)
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None and bucket.level < 1:
                self._refuse(kind, f"{bucket.per_minute} {kind} per minute", bucket.seconds_until(1))

    def settle(self) -> None:
        if self.tokens is not None:
            for request in self.open_requests:
                request.settle()

    def headers(self) -> dict[str, str]:
        """OpenAI's: of each limit what is left, and after how long all of it is, if nothing more is sent."""
        self.settle()
        headers: dict[str, str] = {}
        for kind, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
                headers[f"x-ratelimit-reset-{kind}"] = duration(bucket.seconds_until(bucket.per_minute))
        return headers

    def _refuse(self, reason: str, limit: str, seconds: float) -> None:
        self.num_refused[reason] += 1
        message = f"the API key {self.key.name} may send {limit}"
        raise RateLimitExceeded(f"{message}; try again in {duration(seconds)}", max(1, math.ceil(seconds)))


def duration(seconds: float) -> str:
    """As OpenAI's headers have it: `6m0s`, `8.64s`, `120ms`."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


class Ledger:
    """The usage of all keys. What a key has used is forgotten when it is accepted no longer, so that metrics do not grow with reloads."""

    def __init__(self, keys: Iterable[ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._usages: dict[str, KeyUsage] = {}
        self.update(keys)

    def __iter__(self) -> Iterator[KeyUsage]:
        return iter(self._usages.values())

    def update(self, keys: Iterable[ApiKey]) -> None:
        """The keys that are accepted from now on."""
        usages: dict[str, KeyUsage] = {}
        for key in keys:
            usage = self._usages.get(key.name)
            if usage is None:
                usage = KeyUsage(key, self._clock)
            else:
                usage.set_limits(key)
            usages[key.name] = usage
        self._usages = usages

    def of(self, key: ApiKey) -> KeyUsage:
        """A request that came before a reload may have a key that is gone."""
        return self._usages.get(key.name) or KeyUsage(key, self._clock)


class KeyCollector(StatsCollector[Ledger]):
    """The usage of keys by their names, of which there are as many as in the operator's file."""

    prefix = StatsCollector.prefix + "key_"

    def __init__(self, read: Callable[[], Ledger], model_name: str, *, is_alone: bool = True) -> None:
        super().__init__(read, model_name)
        self._is_alone = is_alone

    def collect(self) -> Iterator[Metric]:
        usages = list(self._read())

        def each(number_of: Callable[[KeyUsage], int]) -> list[tuple[tuple[str, ...], float]]:
            return [((usage.key.name,), number_of(usage)) for usage in usages]

        refused = [((usage.key.name, limit), number) for usage in usages for limit, number in usage.num_refused.items()]
        yield self.counters("requests", "Requests that no limit of their key refused.", ["key"], each(lambda usage: usage.num_requests))
        yield self.counters("refused_requests", "Requests refused, by the limit of their key.", ["key", "limit"], refused)
        yield self.counters("prompt_tokens", "Prompt tokens, by key.", ["key"], each(lambda usage: usage.num_prompt_tokens))
        yield self.counters("generation_tokens", "Generated tokens, by key.", ["key"], each(lambda usage: usage.num_generation_tokens))
        if self._is_alone:  # a gauge of a process that has died would stay in the sums
            yield self.gauges("open_requests", "Requests being answered, by key.", ["key"], each(lambda usage: len(usage.open_requests)))
