"""A server of two ranks as processes: however they are started, they answer as one, and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock import LLM, SamplingParams
from tests.llm.model_directory import SETTINGS, write_model

ROOT = Path(__file__).parents[2]
PROMPT = "Once upon a time"
FLAGS = [
    "--port",
    "0",
    "--dtype",
    "float32",
    "--compile",
    "off",
    "--kv-cache-memory",
    "8MiB",
    "--threads",
    "1",
    "--tensor-parallel-size",
    "2",
]
ENGINE_FAILED = 3

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192))


@pytest.fixture(scope="module")
def expected(model_dir: str) -> str:
    with LLM(model_dir, **{**SETTINGS, "max_model_len": 8192, "kv_cache_memory": "16MiB"}) as llm:
        return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), use_tqdm=False)[0].outputs[0].text


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def url_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = re.search(r"http://[^ ]+/v1", process.stdout.readline())
    assert found is not None, process.communicate()[1]
    return found[0]


def ask(url: str, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 20, "ignore_eos": True} | fields
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=60)


def text_of(url: str) -> str:
    with ask(url) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def await_end(pid: int) -> None:
    for _ in range(300):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().split()[2]
        except (FileNotFoundError, ProcessLookupError):
            return
        if state == "Z":
            return
        time.sleep(0.1)
    raise AssertionError(f"process {pid} has not ended")


def test_the_end_of_a_rank_is_an_error_for_clients_and_the_servers_end(model_dir: str, expected: str) -> None:
    with started("server.py", "--model", model_dir, *FLAGS) as process:
        url = url_of(process)
        assert text_of(url) == expected
        (rank,) = children_of(process.pid)
        with ask(url, stream=True, max_tokens=4000) as stream:
            stream.readline()
            os.kill(rank, signal.SIGKILL)
            assert "the engine has failed" in stream.read().decode()
        assert process.wait(30) == ENGINE_FAILED
        assert process.stderr is not None
        assert "rank 1: its process has ended by signal 9" in process.stderr.read()


def test_a_rank_that_does_not_answer_holds_no_server_up_that_is_to_end(model_dir: str, expected: str) -> None:
    with started("server.py", "--model", model_dir, *FLAGS, "--shutdown-timeout", "1") as process:
        url = url_of(process)
        assert text_of(url) == expected
        (rank,) = children_of(process.pid)
        with ask(url, stream=True, max_tokens=4000) as stream:
            stream.readline()
            os.kill(rank, signal.SIGSTOP)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        await_end(rank)


def test_no_rank_outlives_a_server_that_is_killed_and_a_rank_may_join_before_the_server(model_dir: str, expected: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with (
        started("-m", "penstock.server", "worker", "--join", address, "--rank", "1") as rank,
        started("server.py", "--model", model_dir, *FLAGS, "--distributed-address", address) as process,
    ):
        assert text_of(url_of(process)) == expected
        process.kill()
        await_end(rank.pid)


def test_torchruns_processes_are_ranks_which_a_signal_ends_in_order(model_dir: str, expected: str) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "--rdzv-backend", "c10d")
    with started(*torchrun, "--rdzv-endpoint", "127.0.0.1:0", "server.py", "--model", model_dir, *FLAGS) as process:
        assert text_of(url_of(process)) == expected
        processes = children_of(process.pid)
        assert len(processes) == 2
        process.send_signal(signal.SIGTERM)
        for pid in processes:
            await_end(pid)
