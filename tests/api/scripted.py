"""A server whose engine replays given texts: everything is real but the model."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

from aiohttp import web
from aiohttp.test_utils import BaseTestServer, TestServer
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from penstock import LogitsProcessor, LogitsRow, per_row, per_sequence
from penstock.api.app import build_app, build_runner
from penstock.engine.constraints.compiler import BOUNDS, CompileOutcome, GrammarStats, is_lenient
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher, GrammarSpec
from penstock.engine.deltas import FinishReason, PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import EngineUnavailable, InvalidRequest, PenstockError, QueueFull
from penstock.engine.loop import DeltaStream
from penstock.engine.request import Request
from penstock.engine.system.process import Histogram
from penstock.engine.text.tokenizer import Tokenizer
from penstock.plugins.manager import Plugins
from penstock.plugins.reasoning.formats import FORMATS
from penstock.serving.context import LocalContext, Workers
from penstock.serving.options import ServerOptions
from penstock.serving.templates.rendering import ChatTemplate
from tests.api.remote.loopback import served_context

CHATML = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
MAX_MODEL_LEN = 400
MODEL = "scripted"
CUT = "\x00"


def byte_tokenizer(added: Mapping[str, bool] | None = None) -> Tokenizer:
    """One token per byte, and added ones: by their text, whether they are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=special) for text, special in (ADDED if added is None else added).items()])
    return Tokenizer(backend, {}, {}, [])


ADDED = {"<|im_start|>": True, "<|im_end|>": True, "<think>": False, "</think>": False, "<tool_call>": False, "</tool_call>": False}


@dataclass
class ScriptedEngine:
    """Sequence i of every request says `answers[i % len]`, `tokens_per_step` tokens a step; its last step says that it has stopped.
    No token lies across a `CUT`, which is not said itself.

    `refusal` is raised before the first delta, `failure` is the error that ends every sequence after two steps. Where there is a `gate`,
    step `gate_step` waits until it is set. The deadline of a request that has one passes before step `expiry_step`. `happenings` tells of
    every request that it has begun, and that it has finished or was aborted; `aborted` counts the latter.
    """

    tokenizer: Tokenizer
    answers: list[str] = field(default_factory=lambda: ["Hello there."])
    tokens_per_step: int = 1
    refusal: PenstockError | None = None
    failure: str | None = None
    gate: asyncio.Event | None = None
    gate_step: int = 0
    expiry_step: int | None = None
    requests: list[Request] = field(default_factory=list)
    aborted: int = 0
    pumps: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    happenings: asyncio.Queue[str] = field(default_factory=asyncio.Queue)

    @property
    def is_healthy(self) -> bool:
        return True

    def check_admission(self, priority: int = 0) -> None:
        if isinstance(self.refusal, QueueFull | EngineUnavailable):
            raise self.refusal

    async def generate(self, request: Request) -> AsyncGenerator[SequenceDelta, None]:
        self.requests.append(request)
        self.happenings.put_nowait("begun")
        if self.refusal is not None:
            raise self.refusal
        is_whole = False
        try:
            sequences = [self._sequence(request, index) for index in range(request.params.n)]
            step = 0
            while sequences:
                if self.gate is not None and step == self.gate_step:
                    await self.gate.wait()
                if step == self.expiry_step and request.deadline is not None:
                    for index in range(request.params.n):
                        yield SequenceDelta(index, finish_reason=FinishReason.TIMED_OUT)
                    break
                step += 1
                for sequence in list(sequences):
                    delta = next(sequence)
                    if delta.finish_reason is not None:
                        sequences.remove(sequence)
                    yield delta
                await asyncio.sleep(0)
            is_whole = True
        finally:
            self.aborted += not is_whole
            self.happenings.put_nowait("finished" if is_whole else "aborted")

    async def open(self, stream: DeltaStream) -> None:
        deltas = self.generate(stream.request)
        try:
            first = await anext(deltas)
        except BaseException:
            await deltas.aclose()
            raise
        self.pumps[stream.request.request_id] = asyncio.create_task(self._pump(stream, first, deltas))

    async def _pump(self, stream: DeltaStream, first: SequenceDelta, deltas: AsyncGenerator[SequenceDelta, None]) -> None:
        async with aclosing(deltas):
            stream.put([first])
            async for delta in deltas:
                stream.put([delta])

    def close(self, request_id: str) -> None:
        self.pumps.pop(request_id).cancel()

    def end_sequence(self, request_id: str, index: int, num_tokens: int) -> None:
        """Goes on saying what no client reads."""

    def stats(self) -> Any:
        raise AssertionError("nothing asks for statistics here")

    def _sequence(self, request: Request, index: int) -> Any:
        params, answer = request.params, request.make_answer()
        parts = self.answers[index % len(self.answers)].split(CUT)
        token_ids = [token_id for part in parts for token_id in self.tokenizer.encode(part, add_special_tokens=False)]
        limit = len(token_ids) + 1 if params.max_tokens is None else params.max_tokens
        is_cut = limit <= len(token_ids)
        token_ids = token_ids[:limit]
        prompt: PromptInfo | None = self._prompt(request)
        steps = [token_ids[start : start + self.tokens_per_step] for start in range(0, len(token_ids), self.tokens_per_step)] or [[]]
        for number, step in enumerate(steps):
            delta = SequenceDelta(index, prompt=prompt)
            prompt = None
            if self.failure is not None and number == 2:
                delta.finish_reason, delta.error = FinishReason.ERROR, self.failure
                yield delta
                return
            for token_id in step:
                delta.token_ids.append(token_id)
                num_reasoning_tokens = answer.num_reasoning_tokens
                delta.events += answer.feed(token_id)
                if params.logprobs is not None:
                    is_reasoning = answer.num_reasoning_tokens > num_reasoning_tokens
                    delta.logprobs.append(replace(logprobs_of(token_id, params.logprobs), is_reasoning=is_reasoning))
                if answer.has_ended:
                    break
            if answer.has_ended or number == len(steps) - 1:
                delta.events += answer.finish()
                delta.stop_reason = answer.stop_match
                delta.finish_reason = FinishReason.LENGTH if is_cut and not answer.has_ended else FinishReason.STOP
            delta.num_reasoning_tokens = answer.num_reasoning_tokens
            yield delta
            if delta.finish_reason is not None:
                return

    def _prompt(self, request: Request) -> PromptInfo:
        token_ids, num_top = request.prompt_token_ids, request.params.prompt_logprobs
        logprobs = None if num_top is None else (None, *(logprobs_of(token_id, num_top) for token_id in token_ids[1:]))
        return PromptInfo(len(token_ids), min(16, len(token_ids) - 1), logprobs)


def logprobs_of(token_id: int, num_top: int) -> TokenLogprobs:
    """Made up: the token is the second best, and the worst one is impossible."""
    top = ((token_id + 1) % 256, -0.25), (token_id, -1.5), ((token_id + 2) % 256, float("-inf"))
    return TokenLogprobs(token_id, -1.5, 2, top[:num_top])


@dataclass
class RecordingCompiler:
    """Compiles nothing: keeps what it was given. A regex `[` is refused. `warnings` are those of every lenient grammar."""

    specs: list[tuple[GrammarSpec, str | None]] = field(default_factory=list)
    clients: list[str | None] = field(default_factory=list)
    warnings: tuple[str, ...] = ()

    async def compile(self, spec: GrammarSpec, backend: str | None, *, client: str | None = None) -> CompiledGrammar:
        self.specs.append((spec, backend))
        self.clients.append(client)
        if spec.text == "[":
            raise InvalidRequest("unclosed set at 0", spec.param)
        return NoGrammar(self.warnings if is_lenient(spec) else ())

    def stats(self) -> GrammarStats:
        times = Histogram(BOUNDS)
        for seconds in (0.001, 0.003, 20.0):
            times.observe(seconds)
        attempts = {("fast", CompileOutcome.COMPILED): 2, ("fast", CompileOutcome.REFUSED): 1}
        return GrammarStats(attempts, {"fast": times}, 9, 6, num_cache_entries=2, num_cache_bytes=300, num_running=1, num_waiting=4)


@dataclass(frozen=True)
class NoGrammar(CompiledGrammar):
    warnings: tuple[str, ...] = ()
    num_bytes = 0

    def matcher(self) -> GrammarMatcher:
        raise AssertionError("the scripted engine follows no grammar")


@dataclass
class Scripted:
    """A server under test, and what its parts saw."""

    server: BaseTestServer
    engine: ScriptedEngine
    compiler: RecordingCompiler
    context: LocalContext

    @property
    def base_url(self) -> str:
        return str(self.server.make_url("/v1"))


def double(*, factor: float = 2.0) -> Any:
    if factor <= 0:
        raise ValueError("factor must be positive")
    return lambda token_ids, logits: logits * factor


def add(row: LogitsRow, logits: Any, *, amount: float = 1.0) -> Any:
    return logits + amount


class Scale(LogitsProcessor):
    def begin(self, factor: float) -> float:
        if factor <= 0:
            raise ValueError("factor must be positive")
        return factor

    def process(self, rows: Any, logits: Any) -> Any:
        return [row.state * own for row, own in zip(rows, logits, strict=True)]


def scripted_context(engine: ScriptedEngine, compiler: RecordingCompiler, workers: Workers, **settings: Any) -> LocalContext:
    plugins = Plugins()
    plugins.register_logits_processors({"double": per_sequence(double), "add": per_row(add), "scale": Scale}, "tests")
    plugins.grammar_backends.add("recording", "tests", cast(Any, None))
    defaults: dict[str, Any] = {"reasoning_parser": None, "tool_parser": None, "default_thinking_budget": None, "default_sampling": {}}
    settings = defaults | {"chat_template": ChatTemplate(CHATML), "max_model_len": MAX_MODEL_LEN} | settings
    return LocalContext(
        engine=cast(Any, engine),
        tokenizer=engine.tokenizer,
        model_names=(MODEL, "alias"),
        vocab_size=engine.tokenizer.vocab_size,
        stop_token_ids=frozenset(),
        plugins=plugins,
        grammar_compiler=cast(Any, compiler),
        options=settings.pop("options", ServerOptions(keep_alive_interval=0)),
        workers=workers,
        **settings,
    )


@asynccontextmanager
async def scripted_server(engine: Mapping[str, Any] | None = None, *, thinks: bool = False, **settings: Any) -> AsyncIterator[Scripted]:
    """Serves on a free local port. `engine` are `ScriptedEngine`'s fields, `settings` the context's. `thinks` activates deepseek_r1."""
    if thinks:
        settings["reasoning_parser"] = FORMATS["deepseek_r1"]
    replay, compiler = ScriptedEngine(**{"tokenizer": byte_tokenizer()} | dict(engine or {})), RecordingCompiler()
    with Workers() as workers:
        context = scripted_context(replay, compiler, workers, **settings)
        async with served_context(context) as served, CancellingServer(build_app(served)) as server:
            yield Scripted(server, replay, compiler, context)
        context.responses.close()


def client_of(base_url: str) -> AsyncOpenAI:
    """The official client, without certificates: they take longer to load than most tests run."""
    return AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=DefaultAsyncHttpxClient(verify=False))


class CancellingServer(TestServer):
    """Cancels the handlers of clients that are gone, as the real runner does."""

    async def _make_runner(self, **kwargs: Any) -> web.AppRunner:
        return build_runner(self.app)
