"""A server whose model makes everything up: grammars, parsers, engine and HTTP are real. What is valid here, the grammar has made so."""

import asyncio
import math
import zlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI

from penstock.api.app import build_app
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.loop import Engine
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from penstock.serving.context import ServerContext, Workers
from penstock.serving.templates.rendering import ChatTemplate
from tests import fakes
from tests.api import scripted
from tests.api.remote.loopback import served_context
from tests.api.scripted import client_of, scripted_context

MODEL = scripted.MODEL
MAX_MODEL_LEN = 4096
PROMPT_END = "\x01"
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for message in messages %}{{ message.content }}\n{% endfor %}"
)
MARKER_TOKENS = scripted.byte_tokenizer()
NO_MARKER_TOKENS = fakes.byte_tokenizer()
WEIGHTS = {'"': 60.0, "{": 60.0, "}": 60.0, "]": 30.0, ",": 30.0, "<": 5.0, "\n": 5.0}

Scenario = Callable[["Improvised"], Coroutine[Any, Any, None]]


class Improviser:
    """Begins with `opening` and goes on at random: the same after the same tokens, and mostly with what makes JSON end soon.

    `tail` is what the template opens the answer with.
    """

    def __init__(self, tokenizer: Tokenizer, opening: str, tail: str, stop_token_ids: frozenset[int]) -> None:
        [self._prompt_end] = tokenizer.encode(PROMPT_END, add_special_tokens=False)
        self._opening = tokenizer.encode(tail + opening, add_special_tokens=False)
        self._logits_V = torch.zeros(tokenizer.vocab_size)
        for text, weight in WEIGHTS.items():
            self._logits_V[tokenizer.encode(text, add_special_tokens=False)] = math.log(weight)
        self._logits_V[list(stop_token_ids)] = math.log(10.0)

    def __call__(self, token_ids: Sequence[int]) -> torch.Tensor:
        num_said = len(token_ids) - 1 - token_ids.index(self._prompt_end)
        if num_said < len(self._opening):
            certain_V = torch.zeros_like(self._logits_V)
            certain_V[self._opening[num_said]] = 100.0
            return certain_V
        random = torch.Generator().manual_seed(zlib.crc32(repr(token_ids).encode()))
        return self._logits_V - torch.empty_like(self._logits_V).exponential_(generator=random).log()


@dataclass(frozen=True, slots=True)
class Improvised:
    """A server under test and its client."""

    client: AsyncOpenAI
    context: ServerContext

    async def ask(self, about: object = "", **fields: Any) -> Any:
        """Untyped, since the library's types know no fields but OpenAI's."""
        return await self.client.chat.completions.create(**_request(about) | fields)

    def num_tokens(self, text: str) -> int:
        return len(self.context.tokenizer.encode(text, add_special_tokens=False))

    async def stream(self, about: object = "", **fields: Any) -> list[Any]:
        return [chunk async for chunk in await self.client.chat.completions.create(**_request(about) | fields, stream=True)]


def _request(about: object) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": str(about)}], "temperature": 0, "max_tokens": 1500}


def improvise(
    scenario: Scenario,
    *,
    opening: str = "",
    tail: str = "",
    plugins: Sequence[str] | Plugins = ("hermes",),
    tokenizer: Tokenizer = MARKER_TOKENS,
    **core_options: Any,
) -> None:
    """Runs a scenario against a fresh server with these plug-ins, and asserts that nothing is left of its requests.

    `core_options` are the fake engine core's.
    """

    async def run() -> None:
        ending = frozenset({tokenizer.token_id("<|im_end|>") or fakes.EOS})
        core = fakes.make_core(
            Improviser(tokenizer, opening, tail, ending),
            num_blocks=512,
            block_size=64,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=2048,
            tokenizer=tokenizer,
            stop_token_ids=ending,
            **core_options,
        )
        loaded = plugins if isinstance(plugins, Plugins) else Plugins.start(plugins)
        compiler = GrammarCompiler(loaded.grammar_backends, tokenizer, tokenizer.vocab_size, ending)
        engine = Engine(core)
        with Workers() as workers:
            template = TEMPLATE + "{% if add_generation_prompt %}" + PROMPT_END + tail + "{% endif %}"
            context = replace(
                scripted_context(cast(Any, scripted.ScriptedEngine(tokenizer)), scripted.RecordingCompiler(), workers),
                engine=engine,
                chat_template=ChatTemplate(template),
                max_model_len=MAX_MODEL_LEN,
                stop_token_ids=ending,
                plugins=loaded,
                reasoning_parser=loaded.reasoning_parser,
                tool_parser=loaded.tool_parser,
                grammar_compiler=compiler,
            )
            await engine.start()
            async with (
                served_context(context) as served,
                TestServer(build_app(served)) as server,
                client_of(str(server.make_url("/v1"))) as client,
            ):
                await scenario(Improvised(client, context))
            await engine.stop()
            engine.check_integrity()
            compiler.close()

    asyncio.run(run())
