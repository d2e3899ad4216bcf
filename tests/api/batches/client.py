"""Servers that keep files, and batches sent to them through the official client."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI
from openai.types import Batch

from penstock.serving.options import ServerOptions
from tests.api.scripted import MODEL, Scripted, client_of, scripted_server

CHAT_PATH = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")

Scenario = Callable[[AsyncOpenAI, Scripted], Coroutine[Any, Any, None]]


@asynccontextmanager
async def file_server(
    directory: Path, engine: Mapping[str, Any] | None = None, *, thinks: bool = False, **options: Any
) -> AsyncIterator[tuple[AsyncOpenAI, Scripted]]:
    given = ServerOptions(files_dir=str(directory), keep_alive_interval=0, **options)
    async with scripted_server(engine, thinks=thinks, options=given) as scripted, client_of(scripted.base_url) as client:
        yield client, scripted


def serve(scenario: Scenario, directory: Path, engine: dict[str, Any] | None = None, **options: Any) -> None:
    async def run() -> None:
        async with file_server(directory, engine, **options) as (client, scripted):
            await asyncio.wait_for(scenario(client, scripted), 120)

    asyncio.run(run())


async def begun(scripted: Scripted, count: int) -> None:
    while len(scripted.engine.requests) < count:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def with_key(client: AsyncOpenAI, key: str) -> AsyncOpenAI:
    return client.with_options(api_key=key)


def request_line(custom_id: str, text: str = "Hi", *, url: str = CHAT_PATH, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]} if url == CHAT_PATH else {"model": MODEL, "prompt": text}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body | fields}


def jsonl(lines: list[Any]) -> bytes:
    """Lines that are texts already stay as they are."""
    return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines).encode()


async def start_batch(client: AsyncOpenAI, lines: list[Any], endpoint: Any = CHAT_PATH, **fields: Any) -> Batch:
    file = await client.files.create(file=("input.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def finished(client: AsyncOpenAI, batch: Batch) -> Batch:
    while batch.status not in FINAL:
        await asyncio.sleep(0.002)
        batch = await client.batches.retrieve(batch.id)
    return batch


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> list[Any]:
    return [] if file_id is None else [json.loads(line) for line in (await client.files.content(file_id)).text.splitlines()]


async def by_custom_id(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """Asserts that none is there twice."""
    lines = await lines_of(client, file_id)
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
