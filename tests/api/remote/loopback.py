"""A context whose engine is at the other end of a socket, as in a process of its own: all of it on one loop."""

import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import fields

from penstock.engine.remote.client import RemoteEngine
from penstock.engine.remote.messages import Hello
from penstock.engine.remote.server import Connection, EngineServer, RequestReader
from penstock.serving.context import LocalContext, RemoteContext, ServerContext
from penstock.serving.observability.exposition import metrics_text
from penstock.serving.observability.metrics import merged_registry

IS_REMOTE = False  # whether `served_context` puts a socket in between; test_remote_engine.py sets it


def engine_server(context: LocalContext) -> EngineServer:
    """What an engine's process runs."""
    reader = RequestReader(
        tokenizer=context.tokenizer,
        vocab_size=context.vocab_size,
        processors=context.plugins.logits_processors,
        reasoning_parser=context.reasoning_parser,
        tool_parser=context.tool_parser,
        adapters=context.adapters,
    )
    hello = Hello("", context.max_model_len, context.vocab_size, context.stop_token_ids)

    def merge(reports: Sequence[bytes]) -> bytes:
        return metrics_text(merged_registry([], reports), context.options.metric_prefix)

    return EngineServer(context.engine, context.grammar_compiler, reader, merge, hello)


@asynccontextmanager
async def connected(server: EngineServer, context: LocalContext) -> AsyncIterator[tuple[RemoteContext, Connection]]:
    """An API server's context, and the engine's end of its connection."""
    ours, theirs = socket.socketpair()
    connection = await server.connect(ours)
    engine = RemoteEngine(theirs, context.plugins.logits_processors)
    await engine.start()
    shared = {field.name: getattr(context, field.name) for field in fields(ServerContext) if field.init}
    try:
        yield RemoteContext(**shared | {"engine": engine, "grammar_compiler": engine}), connection
    finally:
        await engine.stop()
        await connection.ended.wait()


@asynccontextmanager
async def served_context(context: LocalContext) -> AsyncIterator[ServerContext]:
    """The context itself, or one at the other end of a socket. Asserts that nothing of a request is left there."""
    if not IS_REMOTE:
        yield context
        return
    async with connected(engine_server(context), context) as (remote, connection):
        yield remote
    connection.check_integrity()
