"""What one client does, or has done, tells others nothing and takes nothing from them."""

import asyncio
import json

import pytest

from penstock.api.context import ServerOptions
from tests.api.running_server import CHAT, Running, serve, until

KEYS = ("one", "two")


@pytest.mark.parametrize(("options", "are_shared"), [({"api_keys": KEYS}, False), ({"api_keys": KEYS, "share_prefix_cache": True}, True)])
@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})])
def test_cached_prefixes_stay_within_a_key_where_there_are_several(
    options: dict[str, object], are_shared: bool, path: str, body: dict[str, object]
) -> None:
    async def scenario(server: Running) -> None:
        for key in (*KEYS, KEYS[0]):
            status, _ = await server.post(path, body | {"cache_salt": "s"}, headers={"Authorization": f"Bearer {key}"})
            assert status == 200
        first, second, again = (request.cache_salt for request in server.engine.requests)
        assert first == again
        assert (first == second) == are_shared
        assert first.endswith("s")

    serve(scenario, ServerOptions(**options))  # type: ignore[arg-type]


def test_a_stream_that_nobody_reads_is_ended_and_others_go_on() -> None:
    async def scenario(server: Running) -> None:
        server.engine.answers = ["word " * 400_000]
        server.engine.tokens_per_step = 20_000
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps(CHAT | {"stream": True, "max_tokens": 2_000_000}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(host, int(port), limit=2**10)
        writer.write(head.encode() + body)
        await writer.drain()
        await until(lambda: server.engine.aborted == 1)
        server.engine.answers, server.engine.tokens_per_step = ["Hello"], 1
        assert (await server.post("/v1/chat/completions", CHAT))[0] == 200
        writer.close()

    serve(scenario, ServerOptions(write_timeout_seconds=0.2))
