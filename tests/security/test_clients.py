"""What one client does, or has done, tells others nothing and takes nothing from them."""

import asyncio
from typing import Any

import pytest

from penstock.serving.options import ServerOptions
from tests.api.event_streams import open_stream
from tests.api.running_server import CHAT, Running, serve

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


def test_a_stream_that_its_client_does_not_read_is_cut() -> None:
    async def scenario() -> None:
        was_refused = False
        async with open_stream(write_timeout_seconds=0.01) as (stream, connection):
            abort: Any = connection.request.transport.abort  # type: ignore[union-attr]
            await stream.send(b"first")
            connection.pause_writing()
            assert not abort.called
            try:
                await stream.send(b"second")
            except ConnectionResetError:
                was_refused = True
                raise  # as handlers let it pass, and the stream ends without a word
        assert was_refused
        assert abort.called

    asyncio.run(scenario())
