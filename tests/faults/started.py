"""Servers as processes of their own, over a model that is loaded at once, in circumstances that a test chooses."""

import json
import os
import re
import select
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_SECONDS = 120.0  # on a busy machine; a start takes some seconds
FLAGS = ("--port", "0", "--compile", "off", "--kv-cache-memory", "32MiB", "--threads", "1", "--no-docs")


@dataclass(frozen=True, slots=True)
class Started:
    """A server that listens. `url` is without /v1."""

    process: "subprocess.Popen[str]"
    url: str
    log: Path

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    def ask(self, method: str, path: str, body: object = None, seconds: float = 60.0) -> tuple[int, Any]:
        """Status and decoded body."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=seconds) as response:
                return response.status, _decoded(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _decoded(error.read())

    def complete(self, prompt: str = "Once upon a time", **fields: Any) -> str:
        """What the model says, which is random weights' choice but always the same."""
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
        status, answer = self.ask("POST", "/v1/completions", body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            found = re.findall(rf"^penstock:{name}(?:\{{[^}}]*\}})? (\S+)", response.read().decode(), re.MULTILINE)
        return sum(map(float, found))

    def until_idle(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while self.metric("num_requests_running") + self.metric("num_requests_waiting"):
            assert time.monotonic() < deadline, "requests are left running"
            time.sleep(0.05)

    def written(self) -> str:
        return self.log.read_text(errors="replace")


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return data


@contextmanager
def started(
    model: Path,
    log: Path,
    *flags: str,
    environment: Mapping[str, str] = {},
    prepare: Callable[[], object] | None = None,
) -> Iterator[Started]:
    """A server that has said where it listens; `prepare` is called in its process before the program. What is left of it is killed."""
    command = [sys.executable, "server.py", *FLAGS, "--model", str(model), *flags]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | dict(environment), preexec_fn=prepare, stdout=subprocess.PIPE, stderr=errors, text=True
        )
    try:
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
        line = process.stdout.readline() if ready else ""
        found = re.search(r"at (http://[^ ]+)/v1", line)
        assert found is not None, f"{line}\n{log.read_text(errors='replace')[-3000:]}"
        yield Started(process, found[1], log)
    finally:
        process.kill()
        process.communicate()
