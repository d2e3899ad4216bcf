"""What one client does, or has done, tells others nothing and takes nothing from them."""

import asyncio
from typing import Any

import pytest

from penstock.engine.errors import ConfigurationError
from penstock.serving.models.startup import server_options
from penstock.serving.options import Arguments, ServerOptions
from tests.api.event_streams import open_stream
from tests.api.running_server import CHAT, Running, serve

KEYS = ("one", "two")


def salt_of(path: str, body: dict[str, object], options: ServerOptions) -> str:
    """What the engine's request has for this body, with the first key."""

    async def scenario(server: Running) -> None:
        status, _ = await server.post(path, body, headers={"Authorization": f"Bearer {KEYS[0]}"})
        assert status == 200
        salts.append(server.engine.requests[0].cache_salt)

    salts: list[str] = []
    serve(scenario, options)
    return salts[0]


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "Hi"})])
def test_a_single_key_has_a_cache_of_its_own_where_keys_are_isolated(path: str, body: dict[str, object]) -> None:
    body = body | {"cache_salt": "s"}
    plain, *isolated = (
        salt_of(path, body, ServerOptions(api_keys=KEYS[:1], isolate_keys=isolate_keys)) for isolate_keys in (False, True, True)
    )
    assert plain == "s"
    assert isolated[0] == isolated[1], "a second process finds what the first one has left"
    assert isolated[0] not in (plain, "")
    assert isolated[0].endswith(" s")
    assert KEYS[0] not in isolated[0], "the key itself goes nowhere"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "--isolate-keys: there are no API keys"),
        ({"api_keys": KEYS, "share_prefix_cache": True}, "--isolate-keys and --share-prefix-cache contradict each other"),
    ],
)
def test_isolated_keys_are_refused_where_there_are_none_and_where_all_share(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        server_options(Arguments(server=ServerOptions(isolate_keys=True, **options)))


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
