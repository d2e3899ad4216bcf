"""The persistent KV cache: full blocks are written behind to a directory, and the beginnings of prompts are loaded from it."""

import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.engine.config import KV_CACHE_DIR_SIZE, KV_TRANSFER_DIR_SIZE, EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.block_files import BlockFiles, BlockFileStats, BlockFormat
from penstock.engine.kv_cache.blocks import DEFAULT_RETENTION, BlockPool, KVCacheManager, group_of_key
from penstock.engine.kv_cache.exchange import SCHEME
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.kv_cache.transfer import BlockTransfer, check_transfer_directory, transfer_directory
from penstock.engine.system.cache import make_data_directory
from penstock.engine.system.memory import CudaHostCopies

MAX_QUEUED = 8192  # blocks that wait to be written; those beyond are dropped
WRITE_BYTES = 4 * 2**20  # that are copied from the cache at once
LOAD_BYTES = 16 * 2**20  # that are written to the cache between two steps; on a GPU, to which they are copied faster, more
LOAD_BYTES_CUDA = 64 * 2**20
LOAD_SECONDS = 10.0  # without progress of any load: prompts are computed instead
RETRY_SECONDS = 30.0  # after an error of the disk
TOUCH_SECONDS = 600.0  # between two uses of a prefix in memory that count as uses of its files
MAX_TOUCHED = 4096
CLOSE_SECONDS = 5.0  # for what is still to be written when the server ends

logger = logging.getLogger(__name__)

Submit = Callable[[Callable[[], None]], "Future[None]"]


@dataclass(frozen=True, slots=True)
class PersistenceStats:
    """Since the start. `num_hits` counts loaded blocks, `num_dropped` those that were not written in time."""

    files: BlockFileStats
    num_hits: int
    num_dropped: int


class BlockSource(Protocol):
    """Where prefixes are loaded from: the directory, or what another process has handed over. Any thread may read."""

    def has(self, key: bytes) -> bool: ...

    def read(self, key: bytes) -> memoryview | None:
        """The contents of a block; None where it is not there. Raises `OSError`."""

    def touch(self, keys: Iterable[bytes]) -> None:
        """These blocks have been used."""


@dataclass(eq=False, slots=True)
class PrefixLoad:
    """A prompt whose sequence waits for blocks from the source, unless it `is_over`.

    `found` are the keys that were found there, `missing` those still to be read. While more is loaded, `blocks` are held: those of the
    prefix that are in memory. `since` is when it was asked for.
    """

    hashes: list[bytes]
    source: BlockSource
    since: float
    found: set[bytes] = field(default_factory=set)
    missing: deque[bytes] = field(default_factory=deque)
    blocks: list[int] = field(default_factory=list)
    is_reading: bool = False
    is_over: bool = False


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Blocks of one group in host memory, bytes [blocks, `payload_bytes`]."""

    group: int
    keys: list[bytes]
    contents: Tensor


class _Worker:
    """A thread for tasks, which must not raise. It is a daemon: a disk that never answers must not keep the process from exiting."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, task: Callable[[], None]) -> None:
        self._tasks.put(task)

    def close(self, seconds: float = 0.0) -> None:
        """Waits so long for the tasks that are left."""
        self._tasks.put(None)
        self._thread.join(seconds)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


class BlockWriter:
    """Write-behind: a block that a step has filled is copied from the cache and written by a thread of its own, while later steps run.

    The block is not held meanwhile. Whether it has been evicted, and so may have been overwritten, is known from its generation after the
    copy.
    """

    def __init__(self, files: BlockFiles, cache: KVCache, pool: BlockPool) -> None:
        self._files = files
        self._cache = cache
        self._pool = pool
        self._device = cache.keys[0].device
        self._stream: Any = None  # on a GPU
        self._thread = _Worker("kv-writer")
        self._queue: SimpleQueue[tuple[int, bytes, int]] = SimpleQueue()
        self._is_due = False
        self._may_write_at = 0.0
        self._is_failing = False
        self._num_overflowed = 0
        self._num_unwritten = 0  # counted by the thread

    @property
    def num_dropped(self) -> int:
        """Blocks that were not written: the queue was full, the block was evicted before, or the disk failed."""
        return self._num_overflowed + self._num_unwritten

    def save(self, blocks: Iterable[int]) -> None:
        """Queues published blocks that have been filled. Those with a low retention priority are not worth it."""
        for block in blocks:
            key = self._pool.hash_of(block)
            if key is None or self._pool.retention_priority(block) < DEFAULT_RETENTION:
                continue
            if self._queue.qsize() >= MAX_QUEUED:
                self._num_overflowed += 1
                continue
            self._queue.put((block, key, self._pool.generation(block)))
            if not self._is_due:
                self._is_due = True
                self._thread.submit(self._write_queued)

    def _write_queued(self) -> None:
        """Writes all blocks that are queued. In the writer's thread."""
        self._is_due = False
        while taken := self._take_queued():
            if time.monotonic() < self._may_write_at:
                self._num_unwritten += len(taken)
                continue
            num_written = self._files.stats.num_written
            try:
                self._write(taken)
                self._is_failing = False
            except Exception as error:  # of the disk, or for lack of the device's memory: what is not written is computed again
                self._num_unwritten += len(taken) - (self._files.stats.num_written - num_written)
                self._may_write_at = time.monotonic() + RETRY_SECONDS
                if not self._is_failing:
                    logger.warning("The KV cache is not written to %s until that succeeds again: %s", self._files.root, error)
                self._is_failing = True

    def _take_queued(self) -> list[tuple[int, bytes, int]]:
        """Queued blocks that can be copied at once."""
        taken: list[tuple[int, bytes, int]] = []
        limit = max(1, WRITE_BYTES // max(map(self._cache.payload_bytes, range(len(self._cache.groups)))))
        while len(taken) < limit:
            try:
                taken.append(self._queue.get_nowait())
            except Empty:
                break
        return taken

    @torch.inference_mode()
    def _write(self, taken: list[tuple[int, bytes, int]]) -> None:
        for group in sorted({group_of_key(key) for _, key, _ in taken}):
            own = [(block, key, generation) for block, key, generation in taken if group_of_key(key) == group]
            own = [entry for entry in own if not self._files.has(entry[1])]
            if not own:
                continue
            contents = self._copy_to_host(group, [block for block, _, _ in own])
            for (block, key, generation), payload in zip(own, contents, strict=True):
                if self._pool.generation(block) == generation:
                    self._files.write(key, memoryview(payload.numpy()))
                else:
                    self._num_unwritten += 1

    def _copy_to_host(self, group: int, blocks: list[int]) -> Tensor:
        # On a GPU in a separate stream, so that the model's is not blocked.
        if self._device.type != "cuda":
            return self._cache.read_blocks(group, blocks)
        torch.cuda.set_device(self._device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            return CudaHostCopies().begin(self._cache.read_blocks(group, blocks))()

    def close(self, seconds: float) -> None:
        """Writes what is queued, for so long."""
        self._thread.close(seconds)


class PrefixLoader:
    """Loads the beginnings of prompts, one prompt at a time, a chunk at a time.

    The blocks are read and verified by a thread, written to blocks of the pool between two steps, and published. They are held until the
    load ends, or a running sequence has no other block left. From then on they are cached blocks like any others.

    Belongs to the thread that schedules. `submit` runs a task in the model's thread, between two steps. `wake` is called, in any thread,
    when `update` has something to do.
    """

    def __init__(self, files: BlockFiles | None, cache: KVCache, blocks: KVCacheManager, submit: Submit) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.num_hits = 0
        self._files = files
        self._cache = cache
        self._blocks = blocks
        self._pool = blocks.pool
        self._submit = submit
        self._device = cache.keys[0].device
        self._is_cuda = self._device.type == "cuda"
        self._finder, self._reader = _Worker("kv-finder"), _Worker("kv-reader")
        self._news: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._loads: list[PrefixLoad] = []  # those that sequences wait for
        self._queue: deque[PrefixLoad] = deque()
        self._active: PrefixLoad | None = None
        self._being_written: dict[bytes, int] = {}  # blocks by their keys
        self._num_reserved = 0
        self._has_freed = False
        self._may_load_at = 0.0
        self._progress_at = 0.0
        self._touched: dict[bytes, float] = {}

    def begin(self, hashes: Sequence[bytes], num_usable: int, received: BlockSource | None = None) -> PrefixLoad | None:
        """Looks for the first `num_usable` blocks of a prompt, and loads those that are not in memory; None where all are.

        Where blocks of the prompt have been `received`, they are looked for there, and not in the directory.
        """
        source = received or self._files
        if not num_usable or source is None or (received is None and time.monotonic() < self._may_load_at):
            return None
        num_cached = len(self._blocks.find(hashes, num_usable)[0])
        if num_cached:
            self._touch(hashes, num_cached)
        if num_cached == num_usable:
            return None
        load = PrefixLoad(list(hashes[:num_usable]), source, time.monotonic())
        self._loads.append(load)
        self._finder.submit(functools.partial(self._find, load))
        return load

    def cancel(self, load: PrefixLoad) -> None:
        """No sequence waits for it any more."""
        load.is_over = True
        self._release(load)

    def give_up(self) -> bool:
        """Ends the load that holds blocks, for a running sequence that needs one; False where none does."""
        if self._active is None or not self._active.blocks:
            return False
        self.cancel(self._active)
        return True

    def update(self, num_reserved: int) -> bool:
        """Processes what the threads have done. Loads leave `num_reserved` blocks free. Returns whether blocks have been freed."""
        self._num_reserved = num_reserved
        while True:
            try:
                news = self._news.get_nowait()
            except Empty:
                break
            news()
            self._progress_at = time.monotonic()
        self._begin_next()
        if self._loads:
            self._expire()
        has_freed, self._has_freed = self._has_freed, False
        return has_freed

    @property
    def blocks_held(self) -> list[int]:
        """Those that are being written to, and those of the prompt that is loaded."""
        return [*self._being_written.values(), *(() if self._active is None else self._active.blocks)]

    def _expire(self) -> None:
        """Ends loads without progress, and loads nothing for a while then: a disk that does not answer must not delay prompts."""
        now = time.monotonic()
        for load in self._loads:
            if not load.is_over and max(load.since, self._progress_at) < now - LOAD_SECONDS:
                self.cancel(load)
                self._pause(load, f"nothing has come for {LOAD_SECONDS:g} s")
        self._loads = [load for load in self._loads if not load.is_over]

    def _pause(self, load: PrefixLoad, reason: object) -> None:
        """Has prompts computed instead, for a while where the directory is at fault. In any thread."""
        now = time.monotonic()
        if load.source is not self._files:
            logger.warning("A prompt is computed although its blocks were handed over: %s", reason)
        elif now >= self._may_load_at:
            logger.warning("The KV cache is not read from %s for %g s: %s", load.source, RETRY_SECONDS, reason)
            self._may_load_at = now + RETRY_SECONDS

    def _post(self, news: Callable[[], None]) -> None:
        self._news.put(news)
        self.wake()

    def _find(self, load: PrefixLoad) -> None:
        """Which blocks of the prompt the source has. In the finder's thread."""
        found: set[bytes] = set()

        def is_there(key: bytes) -> bool:
            if key in found or self._pool.has(key):
                return True
            if not load.source.has(key):
                return False
            found.add(key)
            return True

        try:
            self._blocks.longest_prefix(load.hashes, len(load.hashes), is_there)
        except OSError as error:
            self._pause(load, error)
            found.clear()
        self._post(functools.partial(self._found, load, found))

    def _found(self, load: PrefixLoad, found: set[bytes]) -> None:
        load.found = found
        if found:
            self._queue.append(load)
        else:
            load.is_over = True

    def _begin_next(self) -> None:
        while self._active is None and self._queue:
            load = self._queue.popleft()
            if not load.is_over:
                self._active = load
                self._begin(load)

    def _begin(self, load: PrefixLoad) -> None:
        """Holds what is in memory of the longest prefix that can be had, and has the rest read."""
        num_blocks = self._blocks.longest_prefix(load.hashes, len(load.hashes), lambda key: key in load.found or self._pool.has(key))
        for key in self._blocks.keys_of_prefix(load.hashes, num_blocks):
            if found := self._pool.find([key]):
                load.blocks += found
            else:
                load.missing.append(key)
        self._pool.share(load.blocks)
        self._continue(load)

    def _continue(self, load: PrefixLoad) -> None:
        """Has the next chunk read, while the one before is written to the cache; ends the load where nothing is missing."""
        if load.is_reading:
            return
        if load.missing and not load.is_over:
            keys = self._next_keys(load.missing)
            load.is_reading = True
            self._reader.submit(functools.partial(self._read, load, keys))
        elif not self._being_written:
            load.is_over = True
            self._release(load)
            self._active = None

    def _next_keys(self, missing: deque[bytes]) -> list[bytes]:
        """Takes the keys of a chunk, all of one group."""
        group = group_of_key(missing[0])
        limit = max(1, (LOAD_BYTES_CUDA if self._is_cuda else LOAD_BYTES) // self._cache.payload_bytes(group))
        keys: list[bytes] = []
        while missing and len(keys) < limit and group_of_key(missing[0]) == group:
            keys.append(missing.popleft())
        return keys

    def _release(self, load: PrefixLoad) -> None:
        """Frees what the load holds. It stays cached until it is evicted."""
        self._has_freed = self._has_freed or bool(load.blocks)
        self._pool.free(load.blocks)
        load.blocks = []

    def _read(self, load: PrefixLoad, keys: list[bytes]) -> None:
        """Reads blocks, up to the first that cannot be read. In the reader's thread."""
        num_read, group = 0, group_of_key(keys[0])
        try:
            if self._is_cuda:
                torch.cuda.set_device(self._device)  # memory is pinned for the current one
            contents = torch.empty(len(keys), self._cache.payload_bytes(group), dtype=torch.uint8, pin_memory=self._is_cuda)
            for row, key in zip(contents.numpy(), keys, strict=True):
                payload = load.source.read(key)
                if payload is None:
                    break
                row[:] = payload
                num_read += 1
        except Exception as error:  # of the disk, or for lack of pinned memory
            self._pause(load, error)
        chunk = _Chunk(group, keys[:num_read], contents[:num_read]) if num_read else None
        self._post(functools.partial(self._take_chunk, load, chunk, is_whole=num_read == len(keys)))

    def _take_chunk(self, load: PrefixLoad, chunk: _Chunk | None, *, is_whole: bool) -> None:
        """Has a chunk written to blocks of the pool between two steps, where enough are free."""
        load.is_reading = False
        if chunk is not None and not load.is_over:
            if self._pool.num_free >= len(chunk.keys) + self._num_reserved:
                self._submit_write(load, chunk, {key: self._pool.allocate() for key in chunk.keys})
            else:
                is_whole = False
        if not is_whole:
            load.missing.clear()
        self._continue(load)

    def _submit_write(self, load: PrefixLoad, chunk: _Chunk, blocks: dict[bytes, int]) -> None:
        self._being_written |= blocks
        try:
            written = self._submit(functools.partial(self._cache.write_blocks, chunk.group, list(blocks.values()), chunk.contents))
        except RuntimeError as error:  # the model's thread has ended
            written = Future()
            written.set_exception(error)
        written.add_done_callback(lambda done: self._post(functools.partial(self._written, load, blocks, done.exception())))

    def _written(self, load: PrefixLoad, blocks: dict[bytes, int], error: BaseException | None) -> None:
        """Publishes the blocks, unless another sequence has computed equal ones meanwhile."""
        for key, block in blocks.items():
            del self._being_written[key]
            if error is None:
                is_new = self._pool.publish(block, key)
                self.num_hits += is_new and load.source is self._files
            self._pool.undrafted.add(block)
            load.blocks.append(block)
        if error is not None:
            logger.warning("Blocks of the KV cache could not be written to the device: %s", error)
            load.missing.clear()
        if load.is_over:
            self._release(load)
        self._continue(load)

    def _touch(self, hashes: Sequence[bytes], num_blocks: int) -> None:
        # A hit in memory counts as use of the files, too: otherwise the most popular prefixes would be the first to be evicted on disk.
        last, now = hashes[num_blocks - 1], time.monotonic()
        if self._files is None or now - self._touched.get(last, -TOUCH_SECONDS) < TOUCH_SECONDS:
            return
        if len(self._touched) >= MAX_TOUCHED:
            self._touched.clear()
        self._touched[last] = now
        self._finder.submit(functools.partial(self._files.touch, self._blocks.keys_of_prefix(hashes, num_blocks)))

    def close(self) -> None:
        """Loads nothing more."""
        self._may_load_at = math.inf
        for load in self._loads:
            load.is_over = True
        self._finder.close()
        self._reader.close()


class Persistence:
    """What keeps the blocks of a KV cache in a directory, and finds them there; and what hands them over to other processes.

    Without `files`, it loads what others hand over alone.
    """

    def __init__(
        self,
        files: BlockFiles | None,
        cache: KVCache,
        blocks: KVCacheManager,
        submit: Submit,
        transfer: BlockTransfer | None = None,
    ) -> None:
        self.files = files
        self.transfer = transfer
        self.writer = None if files is None else BlockWriter(files, cache, blocks.pool)
        self.loader = PrefixLoader(files, cache, blocks, submit)

    def begin(self, hashes: Sequence[bytes], num_usable: int, received: BlockSource | None) -> PrefixLoad | None:
        """As that of the loader."""
        return self.loader.begin(hashes, num_usable, received)

    def update(self, num_reserved: int) -> bool:
        """As that of the loader: whether blocks have been freed, also those that were to be exported."""
        has_freed = self.loader.update(num_reserved)
        return (self.transfer is not None and self.transfer.held.take_freed()) or has_freed

    @property
    def blocks_held(self) -> list[int]:
        """Those that are loaded, and those that are to be exported."""
        return self.loader.blocks_held + ([] if self.transfer is None else self.transfer.held.blocks_held)

    def save(self, blocks: Iterable[int]) -> None:
        """Has published blocks that have been filled written behind."""
        if self.writer is not None:
            self.writer.save(blocks)

    def stats(self) -> PersistenceStats | None:
        if self.files is None or self.writer is None:
            return None
        return PersistenceStats(self.files.stats, self.loader.num_hits, self.writer.num_dropped)

    def close(self) -> None:
        """Writes what is queued, for some seconds, and loads nothing more."""
        self.loader.close()
        if self.writer is not None:
            self.writer.close(CLOSE_SECONDS)
        if self.transfer is not None:
            self.transfer.close()


def check_kv_cache_dir(config: EngineConfig) -> None:
    """Makes the directory of persistent blocks or checks it. Raises `ConfigurationError`."""
    directory = _directory(config, "--kv-cache-dir", config.kv_cache_dir, config.kv_cache_dir_size, "holds blocks of")
    if directory is not None:
        make_data_directory(Path(directory).expanduser(), "--kv-cache-dir")


def check_kv_transfer_dir(config: EngineConfig) -> None:
    """Makes the directory of exported blocks or checks it. Raises `ConfigurationError`."""
    directory = _directory(config, "--kv-transfer-dir", config.kv_transfer_dir, config.kv_transfer_dir_size, "receives blocks into")
    if directory is not None:
        check_transfer_directory(directory)


def _directory(config: EngineConfig, flag: str, directory: str | None, size: int | None, use: str) -> str | None:
    """The directory, where there is one. Raises `ConfigurationError` for flags that contradict each other."""
    if directory is None:
        if size is not None:
            raise ConfigurationError(f"{flag}-size: there is no {flag}")
    elif not config.enable_prefix_caching:
        raise ConfigurationError(f"{flag} {use} the prefix cache, and --no-prefix-caching switches that off")
    return directory


def persistence_of(
    config: EngineConfig, cache: KVCache, blocks: KVCacheManager, submit: Submit, block_format: BlockFormat | None
) -> Persistence | None:
    """What keeps the KV cache in the directory that the configuration names, and hands prompts over in another; None for neither.

    Raises `ConfigurationError`.
    """
    if block_format is None:
        return None
    files = transfer = None
    if config.kv_cache_dir is not None:
        check_kv_cache_dir(config)
        max_bytes = KV_CACHE_DIR_SIZE if config.kv_cache_dir_size is None else config.kv_cache_dir_size
        files = BlockFiles(Path(config.kv_cache_dir).expanduser(), block_format, max_bytes)
        logger.info("Blocks of the KV cache are kept in %s, at most %.1f GiB", files.root, max_bytes / 2**30)
    if config.kv_transfer_dir is not None:
        check_kv_transfer_dir(config)
        max_bytes = KV_TRANSFER_DIR_SIZE if config.kv_transfer_dir_size is None else config.kv_transfer_dir_size
        address = config.kv_transfer_dir if config.kv_transfer_dir.startswith(SCHEME) else None
        transfer = BlockTransfer(transfer_directory(config.kv_transfer_dir), block_format, blocks, max_bytes, address)
        logger.info(
            "Prompts are handed over %s %s, at most %.1f GiB", "at" if address else "in", address or transfer.directory, max_bytes / 2**30
        )
    return Persistence(files, cache, blocks, submit, transfer)
