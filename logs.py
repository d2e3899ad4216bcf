"""The log: lines are written by a thread, so that neither a full disk nor a pipe that is not read stops the server."""

import logging
import os
import queue
import sys
import threading

from penstock.serving.observability.log_formats import JsonFormatter, TextFormatter

STANDARD_ERROR = 2
CAPACITY = 10_000  # lines that wait to be written
CLOSE_SECONDS = 1.0  # for those that wait when the process ends


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
