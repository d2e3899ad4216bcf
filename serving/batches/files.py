"""Files that clients upload and batches write: kept on disk, each for the client that it belongs to, within bounds."""

import asyncio
import glob
import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, TypeVar

import msgspec
from filelock import FileLock, Timeout
from msgspec import Struct

from penstock.engine.errors import ConfigurationError, InvalidRequest, NoSuchObject, StorageFull
from penstock.engine.system.cache import make_data_directory

T = TypeVar("T")

log = logging.getLogger(__name__)

Purpose = Literal["batch", "batch_output", "user_data"]
Order = Literal["asc", "desc"]
MAX_FILES = 10_000
MAX_FILENAME = 255  # characters
BATCH_SECONDS = 30 * 86400  # OpenAI's default for files of purpose `batch`: they expire after 30 days


class Disk:
    """A directory and the one thread that works in it, so that jobs run in their order and the event loop never waits for a disk.

    One process owns the directory. Raises `ConfigurationError` where it cannot be used, or another process has it.
    """

    def __init__(self, directory: Path) -> None:
        make_data_directory(directory, "--files-dir")
        self.directory = directory
        try:
            self._lock = FileLock(directory / "lock", mode=0o600)
            self._lock.acquire(blocking=False)
        except Timeout:
            raise ConfigurationError(f"--files-dir {directory} is in use by another server") from None
        except OSError as error:
            raise ConfigurationError(f"--files-dir {directory}: {error.strerror or error}") from error
        self._thread = ThreadPoolExecutor(1, "penstock-disk")

    async def run(self, job: Callable[[], T]) -> T:
        """Runs the job after all that came before. It is not stopped where its caller is cancelled."""
        return await asyncio.shield(asyncio.wrap_future(self._thread.submit(job)))

    def folder(self, name: str) -> Path:
        path = self.directory / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def read_objects(self, folder: Path, kind: type[T], id_of: Callable[[T], str]) -> list[T]:
        """The objects in the JSON files of a folder, each named by its id. Any other, as of a disk that lost something, is set aside with
        all files of that name, which is logged."""
        decode = msgspec.json.Decoder(kind).decode
        found = []
        for path in sorted(folder.glob("*.json")):
            try:
                each = decode(path.read_bytes())
                if id_of(each) != path.stem:
                    raise ValueError(f"it says that it is {id_of(each)[:100]!r}")
            except (ValueError, msgspec.MsgspecError) as error:
                aside = self.folder("damaged")
                for own in folder.glob(f"{glob.escape(path.stem)}*"):
                    own.replace(aside / own.name)
                log.error("%s is damaged, and set aside in %s: %s", path, aside, error)
            else:
                found.append(each)
        return found

    def close(self) -> None:
        """Waits for the jobs that are left."""
        self._thread.shutdown()
        self._lock.release()


def create_private(path: Path) -> BinaryIO:
    """An empty file that only this user can read."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")


def write_atomically(path: Path, data: bytes) -> None:
    """After a crash at any point, the file is as it was before or as it is now."""
    scratch = path.with_name(path.name + ".tmp")
    try:
        with create_private(scratch) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


class FileObject(Struct, kw_only=True):
    """OpenAI's file object. Times are in Unix seconds. `filename` is the client's, and names nothing on this machine."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Purpose
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"
    status_details: None = None


class StoredFile(Struct):
    """A file, the client that it belongs to, and its place in the order of creation."""

    file: FileObject
    owner: str
    order: int


@dataclass(frozen=True, slots=True)
class FileLimits:
    """In bytes: of one file, and of all together."""

    max_file: int
    max_total: int


Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page:
    """What a client asks of a list: at most `limit` objects, those that follow the one called `after`."""

    limit: int
    after: str | None = None
    order: Order = "desc"

    def of(self, objects: Sequence[Item], id_of: Callable[[Item], str]) -> tuple[list[Item], bool]:
        """The page of objects that are in order of creation, and whether more follow. Raises `InvalidRequest`."""
        ordered = list(objects) if self.order == "asc" else list(reversed(objects))
        start = 0
        if self.after is not None:
            ids = [id_of(each) for each in ordered]
            if self.after not in ids:
                raise InvalidRequest(f"`after` names nothing in this list: {self.after!r}", "after")
            start = ids.index(self.after) + 1
        return ordered[start : start + self.limit], start + self.limit < len(ordered)


class FileStore:
    """The files of all clients: contents and metadata beside each other, named by ids of this server's making.

    The index is in memory and belongs to the event loop; `disk` does the work. `is_in_use` says of an id whether a batch still reads it.
    """

    def __init__(self, disk: Disk, limits: FileLimits, now: Callable[[], float] = time.time) -> None:
        self.disk = disk
        self.limits = limits
        self.is_in_use: Callable[[str], bool] = lambda file_id: False
        self._now = now
        self._folder = disk.folder("files")
        self._uploads = disk.folder("uploads")
        self._num_uploading = 0
        self._files = {stored.file.id: stored for stored in self._load()}
        self._num_bytes = sum(stored.file.bytes for stored in self._files.values())

    @property
    def num_files(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        """Those of uploads under way included."""
        return self._num_bytes

    def path(self, file_id: str) -> Path:
        """Where the content of a file is that is known here."""
        assert file_id in self._files
        return self._folder / file_id

    def get(self, owner: str, file_id: str, param: str = "file_id") -> FileObject:
        """Raises `NoSuchObject`, also for files of other clients and those that have expired; `param` is the field that names the file."""
        stored = self._files.get(file_id)
        if stored is None or stored.owner != owner or self._has_expired(stored):
            raise NoSuchObject(f"there is no file {file_id!r}", param)
        return stored.file

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def page_of(self, owner: str, page: Page, purpose: str | None = None) -> tuple[list[FileObject], bool]:
        """A page of the client's files, and whether more follow."""
        own = [stored.file for stored in self._files.values() if stored.owner == owner and not self._has_expired(stored)]
        return page.of([file for file in own if purpose in (None, file.purpose)], lambda file: file.id)

    def check_room(self) -> None:
        """Raises `StorageFull` where a bound is reached."""
        if len(self._files) + self._num_uploading >= MAX_FILES:
            raise StorageFull(f"this server keeps {MAX_FILES} files at most: delete some")
        if self._num_bytes >= self.limits.max_total:
            raise StorageFull(f"the files of this server have {self.limits.max_total} bytes already (--files-quota): delete some")

    async def begin_upload(self) -> "Upload":
        """Raises `StorageFull`."""
        await self.sweep()
        self.check_room()
        self._num_uploading += 1
        path = self._uploads / new_id("upload-")
        return Upload(self, path, await self.disk.run(lambda: create_private(path)))

    async def adopt(self, source: Path, owner: str, file: FileObject) -> None:
        """Makes a file of what lies at `source`, on the same disk; its bytes are on disk afterwards. Not stopped where it is cancelled."""
        await asyncio.shield(self._adopt(source, owner, file))

    async def _adopt(self, source: Path, owner: str, file: FileObject) -> None:
        stored = StoredFile(file, owner, time.time_ns())
        await self.disk.run(lambda: self._place(source, stored))
        self._files[file.id] = stored
        self._num_bytes += file.bytes

    async def delete(self, owner: str, file_id: str) -> None:
        """Raises `NoSuchObject`, and `InvalidRequest` where a batch still reads the file."""
        self.get(owner, file_id)
        if self.is_in_use(file_id):
            raise InvalidRequest(f"a batch still reads {file_id}: cancel it, or wait for its end", "file_id")
        await self._remove([file_id])

    async def sweep(self) -> None:
        """Removes the files that have expired."""
        await self._remove([file_id for file_id, stored in self._files.items() if self._has_expired(stored)])

    async def _remove(self, file_ids: Sequence[str]) -> None:
        for file_id in file_ids:
            self._num_bytes -= self._files.pop(file_id).file.bytes
        if file_ids:
            await self.disk.run(lambda: self._unlink(file_ids))

    def _has_expired(self, stored: StoredFile) -> bool:
        expires_at = stored.file.expires_at
        return expires_at is not None and expires_at <= self._now() and not self.is_in_use(stored.file.id)

    def _load(self) -> Sequence[StoredFile]:
        """Removes what a crash has left half done: uploads, contents without metadata, and metadata without contents."""
        for scratch in (*self._uploads.iterdir(), *self._folder.glob("*.tmp")):
            scratch.unlink()
        found = self.disk.read_objects(self._folder, StoredFile, lambda stored: stored.file.id)
        whole = {stored.file.id: stored for stored in found if (self._folder / stored.file.id).is_file()}
        for path in list(self._folder.iterdir()):
            if path.name.removesuffix(".json") not in whole:
                path.unlink()
        return sorted(whole.values(), key=lambda stored: stored.order)

    def _place(self, source: Path, stored: StoredFile) -> None:
        with source.open("rb+") as file:
            os.fsync(file.fileno())
        # In this order: after a crash in between, the source is where it was, and the metadata are removed.
        write_atomically(self._folder / f"{stored.file.id}.json", msgspec.json.encode(stored))
        source.replace(self._folder / stored.file.id)
        sync_directory(self._folder)

    def _unlink(self, file_ids: Sequence[str]) -> None:
        for file_id in file_ids:
            (self._folder / f"{file_id}.json").unlink(missing_ok=True)
            (self._folder / file_id).unlink(missing_ok=True)

    def _count_upload(self, num_bytes: int) -> None:
        if self._num_bytes + num_bytes > self.limits.max_total:
            raise StorageFull(f"the files of this server may have {self.limits.max_total} bytes together (--files-quota): delete some")
        self._num_bytes += num_bytes

    def _end_upload(self, num_bytes: int) -> None:
        self._num_uploading -= 1
        self._num_bytes -= num_bytes


@dataclass(slots=True)
class Upload:
    """A file on its way to the disk. `close` it in any case: without a `commit` before, nothing is left of it."""

    _store: FileStore
    _path: Path
    _file: BinaryIO
    size: int = 0
    _is_closed: bool = field(default=False, init=False)

    async def write(self, data: bytes) -> None:
        """Raises `StorageFull`, and `OSError` where the disk is full."""
        self._store._count_upload(len(data))
        self.size += len(data)
        await self._store.disk.run(lambda: self._file.write(data))

    async def commit(self, owner: str, filename: str, purpose: Purpose, expires_after: int | None) -> FileObject:
        """`expires_after` is in seconds from now; None is OpenAI's default for the purpose."""
        await self._store.disk.run(self._file.close)
        now = int(self._store._now())
        seconds = BATCH_SECONDS if expires_after is None and purpose == "batch" else expires_after
        file = FileObject(
            id=new_id("file-"),
            bytes=self.size,
            created_at=now,
            filename=filename,
            purpose=purpose,
            expires_at=None if seconds is None else now + seconds,
        )
        await self._store.adopt(self._path, owner, file)
        return file

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._store._end_upload(self.size)

        def discard() -> None:
            try:
                self._file.close()  # which may write what is left, to a full disk
            finally:
                self._path.unlink(missing_ok=True)

        await self._store.disk.run(discard)
