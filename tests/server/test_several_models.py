"""Several models, loaded from files in one process: what they take, what they say, and that their memory returns."""

import asyncio
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from penstock import assembly
from penstock.api.app import build_app, build_runner
from penstock.assembly import assemble_models
from penstock.engine.errors import ConfigurationError
from penstock.engine.system.process import heap_bytes
from penstock.server import main
from penstock.serving.models.file import ModelSpec, read_models_file
from penstock.serving.models.pool import ModelsContext
from penstock.serving.options import Arguments
from tests import encoders

MIB = 2**20
REAL = """
memory = "400MiB"

[models.text]
model = "smollm2"
kv_cache_memory = "256MiB"

[models.vectors]
model = "minilm"
"""


@asynccontextmanager
async def server(path: Path) -> AsyncIterator[tuple[ModelsContext, aiohttp.ClientSession]]:
    arguments = Arguments(models=str(path), port=0)
    context = assemble_models(arguments, read_models_file(arguments)).context
    await context.engine.start()
    runner = build_runner(build_app(context))
    await runner.setup()
    site = aiohttp.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with aiohttp.ClientSession("http://{}:{}".format(*runner.addresses[0])) as http:
            yield context, http
    finally:
        await context.engine.stop()
        await runner.cleanup()
        context.close()


async def completion(http: aiohttp.ClientSession, model: str) -> str:
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    async with http.post("/v1/completions", json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        text: str = answer["choices"][0]["text"]
        return text


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def scripts(directory: Path, *names: str, **fields: Any) -> list[str]:
    """The tables of scripted models, of which each says its name."""
    for name in names:
        (directory / f"{name}.jsonl").write_text(json.dumps({"content": f"I am {name}.", **fields}), encoding="utf-8")
    return [f'[models.{name}]\nmodel = "scripted:{directory}/{name}.jsonl"\nmax_model_len = 1024' for name in names]


def test_models_are_loaded_from_their_files_and_unloaded(tmp_path: Path) -> None:
    embedder = encoders.embedding_directory(tmp_path / "embedder")
    tables = [*scripts(tmp_path, "a", "b"), f'[models.vectors]\nmodel = "{embedder}"']
    path = tmp_path / "models.toml"
    path.write_text('[defaults]\nkv_cache_memory = "16MiB"\n' + "\n".join(tables), encoding="utf-8")

    async def scenario() -> None:
        async with server(path) as (context, http):
            pool = context.engine
            for name in ("a", "b", "a"):
                assert await completion(http, name) == f"I am {name}."[:8]
            assert [model.num_loads for model in pool] == [1, 1, 0]
            a = pool.find("a")
            assert 16 * MIB <= a.num_bytes < 64 * MIB
            before = heap_bytes()
            await pool.unload(a)
            assert before - heap_bytes() > 15 * MIB
            assert await completion(http, "a") == "I am a."
            async with http.post("/v1/embeddings", json={"model": "vectors", "input": "text"}) as response:
                assert len((await response.json())["data"][0]["embedding"]) > 1
            async with http.post("/v1/embeddings", json={"model": "a", "input": "text"}) as response:
                assert response.status == 400

    asyncio.run(scenario())


@pytest.mark.thorough
def test_the_memory_of_real_models_returns_at_each_of_20_swaps(tmp_path: Path) -> None:
    path = tmp_path / "models.toml"
    path.write_text(REAL, encoding="utf-8")

    async def scenario() -> tuple[list[int], list[int]]:
        in_use: list[int] = []
        resident: list[int] = []
        async with server(path) as (context, http):
            answers = set[str]()
            for _ in range(20):
                async with http.post("/v1/embeddings", json={"model": "vectors", "input": "text"}) as response:
                    assert response.status == 200, await response.text()
                in_use.append(heap_bytes())
                resident.append(resident_bytes())
                answers.add(await completion(http, "text"))
            assert len(answers) == 1
            assert [model.num_loads for model in context.engine] == [20, 20]
            assert [model.num_unloads for model in context.engine] == [19, 20]
        return in_use, resident

    in_use, resident = asyncio.run(scenario())
    print("MiB in use:", [size // MIB for size in in_use], "resident:", [size // MIB for size in resident])  # what a failure shows
    # The first loads import what they need. What the allocator keeps of what is freed depends on the order in which threads free it: where
    # a model stayed, which takes more than 400 MiB, at each swap, it would be 20 times as much as is allowed.
    assert in_use[-1] - in_use[2] < 20 * MIB
    assert resident[-1] - resident[2] < 400 * MIB


def test_the_end_of_a_server_does_not_wait_for_a_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def hanging(spec: ModelSpec) -> Path:
        assert threading.current_thread().daemon, "the process would wait for this thread"
        raise ConfigurationError("no answer")

    monkeypatch.setattr(assembly, "directory_of", hanging)
    with pytest.raises(ConfigurationError, match="no answer"):
        asyncio.run(assembly.LocalLoader().fetch(ModelSpec(name="a", arguments=Arguments())))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "smollm2"], "--model is about one model, and --models serves several"),
        (["--api-servers", "2"], "--models: models are loaded in one process, so --api-servers cannot be used beside it"),
        (["--adapter-dir", "x"], "--adapter-dir is about one model"),
        (["--sleep-idle-seconds", "9"], "--sleep-idle-seconds cannot be used beside --models: the `ttl` of a model says when it is"),
        (["--tensor-parallel-size", "2"], "--tensor-parallel-size cannot be used beside --models: ranks compute one model"),
    ],
)
def test_what_several_models_cannot_have_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    path = tmp_path / "models.toml"
    path.write_text('[models.a]\nmodel = "smollm2"\n', encoding="utf-8")
    assert main(["--models", str(path), "--port", "0", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_mistake_in_the_file_ends_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "models.toml"
    path.write_text("[models.a]\nquantization = 'int5'\n", encoding="utf-8")
    assert main(["--models", str(path), "--port", "0"]) == 2
    assert f"penstock: error: --models {path}: models.a.quantization: invalid choice: 'int5'" in capsys.readouterr().err
