"""What the tests of the sandbox run in it. This module is imported in the child processes, so it imports little."""

import os
import re
import resource
import signal
import time

from penstock.engine.errors import InvalidRequest

loaded: list[str] = []


def load(*words: str) -> None:
    loaded.extend(words)


def words() -> list[str]:
    return loaded


def double(number: int) -> int:
    return 2 * number


def pid() -> int:
    return os.getpid()


def niceness() -> int:
    return os.nice(0)


def noisy(data: bytes) -> bytes:
    print("not an answer")
    return data


def refuse(message: str, param: str | None) -> None:
    raise InvalidRequest(message, param)


def fail(secret: str) -> None:
    raise LookupError(secret)


def lie() -> int:
    return "a text"  # type: ignore[return-value]


def hang_in_a_regex() -> bool:
    return re.match("(a+)+$", "a" * 60 + "!") is not None


def take_memory(num_bytes: int) -> int:
    return len(bytearray(num_bytes))


def keep_memory(num_bytes: int) -> int:
    globals()["kept"] = bytearray(num_bytes)
    return os.getpid()


def answer_at_length(num_bytes: int) -> bytes:
    return bytes(num_bytes)


def sleep() -> None:
    time.sleep(600)


def end_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(600)


def end_once(path: str) -> str:
    """Killed as from outside the first time."""
    if not os.path.exists(path):
        with open(path, "w"):
            os.kill(os.getpid(), signal.SIGKILL)
    return "done"


def hang_after_announcing(path: str) -> None:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
    while True:
        pass


def core_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_CORE)[0]


def end_at_start() -> None:
    raise SystemExit(1)
