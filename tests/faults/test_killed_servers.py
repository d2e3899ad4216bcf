"""A process that is killed at any moment leaves nothing that the next one stumbles over, and loses nothing that it has acknowledged."""

import asyncio
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.serving.responses.store import ResponseStore
from tests.faults.started import ROOT, Started, started
from tests.llm.model_directory import write_model

PUT_ENDLESSLY = """
import asyncio, itertools, sys
from penstock.serving.responses.store import ResponseStore, StoredResponse

async def run():
    store = ResponseStore(sys.argv[1])
    for number in itertools.count():
        name, status = f"resp_{number}", "in_progress" if number % 3 == 0 else "completed"
        response = b'{"id": "%s", "status": "%s", "output": []}' % (name.encode(), status.encode())
        await store.put(StoredResponse(name, "owner", status, None, response, b"[]", b"x" * 5000))
        print(name, flush=True)

asyncio.run(run())
"""


def test_responses_that_a_killed_process_has_stored_are_there(tmp_path: Path) -> None:
    path = str(tmp_path / "responses.sqlite")
    with subprocess.Popen([sys.executable, "-c", PUT_ENDLESSLY, path], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline().strip() for _ in range(40)]
        process.kill()
        said += process.stdout.read().split("\n")[:-1]

    async def read() -> None:
        store = ResponseStore(path)
        for number, name in enumerate(said):
            stored = await store.get("owner", name)
            assert stored.status == ("failed" if number % 3 == 0 else "completed"), "what was running has been interrupted"
        store.close()

    asyncio.run(read())
    with sqlite3.connect(path) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    database.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def upload(server: Started, lines: list[dict[str, Any]]) -> str:
    """The id of a file of lines for a batch."""
    import urllib.request

    content = "\n".join(map(json.dumps, lines))
    form = (
        '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--b\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n{content}\r\n--b--\r\n'
    )
    request = urllib.request.Request(
        f"{server.url}/v1/files", form.encode(), {"Content-Type": "multipart/form-data; boundary=b"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return str(json.load(response)["id"])


class Load:
    """Clients in threads, until the server is gone. `stored` are the responses that it has acknowledged."""

    def __init__(self, server: Started) -> None:
        self.server = server
        self.stored: list[dict[str, Any]] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(6)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        try:
            while True:
                said = f"{number} " + "over the harbour " * rng.randrange(1, 20)
                if number % 2:
                    fields = {"model": "model", "input": said, "max_output_tokens": 16}
                    status, answer = self.server.ask("POST", "/v1/responses", fields)
                    if status == 200:
                        self.stored.append(answer)
                else:
                    self.server.ask("POST", "/v1/completions", {"prompt": said, "max_tokens": rng.randint(1, 60), "stream": True})
        except (OSError, EOFError, ValueError):  # the server is gone, within an answer or between two
            return
        except Exception as error:
            if "http.client" not in type(error).__module__:
                raise

    def join(self) -> None:
        for thread in self._threads:
            thread.join()


@pytest.mark.thorough
def test_a_server_that_is_killed_under_load_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    flags = ["--served-model-name", "model", "--kv-cache-dir", str(tmp_path / "kv"), "--kv-cache-dir-size", "8MiB"]
    flags += ["--response-store", str(tmp_path / "responses.sqlite"), "--files-dir", str(tmp_path / "files")]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": {"model": "model", "prompt": "a", "max_tokens": 40}}
        for number in range(60)
    ]
    stored: list[dict[str, Any]] = []
    batch = ""
    expected = ""
    for life in range(3):
        with started(model, tmp_path / f"log{life}", *flags) as server:
            begun = time.monotonic()
            said = server.complete()
            assert time.monotonic() - begun < 30
            expected = expected or said
            assert said == expected, "what is read from the disk is what was computed"
            for response in stored:
                assert server.ask("GET", f"/v1/responses/{response['id']}") == (200, response)
            batch = (
                batch
                or server.ask(
                    "POST",
                    "/v1/batches",
                    {"input_file_id": upload(server, lines), "endpoint": "/v1/completions", "completion_window": "24h"},
                )[1]["id"]
            )
            if life == 2:
                check_batch(server, batch, len(lines))
                assert server.metric("kv_cache_dir_rejected_total") == 0
                assert "Traceback" not in server.written()
                return
            load = Load(server)
            while len(load.stored) < 6:
                time.sleep(0.05)
            server.process.send_signal(signal.SIGKILL)
            load.join()
            stored += load.stored


def check_batch(server: Started, batch: str, num_lines: int) -> None:
    """It ends, and each line is answered once, in whichever life of the server."""
    deadline = time.monotonic() + 120
    while (state := server.ask("GET", f"/v1/batches/{batch}")[1])["status"] != "completed":
        assert time.monotonic() < deadline, state
        time.sleep(0.2)
    content = server.ask("GET", f"/v1/files/{state['output_file_id']}/content")[1]
    answered = [json.loads(line)["custom_id"] for line in content.decode().splitlines()]
    assert sorted(answered, key=int) == [str(number) for number in range(num_lines)]


@pytest.mark.thorough
def test_two_servers_start_at_once_on_one_cache_that_a_third_was_killed_in(model: Path, tmp_path: Path) -> None:
    """The cache has nothing but the kernels, which take long to build: the model is prepared in it by both."""
    from penstock.engine.system.cache import cache_directory

    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    (cache / "native").symlink_to(cache_directory() / "native")
    (cache / "prepared").mkdir(mode=0o700)
    environment = {"PENSTOCK_CACHE": str(cache)}
    scratch = cache / "prepared" / ".half-done.xyz"
    scratch.mkdir()
    (scratch / "weights.safetensors").write_bytes(os.urandom(1000))
    both_answer = threading.Barrier(2)

    def serve(number: int) -> str:
        with started(model, tmp_path / f"log{number}", environment=environment) as server:
            said = server.complete()
            both_answer.wait(120)
            return said

    with ThreadPoolExecutor(2) as servers:
        first, second = servers.map(serve, range(2))
    assert first == second
    with started(model, tmp_path / "log2", environment=environment) as third:
        assert third.complete() == first
    assert "Traceback" not in "".join((tmp_path / f"log{number}").read_text() for number in range(3))
