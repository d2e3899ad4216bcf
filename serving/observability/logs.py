"""The log: lines of text or JSON, written by a thread, so that neither a full disk nor a pipe that is not read stops the server.

Whatever a client can bring into a message, a message stays one line of bounded length without control characters.
"""

import json
import logging
import os
import queue
import sys
import threading
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
MAX_MESSAGE = 8192  # characters
MAX_TRACEBACK = 65536
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]
STANDARD_ERROR = 2
CAPACITY = 10_000  # lines that wait to be written
CLOSE_SECONDS = 1.0  # for those that wait when the process ends


class LogMessage(ABC):
    """A message that is a line in text, and fields in JSON."""

    @abstractmethod
    def __str__(self) -> str: ...

    @property
    @abstractmethod
    def title(self) -> str:
        """The field `message` of its JSON."""

    @property
    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Its other fields. Those that are None are left out."""


class TextFormatter(logging.Formatter):
    """One line for each message. Tracebacks follow indented, so that none of their lines looks like a message."""

    def __init__(self) -> None:
        super().__init__(FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))

    def formatException(self, ei: ExceptionInfo) -> str:
        return "\n".join(f"    {one_line(line)}" for line in shortened(super().formatException(ei), MAX_TRACEBACK).split("\n"))


class JsonFormatter(logging.Formatter):
    """One object for each message, on a line of ASCII: `timestamp`, `level`, `logger`, `message`, and the fields of a `LogMessage`."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.msg
        entry = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": message.title if isinstance(message, LogMessage) else record.getMessage(),
        }
        if isinstance(message, LogMessage):
            entry |= {name: value for name, value in message.fields.items() if value is not None}
        if record.exc_info:
            entry["exception"] = shortened(self.formatException(record.exc_info), MAX_TRACEBACK)
        return json.dumps({name: well_formed(value) if isinstance(value, str) else value for name, value in entry.items()})


def one_line(text: str) -> str:
    """The text with escapes in place of whatever is not printed: line breaks, control characters, and those that reverse a line."""
    text = shortened(text, MAX_MESSAGE)
    if text.isprintable():
        return text
    escaped = (each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text)
    return shortened("".join(escaped), MAX_MESSAGE)


def well_formed(text: str) -> str:
    """JSON escapes the rest; a half of a surrogate pair would be no JSON to many readers."""
    return shortened(text if text.isascii() else text.encode("utf-8", "backslashreplace").decode("utf-8"), MAX_TRACEBACK)


def shortened(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"


def set_up_logging(level: str, *, access_log: bool = False, log_format: str = "text") -> None:
    """Our own loggers at the level asked for; libraries only where something is wrong. Formats are `text` and `json`."""
    handler = logging.NullHandler() if sys.__stderr__ is None else QueuedHandler(STANDARD_ERROR)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.captureWarnings(log_format == "json")  # which Python would print as text
    logging.getLogger("penstock").setLevel(level.upper())
    logging.getLogger("penstock.access").disabled = not access_log


class QueuedHandler(logging.Handler):
    """Writes lines to a descriptor in a thread of its own. Those that find the queue full, or cannot be written, are dropped and counted;
    the count is logged once lines can be written again.

    The thread writes without Python's buffer, whose lock it would hold while it waits, and which the interpreter takes when it ends.
    """

    def __init__(self, descriptor: int, capacity: int = CAPACITY) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lines: queue.Queue[str | None] = queue.Queue(capacity)
        self.num_dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits for what is written."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_lines, name="log", daemon=True)
            self._thread.start()
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._count_dropped(1)
        except Exception:  # arguments that do not go with the message
            self.handleError(record)

    def close(self) -> None:
        """Writes what waits, where that takes no longer than a second."""
        super().close()
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                self._lines.put(None, timeout=CLOSE_SECONDS)
            except queue.Full:
                return
            thread.join(CLOSE_SECONDS)

    def _write_lines(self) -> None:
        line: str | None = ""
        while line is not None:
            line = self._lines.get()
            if line is not None and not self._write(line):
                self._count_dropped(1)
            num_dropped = self.num_dropped
            if num_dropped and self._lines.empty() and self._write(self._notice(num_dropped)):
                self._count_dropped(-num_dropped)

    def _write(self, line: str) -> bool:
        data = f"{line}\n".encode(errors="backslashreplace")
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            return False
        return True

    def _count_dropped(self, number: int) -> None:
        assert self.lock is not None
        with self.lock:
            self.num_dropped += number

    def _notice(self, num_dropped: int) -> str:
        message = f"{num_dropped} lines of the log were dropped: they could not be written"
        return self.format(logging.makeLogRecord({"name": "penstock.log", "levelno": 30, "levelname": "WARNING", "msg": message}))
