"""Exports handed over by torch.distributed, between processes that share no files.

They meet at one address, where the first of them serves a store (`torch.distributed.TCPStore`). A process asks another one for an export
through the store, and gets it through gloo, in a group of those two that is kept for the next one. Nothing of it is authenticated or
encrypted, so it belongs on a network of these machines alone.
"""

import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

from penstock.engine.errors import ConfigurationError, EngineUnavailable
from penstock.engine.options import address_of, host_and_port

SCHEME = "tcp://"
MEET_SECONDS = 60.0  # for the process that serves the store
TRANSFER_SECONDS = 60.0  # for an export, or for the other process to answer
IDLE_SECONDS = 600.0  # after which a group of two is given up
WAIT_SECONDS = 1e6  # of the thread that waits until the process ends
CLOSE_SECONDS = 5.0
GET, DELETE, STOP = b"get ", b"del ", b"stop"

logger = logging.getLogger(__name__)


def check_address(given: str) -> tuple[str, int]:
    """Host and port. Raises `ConfigurationError`."""
    try:
        return address_of(host_and_port(given.removeprefix(SCHEME)))
    except ValueError as error:
        raise ConfigurationError(f"--kv-transfer-dir {given}: {error}") from None


def meet(host: str, port: int) -> Store:
    """The store at the address, which this process serves where nothing does yet. Raises `ConfigurationError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # By itself a store listens on every interface of the machine.
        listener = socket.create_server((host, port), family=family)
    except OSError:
        descriptor = None  # another process has the address, or another machine
    else:
        descriptor = listener.detach()
    try:
        return TCPStore(
            host,
            port,
            is_master=descriptor is not None,
            timeout=timedelta(seconds=MEET_SECONDS),
            wait_for_workers=False,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        raise ConfigurationError(f"--kv-transfer-dir {SCHEME}{host}:{port}: nothing answers there: {_first_line(error)}") from error


def own_address(host: str, port: int) -> str:
    """That of the interface by which this machine reaches the host."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


@dataclass(slots=True)
class Pair:
    """The process that has exports and the one that asks for them: ranks 0 and 1 of a group. `name` is that of their queue in the store."""

    name: str
    group: Any  # torch's stubs of it lack its methods
    lock: threading.Lock = field(default_factory=threading.Lock)
    used_at: float = field(default_factory=time.monotonic)

    def send(self, tensor: Tensor) -> None:
        self.group.send([tensor], 1, 0).wait()

    def receive(self, tensor: Tensor) -> Tensor:
        self.group.recv([tensor], 0, 0).wait()
        return tensor


class Exchange:
    """This process among those that meet at an address. `read` gives the content of an export of its own, `delete` deletes one.

    `name` is what others find it by. Any thread may fetch and discard. Where the process that serves the store ends, the others meet anew.
    """

    def __init__(self, address: str, read: Callable[[str], Tensor | None], delete: Callable[[str], None]) -> None:
        self._host, self._port = check_address(address)
        self.name = secrets.token_hex(8)
        self._read, self._delete = read, delete
        self._lock = threading.Lock()  # of the store, which one thread may use at a time, and of what follows; held for no other process
        self._store = self._meet()
        self._asked: dict[str, Pair] = {}  # by the process that has the exports
        self._threads: dict[str, threading.Thread] = {}  # by the queue that each waits for
        self._is_closing = False
        self._start(self.name, self._accept)

    def fetch(self, source: str, export: str, max_bytes: int) -> memoryview | None:
        """The content of another process's export; None where it has none of this name. Raises `EngineUnavailable`."""
        try:
            pair = self._pair(source)
            if pair is None:
                return None
            with pair.lock:
                self._tell(pair, GET + export.encode())
                size = int(pair.receive(torch.zeros(1, dtype=torch.int64)))
                if size < 0:
                    return None
                if size > max_bytes:
                    raise EngineUnavailable(f"the export has {size} bytes, and --kv-transfer-dir-size is {max_bytes}")
                return pair.receive(torch.empty(size, dtype=torch.uint8)).numpy().data
        except (RuntimeError, EngineUnavailable) as error:
            with self._lock:
                self._asked.pop(source, None)  # whose answer is not read to its end
            if isinstance(error, EngineUnavailable):
                raise
            raise EngineUnavailable(f"the process that has the export does not answer: {_first_line(error)}") from error

    def discard(self, source: str, export: str) -> None:
        """Has the other process delete an export that was received. Waits for nothing; what is not deleted waits until it is too old."""
        threading.Thread(target=self._discard, args=(source, export), name="exports", daemon=True).start()

    def _discard(self, source: str, export: str) -> None:
        with contextlib.suppress(RuntimeError):
            if (pair := self._pair(source)) is not None:
                self._tell(pair, DELETE + export.encode())

    def close(self) -> None:
        """Ends the threads. Others that ask find nothing."""
        with self._lock:
            self._is_closing = True
            threads = dict(self._threads)
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(_open(self.name))
                for queue in threads:
                    self._store.queue_push(queue, STOP)
        for thread in threads.values():
            thread.join(CLOSE_SECONDS)

    def _pair(self, source: str) -> Pair | None:
        """The group with a process, which is made at the first time. Raises `RuntimeError` where the process does not join it."""
        with self._lock:
            pair, now = self._asked.get(source), time.monotonic()
            if pair is not None and now - pair.used_at < IDLE_SECONDS / 2:
                pair.used_at = now
                return pair
            if not self._store.check([_open(source)]):
                return None
            name = f"{source}/{secrets.token_hex(8)}"
            self._store.queue_push(source, name.encode())
        pair = Pair(name, self._group(name, 1))
        with self._lock:
            self._asked[source] = pair
        return pair

    def _tell(self, pair: Pair, what: bytes) -> None:
        with self._lock:
            self._store.queue_push(pair.name, what)

    def _meet(self) -> Store:
        """Raises `ConfigurationError`."""
        store = meet(self._host, self._port)
        store.set(_open(self.name), "")
        return store

    def _clone(self, seconds: float) -> Store:
        # One clone per waiting thread: an operation blocks all others of its store.
        with self._lock:
            store: Store = self._store.clone()  # type: ignore[attr-defined]
        store.set_timeout(timedelta(seconds=seconds))
        return store

    def _group(self, name: str, rank: int) -> Any:
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=own_address(self._host, self._port))]
        options._timeout = timedelta(seconds=TRANSFER_SECONDS)
        return gloo(PrefixStore(name, self._clone(TRANSFER_SECONDS)), rank, 2, options)

    def _start(self, queue: str, serve: Callable[[str], None]) -> None:
        with self._lock:
            if not self._is_closing:
                self._threads[queue] = thread = threading.Thread(target=serve, args=(queue,), name="exports", daemon=True)
                thread.start()

    def _accept(self, queue: str) -> None:
        """Serves each process that asks in a thread of its own, until `close`."""
        while not self._is_closing:
            with contextlib.suppress(RuntimeError):
                store = self._clone(WAIT_SECONDS)
                while (asked := store.queue_pop(queue)) != STOP:
                    self._start(asked.decode(), self._serve)
                return
            logger.warning("The process that served %s%s:%d has ended", SCHEME, self._host, self._port)
            with contextlib.suppress(ConfigurationError, RuntimeError):
                store = self._meet()
                with self._lock:
                    self._store = store
                    self._asked.clear()

    def _serve(self, queue: str) -> None:
        try:
            store = self._clone(IDLE_SECONDS)
            pair = Pair(queue, self._group(queue, 0))
            while (asked := store.queue_pop(queue)) != STOP:
                self._answer(pair, asked)
        except RuntimeError as error:  # also where nothing was asked for long
            logger.debug("Nothing more is handed over to a process: %s", _first_line(error))
        finally:
            with self._lock:
                self._threads.pop(queue, None)

    def _answer(self, pair: Pair, asked: bytes) -> None:
        export = asked[len(GET) :].decode()
        if asked.startswith(DELETE):
            self._delete(export)
            return
        content = self._read(export)
        pair.send(torch.tensor([-1 if content is None else content.numel()]))
        if content is not None:
            pair.send(content)


def _open(name: str) -> str:
    """The key that is in the store while the process answers."""
    return f"{name}/open"


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
