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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import aiohttp
import pytest

from penstock.assembly import Assembled
from penstock.cli.api_servers import (
    MAX_RESTARTS,
    ApiServers,
    ServersFailed,
    bind_all,
    engine_server,
    remote_context,
    run_engine,
    shared_response_store,
)
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ENGINE_FAILED, ConfigurationError, InvalidRequest
from penstock.engine.remote.client import RemoteEngine
from penstock.plugins.manager import Plugins
from penstock.server import ENGINE_FAILED as EXIT_CODE
from penstock.server import START_FAILED, bind, main
from penstock.serving.limits import hash_of
from tests.fakes import TOKENIZER, FakeRunner, letter_after, make_core
from tests.llm.executors import context_over
from tests.llm.model_directory import write_model
from tests.server.test_process import server

SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
MODEL_NAME = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def children_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def has_loaded(pid: int, library: str) -> bool:
    return library in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


async def stream(http: aiohttp.ClientSession, url: str, **body: Any) -> list[dict[str, Any]]:
    """A completion's chunks up to its end."""
    given = {"prompt": "Once", "stream": True, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}} | body
    async with http.post(f"{url}/completions", json=given) as response:
        lines = [line async for line in response.content if line.startswith(b"data: {")]
        return [json.loads(line.removeprefix(b"data: ")) for line in lines]


async def chat(http: aiohttp.ClientSession, url: str, **body: Any) -> dict[str, Any]:
    given = {"model": MODEL_NAME, "messages": QUESTION, "temperature": 0, "max_tokens": 200} | body
    async with http.post(f"{url}/chat/completions", json=given) as response:
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


@pytest.fixture
def byte_model_dir(tmp_path: Path) -> Path:
    """What an API server reads of a model whose tokens are bytes."""
    (tmp_path / "tokenizer.json").write_text(TOKENIZER.serialized(), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end|>"}', encoding="utf-8")
    return tmp_path


def client() -> aiohttp.ClientSession:
    """Each request on a connection of its own: the kernel distributes connections."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=0))


def slow_letter_after(token_ids: Sequence[int]) -> int:
    """So slow that no stream of thousands of tokens ends before others have begun."""
    time.sleep(0.001)
    return letter_after(token_ids)


@dataclass(frozen=True)
class Served:
    """Two API servers in processes of their own, over a fake engine in this one."""

    http: aiohttp.ClientSession
    url: str
    servers: ApiServers
    runner: FakeRunner


Scenario = Callable[[Served], Awaitable[None]]


def serve(directory: Path, capfd: pytest.CaptureFixture[str], scenario: Scenario, *flags: str) -> tuple[int, str]:
    """The exit code once the scenario is over, and what the servers have said on stderr. All have ended then."""
    core, words = make_core(slow_letter_after, max_model_len=4000, num_blocks=8000, max_num_seqs=32), ["--model", str(directory), *flags]
    said = []
    with ExitStack() as on_exit:
        listeners = [on_exit.enter_context(listener) for listener in bind_all("127.0.0.1", 0, 2)]
        servers = ApiServers([*words, "--api-servers", "2"], listeners)
        on_exit.callback(servers.kill)
        servers.start()

        async def run() -> int:
            assembled = Assembled(context_over(core), "a fake", core, directory)
            running = asyncio.create_task(run_engine(parse_arguments(words), assembled, servers, time.monotonic()))
            url = None
            while url is None:
                await asyncio.sleep(0.02)
                out, err = capfd.readouterr()
                said.append(err)
                url = re.search(r"http://[^ ]+/v1", out)
            async with client() as http:
                await scenario(Served(http, url[0], servers, cast(FakeRunner, core.runner)))
            return await running

        code = asyncio.run(asyncio.wait_for(run(), 120))
        assert not any(Path(f"/proc/{pid}").exists() for pid in servers.pids)
        return code, "".join(said) + capfd.readouterr().err


def test_servers_share_a_port_an_engine_and_their_counts_until_the_last_stream_has_ended_and_import_neither_torch_nor_transformers(
    byte_model_dir: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each import is a line on stderr

    async def scenario(served: Served) -> None:
        http, url = served.http, served.url
        assert len(await stream(http, url, max_tokens=2, bad_words=["a"], logit_bias={"70": -1})) > 1
        async with http.post(f"{url}/grammar/check", json={"guided_regex": "["}) as response:
            assert (await response.json())["verdict"] == "refused"
        async with http.get(url.removesuffix("v1")) as response:
            assert (response.status, response.content_type) == (200, "text/html")
        chunks = await asyncio.gather(*(stream(http, url, max_tokens=8 + number) for number in range(32)))
        assert [each[-1]["usage"]["completion_tokens"] for each in chunks] == [8 + number for number in range(32)]
        texts = ["".join(chunk["choices"][0]["text"] for chunk in each if chunk["choices"]) for each in chunks]
        assert all(texts[-1].startswith(text) for text in texts)
        left = asyncio.create_task(stream(http, url, max_tokens=3900))
        await until_running(http, url, 1)
        left.cancel()
        await until_running(http, url, 0)
        assert await metric(http, url, "request_success_total") == 34  # the one that its client left is counted as aborted
        last = asyncio.create_task(stream(http, url, max_tokens=120))
        await until_running(http, url, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await last)[-1]["usage"]["completion_tokens"] == 120

    code, said = serve(byte_model_dir, capfd, scenario)
    assert code == 0
    assert "Traceback" not in said + caplog.text
    imported = {line.rpartition("|")[2].strip() for line in said.splitlines()}
    assert {"penstock.api.answers", "tokenizers"} <= imported
    assert not imported & {"torch", "transformers"}


def test_a_conversation_goes_on_at_whichever_server_until_its_key_is_replaced(
    byte_model_dir: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nhash = "{hash_of("old")}"\nmax_tokens = 3\n')

    def replace_key() -> None:
        keys.write_text(keys.read_text().replace(hash_of("old"), hash_of("new")))

    async def statuses(served: Served, key: str) -> set[int]:
        """Of so many connections that each server has had some."""
        found = set()
        for _ in range(16):
            async with served.http.get(f"{served.url}/models", headers={"x-api-key": key}) as response:
                found.add(response.status)
        return found

    async def scenario(served: Served) -> None:
        async def respond(**body: Any) -> dict[str, Any]:
            given = {"model": byte_model_dir.name, "input": "x"} | body
            async with served.http.post(f"{served.url}/responses", json=given, headers={"x-api-key": "old"}) as response:
                answer: dict[str, Any] = await response.json()
                return answer

        last = await respond()
        for _ in range(8):
            before, last = last, await respond(previous_response_id=last["id"])
            assert last["usage"]["input_tokens"] > before["usage"]["input_tokens"]
        assert last["usage"]["output_tokens"] == 3
        assert (await respond(max_output_tokens=4))["error"]["param"] == "max_output_tokens"
        assert (await respond(background=True))["error"]["param"] == "background"
        replace_key()
        os.kill(os.getpid(), signal.SIGHUP)
        while await statuses(served, "new") != {200}:  # noqa: ASYNC110 - in other processes
            await asyncio.sleep(0.02)
        assert await statuses(served, "old") == {401}
        os.kill(os.getpid(), signal.SIGTERM)

    with shared_response_store() as flags:
        code, _ = serve(byte_model_dir, capfd, scenario, "--chat-template", "chatml", "--keys", str(keys), *flags)
    assert code == 0


def test_a_server_that_dies_is_started_again_and_both_end_with_an_engine_that_has_lost_its_device(
    byte_model_dir: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(served: Served) -> None:
        http, url = served.http, served.url
        first, second = served.servers.pids
        streams = [asyncio.create_task(stream(http, url, max_tokens=100)) for _ in range(16)]
        await until_running(http, url, 16)
        os.kill(first, signal.SIGKILL)
        ended = await asyncio.gather(*streams, return_exceptions=True)
        whole = [chunks for chunks in ended if not isinstance(chunks, BaseException)]
        assert all(chunks[-1]["usage"]["completion_tokens"] == 100 for chunks in whole)
        await until_running(http, url, 0)
        for _ in range(8):  # whichever server it is: clients of the one that is being started wait for it
            assert len(await stream(http, url, max_tokens=2)) > 1
        assert second in served.servers.pids
        assert first not in served.servers.pids
        assert f"API server {first} ended with -9" in caplog.text
        streams = [asyncio.create_task(stream(http, url, max_tokens=3900)) for _ in range(8)]
        await until_running(http, url, 8)
        served.runner.failure = RuntimeError("CUDA error: an illegal memory access was encountered")
        assert {chunks[-1]["error"]["message"] for chunks in await asyncio.gather(*streams)} == {ENGINE_FAILED}

    assert serve(byte_model_dir, capfd, scenario)[0] == EXIT_CODE


def test_defaults_for_sampling_are_those_that_the_engine_has_read(byte_model_dir: Path) -> None:
    core = make_core()
    context = context_over(core)
    context.default_sampling["top_k"] = 7

    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        connection = await engine_server(Assembled(context, "a fake", core, byte_model_dir)).connect(ours)
        engine = RemoteEngine(theirs, {})
        await engine.start()
        remote = remote_context(parse_arguments(["--model", str(byte_model_dir)]), Plugins.start(), engine)
        assert (remote.default_sampling, remote.max_model_len) == ({"top_k": 7}, core.max_model_len)
        with pytest.raises(InvalidRequest, match="--api-servers does not read"):
            remote.require_images("messages[0].content[0]")
        remote.close()
        await engine.stop()
        await connection.ended.wait()

    asyncio.run(scenario())
    context.close()


def test_the_command_line_serves_apart_and_no_server_outlives_an_engine_that_is_killed(tmp_path: Path) -> None:
    name = ["--model", str(write_model(tmp_path, max_position_embeddings=30_000)), "--served-model-name", MODEL_NAME]
    flags = [*name, "--plugin", "deepseek_r1", "--plugin", "hermes", "--chat-template", "think", "--thinking-token-budget", "8"]
    with server("--api-servers", "1", *flags) as (process, url):
        [pid] = children_of(process)

        async def scenario() -> None:
            async with client() as http:
                said = await chat(http, url, guided_json=SCHEMA)
                assert json.loads(said["content"])["city"] in ("Paris", "Rome")
                assert said["reasoning_content"]
                called = await chat(http, url, tools=[WEATHER], tool_choice="required", max_tokens=200)
                assert {call["function"]["name"] for call in called["tool_calls"]} == {"weather"}
                async with http.post(
                    f"{url}/chat/completions", json={"model": MODEL_NAME, "messages": QUESTION, "guided_regex": "["}
                ) as response:
                    assert (response.status, (await response.json())["error"]["param"]) == (400, "guided_regex")
                assert not has_loaded(pid, "libtorch")
                last = asyncio.create_task(stream(http, url, max_tokens=29_000))
                await until_running(http, url, 1)
                process.kill()
                assert "engine has failed" in (await last)[-1]["error"]["message"]

        asyncio.run(asyncio.wait_for(scenario(), 120))
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)


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
        assert main(["--model", str(minilm_dir), "--api-servers", "2", "--port", str(port)]) == START_FAILED
    assert "cannot listen" in capsys.readouterr().err
    assert main(["--model", str(minilm_dir), "--api-servers", "2", "--port", "0"]) == 2
    assert "--api-servers: for models that generate text" in capsys.readouterr().err


def test_files_belong_to_one_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--api-servers", "2", "--port", "0", "--files-dir", str(tmp_path)]) == 2
    assert "--files-dir" in capsys.readouterr().err
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[keys.alice]\nhash = "{hash_of("a")}"\ntokens_per_minute = 5\n')
    assert main(["--api-servers", "2", "--port", "0", "--keys", str(keys)]) == 2
    assert "tokens_per_minute of alice" in capsys.readouterr().err
    assert main(["--api-servers", "2", "--port", "0", "--enable-prompt-embeds"]) == 2
    assert "--enable-prompt-embeds" in capsys.readouterr().err
