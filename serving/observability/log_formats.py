"""Lines of the log, as text or as JSON.

Whatever a client can bring into a message, a message stays one line of bounded length without control characters.
"""

import json
import logging
from abc import ABC, abstractmethod
from datetime import UTC, datetime
from types import TracebackType
from typing import Any

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
MAX_MESSAGE = 8192  # characters
MAX_TRACEBACK = 65536
ExceptionInfo = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


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
