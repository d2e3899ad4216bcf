"""Blocks of the KV cache as files: their format, and a bounded directory of them that several processes may use at once."""

import contextlib
import hashlib
import json
import logging
import os
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.blocks import group_of_key
from penstock.engine.kv_cache.tensors import LayerGroup, LayerKV, block_bytes
from penstock.engine.system.cache import exposure, make_data_directory

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MAGIC = b"PNSTKKV\0"
FORMAT_VERSION = 1
CHECKSUM_BYTES = 4  # CRC-32: against damage, at a fifth of a cryptographic hash's time; no other user can write the files
SUFFIX = ".kv"
SCRATCH_PREFIX = ".writing-"
_PREAMBLE = struct.Struct("<8sII")  # magic, format version, bytes of the header

KEPT_SHARE = 0.9  # of the largest size, after an eviction: each lists the whole directory
SHARE_UNTIL_RECOUNT = 1 / 16  # of the largest size, written since the directory was last counted: other processes write as well
SCRATCH_SECONDS = 600  # after which an unfinished file is one of a process that was killed

logger = logging.getLogger(__name__)


class DamagedBlock(Exception):
    """A file does not hold the block that its name says, as the message tells."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """What a file of a block holds, after the keys and values of which model.

    `layers` has those of each group, by number, and `sizes` the bytes of a block in them. `model` is a digest of what identifies the model.
    """

    fingerprint: str
    model: str
    block_size: int
    dtype: str
    layers: tuple[tuple[tuple[int, LayerKV], ...], ...]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layout: list[LayerKV], groups: list[LayerGroup], *, block_size: int, dtype: torch.dtype, model: str) -> "BlockFormat":
        """`model` identifies the weights and the config, as `model_identity` does."""
        layers = tuple(tuple((number, layout[number]) for number in group.layers) for group in groups)
        name = str(dtype).removeprefix("torch.")
        parts = (FORMAT_VERSION, model, block_size, name, layers, [group.sliding_window for group in groups])
        fingerprint = _digest(repr(parts))
        sizes = tuple(block_bytes([layer for _, layer in group], block_size, dtype) for group in layers)
        return cls(fingerprint, _digest(model), block_size, name, layers, sizes)

    def payload_bytes(self, group: int) -> int:
        return self.sizes[group]

    def header(self, key: bytes) -> bytes:
        """All that comes before the contents of the block with this key."""
        group = group_of_key(key)
        described = json.dumps(
            {
                "fingerprint": self.fingerprint,
                "key": key.hex(),
                "group": group,
                "block_size": self.block_size,
                "dtype": self.dtype,
                "layers": [[number, *layer.shape] for number, layer in self.layers[group]],
                "payload_bytes": self.payload_bytes(group),
            },
            separators=(",", ":"),
        ).encode()
        return _PREAMBLE.pack(MAGIC, FORMAT_VERSION, len(described)) + described

    def encode(self, key: bytes, payload: bytes | bytearray | memoryview) -> list[bytes | bytearray | memoryview]:
        """The parts of the file in order."""
        header = self.header(key)
        return [header, payload, _checksum(header, payload)]

    def decode(self, key: bytes, data: bytearray | memoryview) -> memoryview:
        """The contents of the block. Raises `DamagedBlock`."""
        header, view = self.header(key), memoryview(data)
        if view[: len(header)] != header:
            raise DamagedBlock("its header is that of another block, model or version")
        if len(data) != self.file_bytes(key):
            raise DamagedBlock(f"it has {len(data)} bytes instead of {self.file_bytes(key)}")
        payload = view[len(header) : -CHECKSUM_BYTES]
        if _checksum(header, payload) != view[-CHECKSUM_BYTES:]:
            raise DamagedBlock("its checksum is another one than when it was written")
        return payload

    def file_bytes(self, key: bytes) -> int:
        return len(self.header(key)) + self.payload_bytes(group_of_key(key)) + CHECKSUM_BYTES


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _checksum(header: bytes, payload: bytes | bytearray | memoryview) -> bytes:
    return zlib.crc32(payload, zlib.crc32(header)).to_bytes(CHECKSUM_BYTES, "little")


WORDS = 4096  # a tensor's bytes are added up in so many sums


def weights_digest(model: nn.Module) -> str:
    """Identifies the weights that are in memory, in the types and with the quantization that they have there."""
    digest = hashlib.blake2b(digest_size=16)
    tensors = {name: tensor for own in (model.named_parameters(), model.named_buffers()) for name, tensor in own}
    for name, tensor in sorted(tensors.items()):
        digest.update(repr((name, tuple(tensor.shape), str(tensor.dtype))).encode())
        digest.update(_sums(tensor.detach()))
    return digest.hexdigest()


def _sums(tensor: Tensor) -> bytes:
    # Sums run at memory speed, on the device; hashing many gigabytes would take minutes.
    data = tensor.contiguous().flatten().view(torch.uint8)
    stop = data.numel() // (8 * WORDS) * 8 * WORDS
    if data.storage_offset() % 8:
        data = data.clone()
    sums = data[:stop].view(torch.int64).view(-1, WORDS).sum(0).cpu()
    return sums.numpy().tobytes() + data[stop:].cpu().numpy().tobytes()


def model_identity(weights: str, config: "PretrainedConfig", quantization: str, dtype: torch.dtype) -> str:
    """Identifies a model by its weights and all of its config, with the parameters of its rotary embedding."""
    settings = {name: value for name, value in config.to_dict().items() if name not in ("_name_or_path", "transformers_version")}
    return repr((weights, json.dumps(settings, sort_keys=True, default=str), quantization, str(dtype)))


@dataclass(slots=True)
class BlockFileStats:
    """Blocks and bytes since the start. `num_rejected` files were damaged, and deleted."""

    num_written: int = 0
    num_bytes_written: int = 0
    num_read: int = 0
    num_bytes_read: int = 0
    num_rejected: int = 0
    num_evicted: int = 0
    num_write_errors: int = 0
    num_read_errors: int = 0


class BlockFiles:
    """Files of blocks in `directory`, at most `max_bytes` of all models together; the least recently used ones are deleted.

    A file is complete under its name from the beginning, so that another process reads all of it or nothing. One thread at a time writes;
    any may read. Raises `ConfigurationError` where others could have written to it.
    """

    def __init__(self, directory: Path, block_format: BlockFormat, max_bytes: int) -> None:
        self.root = directory
        self.format = block_format
        self.max_bytes = max_bytes
        self.stats = BlockFileStats()
        self._own = directory / block_format.fingerprint
        make_data_directory(directory, "--kv-cache-dir")
        if self._own.exists():
            make_data_directory(self._own, "--kv-cache-dir")
        self._num_bytes: int | None = None  # in the directory, as far as known
        self._num_bytes_since_count = 0
        self._stats_lock = threading.Lock()

    def __str__(self) -> str:
        return str(self.root)

    def has(self, key: bytes) -> bool:
        return self._path(key).exists()

    def read(self, key: bytes) -> memoryview | None:
        """The contents of a block; None where it is not there, or its file is damaged and has been deleted. Raises `OSError`."""
        path = self._path(key)
        try:
            with path.open("rb", buffering=0) as file:
                status = os.fstat(file.fileno())
                data = bytearray(min(status.st_size, self.format.file_bytes(key) + 1))
                num_read = 0
                while num_read < len(data) and (count := file.readinto(memoryview(data)[num_read:])):
                    num_read += count
        except FileNotFoundError:
            return None
        except OSError:
            self._count(num_read_errors=1)
            raise
        try:
            if (fault := exposure(status, path.name)) is not None:
                raise DamagedBlock(f"it {fault.reason}")
            payload = self.format.decode(key, data)
        except DamagedBlock as damage:
            logger.warning("The KV cache's file %s is deleted: %s", path, damage)
            self._count(num_rejected=1)
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        self._count(num_read=1, num_bytes_read=len(data))
        self.touch([key])
        return payload

    def touch(self, keys: Iterable[bytes]) -> None:
        """Makes these blocks the most recently used ones."""
        for key in keys:
            with contextlib.suppress(OSError):
                os.utime(self._path(key))

    def write(self, key: bytes, payload: memoryview) -> None:
        """Writes a block unless it is there. Raises `OSError`."""
        path = self._path(key)
        if path.exists():
            self.touch([key])
            return
        parts = self.format.encode(key, payload)
        try:
            self._write(path, parts)
        except OSError:
            self._count(num_write_errors=1)
            raise
        num_bytes = sum(map(len, parts))
        self._count(num_written=1, num_bytes_written=num_bytes)
        self._num_bytes_since_count += num_bytes
        self._keep_to_size()

    def clear(self) -> int:
        """Deletes the blocks of this model; those of others stay. Returns how many there were. Takes as long as there are files."""
        num_deleted = 0
        for path in self._own.glob(f"*/*{SUFFIX}"):
            with contextlib.suppress(OSError):
                path.unlink()
                num_deleted += 1
        return num_deleted

    def _write(self, path: Path, parts: list[bytes | bytearray | memoryview]) -> None:
        if not path.parent.exists():
            self._make(path.parent)
        descriptor, scratch = tempfile.mkstemp(prefix=SCRATCH_PREFIX, dir=path.parent)  # which only the user may read and write
        try:
            with open(descriptor, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
            # Without fsync: after a power failure the checksum shows what is missing.
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise

    def _make(self, directory: Path) -> None:
        """Makes a directory of files, and those above it where they were deleted meanwhile. Raises `OSError`."""
        try:
            make_data_directory(self.root, "--kv-cache-dir")
            make_data_directory(directory, "--kv-cache-dir")
        except ConfigurationError as error:
            raise PermissionError(str(error)) from error

    def _keep_to_size(self) -> None:
        """Evicts what is over the largest size. The directory is counted now and then, since other processes write to it as well."""
        known = None if self._num_bytes is None else self._num_bytes + self._num_bytes_since_count
        is_current = self._num_bytes_since_count < self.max_bytes * SHARE_UNTIL_RECOUNT
        if known is not None and known <= self.max_bytes and is_current:
            return
        files = sorted(self._files())
        self._num_bytes, self._num_bytes_since_count = sum(size for _, size, _ in files), 0
        if self._num_bytes <= self.max_bytes:
            return
        for _, size, path in files:
            if self._num_bytes <= self.max_bytes * KEPT_SHARE:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                self._num_bytes -= size
                self._count(num_evicted=1)

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Time of last use, size and path of each block of any model. Unfinished files of processes that were killed are deleted."""
        for path in self.root.glob("*/*/*"):
            try:
                status = path.stat()
                if path.name.startswith(SCRATCH_PREFIX):
                    if status.st_mtime < time.time() - SCRATCH_SECONDS:
                        path.unlink()
                elif path.suffix == SUFFIX:
                    yield status.st_mtime, status.st_size, path
            except OSError:  # another process has deleted it
                continue

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._own / name[:2] / f"{name}{SUFFIX}"

    def _count(self, **changes: int) -> None:
        with self._stats_lock:
            for name, change in changes.items():
                setattr(self.stats, name, getattr(self.stats, name) + change)
