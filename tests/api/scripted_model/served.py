"""A server over a script (docs/scripted-model.md)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.api.threaded_server import ThreadedServer


def write_script(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


class ServedScript(ThreadedServer):
    def __init__(self, path: Path, flags: Sequence[str]) -> None:
        super().__init__(["--model", f"scripted:{path}", "--kv-cache-memory", "64MiB", "--device", "cpu", *flags])


@contextmanager
def served_script(path: Path, *flags: str) -> Iterator[ServedScript]:
    served = ServedScript(path, flags)
    try:
        yield served
    finally:
        served.close()
