"""Prefill and decode apart: the blocks of a prompt that one process has computed, handed over to another one as a file.

The file has a header and then, one after another, the blocks as `block_files` writes them. In shared memory it touches no disk. Over
torch.distributed (`exchange`) the receiving process gets its content.
"""

import asyncio
import contextlib
import mmap
import os
import secrets
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from penstock.engine.errors import ConfigurationError, EngineUnavailable, InvalidRequest
from penstock.engine.kv_cache.block_files import SCRATCH_PREFIX, BlockFormat, DamagedBlock
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager, group_of_key
from penstock.engine.kv_cache.exchange import SCHEME, Exchange, check_address
from penstock.engine.system.cache import exposure, make_data_directory

MAGIC = b"PNSTKKVX"
FORMAT_VERSION = 1
SUFFIX = ".kvx"
SHARED_MEMORY = "shm"
SHARED_MEMORY_ROOT = Path("/dev/shm")
EXPORT_SECONDS = 600.0  # that an export waits to be received
READ_BYTES = 4 * 2**20  # that are copied from the cache at once: steps go on in between
MAX_STATE_BYTES = 1024
MAX_HEADER_BYTES = 4096
_PREAMBLE = struct.Struct("<8sII")  # magic, format version, bytes of the header


ReadBlocks = Callable[[int, list[int]], Awaitable[Tensor]]  # of a group, the blocks' contents as bytes in host memory


class TransferRefused(InvalidRequest):
    """Blocks cannot be handed over, or what was handed over cannot be used, as the message says."""


class TransferState(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the receiving process gets: the name of the export in the directory that both have, or of the process that has it."""

    version: int
    export: str
    source: str | None = None


class ExportHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the blocks are. `prefix` is the hash of the last of the prompt's first `num_blocks` blocks, empty without any."""

    model: str
    block_size: int
    dtype: str
    fingerprint: str
    num_blocks: int
    prefix: str


def transfer_directory(given: str) -> Path:
    """The directory that the option names. What is handed over by torch.distributed waits in shared memory."""
    is_shared_memory = given == SHARED_MEMORY or given.startswith(SCHEME)
    return SHARED_MEMORY_ROOT / f"penstock-kv-{os.geteuid()}" if is_shared_memory else Path(given).expanduser()


def check_transfer_directory(given: str) -> None:
    """Makes it or checks it. Raises `ConfigurationError`."""
    if given.startswith(SCHEME):
        check_address(given)
    if (given == SHARED_MEMORY or given.startswith(SCHEME)) and not SHARED_MEMORY_ROOT.is_dir():
        raise ConfigurationError(f"--kv-transfer-dir {SHARED_MEMORY}: this system has no {SHARED_MEMORY_ROOT}: name a directory")
    make_data_directory(transfer_directory(given), "--kv-transfer-dir")


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """The first blocks of a prompt, which stay as they are until they have been exported. `blocks` are by their keys, in order."""

    num_blocks: int
    prefix: bytes
    blocks: dict[bytes, int]

    def chunks(self, block_format: BlockFormat) -> Iterator[tuple[int, dict[bytes, int]]]:
        """Blocks that are copied at once, with their group."""
        for group, keys in groupby(self.blocks, group_of_key):
            limit, own = max(1, READ_BYTES // block_format.payload_bytes(group)), list(keys)
            for start in range(0, len(own), limit):
                yield group, {key: self.blocks[key] for key in own[start : start + limit]}


@dataclass(slots=True)
class HeldPrefixes:
    """Those of requests whose prompts are to be exported. Belongs to the thread that schedules."""

    blocks: KVCacheManager
    _by_request: dict[str, HeldPrefix] = field(default_factory=dict)
    _has_freed: bool = False

    def hold(self, request_id: str, hashes: Sequence[bytes], num_usable: int) -> None:
        """Holds the longest prefix of at most so many blocks that is cached."""
        if request_id in self._by_request:
            return
        pool = self.blocks.pool
        num_blocks = self.blocks.longest_prefix(hashes, min(num_usable, len(hashes)), pool.has)
        blocks = {key: block for key in self.blocks.keys_of_prefix(hashes, num_blocks) for block in pool.find([key])}
        pool.share(blocks.values())
        self._by_request[request_id] = HeldPrefix(num_blocks, hashes[num_blocks - 1] if num_blocks else b"", blocks)

    def of(self, request_id: str) -> HeldPrefix | None:
        return self._by_request.get(request_id)

    def release(self, request_id: str) -> None:
        """Frees what is held for the request, if anything is."""
        if (held := self._by_request.pop(request_id, None)) is not None:
            self._pool.free(list(held.blocks.values()))
            self._has_freed = True

    def take_freed(self) -> bool:
        """Whether blocks have been freed since the last time."""
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    def clear(self) -> None:
        for request_id in list(self._by_request):
            self.release(request_id)

    @property
    def _pool(self) -> BlockPool:
        return self.blocks.pool

    @property
    def blocks_held(self) -> list[int]:
        return [block for held in self._by_request.values() for block in held.blocks.values()]


class Export:
    """A file that is being written. It has its name once `finish` has been called; no process finds it before.

    From the beginning it is as long as `num_bytes`, which it may take, so that what is being written counts in the directory's size.
    """

    def __init__(self, directory: Path, block_format: BlockFormat, held: HeldPrefix, num_bytes: int) -> None:
        self.name = secrets.token_hex(16)
        self._format = block_format
        self._directory = directory
        descriptor, scratch = tempfile.mkstemp(prefix=SCRATCH_PREFIX, dir=directory)  # which only the user may read and write
        self._scratch = Path(scratch)
        self._file = open(descriptor, "wb")  # noqa: SIM115 - closed by `finish` or `discard`
        self._file.truncate(num_bytes)
        header = msgspec.json.encode(
            ExportHeader(
                model=block_format.model,
                block_size=block_format.block_size,
                dtype=block_format.dtype,
                fingerprint=block_format.fingerprint,
                num_blocks=held.num_blocks,
                prefix=held.prefix.hex(),
            )
        )
        self._file.write(_PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(header)) + header)

    def write(self, keys: Iterable[bytes], contents: Tensor) -> None:
        """Adds blocks, bytes [blocks, `payload_bytes`] in host memory. Raises `OSError`."""
        for key, payload in zip(keys, contents, strict=True):
            for part in self._format.encode(key, memoryview(payload.numpy())):
                self._file.write(part)

    def finish(self, source: str | None = None) -> bytes:
        """What the receiving process is to be given. Raises `OSError`."""
        self._file.truncate()
        self._file.close()
        self._scratch.rename(self._directory / f"{self.name}{SUFFIX}")
        return msgspec.json.encode(TransferState(FORMAT_VERSION, self.name, source))

    def discard(self) -> None:
        """Leaves nothing behind, unless it has been finished."""
        with contextlib.suppress(OSError):
            self._file.close()
        self._scratch.unlink(missing_ok=True)


class ReceivedBlocks:
    """Blocks of a prompt that another process has computed, verified, in mapped memory. A source that prefixes are loaded from.

    Their file is there until `delete_file`: a request that is not answered may be sent again with it.
    """

    def __init__(self, payloads: dict[bytes, memoryview], delete: Callable[[], None]) -> None:
        self._payloads = payloads
        self._delete = delete

    def __str__(self) -> str:
        return "an export of another process"

    def __len__(self) -> int:
        return len(self._payloads)

    def has(self, key: bytes) -> bool:
        return key in self._payloads

    def read(self, key: bytes) -> memoryview | None:
        return self._payloads.get(key)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Nothing of it is evicted."""

    def delete_file(self) -> None:
        """No other request is to receive them. The blocks stay as they are."""
        with contextlib.suppress(OSError):  # in a directory of another machine; it is deleted with those that have waited too long
            self._delete()


class BlockTransfer:
    """Exports of prompts in a directory, at most `max_bytes` of them, and those of others that are received from it.

    An export is for one request: its file is deleted once that has its first token. One that has not been used is deleted after
    `EXPORT_SECONDS`, when there is no room for another one, or when this process ends. With an `address`, processes receive from each other
    in place of the directory. Any thread may export and receive.
    """

    def __init__(
        self, directory: Path, block_format: BlockFormat, blocks: KVCacheManager, max_bytes: int, address: str | None = None
    ) -> None:
        self.directory = directory
        self.format = block_format
        self.max_bytes = max_bytes
        self.held = HeldPrefixes(blocks)
        self.received: dict[str, ReceivedBlocks] = {}  # by the requests that have no token yet; of the thread that schedules
        self._blocks = blocks
        self._own: dict[str, float] = {}  # when each was begun
        self._beginning = threading.Lock()
        self._exchange = None if address is None else Exchange(address, self._content, self._delete_own)

    @property
    def num_own(self) -> int:
        """The exports of this process that may be there."""
        return len(self._own)

    async def export(self, request_id: str, read: ReadBlocks) -> bytes:
        """Writes what is held for the request, which `read` copies from the cache; returns what the receiving process is to be given.

        Raises `TransferRefused` where the prompt is too long, `EngineUnavailable` where it cannot be written.
        """
        held = self.held.of(request_id)
        if held is None:
            raise EngineUnavailable("the prompt cannot be handed over: its blocks are no longer held")
        try:
            begun = asyncio.get_running_loop().run_in_executor(None, self.begin, held)
            try:
                export = await asyncio.shield(begun)
            except asyncio.CancelledError:  # the thread goes on, and may have made the file by now
                begun.add_done_callback(_discard)
                raise
            try:
                for group, blocks in held.chunks(self.format):
                    contents = await read(group, list(blocks.values()))
                    await asyncio.to_thread(export.write, blocks, contents)
                return await asyncio.to_thread(export.finish, None if self._exchange is None else self._exchange.name)
            finally:
                export.discard()
        except OSError as error:
            raise EngineUnavailable(f"the prompt cannot be handed over in {self.directory}: {error.strerror or error}") from error

    def begin(self, held: HeldPrefix) -> Export:
        """An export of these blocks, which are to be written to it.

        Raises `TransferRefused` where they take too much room, `EngineUnavailable` where those that are being written do, and `OSError`.
        """
        num_bytes = sum(map(self.format.file_bytes, held.blocks)) + MAX_HEADER_BYTES
        if num_bytes > self.max_bytes:
            raise TransferRefused(
                f"the prompt cannot be handed over: it takes {num_bytes} bytes, and --kv-transfer-dir-size is {self.max_bytes}"
            )
        with self._beginning:
            self._make_room(num_bytes)
            export = Export(self.directory, self.format, held, num_bytes)
        self._own[export.name] = time.time()
        return export

    def receive(self, state: bytes, hashes: Sequence[bytes]) -> ReceivedBlocks:
        """The blocks that `state` names, of the prompt whose blocks have these hashes. Reads and verifies all of them.

        Raises `TransferRefused` for what is none of this process's model, of another prompt, or damaged.
        """
        known = _state_of(state)
        if (self._exchange is None) != (known.source is None):
            raise TransferRefused("it was handed over in another way: --kv-transfer-dir has to be the same in both processes")
        if self._exchange is None or known.source is None:
            return ReceivedBlocks(self._verified(self._read(known.export), hashes), partial(self._delete, known.export))
        view = self._exchange.fetch(known.source, known.export, self.max_bytes)
        if view is None:
            raise TransferRefused("its process has no such export: it has been received, or has waited too long, or the process has ended")
        return ReceivedBlocks(self._verified(view, hashes), partial(self._exchange.discard, known.source, known.export))

    def delete_used(self, request_ids: Iterable[str]) -> None:
        """These requests have tokens: what they have received is for no other one."""
        for request_id in self.received.keys() & request_ids:
            self.received.pop(request_id).delete_file()

    def release(self, request_id: str) -> None:
        """The request has ended. What it has received and not used may be received again."""
        self.held.release(request_id)
        self.received.pop(request_id, None)

    def _read(self, export: str) -> memoryview:
        """Its content, in mapped memory. Raises `TransferRefused`."""
        path = self._path(export)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise TransferRefused(f"there is no such export in {self.directory}: it has been received, or has waited too long") from None
        except OSError as error:
            raise TransferRefused(f"the export cannot be read: {error.strerror or error}") from None
        with open(descriptor, "rb"):
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise TransferRefused("the export is not a file")
            if (fault := exposure(status, path.name)) is not None:
                raise TransferRefused(f"the export {fault.reason}")
            if not status.st_size:
                raise TransferRefused("the export is damaged: it is empty")
            return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY))  # torch has no tensors that are read only

    def _content(self, export: str) -> Tensor | None:
        # Of an export of this process, for another one, which verifies it.
        try:
            return torch.frombuffer(self._read(export), dtype=torch.uint8) if export in self._own else None
        except TransferRefused:
            return None

    def _delete_own(self, export: str) -> None:
        # For another process, which has received it.
        if self._own.pop(export, None) is not None:
            self._delete(export)

    def _delete(self, export: str) -> None:
        self._path(export).unlink(missing_ok=True)

    def _path(self, export: str) -> Path:
        return self.directory / f"{export}{SUFFIX}"

    def _verified(self, view: memoryview, hashes: Sequence[bytes]) -> dict[bytes, memoryview]:
        header, start = _header_of(view)
        self._check(header, hashes)
        keys = self._blocks.keys_of_prefix(hashes, header.num_blocks)
        expected = start + sum(map(self.format.file_bytes, keys))
        if len(view) != expected:
            raise TransferRefused(f"the export is damaged: it has {len(view)} bytes instead of {expected}")
        payloads = {}
        for key in keys:
            stop = start + self.format.file_bytes(key)
            try:
                payloads[key] = self.format.decode(key, view[start:stop])
            except DamagedBlock as damage:
                raise TransferRefused(f"the export is damaged: of its block {len(payloads)}, {damage}") from None
            start = stop
        return payloads

    def _check(self, header: ExportHeader, hashes: Sequence[bytes]) -> None:
        own = self.format
        if header.block_size != own.block_size:
            raise TransferRefused(f"its blocks are of {header.block_size} tokens, and here they are of {own.block_size} (--block-size)")
        if header.dtype != own.dtype:
            raise TransferRefused(f"its keys and values are {header.dtype}, and here they are {own.dtype} (--dtype, --kv-cache-dtype)")
        if header.model != own.model:
            raise TransferRefused("it is of another model: the weights, the config or the quantization differ")
        if header.fingerprint != own.fingerprint:
            raise TransferRefused("its layers have other sliding windows (--max-model-len, --hybrid-kv-cache)")
        is_known = 0 <= header.num_blocks <= len(hashes)
        if not is_known or header.prefix != (hashes[header.num_blocks - 1].hex() if header.num_blocks else ""):
            raise TransferRefused("it is of another prompt, or was computed with another adapter or cache_salt")

    def _make_room(self, num_bytes: int) -> None:
        """Deletes exports that have waited too long, and the oldest ones where there is no room for so many bytes."""
        found = []
        for pattern in (f"*{SUFFIX}", f"{SCRATCH_PREFIX}*"):
            for path in self.directory.glob(pattern):
                with contextlib.suppress(OSError):  # another process has received it
                    status = path.stat()
                    found.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in found)
        for changed_at, size, path in sorted(found):
            if changed_at > time.time() - EXPORT_SECONDS and (path.suffix != SUFFIX or total + num_bytes <= self.max_bytes):
                continue
            path.unlink(missing_ok=True)
            total -= size
        if total + num_bytes > self.max_bytes:
            raise EngineUnavailable("exports that are being written leave no room for the prompt (--kv-transfer-dir-size)")
        for name, begun_at in list(self._own.items()):
            if begun_at <= time.time() - EXPORT_SECONDS:  # it has been received or deleted
                self._own.pop(name, None)

    def close(self) -> None:
        """Deletes what has not been received of this process."""
        if self._exchange is not None:
            self._exchange.close()
        for name in self._own:
            with contextlib.suppress(OSError):
                self._delete(name)


def _discard(begun: "asyncio.Future[Export]") -> None:
    if not begun.cancelled() and begun.exception() is None:
        begun.result().discard()


def _state_of(state: bytes) -> TransferState:
    """Raises `TransferRefused` for what no export has made."""
    if len(state) > MAX_STATE_BYTES:
        raise TransferRefused(f"it has {len(state)} bytes, which no export has made")
    try:
        known = msgspec.json.decode(state, type=TransferState)
    except msgspec.MsgspecError as error:
        raise TransferRefused(f"no export has made it: {error}") from None
    if known.version != FORMAT_VERSION:
        raise TransferRefused(f"it is in version {known.version}, and this process reads version {FORMAT_VERSION}")
    if len(known.export) != 2 * 16 or not set(known.export) | set(known.source or "") <= set("0123456789abcdef"):
        raise TransferRefused("it names no export")
    return known


def _header_of(view: memoryview) -> tuple[ExportHeader, int]:
    """With its end. Raises `TransferRefused`."""
    if len(view) < _PREAMBLE.size:
        raise TransferRefused("the export is damaged: it has no header")
    magic, version, size = _PREAMBLE.unpack(view[: _PREAMBLE.size])
    if magic != MAGIC:
        raise TransferRefused("the export is damaged: it does not begin as one")
    if version != FORMAT_VERSION:
        raise TransferRefused(f"the export is in version {version}, and this process reads version {FORMAT_VERSION}")
    stop = _PREAMBLE.size + size
    if size > MAX_HEADER_BYTES or stop > len(view):
        raise TransferRefused("the export is damaged: its header is not whole")
    try:
        return msgspec.json.decode(view[_PREAMBLE.size : stop], type=ExportHeader), stop
    except msgspec.MsgspecError as error:
        raise TransferRefused(f"the export is damaged: its header: {error}") from None
