"""`--api-servers`: several processes at one port, from the first request to the last."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from penstock.assembly import Assembled
from penstock.cli.api_servers import MAX_RESTARTS, ApiServers, ServersFailed, bind_all, run_engine
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ENGINE_FAILED, ConfigurationError
from penstock.server import ENGINE_FAILED as EXIT_CODE
from penstock.server import bind, main
from tests.fakes import TOKENIZER, FakeRunner, letter_after, make_core
from tests.llm.executors import context_over
from tests.test_server import server

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def talk(url: str, scenario: Callable[[aiohttp.ClientSession], Awaitable[None]]) -> None:
    """Each request on a connection of its own: the kernel distributes connections."""

    async def run() -> None:
        async with asyncio.timeout(120), aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0)) as http:
            await scenario(http)

    asyncio.run(run())


async def stream(http: aiohttp.ClientSession, url: str, **body: Any) -> list[dict[str, Any]]:
    """A completion's chunks up to its end."""
    given = {"prompt": "Once", "stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}} | body
    async with http.post(f"{url}/completions", json=given) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]


async def chat(http: aiohttp.ClientSession, url: str, **body: Any) -> dict[str, Any]:
    async with http.post(f"{url}/chat/completions", json={"messages": QUESTION, "temperature": 0, "max_tokens": 60} | body) as response:
        assert response.status == 200, await response.text()
        message: dict[str, Any] = (await response.json())["choices"][0]["message"]
        return message


async def metric(http: aiohttp.ClientSession, url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    async with http.get(f"{url.removesuffix('/v1')}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"penstock:{name}{{"))


async def until_running(http: aiohttp.ClientSession, url: str, number: int) -> None:
    """Until that many sequences run."""
    while await metric(http, url, "num_requests_running") != number:  # noqa: ASYNC110 - in another process
        await asyncio.sleep(0.02)


def test_servers_share_a_port_an_engine_and_their_counts_until_the_last_stream_has_ended(default_model_dir: Path) -> None:
    with server("--api-servers", "2", "--plugin", "deepseek_r1", "--plugin", "hermes") as (process, url):
        first, second = children_of(process)
        for pid in (first, second):
            assert "libtorch" not in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")

        async def answers(http: aiohttp.ClientSession) -> None:
            chunks = await asyncio.gather(*(stream(http, url, max_tokens=8 + number) for number in range(32)))
            assert [each[-1]["usage"]["completion_tokens"] for each in chunks] == [8 + number for number in range(32)]
            texts = ["".join(chunk["choices"][0]["text"] for chunk in each if chunk["choices"]) for each in chunks]
            assert all(texts[-1].startswith(text) for text in texts)
            said = await chat(http, url, guided_json=SCHEMA)
            assert json.loads(said["content"])["city"] in ("Paris", "Rome")
            assert said["reasoning_content"]
            called = await chat(http, url, tools=[WEATHER], tool_choice="required", max_tokens=200)
            assert {call["function"]["name"] for call in called["tool_calls"]} == {"weather"}
            async with http.post(f"{url}/chat/completions", json={"messages": QUESTION, "guided_regex": "["}) as response:
                assert (response.status, (await response.json())["error"]["param"]) == (400, "guided_regex")
            left = asyncio.create_task(stream(http, url, max_tokens=4000))
            await until_running(http, url, 1)
            left.cancel()
            await until_running(http, url, 0)
            assert await metric(http, url, "request_success_total") == 34

        async def deaths(http: aiohttp.ClientSession) -> None:
            streams = [asyncio.create_task(stream(http, url, max_tokens=300)) for _ in range(16)]
            await until_running(http, url, 16)
            os.kill(first, signal.SIGKILL)
            ended = await asyncio.gather(*streams, return_exceptions=True)
            whole = [chunks for chunks in ended if not isinstance(chunks, BaseException)]
            assert all(chunks[-1]["usage"]["completion_tokens"] == 300 for chunks in whole)
            await until_running(http, url, 0)
            for _ in range(8):  # whichever server it is: clients of the one that is being started wait for it
                assert len(await stream(http, url, max_tokens=2)) > 1

        talk(url, answers)
        talk(url, deaths)
        assert second in children_of(process)
        assert first not in children_of(process)

        async def ending(http: aiohttp.ClientSession) -> None:
            last = asyncio.create_task(stream(http, url, max_tokens=120))
            await until_running(http, url, 1)
            process.send_signal(signal.SIGTERM)
            assert (await last)[-1]["usage"]["completion_tokens"] == 120

        servers = children_of(process)
        talk(url, ending)
        said = process.communicate()[1]
        assert process.returncode == 0
        assert f"API server {first} ended with -9" in said
        assert "Traceback" not in said
        assert not any(Path(f"/proc/{pid}").exists() for pid in servers)


def test_clients_of_an_engine_that_dies_are_told_and_no_server_outlives_it(default_model_dir: Path) -> None:
    with server("--api-servers", "1") as (process, url):
        [pid] = children_of(process)

        async def scenario(http: aiohttp.ClientSession) -> None:
            last = asyncio.create_task(stream(http, url, max_tokens=4000))
            await until_running(http, url, 1)
            process.kill()
            assert "engine has failed" in (await last)[-1]["error"]["message"]

        talk(url, scenario)
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)


@pytest.fixture
def byte_model_dir(tmp_path: Path) -> Path:
    """What an API server reads of a model whose tokens are bytes."""
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.serialized(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    return tmp_path


async def started(capsys: pytest.CaptureFixture[str]) -> str:
    """The URL in the line that says that all servers listen."""
    while not (found := re.search(r"http://[^ ]+/v1", capsys.readouterr().out)):  # noqa: ASYNC110 - in other processes
        await asyncio.sleep(0.02)
    return found[0]


def test_an_engine_that_has_lost_its_device_ends_with_its_servers_and_clients_are_told(
    byte_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(token_ids: Sequence[int]) -> int:
        time.sleep(0.001)  # no stream ends before all have begun
        return letter_after(token_ids)

    core, words = make_core(slow, max_model_len=4000, num_blocks=8000), ["--model", str(byte_model_dir), "--api-servers", "2"]
    with ExitStack() as on_exit:
        listeners = [on_exit.enter_context(listener) for listener in bind_all("127.0.0.1", 0, 2)]
        servers = ApiServers(words, listeners)
        on_exit.callback(servers.kill)
        servers.start()

        async def scenario() -> int:
            assembled = Assembled(context_over(core), "a fake", core, byte_model_dir)
            running = asyncio.create_task(run_engine(parse_arguments(words), assembled, servers, time.monotonic()))
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
                url = await started(capsys)
                streams = [asyncio.create_task(stream(http, url, max_tokens=3900)) for _ in range(8)]
                await until_running(http, url, 8)
                cast(FakeRunner, core.runner).failure = RuntimeError("CUDA error: an illegal memory access was encountered")
                assert {chunks[-1]["error"]["message"] for chunks in await asyncio.gather(*streams)} == {ENGINE_FAILED}
            return await running

        pids = servers.pids
        assert asyncio.run(asyncio.wait_for(scenario(), 60)) == EXIT_CODE
        assert [server.process.returncode for server in servers._servers] == [0, 0]
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_several_sockets_share_a_port_that_no_other_server_gets() -> None:
    sockets = bind_all("127.0.0.1", 0, 3)
    try:
        [address] = {each.getsockname() for each in sockets}
        for each in sockets:
            each.listen()
        with pytest.raises(ConfigurationError, match="cannot listen"):
            bind(*address)
    finally:
        for each in sockets:
            each.close()


def test_servers_that_end_again_and_again_are_not_started_for_ever() -> None:
    servers = ApiServers([], [])
    for _ in range(MAX_RESTARTS):
        servers._count_restart(1)
    with pytest.raises(ServersFailed, match="6 times in 60 s, the last one with 1"):
        servers._count_restart(1)


def test_a_model_that_embeds_is_served_by_one_process(minilm_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--model", str(minilm_dir), "--api-servers", "2", "--port", str(port)]) == 2
    assert "cannot listen" in capsys.readouterr().err
    assert main(["--model", str(minilm_dir), "--api-servers", "2", "--port", "0"]) == 2
    assert "--api-servers: for models that generate text" in capsys.readouterr().err
