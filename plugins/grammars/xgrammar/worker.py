"""The process in which xgrammar compiles: some inputs take half a minute or all memory, and only a process can be ended.

Run as a file, so that it imports nothing of the server; importing xgrammar itself brings PyTorch and takes a second or two. It reads
frames and answers each with one: first the vocabulary, then grammars. It ends with its input, and on its own when one takes too long.
All limits are on CPU time, which a busy machine does not lengthen.
"""

import os
import resource
import signal
import struct
import sys
from typing import Any, BinaryIO

NICENESS = 19  # once it is up: a process of its own holds no lock that others wait for
START_CPU_SECONDS = 120  # far more than any start takes: one that uses them up is broken
MAX_ADDRESS_SPACE = 2 * 2**30  # beyond what the libraries take
_HEADER = struct.Struct("<cQ")
_TOKEN = struct.Struct("<H")
MAX_TOKEN_BYTES = 2**16 - 1

VOCABULARY = b"v"
GRAMMAR = b"g"
COMPILED = b"c"
REFUSED = b"r"
TOO_LARGE = b"l"


def pack(kind: bytes, payload: bytes) -> bytes:
    return _HEADER.pack(kind, len(payload)) + payload


def header_size() -> int:
    return _HEADER.size


def unpack_header(header: bytes) -> tuple[bytes, int]:
    kind, num_bytes = _HEADER.unpack(header)
    return kind, num_bytes


def pack_vocabulary(tokens: list[bytes], vocab_size: int, stop_token_ids: list[int], max_bytes: int, max_seconds: float) -> bytes:
    """What the process needs to begin. A token without bytes is never matched. None may be longer than `MAX_TOKEN_BYTES`."""
    numbers = struct.pack(f"<QQdQ{len(stop_token_ids)}Q", vocab_size, max_bytes, max_seconds, len(stop_token_ids), *stop_token_ids)
    return numbers + b"".join([_TOKEN.pack(len(token)) + token for token in tokens])


def _unpack_vocabulary(payload: bytes) -> tuple[list[bytes], int, list[int], int, float]:
    vocab_size, max_bytes, max_seconds, num_stops = struct.unpack_from("<QQdQ", payload)
    position = struct.calcsize("<QQdQ")
    stop_token_ids = list(struct.unpack_from(f"<{num_stops}Q", payload, position))
    position += 8 * num_stops
    tokens = []
    while position < len(payload):
        (num_bytes,) = _TOKEN.unpack_from(payload, position)
        position += _TOKEN.size
        tokens.append(payload[position : position + num_bytes])
        position += num_bytes
    return tokens, vocab_size, stop_token_ids, max_bytes, max_seconds


def _read(source: BinaryIO) -> tuple[bytes, bytes] | None:
    header = source.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    kind, num_bytes = unpack_header(header)
    return kind, source.read(num_bytes)


def _compile(compiler: Any, ebnf: str, max_bytes: int) -> bytes:
    import xgrammar

    try:
        grammar = compiler.compile_grammar(xgrammar.Grammar.from_ebnf(ebnf))
        if grammar.memory_size_bytes > max_bytes:
            return pack(TOO_LARGE, b"")
        return pack(COMPILED, grammar.serialize_json().encode())
    except MemoryError:
        return pack(TOO_LARGE, b"")
    except (RuntimeError, ValueError) as error:
        if "bad_alloc" in str(error):
            return pack(TOO_LARGE, b"")
        return pack(REFUSED, str(error).encode())


def main() -> None:
    _limit_cpu_time(START_CPU_SECONDS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints does not get among the answers
    requests = sys.stdin.buffer
    first = _read(requests)
    if first is None:
        return
    tokens, vocab_size, stop_token_ids, max_bytes, max_seconds = _unpack_vocabulary(first[1])
    import xgrammar

    info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    answers.write(pack(VOCABULARY, info.serialize_json().encode()))
    answers.flush()
    _limit_cpu_time(None)
    os.nice(NICENESS)
    limit = _address_space() + MAX_ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    while (request := _read(requests)) is not None:
        # The default action of SIGPROF ends the process, wherever it is: also when the server has died meanwhile.
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        answer = _compile(compiler, request[1].decode(), max_bytes)
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(answer)
        answers.flush()
        if answer[:1] == TOO_LARGE:
            return  # a process with a full heap is of no more use


def _limit_cpu_time(seconds: int | None) -> None:
    """Beyond it the system ends the process. None is no limit but the one it came with."""
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if seconds is None or resource.RLIM_INFINITY != most < seconds:
        seconds = most
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, most))


def _address_space() -> int:
    """What is mapped already, in bytes; where the system does not say, more than that."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * resource.getpagesize()
    except FileNotFoundError:
        return 8 * 2**30


if __name__ == "__main__":
    main()
