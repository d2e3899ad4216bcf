"""How events get from a fold onto the wire: encoded in parts, written together, and waiting for clients that do not read."""

import asyncio
import re
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp
import pytest
from aiohttp import HttpVersion10, HttpVersion11
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct

from penstock.api.answers import EventStream, Outbox
from penstock.engine.deltas import SequenceDelta
from penstock.serving.endpoints.answers import MARK, ChunkFold, StreamFormat, TextEvent, encode_event, encode_events
from penstock.serving.endpoints.chat import ChatChunkChoice, ChatDelta
from tests.api.event_streams import open_stream
from tests.api.running_server import Running, serve, until
from tests.api.scripted import MODEL, Scripted, scripted_server

DONE = b"data: [DONE]\n\n"


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_what_a_stream_sends_in_one_turn_of_the_loop_is_one_write() -> None:
    async def scenario() -> None:
        outbox = Outbox()
        async with open_stream(outbox) as (one, first), open_stream(outbox) as (other, second):
            for number in range(3):
                await one.send(b"data: %d\n\n" % number)
            await other.send(b"data: x\n\n")
            await other.send(b"")
            assert first.writes == second.writes == []
            await asyncio.sleep(0)
            assert first.writes == [chunked(b"data: 0\n\ndata: 1\n\ndata: 2\n\n")]
            assert second.writes == [chunked(b"data: x\n\n")]
            await asyncio.sleep(0)
            assert len(first.writes) == len(second.writes) == 1

    run(scenario)


@pytest.mark.parametrize("version", [HttpVersion10, HttpVersion11])
def test_the_last_events_the_end_and_the_end_of_the_body_are_one_write(version: Any) -> None:
    async def scenario() -> None:
        async with open_stream(version=version) as (stream, connection):
            await stream.send(b"data: last\n\n")
        body = b"data: last\n\n" + DONE
        assert connection.writes == [chunked(body) + b"0\r\n\r\n" if version == HttpVersion11 else body]
        await asyncio.sleep(0)
        assert len(connection.writes) == 1

    run(scenario)


class Named(Struct, tag="greeting"):
    text: str


class Bare(StreamFormat):
    """Streams that end without a mark, with errors of their own."""

    keep_alive = b"event: ping\n\n"
    ending = b""

    def failure(self, error: Exception) -> bytes:
        return encode_event(Named(str(error)))


def test_a_stream_format_says_how_events_errors_and_the_end_are_written() -> None:
    async def scenario() -> None:
        async with open_stream(stream_format=Bare(), keep_alive_seconds=0.001) as (stream, connection):
            await stream.send(encode_event(Named("hello")))
            await until(lambda: chunked(Bare.keep_alive) in connection.writes)
            raise ValueError("broken")
        assert connection.writes[0] == chunked(b'event: greeting\ndata: {"type":"greeting","text":"hello"}\n\n')
        assert connection.writes[-1].endswith(b'event: greeting\ndata: {"type":"greeting","text":"broken"}\n\n\r\n0\r\n\r\n')

    run(scenario)


def test_a_client_that_reads_slowly_is_waited_for_and_misses_nothing() -> None:
    async def scenario() -> None:
        async with open_stream() as (stream, connection):
            connection.pause_writing()
            sending = asyncio.create_task(stream.send(b"data: 1\n\n"))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not sending.done()
            connection.resume_writing()
            await sending
            await stream.send(b"data: 2\n\n")
        assert b"".join(connection.writes) == chunked(b"data: 1\n\n") + chunked(b"data: 2\n\n" + DONE) + b"0\r\n\r\n"

    run(scenario)


@pytest.mark.parametrize("is_closing", [False, True])
def test_a_stream_notices_that_its_client_is_gone(is_closing: bool) -> None:
    async def scenario() -> None:
        async with open_stream() as (stream, connection):
            assert connection.transport is not None
            if is_closing:
                connection.transport.is_closing.return_value = True  # type: ignore[attr-defined]
                await stream.send(b"data: 1\n\n")
                await asyncio.sleep(0)
            else:
                connection.connection_lost(None)
            with pytest.raises(ConnectionResetError):
                await stream.send(b"data: 2\n\n")
            assert connection.writes == []

    run(scenario)


def test_a_stream_whose_handler_is_cancelled_writes_no_more() -> None:
    async def scenario() -> None:
        connections = []

        async def handle() -> None:
            async with open_stream() as (stream, connection):
                connections.append(connection)
                await stream.send(b"data: 1\n\n")
                raise asyncio.CancelledError

        with pytest.raises(asyncio.CancelledError):
            await handle()
        await asyncio.sleep(0)
        assert connections[0].writes == []

    run(scenario)


@given(st.text())
def test_an_event_whose_text_is_put_in_later_is_the_same_event(text: str) -> None:
    def chunk(text: str) -> ChatChunkChoice:
        return ChatChunkChoice(0, ChatDelta(reasoning_content=text, reasoning=text))

    assert TextEvent(chunk(MARK)).of(text) == encode_event(chunk(text))


REASONED = 'Let me see: é, 日本 "quoted".</think>\n\nSo it is.\n<tool_call>\n{}\n</tool_call> Done.'
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}]}
USAGE = {"stream_options": {"include_usage": True}}
EACH_USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
REQUESTS = [
    *[("/chat/completions", CHAT | extra) for extra in ({}, {"n": 3}, USAGE, EACH_USAGE, {"logprobs": True, "top_logprobs": 1})],
    *[("/chat/completions", CHAT | {name: False}) for name in ("include_reasoning", "separate_reasoning", "stream_reasoning")],
    *[("/completions", {"prompt": ["a", "b"]} | extra) for extra in ({}, {"n": 2}, {"echo": True}, USAGE, EACH_USAGE, {"logprobs": 1})],
]


async def ask(server: Scripted, path: str, body: dict[str, Any]) -> bytes:
    """The stream, without what differs from request to request."""
    async with aiohttp.ClientSession() as client, client.post(server.base_url + path, json=body | {"stream": True}) as response:
        return without_identity(await response.read())


def without_identity(stream: bytes) -> bytes:
    return re.sub(rb'"(id|created)":("[^"]*"|\d+)', b"", stream)


@pytest.mark.parametrize("thinks", [False, True])
@pytest.mark.parametrize(("path", "body"), REQUESTS)
@pytest.mark.parametrize("tokens_per_step", [1, 3])
def test_a_stream_is_the_same_as_with_every_chunk_encoded_whole(
    path: str, body: dict[str, Any], thinks: bool, tokens_per_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def whole(fold: ChunkFold, delta: SequenceDelta) -> bytes:
        return encode_events(fold.chunks(delta))

    async def scenario() -> None:
        async with scripted_server({"answers": [REASONED], "tokens_per_step": tokens_per_step}, thinks=thinks) as server:
            stream = await ask(server, path, body)
            monkeypatch.setattr(ChunkFold, "events", whole)
            assert stream == await ask(server, path, body)
            assert stream.endswith(DONE)

    run(scenario)


@pytest.mark.parametrize(
    ("path", "body", "num_choices"), [("/chat/completions", CHAT | {"n": 3}, 3), ("/completions", {"prompt": "x", "max_tokens": 99}, 1)]
)
def test_each_step_is_one_write_to_its_connection_and_few_chunks_are_encoded_whole(
    path: str, body: dict[str, Any], num_choices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, writes, whole = "A sentence of many tokens.", 0, 0
    flush, encode = EventStream.flush, encode_events

    def counted_flush(stream: EventStream) -> None:
        nonlocal writes
        writes += bool(stream._unsent)
        flush(stream)

    def counted_encode(chunks: Any) -> bytes:
        nonlocal whole
        whole += 1
        return encode(chunks)

    async def scenario() -> None:
        async with scripted_server({"answers": [answer]}) as server:
            monkeypatch.setattr(EventStream, "flush", counted_flush)
            monkeypatch.setattr("penstock.serving.endpoints.answers.encode_events", counted_encode)
            stream = await ask(server, path, body)
        assert stream.count(b"data: ") >= num_choices * len(answer)
        assert writes == len(answer)
        assert whole == 2 * num_choices, "the first and last delta of each choice"

    run(scenario)


def test_uvloop_serves_streams_alike() -> None:
    uvloop: Any = pytest.importorskip("uvloop")
    streams = []

    async def scenario(server: Running) -> None:
        async with server.http.post("/v1/chat/completions", json=CHAT | {"stream": True, "n": 3}) as response:
            streams.append(without_identity(await response.read()))

    for loop_factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        serve(scenario, loop_factory=loop_factory)
    assert streams[0] == streams[1]
    assert streams[0].endswith(DONE)
