"""Servers on systems that lack something: descriptors, a compiler, cores, room on the disk, a cache, a clock that can be trusted."""

import ctypes
import json
import os
import resource
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from penstock.engine.native.runtime import find_compiler
from penstock.engine.system.cache import cache_directory
from tests.faults.started import Started, started
from tests.llm.model_directory import write_model

pytestmark = pytest.mark.thorough  # each starts a server
PR_CAPBSET_DROP, CAP_DAC_OVERRIDE = 24, 1  # of linux/prctl.h and linux/capability.h
FILE_BYTES = 2**15

# Every clock that counts from 1970 is ahead by as many seconds as the file says, from one moment to the next.
CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) {
    long seconds = 0;
    FILE *file = fopen(getenv("CLOCK_AHEAD"), "r");
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, now);
    if (clock == CLOCK_REALTIME) now->tv_sec += ahead();
    return result;
}

time_t time(time_t *place) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (place) *place = now.tv_sec;
    return now.tv_sec;
}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def check_serves(server: Started) -> None:
    assert server.complete() == server.complete()
    assert "Traceback" not in server.written()


def test_64_descriptors_are_enough_and_connections_beyond_them_wait(model: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    with started(model, tmp_path / "log", "--read-timeout", "2", prepare=limit) as server:
        idle = [socket.create_connection(server.address) for _ in range(100)]
        assert server.ask("GET", "/health") == (200, {"status": "ok"}), "once those that send nothing have been closed"
        check_serves(server)
        for connection in idle:
            connection.close()
        assert len(server.written().splitlines()) < 30


def test_one_core_is_enough(model: Path, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with started(model, tmp_path / "log", prepare=lambda: os.sched_setaffinity(0, {core})) as server:
        check_serves(server)


def test_without_a_compiler_and_with_a_cache_that_cannot_be_made_the_portable_code_serves(model: Path, tmp_path: Path) -> None:
    environment = {"CXX": "/bin/false", "PATH": "/nowhere", "PENSTOCK_CACHE": "/proc/penstock"}
    with started(model, tmp_path / "log", environment=environment) as server:
        check_serves(server)
        assert "portable code" in server.written()


def obey_permissions() -> None:
    """Root may write anywhere, unless it gives that up for itself and all that it runs."""
    if os.geteuid() == 0 and ctypes.CDLL(None, use_errno=True).prctl(PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def test_a_cache_that_is_read_only_is_read(model: Path, tmp_path: Path) -> None:
    """As in an image that was built with a cache in it."""
    cache = tmp_path / "cache"
    cache.mkdir()
    shutil.copytree(cache_directory() / "native", cache / "native")
    places = [cache, *cache.rglob("*")]
    for place in places:
        place.chmod(0o555)
    try:
        with started(model, tmp_path / "log", environment={"PENSTOCK_CACHE": str(cache)}, prepare=obey_permissions) as server:
            check_serves(server)
            assert "portable code" not in server.written(), "the kernels are found"
        assert [cache, *cache.rglob("*")] == places
    finally:
        for place in places:
            place.chmod(0o755)


def test_a_disk_that_takes_no_more_costs_no_answer(model: Path, tmp_path: Path) -> None:
    """Files of this process and its children may not grow beyond some pages: the same places fail as on a disk that is full."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))

    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    flags = ["--kv-cache-dir", str(tmp_path / "kv"), "--response-store", str(tmp_path / "responses.sqlite")]
    flags += ["--files-dir", str(tmp_path / "files"), "--no-access-log"]
    environment = {"PENSTOCK_CACHE": str(cache)}
    with started(model, tmp_path / "log", *flags, environment=environment, prepare=limit) as server:
        prompt = "a long prompt fills blocks " * 40
        assert server.complete(prompt) == server.complete(prompt)
        for _ in range(12):
            status, answer = server.ask("POST", "/v1/responses", {"model": model.name, "input": "x" * 1500, "max_output_tokens": 4})
            assert status == 200, answer
        assert server.ask("GET", "/health")[0] == 200
        written = server.written()
        assert "is not stored" in written
        assert "portable code" in written, "the kernels could not be built"
        assert "Traceback" not in written
    assert not list((cache / "native").glob("kernels-*.so"))


@pytest.mark.skipif(find_compiler() is None, reason="the clock is changed by a library that is compiled here")
def test_a_clock_that_jumps_ends_no_request_and_no_connection(model: Path, tmp_path: Path) -> None:
    (tmp_path / "clock.c").write_text(CLOCK)
    library, ahead = tmp_path / "clock.so", tmp_path / "ahead"
    compiler = str(find_compiler()).replace("g++", "gcc")
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, tmp_path / "clock.c", "-ldl"], check=True)
    environment = {"LD_PRELOAD": str(library), "CLOCK_AHEAD": str(ahead)}
    flags = ["--kv-cache-dir", str(tmp_path / "kv"), "--response-store", str(tmp_path / "responses.sqlite"), "--max-model-len", "2000"]
    decade = 10 * 365 * 86400
    with started(model, tmp_path / "log", *flags, environment=environment) as server:
        expected = server.complete(max_tokens=1500, timeout=600)
        _, stored = server.ask("POST", "/v1/responses", {"model": model.name, "input": "Hi", "max_output_tokens": 4})
        for jump in (decade, -decade, 0):
            with socket.create_connection(server.address, timeout=60) as connection:
                body = json.dumps(
                    {"prompt": "Once upon a time", "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "timeout": 600}
                ).encode()
                head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                connection.sendall(head.encode() + body[:10])
                ahead.write_text(str(jump))  # within the body, and then while it is computed
                connection.sendall(body[10:])
                answer = b""
                while piece := connection.recv(2**16):
                    answer += piece
            choice = json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (expected, "length")
            created = server.ask("POST", "/v1/completions", {"prompt": "a", "max_tokens": 1})[1]["created"]
            assert abs(created - time.time() - jump) < 3600, "the clock of the server has jumped"
        assert server.ask("GET", f"/v1/responses/{stored['id']}")[0] == 200, "a jump ahead evicts nothing by itself"
        assert "Traceback" not in server.written()
