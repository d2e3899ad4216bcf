"""Nothing that a client can bring into a message makes it more than one line, or anything but text; in JSON, anything but one object."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.serving.observability.logs import MAX_MESSAGE, MAX_TRACEBACK, JsonFormatter, LogMessage, QueuedHandler, TextFormatter

FORGED = "2026-01-01 00:00:00,000 INFO    penstock.access: 10.0.0.1 GET / 200"
HOSTILE = (
    f"line\n{FORGED}",
    f"line\r\n{FORGED}",
    f"line\x0b\x0c\x1c\x85\u2028\u2029{FORGED}",
    "\x1b[2J\x1b]0;title\x07\x9b31m red",
    "%s %d %(name)s {0} %n",
    "half a pair \ud800, reversed \u202e, zero \x00",
    "x" * 2**20,
    "\n" * 2**20,
)
LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} [A-Z]+ +penstock\.test: ")


class Hostile(LogMessage):
    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return f"told {self.text}"

    @property
    def title(self) -> str:
        return "told"

    @property
    def fields(self) -> dict[str, Any]:
        return {"text": self.text, "count": 3, "none": None}


@contextmanager
def written(formatter: logging.Formatter) -> Iterator[tuple[logging.Logger, list[str]]]:
    """A logger, and the lines that it has written once the context has ended."""
    lines: list[str] = []
    reading, writing = os.memfd_create("log"), 0
    writing = os.dup(reading)
    handler = QueuedHandler(writing)
    handler.setFormatter(formatter)
    logger = logging.Logger("penstock.test")
    logger.addHandler(handler)
    try:
        yield logger, lines
    finally:
        handler.close()
        os.close(writing)
    with os.fdopen(reading, "rb") as file:
        file.seek(0)
        lines += file.read().decode().removesuffix("\n").split("\n")


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_line_of_text_stays_one_line_of_bounded_length(text: str) -> None:
    with written(TextFormatter()) as (logger, lines):
        logger.warning("the model %r is not served", text)
        logger.warning("name %s", text)
        logger.warning(Hostile(text))
    assert len(lines) == 3
    for line in lines:
        assert LINE.match(line)
        assert line.isprintable()
        assert len(line) < MAX_MESSAGE + 100


def test_what_is_printed_is_left_as_it_is() -> None:
    with written(TextFormatter()) as (logger, lines):
        logger.info("größer als %d日本 😀 '%%s'", 3)
    assert [line.partition(": ")[2] for line in lines] == ["größer als 3日本 😀 '%s'"]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_traceback_is_indented(text: str) -> None:
    with written(TextFormatter()) as (logger, lines):
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("failed")
    first, *others = lines
    assert first.endswith("penstock.test: failed")
    assert others[0] == "    Traceback (most recent call last):"
    assert all(line.startswith("    ") and line.isprintable() for line in others)
    assert sum(map(len, lines)) < 6 * MAX_TRACEBACK  # five characters for each line that is empty


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_each_message_is_one_object_of_json(text: str) -> None:
    with written(JsonFormatter()) as (logger, lines):
        logger.warning("name %s", text)
        logger.info(Hostile(text))
        try:
            raise ValueError(text)
        except ValueError:
            logger.exception("failed")
    plain, with_fields, failed = (json.loads(line) for line in lines)
    for line in lines:
        assert line.isascii()
        assert line.isprintable()
        assert not re.search(r"\\ud[89a-f][0-9a-f]{2}(?!\\ud)", line.replace("\\\\", ""))  # half of a pair is no text
    assert {"level": "warning", "logger": "penstock.test"}.items() <= plain.items()
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", plain["timestamp"])
    assert plain["message"].startswith(f"name {text[:4]}" if text.isprintable() else "name ")
    assert set(with_fields) == {"timestamp", "level", "logger", "message", "text", "count"}
    assert (with_fields["message"], with_fields["count"]) == ("told", 3)
    assert failed["exception"].startswith("Traceback (most recent call last):\n")
    assert len(failed["exception"]) <= MAX_TRACEBACK + 40


def test_short_texts_come_out_of_json_as_they_were() -> None:
    texts = [text for text in HOSTILE if len(text) < 1000 and "\ud800" not in text]
    with written(JsonFormatter()) as (logger, lines):
        for text in texts:
            logger.info(Hostile(text))
    assert [json.loads(line)["text"] for line in lines] == texts


ALL_KINDS = """
import logging, warnings
from penstock.serving.observability.logs import set_up_logging
from penstock.server import announce
set_up_logging("info", log_format="json")
logging.getLogger("penstock").info("a message")
logging.getLogger("of a library").warning("its message")
warnings.warn("a warning")
announce("serves", "json")
"""


def test_a_process_that_logs_json_writes_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", ALL_KINDS], capture_output=True, text=True, check=True)
    logged = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(entry["logger"], entry["level"]) for entry in logged] == [
        ("penstock", "info"),
        ("of a library", "warning"),
        ("py.warnings", "warning"),
    ]
    assert json.loads(done.stdout).items() >= {"logger": "penstock.server", "level": "info", "message": "serves"}.items()
