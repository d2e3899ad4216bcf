"""API keys by name, kept as hashes, with what each of them may do, and what each has used.

Keys are those of `--keys FILE.toml` and of `--api-key`. Counted are requests and tokens of the last minute, open requests, and totals for
the metrics.
"""

import difflib
import hashlib
import hmac
import logging
import math
import re
import secrets
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta, Struct, structs
from prometheus_client.core import Metric

from penstock.engine.errors import ConfigurationError, RateLimitExceeded
from penstock.serving.observability.metrics import LoggedTimer, StatsCollector
from penstock.serving.options import ServerOptions, parse_toml
from penstock.serving.requests import FIELD, Int32, message_of, mistaken_path

log = logging.getLogger(__name__)

PREFIX = "sk-"  # of the keys that are made here: clients and scanners for leaked secrets know it
NUM_SECRET_BYTES = 32  # a secret that long cannot be guessed from a hash without salt, unlike a password
HASH = re.compile(r"sha256:([0-9a-f]{64})")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # it is a label of metrics and a word of log lines
NO_NAME = "is not a name of up to 64 letters, digits, dots, dashes and underscores"
MAX_KEYS = 10_000
UNKNOWN = bytes(hashlib.sha256().digest_size)

Table = TypeVar("Table", bound=Struct)

Limit = Annotated[int, Meta(ge=1, le=2**53)]
MINUTE = 60.0
BYTES_PER_TOKEN = 4  # what the tokens of a body are estimated by until its prompt has been tokenized
BUSY_SECONDS = 1.0  # after which a request is worth sending again where a key has too many open ones: when one ends is not known


class KeyLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of a key. None is no limit. `priority` is the default of its requests, and the lowest number that they may set;
    `models` are names, or patterns of them as in a shell.
    """

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent_requests: Limit | None = None
    max_tokens: Limit | None = None
    priority: Int32 | None = None
    models: Annotated[tuple[str, ...], Meta(min_length=1)] | None = None


UNLIMITED = KeyLimits()
COUNTED = ("requests_per_minute", "tokens_per_minute", "max_concurrent_requests")  # in one process


class _KeyTable(KeyLimits, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file. `hash` may be several while a key is replaced; keys of one `tenant` share what belongs to a key."""

    hash: str | Annotated[tuple[str, ...], Meta(min_length=1)]
    tenant: str | None = None


class _KeyFile(Struct, forbid_unknown_fields=True):
    keys: dict[str, Any]
    defaults: dict[str, Any] = {}


@dataclass(frozen=True, slots=True, eq=False)
class ApiKey:
    """A key without its secret. Stored responses, files, batches and cached prefixes belong to its `owner`."""

    name: str
    owner: str
    digests: tuple[bytes, ...]
    limits: KeyLimits = UNLIMITED

    @classmethod
    def of_secret(cls, name: str, secret: str) -> Self:
        digest = digest_of(secret)
        return cls(name, digest.hex(), (digest,))

    def allows_model(self, name: str) -> bool:
        return self.limits.models is None or any(fnmatchcase(name, pattern) for pattern in self.limits.models)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def hash_of(secret: str) -> str:
    """The hash of a key as the file has it."""
    return f"sha256:{digest_of(secret).hex()}"


def new_secret() -> str:
    return PREFIX + secrets.token_urlsafe(NUM_SECRET_BYTES)


def is_name(text: str) -> bool:
    """Whether a key or a tenant may have this name."""
    return NAME.fullmatch(text) is not None


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file. Raises `ConfigurationError`, which says in which line the mistake is."""
    try:
        if path.stat().st_mode & stat.S_IWOTH:
            raise ConfigurationError(f"--keys {path}: all users can write it, and so add keys: chmod o-w {path}")
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigurationError(f"--keys {path}: cannot be read: {reason}") from error
    try:
        return parse_keys(source)
    except MistakeInKeys as mistake:
        raise ConfigurationError(f"--keys {path}{mistake.place}: {mistake}") from mistake


class MistakeInKeys(Exception):
    """What is wrong with a file of keys. `line` counts from 1, and is None where it is not known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message)
        self.line = line

    @property
    def place(self) -> str:
        return "" if self.line is None else f", line {self.line}"


def parse_keys(source: str) -> list[ApiKey]:
    """Raises `MistakeInKeys`."""
    try:
        tables = parse_toml(source)
    except ValueError as error:
        found = re.search(r" \(at line (\d+), column \d+\)$", str(error))
        message = str(error)[: found.start()] if found else str(error)
        raise MistakeInKeys(message, int(found[1]) if found else source.count("\n") + 1) from error
    try:
        file = msgspec.convert(tables, _KeyFile)
    except msgspec.ValidationError as error:
        name = mistaken_path(error)
        message = f"{hinted(str(error), _KeyFile)}; it has [keys.NAME] tables, and [defaults]"
        raise MistakeInKeys(message, line_of(source, (), name)) from error
    _table(source, ("defaults",), file.defaults, KeyLimits)
    if not file.keys:
        raise MistakeInKeys("there is no key in it")
    if len(file.keys) > MAX_KEYS:
        raise MistakeInKeys(f"it has {len(file.keys)} keys, and may have {MAX_KEYS}")
    keys = [_key(source, name, file.defaults, table) for name, table in file.keys.items()]
    known: dict[bytes, str] = {}
    for key in keys:
        for digest in key.digests:
            if digest in known:
                raise MistakeInKeys(f"{key.name} has the same hash as {known[digest]}", line_of(source, ("keys", key.name), "hash"))
            known[digest] = key.name
    return keys


def _key(source: str, name: str, defaults: Mapping[str, Any], table: Any) -> ApiKey:
    place = ("keys", name)
    if not is_name(name):
        raise MistakeInKeys(f"{name!r} {NO_NAME}", line_of(source, place))
    at = header_of(place)
    if not isinstance(table, dict):
        raise MistakeInKeys(f"{at} is a table, not a value", line_of(source, ("keys",), name))
    given = _table(source, place, {**defaults, **table}, _KeyTable)
    if given.tenant is not None and not is_name(given.tenant):  # with a blank in it, what follows in a salt could be another tenant's
        raise MistakeInKeys(f"{at}: the tenant {given.tenant!r} {NO_NAME}", line_of(source, place, "tenant"))
    hashes = [given.hash] if isinstance(given.hash, str) else given.hash
    matches = [HASH.fullmatch(each) for each in hashes]
    digests = tuple(bytes.fromhex(match[1]) for match in matches if match)
    if len(digests) < len(matches):
        message = f"{at}: `hash` is `sha256:` and 64 hexadecimal digits, as `penstock keys` prints it"
        raise MistakeInKeys(message, line_of(source, place, "hash"))
    limits = KeyLimits(**{each.name: getattr(given, each.name) for each in structs.fields(KeyLimits)})
    return ApiKey(name, f"tenant {given.tenant or name}", digests, limits)


def header_of(place: tuple[str, ...]) -> str:
    """Of a table."""
    return f"[{'.'.join(part if re.fullmatch(r'[A-Za-z0-9_-]+', part) else repr(part) for part in place)}]"


def hinted(message: str, kind: type[Struct]) -> str:
    """With the nearest known name, where a message of msgspec's is about an unknown one."""
    unknown = FIELD.match(message) if "unknown field" in message else None
    nearest = difflib.get_close_matches(unknown[1], kind.__struct_fields__, n=1) if unknown else []
    return f"{message}; did you mean `{nearest[0]}`?" if nearest else message


def _table(source: str, place: tuple[str, ...], values: Mapping[str, Any], kind: type[Table]) -> Table:
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        name = (mistaken_path(error) or "").partition("[")[0]
        lines = (line_of(source, place, name), line_of(source, ("defaults",), name))
        raise MistakeInKeys(f"{header_of(place)}: {hinted(message_of(error, kind), kind)}", next(filter(None, lines), None)) from error


def line_of(source: str, table: tuple[str, ...], name: str | None = None) -> int | None:
    """The line of a name in a table, else that of the table's header. None where neither is on a line of its own."""
    header: int | None = None
    current: tuple[str, ...] = ()
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if text.startswith("["):
            current = _header(text) or current
            if name and current[: len(table) + 1] == (*table, name):
                return number
            if current == table:
                header = number
        elif current == table and name and re.match(rf"[\"']?{re.escape(name)}[\"']?\s*=", text):
            return number
    return header


def _header(line: str) -> tuple[str, ...]:
    """The path of a table's header; empty where the line is none, but a part of an array."""
    try:
        table: Any = parse_toml(line)
    except ValueError:
        return ()
    path: list[str] = []
    while isinstance(table, dict) and len(table) == 1:
        (name,) = table
        path.append(name)
        table = table[name]
    return tuple(path)


@dataclass(slots=True)
class KeyRing:
    """The keys that are accepted, in `path` and the `fixed` ones. None is asked for where there are neither.

    `on_change` is called with all of them when the file has been read again. Where several processes serve, none of them `counts` what
    a key has used.
    """

    path: Path | None = None
    fixed: Sequence[ApiKey] = ()
    counts: bool = True
    on_change: Callable[[Iterable[ApiKey]], object] = lambda keys: None
    _by_digest: dict[bytes, ApiKey] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, options: ServerOptions, *, counts: bool = True) -> Self:
        """Raises `ConfigurationError` where the file cannot be used."""
        names = ["api-key"] if len(options.api_keys) == 1 else [f"api-key-{number}" for number in range(1, len(options.api_keys) + 1)]
        fixed = [ApiKey.of_secret(name, secret) for name, secret in zip(names, options.api_keys, strict=True)]
        ring = cls(None if options.keys_file is None else Path(options.keys_file).expanduser(), fixed, counts)
        ring.replace([] if ring.path is None else read_keys(ring.path))
        return ring

    @property
    def is_required(self) -> bool:
        return bool(self._by_digest)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(dict.fromkeys(self._by_digest.values()))

    def find(self, offered: str) -> ApiKey | None:
        """Takes as long whichever key is wrong, and where: only hashes are looked up and compared, which a client cannot choose."""
        digest = digest_of(offered)
        key = self._by_digest.get(digest)
        known = UNKNOWN if key is None else next(each for each in key.digests if each == digest)
        return key if hmac.compare_digest(digest, known) else None

    def of_owner(self, owner: str, name: str | None) -> ApiKey | None:
        """The key of this name, where the owner has it. A key of --api-key is its owner's only one, and may be called otherwise by now."""
        return next((key for key in self if key.owner == owner and (key.name == name or key in self.fixed)), None)

    def reload(self) -> None:
        """Reads the file again. One that cannot be used is logged, and the keys stay as they are."""
        if self.path is None:
            return
        try:
            keys = read_keys(self.path)
            self.replace(keys)
        except ConfigurationError as error:
            log.error("%s; the keys stay as they were", error)
        else:
            log.info("--keys %s is read again: %d key%s", self.path, len(keys), "" if len(keys) == 1 else "s")

    def replace(self, keys: Iterable[ApiKey]) -> None:
        """Accepts these and the fixed ones, and no others from now on. Raises `ConfigurationError` where that cannot be."""
        names: set[str] = set()
        by_digest: dict[bytes, ApiKey] = {}
        for key in (*self.fixed, *keys):
            if key.name in names:
                raise ConfigurationError(f"--keys {self.path}: {key.name} is the name of a key of --api-key")
            limit = next((name for name in COUNTED if getattr(key.limits, name) is not None), None)
            if limit is not None and not self.counts:
                message = f"{limit} of {key.name} is counted in one process, so it cannot be combined with --api-servers"
                raise ConfigurationError(f"--keys {self.path}: {message}")
            names.add(key.name)
            by_digest.update(dict.fromkeys(key.digests, key))
        self._by_digest = by_digest
        self.on_change(self)


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
