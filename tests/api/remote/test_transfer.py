"""`kv_transfer_params`: one server computes a prompt and another one answers, as vLLM's routers ask for it."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from penstock.api.app import build_app
from penstock.assembly import Assembled, assemble
from penstock.cli.flags import parse_arguments
from penstock.engine.errors import EngineUnavailable
from penstock.engine.kv_cache import exchange
from penstock.engine.kv_cache.block_files import BlockFormat
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager
from penstock.engine.kv_cache.transfer import EXPORT_SECONDS, MAX_HEADER_BYTES, BlockTransfer, Export, HeldPrefix
from penstock.engine.loop import Engine
from penstock.plugins.manager import Plugins
from tests.api.scripted import CancellingServer
from tests.llm.model_directory import write_model

FLAGS = "--dtype float32 --compile off --kv-cache-memory 4MiB --threads 1 --max-model-len 256 --speculation none"
PROMPT = "the quick brown fox jumps over the lazy dog and then it goes home to sleep"
MESSAGES = [{"role": "user", "content": PROMPT}]
# As vLLM's routers send it, with what they fill in for its own connectors.
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False} | dict.fromkeys(
    ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
)
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 12}
FORMAT = BlockFormat.of([], [], block_size=16, dtype=torch.float32, model="any")


@dataclass(frozen=True, slots=True)
class Post:
    """A client of a server, which is called with a path and a body, and returns the status and the answer."""

    http: aiohttp.ClientSession
    engine: Engine

    async def __call__(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        async with self.http.post(path, json={"model": "m"} | body) as response:
            return response.status, await response.json()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def served(model_dir: Path, *flags: str) -> AsyncIterator[Post]:
    arguments = parse_arguments(["--model", str(model_dir), "--served-model-name", "m", *FLAGS.split(), *flags])
    assembled = assemble(arguments, Plugins.start(arguments.plugins, ()))
    assert isinstance(assembled, Assembled)
    await assembled.context.engine.start()
    try:
        async with CancellingServer(build_app(assembled.context)) as server, aiohttp.ClientSession(str(server.make_url("/"))) as http:
            yield Post(http, assembled.context.engine)
        assembled.core.check_integrity()
        assert assembled.core.scheduler.pool.num_free == assembled.core.scheduler.pool.num_blocks
    finally:
        await assembled.context.engine.stop()
        assembled.context.close()


def run(model_dir: Path, scenario: Callable[..., Awaitable[None]], *servers: tuple[str, ...]) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            posts = [await stack.enter_async_context(served(model_dir, *flags)) for flags in servers]
            await asyncio.wait_for(scenario(*posts), 60)

    asyncio.run(main())


def test_a_prompt_computed_by_one_server_is_answered_by_another(model_dir: Path, tmp_path: Path) -> None:
    async def scenario(prefill: Post, decode: Post) -> None:
        for path, prompt in (("/v1/chat/completions", {"messages": MESSAGES}), ("/v1/completions", {"prompt": PROMPT})):
            asked = GREEDY | prompt
            status, first = await prefill(path, asked | {"max_tokens": 1, "kv_transfer_params": PREFILL})
            assert status == 200, first
            handed_over = first["kv_transfer_params"]
            assert (handed_over["do_remote_prefill"], handed_over["do_remote_decode"]) == (True, False)
            status, answer = await decode(path, asked | {"kv_transfer_params": handed_over})
            assert status == 200, answer
            num_prompt = answer["usage"]["prompt_tokens"]
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16
            assert "kv_transfer_params" not in answer
            _, alone = await prefill(path, asked)
            assert answer["choices"] == alone["choices"]
            status, error = await decode(path, asked | {"kv_transfer_params": handed_over})
            assert (status, error["error"]["param"]) == (400, "kv_transfer_params.state")
            assert "has been received" in error["error"]["message"]

    folder = tmp_path / "transfer"
    run(model_dir, scenario, *[("--kv-transfer-dir", str(folder))] * 2)
    assert not list(folder.iterdir())


def test_a_prompt_is_handed_over_by_torch_distributed(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
    silent = "0" * 16  # a process that has met the others, and does not answer

    async def scenario(prefill: Post, decode: Post) -> None:
        exchange.meet(host, port).set(exchange._open(silent), "")
        asked = GREEDY | {"messages": MESSAGES}
        _, first = await prefill("/v1/chat/completions", asked | {"max_tokens": 1, "kv_transfer_params": PREFILL})
        state = first["kv_transfer_params"]
        status, answer = await decode("/v1/chat/completions", asked | {"kv_transfer_params": state})
        assert status == 200, answer
        num_prompt = answer["usage"]["prompt_tokens"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (num_prompt - 1) // 16 * 16
        assert answer["choices"] == (await prefill("/v1/chat/completions", asked))[1]["choices"]
        monkeypatch.setattr(exchange, "TRANSFER_SECONDS", 0.2)
        other = json.dumps(json.loads(state["state"]) | {"source": silent})
        status, error = await decode("/v1/chat/completions", asked | {"kv_transfer_params": state | {"state": other}})
        assert status == 503
        assert "does not answer" in error["error"]["message"]

    run(model_dir, scenario, *[("--kv-transfer-dir", f"tcp://{host}:{port}")] * 2)


def test_what_cannot_be_handed_over_is_refused(model_dir: Path, tmp_path: Path) -> None:
    def asking(**params: Any) -> dict[str, Any]:
        return {"messages": MESSAGES, "max_tokens": 1, "kv_transfer_params": params}

    async def scenario(server: Post, without: Post) -> None:
        async def refusal(post: Post, body: dict[str, Any], path: str = "/v1/chat/completions") -> str:
            status, answer = await post(path, body)
            assert status == 400
            assert answer["error"]["param"].startswith("kv_transfer_params")
            return str(answer["error"]["message"])

        assert "--kv-transfer-dir" in await refusal(without, asking(do_remote_decode=True))
        assert "two servers" in await refusal(server, asking(do_remote_decode=True, do_remote_prefill=True))
        assert "stream" in await refusal(server, asking(do_remote_decode=True) | {"stream": True})
        assert "needs the `state`" in await refusal(server, asking(do_remote_prefill=True))
        assert "no export has made it" in await refusal(server, asking(do_remote_prefill=True, state="x"))
        await refusal(server, asking(do_remote_prefill=True, remote_host="10.0.0.1"))
        prompts = {"prompt": ["a", "b"], "kv_transfer_params": {"do_remote_decode": True}}
        assert "one prompt" in await refusal(server, prompts, "/v1/completions")
        assert (await without("/v1/chat/completions", asking(do_remote_decode=False)))[0] == 200

    run(model_dir, scenario, ("--kv-transfer-dir", str(tmp_path / "transfer")), ())


def test_a_request_that_is_refused_may_be_sent_again(model_dir: Path, tmp_path: Path) -> None:
    async def scenario(prefill: Post, decode: Post) -> None:
        asked = GREEDY | {"messages": MESSAGES}
        _, first = await prefill("/v1/chat/completions", asked | {"max_tokens": 1, "kv_transfer_params": PREFILL})
        asked["kv_transfer_params"] = first["kv_transfer_params"] | {"do_remote_decode": None}
        status, refusal = await decode("/v1/chat/completions", asked | {"n": 3, "temperature": 1})
        assert (status, refusal["error"]["param"]) == (400, "n"), refusal
        status, answer = await decode("/v1/chat/completions", asked)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0

    folder = tmp_path / "transfer"
    run(model_dir, scenario, *[("--kv-transfer-dir", str(folder), "--max-num-seqs", "2")] * 2)
    assert not list(folder.iterdir())


def test_a_request_whose_time_passes_in_the_queue_may_be_sent_again(model_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "transfer"

    async def scenario(prefill: Post, decode: Post) -> None:
        asked = GREEDY | {"messages": MESSAGES}
        _, first = await prefill("/v1/chat/completions", asked | {"max_tokens": 1, "kv_transfer_params": PREFILL})
        asked["kv_transfer_params"] = first["kv_transfer_params"]
        await decode.engine.pause()
        asking = asyncio.create_task(decode("/v1/chat/completions", asked))
        while not decode.engine.num_requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        decode.engine.core.deadlines.add(decode.engine.requests()[0].id, 0.0)
        status, error = await asking
        assert (status, error["error"]["code"]) == (504, "timeout")
        assert len(list(folder.iterdir())) == 1
        decode.engine.resume()
        status, answer = await decode("/v1/chat/completions", asked)
        assert status == 200, answer
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert not list(folder.iterdir())
        assert decode.engine.core.transfer is not None
        assert not decode.engine.core.transfer.received

    run(model_dir, scenario, *[("--kv-transfer-dir", str(folder))] * 2)


def test_responses_say_where_prompts_are_handed_over(model_dir: Path, tmp_path: Path) -> None:
    async def scenario(server: Post) -> None:
        status, answer = await server("/v1/responses", {"input": PROMPT, "max_output_tokens": 1, "kv_transfer_params": PREFILL})
        assert (status, answer["error"]["param"]) == (400, "kv_transfer_params"), answer

    run(model_dir, scenario, ("--kv-transfer-dir", str(tmp_path)))


def test_an_export_whose_request_is_cancelled_leaves_no_file(tmp_path: Path) -> None:
    begin, is_cancelled, has_begun = BlockTransfer.begin, threading.Event(), threading.Event()

    class Slow(BlockTransfer):
        def begin(self, held: HeldPrefix) -> Export:
            has_begun.set()
            assert is_cancelled.wait(10)
            return begin(self, held)

    async def scenario() -> None:
        transfer = Slow(tmp_path, FORMAT, KVCacheManager(BlockPool(4), 16), 2**20)
        transfer.held.hold("a", [], 0)

        async def read(group: int, blocks: list[int]) -> torch.Tensor:
            raise AssertionError("there are none")

        export = asyncio.create_task(transfer.export("a", read))
        await asyncio.to_thread(has_begun.wait, 10)
        export.cancel()
        await asyncio.wait([export])
        is_cancelled.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert not list(tmp_path.iterdir())


def test_exports_that_are_being_written_count_in_the_size_of_the_directory(tmp_path: Path) -> None:
    transfer = BlockTransfer(tmp_path, FORMAT, KVCacheManager(BlockPool(4), 16), 2 * MAX_HEADER_BYTES)
    held = HeldPrefix(0, b"", {})
    first, second = transfer.begin(held), transfer.begin(held)
    with pytest.raises(EngineUnavailable, match="being written"):
        transfer.begin(held)
    first.discard()
    third = transfer.begin(held)
    second.finish()
    state = third.finish()
    transfer.begin(held).finish()  # once they have been written, they take what they have
    assert len(list(tmp_path.iterdir())) == 3
    assert len(transfer.receive(state, [])) == 0
    transfer.close()


def test_what_is_known_of_exports_does_not_outlast_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = BlockTransfer(tmp_path, FORMAT, KVCacheManager(BlockPool(4), 16), 2**20)
    now = time.time()
    for minutes in range(30):
        monkeypatch.setattr(time, "time", lambda minutes=minutes: now + 60 * minutes)
        transfer.begin(HeldPrefix(0, b"", {})).finish()
    assert transfer.num_own == EXPORT_SECONDS // 60
    transfer.close()
    assert not list(tmp_path.iterdir())
