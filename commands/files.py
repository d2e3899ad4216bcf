"""The file that a command reads."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import BinaryIO

from penstock.engine.errors import ConfigurationError


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """`-` is standard input."""
    if path == "-":
        yield sys.stdin.buffer
        return
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
        yield file
