"""examples/ray_serve/local.py as a process of its own: a real Ray on this machine."""

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil  # type: ignore[import-untyped]

EXAMPLE = str(Path(__file__).parent.parent.parent / "examples" / "ray_serve" / "local.py")
START_SECONDS, STOP_SECONDS = 600.0, 60.0
# By itself, Serve takes a proxy on a machine with other work for dead, and starts another one.
PATIENCE = {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120"}
REPLICA_TITLE = "ray::ServeReplica:penstock:penstock"


class LocalRay:
    def __init__(self, process: "subprocess.Popen[str]", url: str) -> None:
        self.process, self.url = process, url

    def replicas(self) -> list[psutil.Process]:
        """The processes of the replicas that have a model."""
        return [child for child in psutil.Process(self.process.pid).children(recursive=True) if title(child).startswith(REPLICA_TITLE)]

    def replace_all(self) -> None:
        """Returns when all replicas are new."""
        self.process.send_signal(signal.SIGHUP)
        assert self.process.stdout is not None
        assert any(line == "all replicas are new\n" for line in self.process.stdout), "the process has ended"


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@contextmanager
def local_ray(log: Path, *options: str) -> Iterator[LocalRay]:
    """The options are those of the example. What Ray logs is in the file. A Ray that does not start in time is killed."""
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "127.0.0.1:1"} | PATIENCE  # no Ray is at this address
    command = [sys.executable, EXAMPLE, "--port", "0", *options]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=log.parent)
    timer = threading.Timer(START_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        found = next((match for line in process.stdout if (match := re.search(r"http://\S+", line))), None)
        timer.cancel()
        assert found is not None, log.read_text(encoding="utf-8")[-4000:]
        yield LocalRay(process, found[0])
    finally:
        timer.cancel()
        family = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in psutil.wait_procs(family, timeout=10)[1]:
            child.kill()
        if process.stdout is not None:
            process.stdout.close()
