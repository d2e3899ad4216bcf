"""A log that cannot be written stops nothing, and says what it lacks once it can be written again."""

import fcntl
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.serving.observability.logs import QueuedHandler

WRITE_MUCH = """
import logging
from penstock.serving.observability.logs import set_up_logging
set_up_logging("info")
for number in range(50_000):
    logging.getLogger("penstock").info("line %d", number)
print("alive", flush=True)
"""


@contextmanager
def logger_to(descriptor: int, capacity: int) -> Iterator[logging.Logger]:
    handler = QueuedHandler(descriptor, capacity)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    try:
        yield logger
    finally:
        handler.close()


def test_a_pipe_that_is_not_read_costs_lines_which_are_counted() -> None:
    reading, writing = os.pipe()
    filled = os.write(writing, b"." * fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ))
    with logger_to(writing, 100) as logger, os.fdopen(reading) as reader:
        for number in range(1000):
            logger.info("line %d", number)
        assert reader.read(filled) == "." * filled
        numbers = []
        while (found := re.match(r"line (\d+)", line := reader.readline())) is not None:
            numbers.append(int(found[1]))
        assert line == f"{1000 - len(numbers)} lines of the log were dropped: they could not be written\n"
        assert numbers == sorted(set(numbers))
        assert len(numbers) >= 100
        logger.info("after %s", "it")
        assert reader.readline() == "after it\n"
    os.close(writing)


def test_a_full_disk_costs_lines_which_are_counted(tmp_path: Path) -> None:
    disk, room = os.open("/dev/full", os.O_WRONLY), os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    with logger_to(disk, 100) as logger:
        for _ in range(3):
            logger.info("lost")
        (handler,) = logger.handlers
        assert isinstance(handler, QueuedHandler)
        while handler.num_dropped < 3:
            pass
        os.dup2(room, disk)
        logger.info("found")
    assert (tmp_path / "log").read_text() == "found\n3 lines of the log were dropped: they could not be written\n"
    os.close(disk)
    os.close(room)


def test_a_process_whose_log_is_not_read_goes_on_and_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", WRITE_MUCH], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "alive\n"
        assert process.wait() == 0


def test_what_was_logged_is_written_before_the_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", WRITE_MUCH.replace("50_000", "500")], capture_output=True, text=True, check=True)
    assert [line.rpartition(" ")[2] for line in done.stderr.splitlines()] == [str(number) for number in range(500)]
