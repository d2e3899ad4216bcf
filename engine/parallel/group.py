"""The processes, or ranks, that compute one model together: how they reach each other, and how the end of one ends them all.

Rank 0 schedules, samples and answers. It sends the others an order for each thing to compute, as integers over a socket; what they
compute together goes through torch.distributed. The same sockets show at once when a rank has ended.
"""

import contextlib
import logging
import os
import select
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

REPORT_SECONDS = 1.0  # for the reason why a rank has ended, which comes by another way than what fails without it
EXIT_SECONDS = 5.0  # for a process that was ordered to end, and for the last step
HANGUP = getattr(select, "POLLRDHUP", 0) | select.POLLHUP  # the other side has closed; not where there is still something to read
_LENGTH = struct.Struct("<q")


class Order(IntEnum):
    """The first number of each message from rank 0: what the other ranks are to do."""

    STOP = 0
    SIZE = 1  # the KV cache, together
    BUILD = 2  # a KV cache, and what runs over it
    STEP = 3
    CAPTURE = 4  # the next CUDA graph
    ADAPTER = 5  # keep one
    RELEASE = 6  # the KV cache
    POOL = 7  # a batch of texts, by a model for pooling


class RankFailed(RuntimeError):
    """A rank has ended, or no longer computes what the others do: nothing more can be computed."""


class Group:
    """The one process of a model that is not shared, which has nothing to send and nothing to wait for."""

    rank = 0
    size = 1

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return number

    def agree(self, is_so: bool) -> bool:
        """Whether it is so on all ranks."""
        return bool(self.least(int(is_so)))

    def sum(self, tensor: Tensor) -> Tensor:
        """The tensor itself, once it holds the sum over all ranks."""
        return tensor

    def gathered(self, part: Tensor, num_columns: int, *, on_all: bool) -> Tensor:
        """The columns of all ranks side by side, in their order; without `on_all` only rank 0 gets them."""
        return part

    def share(self, tensor: Tensor) -> Tensor:
        """The tensor itself, once it holds what rank 0 has in it."""
        return tensor

    def send_to(self, rank: int, tensor: Tensor) -> None:
        """Begins to send the tensor, which must not be written to any more. Waits until the one before has been received."""
        raise AssertionError("there is no other rank")

    def receive_from(self, rank: int, tensor: Tensor) -> Tensor:
        """The tensor itself, once it holds the next one that the rank has sent."""
        raise AssertionError("there is no other rank")

    def send(self, order: Order, *numbers: Tensor) -> None:
        """Orders the other ranks to do something."""

    def when_failed(self, callback: Callable[[], None]) -> None:
        """Has the end of another rank call this, once, from another thread."""

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Within the context ranks wait for each other, so that an error of one is the end of all: it becomes a `RankFailed`."""
        return contextlib.nullcontext()

    def last_step(self) -> contextlib.AbstractContextManager[None]:
        """For the wait for a step in flight when the engine stops: ranks that hold it up for long are killed, as far as this one can."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Ends the other ranks."""


ALONE = Group()


class Channel:
    """Whole messages over a socket, in order."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection

    def send(self, content: bytes) -> None:
        """Raises `OSError` where the other side is gone."""
        self.socket.sendall(_LENGTH.pack(len(content)) + content)

    def receive(self, limit: int = 2**40) -> bytearray:
        """Raises `EOFError` where the other side is gone, `ValueError` for more bytes than the limit."""
        (length,) = _LENGTH.unpack(self._exactly(bytearray(_LENGTH.size)))
        if not 0 <= length <= limit:
            raise ValueError(f"a message of {length} bytes")
        return self._exactly(bytearray(length))

    def _exactly(self, content: bytearray) -> bytearray:
        rest = memoryview(content)
        while rest:
            try:
                number = self.socket.recv_into(rest)
            except ConnectionError:
                number = 0
            if not number:
                raise EOFError("the connection has ended")
            rest = rest[number:]
        return content

    def close(self) -> None:
        self.socket.close()


class Ranks(Group):
    """This process as one of several. torch.distributed's default group is theirs, until `close`.

    `channels` are to the other ranks by their numbers: of rank 0 to all of them, of others to rank 0. `processes` are those of them that
    this process has started.
    """

    def __init__(self, rank: int, size: int, channels: Mapping[int, Channel], processes: Mapping[int, "subprocess.Popen[bytes]"]) -> None:
        self.rank, self.size = rank, size
        self._channels = channels
        self._processes = processes
        self._reason: str | None = None
        self._has_failed = threading.Event()
        self._is_closing = False
        self._sending: tuple[Any, Tensor] | None = None  # which is kept for as long
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        threading.Thread(target=self._watch_ranks if rank == 0 else self._watch_leader, name="ranks", daemon=True).start()

    def least(self, number: int) -> int:
        numbers = torch.tensor([number])
        with self.together():
            dist.all_reduce(numbers, op=dist.ReduceOp.MIN)
        return int(numbers)

    def sum(self, tensor: Tensor) -> Tensor:
        with self.together():
            dist.all_reduce(tensor)
        return tensor

    def gathered(self, part: Tensor, num_columns: int, *, on_all: bool) -> Tensor:
        width = -(-num_columns // self.size)  # the last part may be narrower
        part = torch.nn.functional.pad(part, (0, width - part.shape[-1])).contiguous()
        parts = [torch.empty_like(part) for _ in range(self.size)] if on_all or self.rank == 0 else None
        with self.together():
            if on_all:
                dist.all_gather(parts, part)
            else:
                dist.gather(part, parts, dst=0)
        return part if parts is None else torch.cat(parts, dim=-1)[..., :num_columns]

    def share(self, tensor: Tensor) -> Tensor:
        with self.together():
            dist.broadcast(tensor, 0)
        return tensor

    def send_to(self, rank: int, tensor: Tensor) -> None:
        with self.together():
            if self._sending is not None:
                self._sending[0].wait()
            tensor = tensor.contiguous()
            self._sending = (dist.isend(tensor, rank), tensor)

    def receive_from(self, rank: int, tensor: Tensor) -> Tensor:
        with self.together():
            dist.recv(tensor, rank)
        return tensor

    def send(self, order: Order, *numbers: Tensor) -> None:
        assert self.rank == 0, "only rank 0 gives orders"
        message = torch.cat([torch.tensor([order]), *numbers]).numpy().tobytes()
        for channel in self._channels.values():
            try:
                channel.send(message)
            except OSError as error:
                raise self._failure(error) from error

    def receive(self) -> Tensor:
        """The next order, int64. That of a rank 0 that is gone is to stop."""
        try:
            content = self._channels[0].receive()
        except EOFError:
            return torch.tensor([Order.STOP])
        return torch.from_numpy(np.frombuffer(content, dtype=np.int64))

    def report(self, reason: str) -> None:
        """Tells rank 0 why this one ends."""
        with contextlib.suppress(OSError):
            self._channels[0].send(reason.encode())

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> RankFailed:
        if isinstance(error, RankFailed):
            return error
        self._has_failed.wait(REPORT_SECONDS)
        return RankFailed(self._reason or f"the ranks no longer compute the same: {type(error).__name__}: {error}")

    def when_failed(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks.append(callback)
            is_late = self._has_failed.is_set()
        if is_late:
            callback()

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self._is_closing or self._has_failed.is_set():
                return
            self._reason = reason
            self._has_failed.set()
            callbacks = list(self._callbacks)
        logger.error("%s: the model cannot be computed any more", reason)
        for callback in callbacks:
            callback()
        self._abort()

    def _watch_ranks(self) -> None:
        # On rank 0: another rank sends nothing except the reason why it ends.
        poller = select.poll()
        ranks = {channel.socket.fileno(): rank for rank, channel in self._channels.items()}
        for descriptor in ranks:
            poller.register(descriptor, select.POLLIN | HANGUP)
        for descriptor, _ in poller.poll():
            rank = ranks[descriptor]
            try:
                reason = self._channels[rank].receive().decode(errors="replace")
            except (EOFError, OSError):
                reason = f"its process has ended{self._exit_of(rank)}"
            self._fail(f"rank {rank}: {reason}")
            return

    def _exit_of(self, rank: int) -> str:
        process = self._processes.get(rank)
        if process is None:
            return ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REPORT_SECONDS / 2)
        code = process.returncode
        return "" if code is None else f" by signal {-code}" if code < 0 else f" with exit code {code}"

    def _watch_leader(self) -> None:
        # On other ranks: without rank 0 this process ends, even in a collective that waits for it.
        poller = select.poll()
        poller.register(self._channels[0].socket.fileno(), HANGUP)
        poller.poll()
        if not self._is_closing:
            threading.Event().wait(EXIT_SECONDS)
            os._exit(1)

    def _abort(self) -> None:
        """Ends the collectives that wait for a rank that is gone: those of NCCL would wait forever, gloo's end by themselves."""
        if dist.is_initialized() and torch.cuda.is_available():
            with contextlib.suppress(RuntimeError):
                dist.distributed_c10d._abort_process_group()

    @contextlib.contextmanager
    def last_step(self) -> Iterator[None]:
        timer = threading.Timer(EXIT_SECONDS, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        """Ends the collectives that wait for the others."""
        logger.warning("the last step has not ended after %g s: the other ranks are killed", EXIT_SECONDS)
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        if self.rank == 0:
            for channel in self._channels.values():
                with contextlib.suppress(OSError):
                    channel.send(torch.tensor([Order.STOP]).numpy().tobytes())
        if dist.is_initialized():
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group()
        for process in self._processes.values():
            end(process)
        for channel in self._channels.values():
            channel.close()


def end(process: "subprocess.Popen[bytes]") -> None:
    """Waits for a process that was ordered to end, and kills it where it does not."""
    try:
        process.wait(EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
