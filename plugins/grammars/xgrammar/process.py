"""Keeps the process in which xgrammar compiles: started beforehand or on first use, used again, replaced when it had to be ended."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

from penstock.engine.compile_clock import uncounted
from penstock.engine.errors import EngineUnavailable, QueueFull
from penstock.engine.grammar import Vocabulary
from penstock.plugins.grammars.xgrammar import worker as protocol

MAX_SECONDS = 5.0  # of CPU time
MAX_WALL_SECONDS = 30.0  # for a compilation that gets little CPU time because the machine is busy
MAX_BYTES = 48 * 2**20  # of memory; as text half as much again, which takes a third of a second to read in, without the interpreter's lock
MAX_WAIT = 3.0  # seconds for the process to be free: a constraint that is compiled after that should still be waited for


class CompilationFailed(Exception):
    """xgrammar refused the grammar, or a limit was reached. The message says which, and quotes no more than a line."""


class CompilerProcess:
    """At most one process, which one thread uses at a time. It ends with this object or with the server."""

    def __init__(self, vocabulary: Vocabulary, *, max_seconds: float = MAX_SECONDS, max_bytes: int = MAX_BYTES) -> None:
        self._vocabulary = vocabulary
        self._max_seconds = max_seconds
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._is_up = threading.Event()  # not while the process is being started
        self._is_up.set()
        self._process: subprocess.Popen[bytes] | None = None
        self._tokenizer_info = ""

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def prestart(self) -> None:
        """Starts the process in the background, so that the first constraint does not wait for it. Returns at once."""
        threading.Thread(target=self._prestart, name="penstock-xgrammar-start", daemon=True).start()

    def _prestart(self) -> None:
        with self._lock, suppress(EngineUnavailable):  # the first constraint starts it again, and its client is told
            self._started()

    def compile(self, ebnf: str) -> tuple[str, str]:
        """The compiled grammar and the tokenizer information, as xgrammar writes them.

        Raises `CompilationFailed`, `QueueFull` where the process is busy with another grammar or gets too little CPU time, and
        `EngineUnavailable` where it does not start.
        """
        self._wait_for_turn()
        try:
            return self._compiled(protocol.pack(protocol.GRAMMAR, ebnf.encode())), self._tokenizer_info
        finally:
            self._lock.release()

    def _wait_for_turn(self) -> None:
        while not self._lock.acquire(timeout=MAX_WAIT):
            if self._is_up.is_set():
                raise QueueFull("too many constraints are being compiled by xgrammar")
            with uncounted():
                self._is_up.wait()

    def _compiled(self, frame: bytes) -> str:
        process = self._started()
        try:
            kind, payload = self._exchange(process, frame, time.monotonic() + MAX_WALL_SECONDS)
        except TimeoutError:
            self._end()
            raise QueueFull("the machine is too busy to compile the constraint with xgrammar") from None
        except (EOFError, BrokenPipeError):
            self._end()
            if process.returncode == -signal.SIGPROF:
                raise CompilationFailed(f"compiling took more than {self._max_seconds:g} s of CPU time") from None
            raise CompilationFailed("compiling took more memory than is allowed, or ended the compiler") from None
        if kind == protocol.TOO_LARGE:
            self._end()
            raise CompilationFailed(f"compiled, it would take more than {self._max_bytes / 2**20:.0f} MiB") from None
        if kind == protocol.REFUSED:
            raise CompilationFailed(_reason(payload.decode()))
        return payload.decode()

    def close(self) -> None:
        """Ends the process. Compiling again starts another."""
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._is_up.clear()
        try:
            with uncounted():  # importing the library takes seconds, and many of them where the model has all cores
                return self._start()
        finally:
            self._is_up.set()

    def _start(self) -> subprocess.Popen[bytes]:
        self._end()
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", protocol.__file__],  # -P: nothing that lies next to that file is taken for a library
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # xgrammar's warnings may quote what clients sent
                cwd=Path(protocol.__file__).anchor,
                process_group=0,  # Ctrl-C in a terminal is the server's to handle
            )
            self._finalizer = weakref.finalize(self, _kill, process)
            # Without a deadline: the process bounds its own CPU time, and how long that takes says nothing of it on a busy machine.
            _, payload = self._exchange(process, protocol.pack(protocol.VOCABULARY, self._packed_vocabulary()), None)
        except (EOFError, OSError, ValueError):  # ValueError: its pipes have been closed, as this process ends
            self._end()
            raise EngineUnavailable("the process in which xgrammar compiles does not start") from None
        self._tokenizer_info = payload.decode()
        return process

    def _packed_vocabulary(self) -> bytes:
        vocabulary = self._vocabulary
        # Without bytes, a token is never allowed: the stop tokens as text, and those that spell what no text holds. An added token gets a
        # byte that is in no text either, so that a rule may name it.
        added = set(vocabulary.added_token_ids.values())
        tokens = [self._bytes_of(i, token, added) for i, token in enumerate(vocabulary.token_bytes[: vocabulary.size])]
        stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
        return protocol.pack_vocabulary(tokens, vocabulary.size, stop_token_ids, self._max_bytes, self._max_seconds)

    def _bytes_of(self, token_id: int, token: bytes | None, added: set[int]) -> bytes:
        if token_id in self._vocabulary.stop_token_ids:
            return b""
        if token_id in added:
            return b"\xff%d" % token_id
        return token if token and b"\0" not in token and len(token) <= protocol.MAX_TOKEN_BYTES else b""

    def _exchange(self, process: subprocess.Popen[bytes], frame: bytes, deadline: float | None) -> tuple[bytes, bytes]:
        assert process.stdin is not None
        process.stdin.write(frame)
        process.stdin.flush()
        kind, num_bytes = protocol.unpack_header(_read(process, protocol.header_size(), deadline))
        return kind, _read(process, num_bytes, deadline)

    def _end(self) -> None:
        if self._process is not None:
            self._finalizer()
            self._process = None


def _read(process: subprocess.Popen[bytes], num_bytes: int, deadline: float | None) -> bytes:
    assert process.stdout is not None
    parts = []
    while num_bytes:
        readable, _, _ = select.select([process.stdout], [], [], None if deadline is None else max(deadline - time.monotonic(), 0))
        if not readable:
            raise TimeoutError
        part = os.read(process.stdout.fileno(), min(num_bytes, 2**20))
        if not part:
            raise EOFError
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        try:
            pipe.close()
        except BrokenPipeError:  # something was left to be written
            continue


def _reason(message: str) -> str:
    """xgrammar's own words, without the time and the place in its source."""
    line = message.strip().splitlines()[0] if message.strip() else "refused"
    for parser in ("EBNF lexer error ", "EBNF parser error "):
        line = line.rpartition(parser)[2]
    return line[:200]
