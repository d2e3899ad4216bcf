"""The server inside another program, as a replica has it: several models that are loaded as requests name them."""

import asyncio
import json
from pathlib import Path
from typing import Any

from penstock.integrations.embedded import Call, EmbeddedServer, Head, read_flags

NAMES = ("a", "b")


def models_file(directory: Path) -> Path:
    tables = []
    for name in NAMES:
        script = directory / f"{name}.jsonl"
        script.write_text(f'{{"model": {{"name": "{name}"}}}}\n{{"content": "I am {name}"}}\n', encoding="utf-8")
        tables.append(f'[models.{name}]\nmodel = "scripted:{script}"\nmax_model_len = 1024\n')
    path = directory / "models.toml"
    path.write_text("\n".join(tables), encoding="utf-8")
    return path


def test_a_replica_answers_with_the_model_that_is_asked_for(tmp_path: Path) -> None:
    server = EmbeddedServer(read_flags(["--models", str(models_file(tmp_path)), "--device", "cpu"]))

    async def answer(target: str, **fields: Any) -> tuple[int, Any]:
        body = json.dumps(fields).encode() if fields else b""
        call = Call("POST" if fields else "GET", target, [("Content-Type", "application/json")], body)
        head, *pieces = [piece async for piece in await server.answer(call)]
        assert isinstance(head, Head)
        return head.status, json.loads(b"".join(piece for piece in pieces if isinstance(piece, bytes)))

    async def scenario() -> None:
        for name in (*NAMES, NAMES[0]):
            status, found = await answer("/v1/chat/completions", model=name, messages=[{"role": "user", "content": "Your name?"}])
            assert status == 200, found
            assert found["choices"][0]["message"]["content"] == f"I am {name}"
        _, found = await answer("/v1/models")
        assert [model["id"] for model in found["data"]] == list(NAMES)
        assert (await answer("/v1/completions", model="c", prompt="x"))[0] == 404
        assert server.is_healthy
        await server.stop()

    asyncio.run(scenario())
