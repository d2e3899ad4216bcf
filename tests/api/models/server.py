"""A server with several models, each with an engine that replays texts: loading takes as long as a test says."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
from aiohttp.test_utils import BaseTestServer

from penstock.api.app import build_app
from penstock.serving.context import LocalContext, ServerContext, Workers
from penstock.serving.models.file import ModelSpec
from penstock.serving.models.pool import Expectation, ModelPool, ModelsContext, PoolLimits, Resident
from penstock.serving.options import Arguments, ServerOptions
from penstock.serving.responses.store import ResponseStore
from tests.api.running_server import CountingEngine
from tests.api.scripted import CancellingServer, RecordingCompiler, byte_tokenizer, scripted_context

LIMITS = PoolLimits(num_bytes=2, wait_seconds=60, turn_seconds=0, pause_seconds=0)
OPTIONS = ServerOptions(keep_alive_interval=0)


@dataclass
class ScriptedLoader:
    """Every model says `I am NAME.`, and takes one byte. Loads wait for the `gate` where there is one; `failures` are raised once each."""

    options: ServerOptions
    gate: asyncio.Event | None = None
    failures: dict[str, list[Exception]] = field(default_factory=dict)
    engines: dict[str, CountingEngine] = field(default_factory=dict)
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    loads: list[str] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)

    async def fetch(self, spec: ModelSpec) -> Expectation:
        return Expectation(1, "generate")

    async def load(self, spec: ModelSpec) -> Resident:
        self.loads.append(spec.name)
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self.failures.get(spec.name):
            raise self.failures[spec.name].pop(0)
        engine = self.engines[spec.name] = CountingEngine(byte_tokenizer(), answers=[f"I am {spec.name}."])
        context = scripted_context(engine, RecordingCompiler(), Workers(), options=self.options, **self.settings.get(spec.name, {}))
        context.model_names = spec.model_names
        self.loaded.add(spec.name)
        return Resident(context, 1)

    async def unload(self, resident: Resident) -> None:
        self.loaded.remove(resident.context.model_names[0])
        await resident.closing.aclose()
        assert isinstance(resident.context, LocalContext)
        ServerContext.close(resident.context)  # there is no compiler to be closed

    async def free(self) -> None:
        """Nothing: the models are small."""


@dataclass(frozen=True, slots=True)
class ModelsServer:
    server: BaseTestServer
    http: aiohttp.ClientSession
    pool: ModelPool
    loader: ScriptedLoader
    context: ModelsContext

    @property
    def base_url(self) -> str:
        return str(self.server.make_url("/v1"))

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def get(self, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.get(path, **options) as response:
            return response.status, await response.json()

    async def chat(self, model: str, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", chat(model, **fields))


def chat(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Which model are you?"}], **fields}


def spec(name: str, **settings: Any) -> ModelSpec:
    return ModelSpec(name=name, arguments=Arguments(), **{"kind": "generate"} | settings)


@asynccontextmanager
async def models_server(
    specs: Sequence[ModelSpec], limits: PoolLimits = LIMITS, options: ServerOptions = OPTIONS, **loader: Any
) -> AsyncIterator[ModelsServer]:
    ours = ScriptedLoader(replace(options, files_dir=None), **loader)
    context = ModelsContext(engine=ModelPool(specs, ours, limits), workers=Workers(), options=options, responses=ResponseStore())
    await context.engine.start()
    async with CancellingServer(build_app(context)) as server, aiohttp.ClientSession(server.make_url("/")) as http:
        yield ModelsServer(server, http, context.engine, ours, context)
    await context.engine.stop()
    context.close()
    assert ours.loaded == set()
