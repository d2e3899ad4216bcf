"""Stored responses, which `previous_response_id` continues and GET finds: a SQLite database, in memory or in a file."""

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from filelock import FileLock, Timeout

from penstock.engine.errors import ConfigurationError, EngineUnavailable, InvalidRequest, NoSuchObject, NoSuchPreviousResponse
from penstock.engine.system.cache import check_data
from penstock.engine.system.process import examined

T = TypeVar("T")

log = logging.getLogger(__name__)

APPLICATION_ID = 0x50454E53  # marks a file as one of these
SCHEMA = """
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, status TEXT NOT NULL, previous TEXT, used REAL NOT NULL, size INTEGER NOT NULL,
    response BLOB NOT NULL, input BLOB NOT NULL, events BLOB NOT NULL
);
CREATE INDEX by_use ON responses (used, status, size);
CREATE TABLE items (id TEXT, response TEXT REFERENCES responses (id) ON DELETE CASCADE, PRIMARY KEY (id, response));
CREATE INDEX by_response ON items (response);
"""
COLUMNS = "id, owner, status, previous, response, input, events"
OF_OWNER = "(? IS NULL OR owner = ?)"
RUNNING = ("queued", "in_progress")
BUSY_SECONDS = 5.0  # how long a process waits for another that writes to the same file
MAX_CHAIN = 2**12  # responses that are continued one after another


class _Identified(msgspec.Struct):
    id: str


class _Output(msgspec.Struct):
    output: list[_Identified]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One response as JSON texts: the object itself, the items of its input, and, of one in the background, its stream.

    `owner` is the client that may ask for it. `previous` is the id of the response that it continues.
    """

    id: str
    owner: str
    status: str
    previous: str | None
    response: bytes
    input: bytes
    events: bytes = b""

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    @property
    def size(self) -> int:
        return len(self.response) + len(self.input) + len(self.events)

    def input_items(self) -> list[dict[str, Any]]:
        return msgspec.json.decode(self.input, type=examined(list[dict[str, Any]]))

    def output_items(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = msgspec.json.decode(self.response)["output"]
        return items

    def item_ids(self) -> set[str]:
        """Those of its input and its output. Nothing else is decoded: long texts would hold the interpreter's lock."""
        output = msgspec.json.decode(self.response, type=examined(_Output)).output
        return {item.id for item in (*msgspec.json.decode(self.input, type=examined(list[_Identified])), *output)}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreLimits:
    """Bounds on what is kept. `max_age` is in seconds since the last use, 0 without a bound. Running responses are never evicted.

    Of bytes and responses each of `num_owners` has an equal share, so that none evicts those of another.
    """

    max_bytes: int = 2**28
    max_count: int = 10_000
    max_age: float = 7 * 86400.0
    num_owners: int = 1

    @property
    def share(self) -> tuple[int, int]:
        """How many responses one owner may have, and their bytes."""
        return max(1, self.max_count // self.num_owners), self.max_bytes // self.num_owners


class ResponseStore:
    """Bounded: the responses that have not been used for longest are evicted first. All work is done in a thread of its own.

    `is_shared` says that several processes have the file open. None of them runs responses in the background then.
    """

    def __init__(
        self, path: str | None = None, limits: StoreLimits | None = None, *, is_shared: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """Raises `ConfigurationError` for a file that cannot be opened, is damaged, is something else, or can be another user's work."""
        self.is_shared = is_shared
        self._limits = limits or StoreLimits()
        self._clock = clock
        self._executor = ThreadPoolExecutor(1, "penstock-responses")
        self._opened: sqlite3.Connection | None = None
        # Another server would take responses that run in this one's background for interrupted. Not of the file itself: closing that once
        # more would give up SQLite's own locks.
        self._lock = None if path is None or is_shared else FileLock(f"{path}.lock", mode=0o600)
        if path is None:
            return
        check_data(Path(path), "--response-store")
        try:
            self._opened = open_database(path)
            if self._lock is not None:
                self._lock.acquire(blocking=False)
            self._fail_interrupted()
        except Timeout:
            raise ConfigurationError(f"--response-store: another server uses {path}") from None
        except (sqlite3.Error, OSError) as error:
            raise ConfigurationError(f"--response-store: {path} cannot be used: {error}") from error

    @property
    def _database(self) -> sqlite3.Connection:
        if self._opened is None:
            self._opened = open_database(None)
        return self._opened

    async def put(self, stored: StoredResponse) -> None:
        """Keeps a response, in place of one with its id. Where there is no room on the disk it is not kept, which is logged."""
        try:
            await self._run(partial(self._put, stored))
        except sqlite3.Error as error:
            log.warning("response %s is not stored: %s", stored.id, error)

    async def get(self, owner: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises `NoSuchObject` for one that is not there, or is another client's."""
        (found,) = await self._read(partial(self._chain, owner, response_id, param, 1))
        return found

    async def chain(self, owner: str, response_id: str, param: str) -> list[StoredResponse]:
        """The response and those that it continues, the first one first.

        Raises `NoSuchPreviousResponse`, and `InvalidRequest` for a running one.
        """
        found = await self._read(partial(self._chain, owner, response_id, param, MAX_CHAIN))
        if found[-1].is_running:
            raise InvalidRequest(f"response {response_id[:100]!r} is not complete yet", param)
        return found

    async def items(self, owner: str, wanted: Mapping[str, str], max_bytes: int) -> dict[str, tuple[dict[str, Any], int]]:
        """Items of any stored responses by their ids, with their sizes in bytes. `wanted` are ids, with the paths where they are named.

        Where they are larger than `max_bytes` together, some are left out. Raises `NoSuchObject`.
        """
        return await self._read(partial(self._items, owner, wanted, max_bytes))

    async def delete(self, owner: str, response_id: str) -> None:
        """Raises `NoSuchObject`."""
        await self.get(owner, response_id)
        await self._read(lambda: self._execute("DELETE FROM responses WHERE id = ?", response_id))

    async def statistics(self) -> tuple[int, int]:
        """How many responses there are, and their bytes."""
        return await self._read(self._totals)

    def close(self) -> None:
        self._executor.shutdown()
        if self._opened is not None:
            self._opened.close()
        if self._lock is not None:
            self._lock.release()

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def _read(self, call: Callable[[], T]) -> T:
        try:
            return await self._run(call)
        except sqlite3.Error as error:
            log.error("the response store cannot be read: %s", error)
            raise EngineUnavailable("the store of responses cannot be read") from error

    def _execute(self, statement: str, *values: Any) -> list[Any]:
        with self._database:
            return self._database.execute(statement, values).fetchall()

    def _put(self, stored: StoredResponse) -> None:
        row = (stored.id, stored.owner, stored.status, stored.previous, stored.response, stored.input, stored.events)
        item_ids = stored.item_ids()
        with self._database as database:
            database.execute("DELETE FROM responses WHERE id = ?", (stored.id,))
            if stored.size > self._limits.share[1] and not stored.is_running:
                return  # all others of its owner would be evicted first, and then it as well
            statement = f"INSERT INTO responses ({COLUMNS}, used, size) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            database.execute(statement, (*row, self._clock(), stored.size))
            database.executemany("INSERT INTO items VALUES (?, ?)", [(item_id, stored.id) for item_id in item_ids])
            self._evict(database, stored.owner)

    def _evict(self, database: sqlite3.Connection, owner: str) -> None:
        limits = self._limits
        if limits.max_age:
            statement = "DELETE FROM responses WHERE used < ? AND status NOT IN (?, ?)"
            database.execute(statement, (self._clock() - limits.max_age, *RUNNING))
        self._evict_beyond(database, *limits.share, owner)
        self._evict_beyond(database, limits.max_count, limits.max_bytes)  # a file may have those of keys that are no longer there

    def _evict_beyond(self, database: sqlite3.Connection, max_count: int, max_bytes: int, owner: str | None = None) -> None:
        count, size = self._totals(owner)
        if count <= max_count and size <= max_bytes:
            return
        evicted: list[str] = []
        oldest_first = f"SELECT id, size FROM responses WHERE {OF_OWNER} AND status NOT IN (?, ?) ORDER BY used"
        for response_id, freed in database.execute(oldest_first, (owner, owner, *RUNNING)):
            if count <= max_count and size <= max_bytes:
                break
            evicted.append(response_id)
            count, size = count - 1, size - freed
        database.executemany("DELETE FROM responses WHERE id = ?", [(each,) for each in evicted])

    def _totals(self, owner: str | None = None) -> tuple[int, int]:
        """Of one owner, or of all."""
        statement = f"SELECT COUNT(*), COALESCE(SUM(size), 0) FROM responses WHERE {OF_OWNER}"
        count, size = self._database.execute(statement, (owner, owner)).fetchone()
        return count, size

    def _chain(self, owner: str, response_id: str, param: str | None, length: int) -> list[StoredResponse]:
        # Marks them as used, the last one first: a response is evicted only after those that continue it.
        found: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None and len(found) < length:
            rows = self._execute(f"SELECT {COLUMNS} FROM responses WHERE id = ? AND owner = ?", wanted, owner)
            if not rows:
                if param is not None:
                    raise NoSuchPreviousResponse(f"Previous response with id '{wanted[:100]}' not found.", param)
                raise NoSuchObject(f"Response with id '{wanted[:100]}' not found.")
            found.append(StoredResponse(*rows[0]))
            wanted = found[-1].previous
        if wanted is not None and length > 1:
            raise InvalidRequest(f"more than {MAX_CHAIN} responses in a row", param)
        with contextlib.suppress(sqlite3.Error), self._database as database:  # a full disk does not keep anyone from reading
            now = self._clock()
            uses = [(now + place * 1e-6, each.id) for place, each in enumerate(found)]
            database.executemany("UPDATE responses SET used = MAX(used, ?) WHERE id = ?", uses)  # a clock may have been set back
        return found[::-1]

    def _items(self, owner: str, wanted: Mapping[str, str], max_bytes: int) -> dict[str, tuple[dict[str, Any], int]]:
        found: dict[str, tuple[dict[str, Any], int]] = {}
        num_bytes = 0
        statement = f"SELECT {COLUMNS} FROM responses WHERE owner = ? AND id IN (SELECT response FROM items WHERE id = ?) LIMIT 1"
        for item_id, param in wanted.items():
            if item_id in found:
                continue
            if num_bytes > max_bytes:
                break
            rows = self._execute(statement, owner, item_id)
            if not rows:
                raise NoSuchObject(f"Item with id '{item_id[:100]}' not found.", param)
            stored = StoredResponse(*rows[0])
            for item in (*stored.input_items(), *stored.output_items()):
                if item["id"] in wanted and item["id"] not in found:  # a response is decoded once for all of its items
                    found[item["id"]] = item, len(msgspec.json.encode(item))
                    num_bytes += found[item["id"]][1]
        return found

    def _fail_interrupted(self) -> None:
        """What was running when the process before this one ended."""
        for row in self._execute(f"SELECT {COLUMNS} FROM responses WHERE status IN (?, ?)", *RUNNING):
            stored = StoredResponse(*row)
            error = {"code": "server_error", "message": "the server was stopped before the response was complete"}
            response = msgspec.json.decode(stored.response) | {"status": "failed", "error": error}
            self._execute("UPDATE responses SET status = 'failed', response = ? WHERE id = ?", msgspec.json.encode(response), stored.id)


def open_database(path: str | None) -> sqlite3.Connection:
    """A new database gets its tables; a file is readable by its owner only. Raises `OSError`, `sqlite3.Error` and `ConfigurationError`."""
    if path is not None:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
    database = sqlite3.connect(path or ":memory:", timeout=BUSY_SECONDS, check_same_thread=False)
    try:
        database.execute("PRAGMA foreign_keys = ON")
        with contextlib.closing(database.cursor()) as cursor:
            cursor.execute("BEGIN IMMEDIATE")
            create_tables(cursor, path)
            cursor.execute("CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used, status, size)")
            cursor.execute("COMMIT")
        if path is not None:
            with contextlib.suppress(sqlite3.OperationalError):  # another process has just opened it, and switches as well
                database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")
        return database
    except BaseException:
        database.close()
        raise


def create_tables(cursor: sqlite3.Cursor, path: str | None) -> None:
    (application_id,) = cursor.execute("PRAGMA application_id").fetchone()
    (num_tables,) = cursor.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if not num_tables:
        for statement in SCHEMA.split(";"):
            cursor.execute(statement)
        cursor.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    elif application_id != APPLICATION_ID:
        raise ConfigurationError(f"--response-store: {path} is another program's database")
    elif (verdict := first(cursor.execute("PRAGMA quick_check(1)"))) != "ok":
        raise ConfigurationError(f"--response-store: {path} is damaged: {verdict}")


def first(rows: Iterable[Any]) -> Any:
    return next(iter(rows))[0]
