"""API keys by name: those of `--keys FILE.toml`, kept as hashes, with what each of them may do, and those of `--api-key`."""

import difflib
import hashlib
import hmac
import logging
import re
import secrets
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import msgspec
from msgspec import Meta, Struct, structs

from penstock.engine.errors import ConfigurationError
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


class KeyLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a key may do. None is no limit. `priority` is the lowest number that its requests may ask for, and what they have unasked;
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
