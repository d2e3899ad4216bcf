"""A server over a tiny model that turns text into numbers, with an HTTP client of its own."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import torch
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from penstock.api.app import build_app
from penstock.engine.config import EngineConfig
from penstock.engine.pooling.engine import PoolingEngine
from penstock.engine.pooling.loader import build_pooling_engine
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.context import PoolingContext, Workers
from penstock.serving.options import ServerOptions
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.listening import listening

MODEL = "tiny"
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@dataclass(frozen=True, slots=True)
class PoolingServer:
    url: str
    context: PoolingContext
    http: aiohttp.ClientSession

    @property
    def engine(self) -> PoolingEngine:
        return self.context.engine

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(path) as response:
            return response.status, await response.json()

    async def text(self, path: str) -> str:
        async with self.http.get(path) as response:
            return await response.text()

    async def post(self, path: str, body: object, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def refusal(self, path: str, body: object) -> tuple[int, str | None, str]:
        """Status, path and message of an error."""
        status, answer = await self.post(path, body)
        error = answer["error"]
        return status, error["param"], error["message"]


@asynccontextmanager
async def pooling_server(directory: Path, options: ServerOptions | None = None, **config: Any) -> AsyncIterator[PoolingServer]:
    """A server over the model in `directory`. `config` are fields of `EngineConfig`. Asserts that nothing is left in the engine."""
    engine = build_pooling_engine(directory, Tokenizer.load(directory), EngineConfig(**{"num_threads": 1} | config))
    with Workers() as workers:
        context = PoolingContext(
            engine=engine,
            tokenizer=engine.tokenizer,
            chat_template=ChatTemplate(TEMPLATE),
            model_names=(MODEL, "alias"),
            max_model_len=engine.model.max_model_len,
            vocab_size=engine.model.vocab_size,
            workers=workers,
            options=options or ServerOptions(),
        )
        await engine.start()
        async with listening(build_app(context)) as url:
            try:
                async with aiohttp.ClientSession(url) as http:
                    yield PoolingServer(url, context, http)
                assert (engine.stats().num_running, engine.stats().num_waiting) == (0, 0)
            finally:
                await engine.stop()


def serve_pooling(
    directory: Path, scenario: Callable[[PoolingServer], Awaitable[None]], options: ServerOptions | None = None, **config: Any
) -> None:
    """Runs a test's coroutine against `pooling_server`."""

    async def run() -> None:
        async with pooling_server(directory, options, **config) as server:
            await scenario(server)

    asyncio.run(run())


@dataclass(frozen=True, slots=True)
class Reference:
    """transformers' own embeddings of a directory: the mean of the token vectors, of length 1."""

    model: PreTrainedModel
    tokenizer: Tokenizer

    @classmethod
    def of(cls, directory: Path) -> "Reference":
        return cls(AutoModel.from_pretrained(directory).eval(), Tokenizer.load(directory))

    def embedding(self, text: str | list[int]) -> Tensor:
        token_ids = self.tokenizer.encode(text, add_special_tokens=True) if isinstance(text, str) else text
        return torch.nn.functional.normalize(self.vectors(token_ids).mean(dim=0), dim=0)

    def vectors(self, token_ids: list[int]) -> Tensor:
        """[T, D]"""
        with torch.no_grad():
            states: Tensor = self.model(input_ids=torch.tensor([token_ids])).last_hidden_state[0]
        return states
