"""Thousands of clients that are idle, slow, silent or gone at any moment: the server answers the others, and keeps nothing of them."""

import asyncio
import json
import random
import resource
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from penstock.engine.system.process import raise_descriptor_limit
from tests.faults.started import Started, started
from tests.llm.model_directory import write_model

NUM_IDLE = 5000
NUM_GONE = 1000
MEGABYTE = 2**20


def request(**fields: object) -> bytes:
    body = json.dumps({"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True, "stream": True} | fields).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def leave(server: Started, rng: random.Random) -> None:
    """Sends any part of a request, reads any part of its answer, and goes: by FIN, by RST, or half, for the server to end the rest."""
    sent = request(max_tokens=rng.randint(1, 200), n=rng.choice((1, 1, 4)))
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(sent[: rng.choice((0, rng.randrange(len(sent)), len(sent), len(sent), len(sent)))])
        if rng.random() < 0.5:
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(2**12), rng.random() / 2)
        else:
            await asyncio.sleep(rng.random() / 4)
        way = rng.choice(("fin", "rst", "half"))
        if way == "rst":
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        elif way == "half":
            writer.write_eof()
            with suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 5)
        writer.close()


async def vanish(server: Started, count: int) -> None:
    limit = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with limit:
            await leave(server, random.Random(number))

    await asyncio.gather(*(one(number) for number in range(count)))


def unread_stream(server: Started) -> socket.socket:
    """A client that asks for much and reads nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(server.address)
    client.sendall(request(max_tokens=1900, n=4, logprobs=5))
    return client


@pytest.fixture
def many_descriptors() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    raise_descriptor_limit()
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.thorough
@pytest.mark.usefixtures("many_descriptors")
def test_idle_slow_and_vanishing_clients_leave_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=2048)
    flags = ["--write-timeout", "2", "--max-num-seqs", "16", "--no-access-log"]
    with started(model, tmp_path / "log", *flags) as server, ExitStack() as stack:
        process = psutil.Process(server.process.pid)
        expected = server.complete()
        asyncio.run(vanish(server, 100))
        server.until_idle()
        before = process.num_fds(), process.num_threads(), process.memory_info().rss

        asyncio.run(vanish(server, NUM_GONE))
        server.until_idle()
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.complete() == expected

        unread = [stack.enter_context(unread_stream(server)) for _ in range(16)]
        server.until_idle()
        assert server.complete() == expected
        assert process.memory_info().rss - before[2] < 64 * MEGABYTE, "what is not read is not kept"
        for client in unread:
            client.close()

        idle = [stack.enter_context(socket.create_connection(server.address)) for _ in range(NUM_IDLE)]
        assert server.complete() == expected
        assert process.memory_info().rss - before[2] < (64 + NUM_IDLE * 40 / 1024) * MEGABYTE
        for connection in idle:
            connection.close()

        assert server.complete() == expected
        server.until_idle()
        assert asyncio.run(until_closed(process, before[0])), f"{process.num_fds()} descriptors, before {before[0]}"
        assert process.num_threads() <= before[1] + 2
        assert "Traceback" not in server.written()


async def until_closed(process: "psutil.Process", num_descriptors: int) -> bool:
    for _ in range(300):
        if process.num_fds() <= num_descriptors + 2:
            return True
        await asyncio.sleep(0.1)
    return False
