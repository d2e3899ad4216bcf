"""Everything that serving a model needs, in one object: the engine, the tokenizer, the parsers, the operator's options, and worker threads
for jobs that would block the event loop, with a queue for each size, so that short jobs never wait for long ones.
"""

import asyncio
import enum
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from penstock.engine.adapters.registry import Adapter, AdapterRegistry
from penstock.engine.errors import EngineUnavailable, InvalidRequest, NoSuchModel
from penstock.engine.system.process import HANDOVER, release_heap
from penstock.engine.system.sandbox import Cancellation
from penstock.serving.messages import ConformanceChecker
from penstock.serving.observability.exposition import metrics_text
from penstock.serving.observability.metrics import (
    GrammarCollector,
    Metrics,
    PoolingCollector,
    RequestMetrics,
    ServerMetrics,
    TranscriptionCollector,
    report_of,
)
from penstock.serving.options import ServerOptions
from penstock.serving.responses.store import ResponseStore
from penstock.serving.templates.transcripts import Transcripts

if TYPE_CHECKING:
    from penstock.engine.constraints.compiler import GrammarCompiler
    from penstock.engine.contracts.grammar import CompiledGrammar, GrammarSpec
    from penstock.engine.contracts.hooks import ReasoningParserFactory, ToolParserFactory
    from penstock.engine.deltas import SequenceDelta
    from penstock.engine.loop import Engine
    from penstock.engine.multimodal.inputs import ImageProcessor
    from penstock.engine.pooling.engine import PoolingEngine
    from penstock.engine.pooling.model import PoolingModel, PoolingTask
    from penstock.engine.remote.client import RemoteEngine
    from penstock.engine.request import Request
    from penstock.engine.sampling.params import SamplingParams
    from penstock.engine.sampling.rows import TokenRules
    from penstock.engine.text.tokenizer import ContentTokenizer, Tokenizer
    from penstock.engine.transcription.engine import TranscriptionEngine
    from penstock.plugins.manager import Plugins
    from penstock.serving.templates.rendering import ChatTemplate


T = TypeVar("T")
Parameters = ParamSpec("Parameters")


class JobQueue(enum.Enum):
    """Jobs of one size. Each queue has its own threads, and refuses jobs beyond a bound on those that wait."""

    SHORT = "short"  # milliseconds: an ordinary conversation
    LONG = "long"  # up to seconds
    HUGE = "huge"  # tokenizing takes up to 300 bytes of memory for each character, so one at a time
    SANDBOXED = "sandboxed"  # seconds, in which the thread waits for a child process


NUM_THREADS = {JobQueue.SHORT: 2, JobQueue.LONG: 3, JobQueue.HUGE: 1, JobQueue.SANDBOXED: 2}
MAX_WAITING = {JobQueue.SHORT: 2048, JobQueue.LONG: 128, JobQueue.HUGE: 16, JobQueue.SANDBOXED: 16}
SMALL = 2**12  # what is smaller is done at once: a millisecond or two
LONG = 2**16
HUGE = 2**19


def queue_for(size: int) -> JobQueue | None:
    """The queue for work on `size` bytes, characters or numbers; None where the event loop can do it between two steps."""
    if size < SMALL:
        return None
    return JobQueue.SHORT if size < LONG else JobQueue.LONG if size < HUGE else JobQueue.HUGE


def rendering_queue(size: int, template: str | None) -> JobQueue:
    """Where a conversation of `size` is rendered and tokenized: never on the event loop, whatever its template does."""
    queue = queue_for(size) or JobQueue.SHORT
    return queue if template is None or queue is JobQueue.HUGE else JobQueue.SANDBOXED


def prompt_queue(size: int, *, is_conversation: bool, template: str | None) -> JobQueue | None:
    """Where a prompt is made of texts, which are only tokenized, or of a conversation, which its template renders first."""
    return rendering_queue(size, template) if is_conversation else queue_for(size)


def image_queue(queue: JobQueue | None) -> JobQueue:
    """Where work is done that is for `queue` by its texts, and has images to decode."""
    return JobQueue.LONG if queue is None or queue is JobQueue.SHORT else queue


class Workers(Executor):
    """One `ThreadPoolExecutor` for each queue; as an `Executor` itself it is the queue of long jobs, without a bound."""

    def __init__(self, max_waiting: dict[JobQueue, int] | None = None) -> None:
        self._pools = {queue: ThreadPoolExecutor(number, f"penstock-{queue.value}") for queue, number in NUM_THREADS.items()}
        self._max_waiting = MAX_WAITING | (max_waiting or {})
        self._num_unfinished = dict.fromkeys(JobQueue, 0)
        self._lock = threading.Lock()

    async def run(self, queue: JobQueue | None, call: Callable[[], T]) -> T:
        """Calls it in one of the queue's threads, or here without one. Where the caller stops waiting, its jobs in sandboxes are killed.

        Raises `EngineUnavailable` where too many jobs wait in the queue already.
        """
        if queue is None:
            return call()
        if self._num_unfinished[queue] >= self._max_waiting[queue] + NUM_THREADS[queue]:
            raise EngineUnavailable("the server has too many long requests to prepare: try again later")
        with self._lock:
            self._num_unfinished[queue] += 1
        cancellation = Cancellation()
        future = self._pools[queue].submit(cancellation.run, functools.partial(_trimming, call) if queue is JobQueue.HUGE else call)
        future.add_done_callback(lambda _: self._finish(queue))  # not when the caller stops waiting: a thread cannot be stopped
        try:
            with HANDOVER:
                return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            cancellation.cancel()
            raise

    def submit(self, function: Callable[Parameters, T], /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Future[T]:
        return self._pools[JobQueue.LONG].submit(function, *args, **kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for pool in self._pools.values():
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _finish(self, queue: JobQueue) -> None:
        with self._lock:
            self._num_unfinished[queue] -= 1


class Places:
    """A bound on the requests that do something at the same time, and on those that wait to do it."""

    def __init__(self, purpose: str, number: int, max_waiting: int) -> None:
        self._purpose = purpose
        self._free = asyncio.Semaphore(number)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Waits for one, and holds it. Raises `EngineUnavailable` where too many wait already."""
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            raise EngineUnavailable(f"too many requests wait to {self._purpose}: try again later")
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        try:
            yield
        finally:
            self._free.release()


def _trimming(call: Callable[[], T]) -> T:
    # The allocator would keep the memory of a huge text.
    try:
        return call()
    finally:
        release_heap()


NUM_FETCHING = 16  # requests whose images are fetched at a time, each with as many bytes as a body may have
MAX_WAITING_TO_FETCH = 64


class RunningEngine(Protocol):
    """The life of an engine, whatever it computes."""

    @property
    def is_healthy(self) -> bool: ...

    def check_admission(self, priority: int = 0) -> None:
        """Raises `EngineUnavailable` or `QueueFull` where a request of this priority would be refused whatever is in it."""
        ...

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float = 0.0) -> None: ...

    async def failed(self) -> None:
        """Returns when it has failed for good."""
        ...


class TextEngine(RunningEngine, Protocol):
    """An engine that generates text, in this process or in another one."""

    def generate(self, request: "Request") -> "AsyncGenerator[SequenceDelta, None]": ...


class Compiler(Protocol):
    """What compiles constraints, in this process or in another one."""

    async def compile(self, spec: "GrammarSpec", backend_name: str | None = None, *, client: str | None = None) -> "CompiledGrammar": ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What clients are shown of a name that they may ask for. `root` is the model's own name; `parent` is that of an adapter's model.

    `state` is there where models are loaded and unloaded; of one that never was, the length of its context is unknown.
    """

    name: str
    root: str
    tasks: tuple[str, ...]
    max_model_len: int | None
    parent: str | None = None
    state: str | None = None


@dataclass(slots=True, kw_only=True)
class SharedContext(ABC):
    """What handlers need whatever is served: one model or several. `workers` is for anything slow: the event loop stays free."""

    engine: RunningEngine
    workers: Workers
    options: ServerOptions = field(default_factory=ServerOptions)

    @property
    @abstractmethod
    def served_names(self) -> tuple[str, ...]:
        """All that requests may give as their model."""

    @property
    @abstractmethod
    def metrics_label(self) -> str:
        """The `model_name` of metrics that count for the server as a whole; empty where it has several models."""

    @abstractmethod
    def descriptions(self) -> list[ModelDescription]:
        """One for each of the names that are served."""

    def warm_up(self) -> None:  # noqa: B027 - several models are warmed up when they are loaded
        """Does beforehand what the first request would wait for. Blocks for up to a second."""

    async def metrics_text(self, metrics: ServerMetrics) -> bytes:
        """What /metrics answers. `metrics` are those of this process."""
        return metrics_text(metrics.registry, self.options.metric_prefix)

    def close(self) -> None:
        """Ends the threads and processes. The engine has been stopped before."""
        self.workers.shutdown(wait=False, cancel_futures=True)


@dataclass(slots=True, kw_only=True)
class ModelContext(SharedContext):
    """What handlers need of one model, whatever it does. `vocab_size` bounds the token ids that may come in. `content_tokenizer` is set
    where special tokens in messages are text. `model_names` are those of the model itself, of which answers have the first; `adapters` are
    served beside it.
    """

    tokenizer: "Tokenizer"
    chat_template: "ChatTemplate"
    model_names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    content_tokenizer: "ContentTokenizer | None" = None
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)

    @property
    def served_names(self) -> tuple[str, ...]:
        """Of the model, then of the adapters."""
        return (*self.model_names, *(adapter.name for adapter in self.adapters))

    @property
    def metrics_label(self) -> str:
        return self.model_names[0]

    @property
    @abstractmethod
    def tasks(self) -> tuple[str, ...]:
        """What the model does, by the names of /v1/models."""

    def descriptions(self) -> list[ModelDescription]:
        root, tasks, length = self.model_names[0], self.tasks, self.max_model_len
        own = [ModelDescription(name=name, root=root, tasks=tasks, max_model_len=length) for name in self.model_names]
        return own + [
            ModelDescription(name=adapter.name, root=root, tasks=tasks, max_model_len=length, parent=root) for adapter in self.adapters
        ]

    @abstractmethod
    def make_metrics(self) -> RequestMetrics:
        """Those of this process; those of the engine are among them where it runs here."""

    def adapter_of(self, name: str | None) -> Adapter | None:
        """The adapter that is served under this name; None where that is the model's own, or none. Raises `NoSuchModel`."""
        if not name or name in self.model_names:
            return None
        adapter = self.adapters.get(name)
        if adapter is None:
            raise NoSuchModel(f"The model `{name}` does not exist. Served here: {', '.join(self.served_names)}.", "model")
        return adapter

    def warm_up(self) -> None:
        if self.options.trust_request_chat_template:
            self.chat_template.prestart()

    def close(self) -> None:
        self.chat_template.close()
        SharedContext.close(self)


@dataclass(slots=True, kw_only=True)
class ServerContext(ModelContext):
    """A model that generates, shared by every handler: a `LocalContext` or a `RemoteContext`.

    `vocab_size` is the width of the logits that may be sampled; `stop_token_ids` are the model's own. `default_sampling` holds the
    model's generation_config by our field names. `system_fingerprint` changes with whatever may change the answer to a seed.
    `image_processor` is None where the model takes no images; `embedding_size` is that of the vectors in `prompt_embeds`, if these are on.
    """

    engine: TextEngine
    stop_token_ids: frozenset[int]
    plugins: "Plugins"
    reasoning_parser: "ReasoningParserFactory | None"
    tool_parser: "ToolParserFactory | None"
    grammar_compiler: Compiler
    default_thinking_budget: int | None
    default_sampling: dict[str, Any]
    system_fingerprint: str | None = None
    image_processor: "ImageProcessor | None" = None
    embedding_size: int | None = None
    conformance: ConformanceChecker = field(default_factory=ConformanceChecker)
    transcripts: Transcripts = field(init=False)
    responses: ResponseStore = field(default_factory=ResponseStore)
    image_fetches: Places = field(default_factory=lambda: Places("fetch images", NUM_FETCHING, MAX_WAITING_TO_FETCH))

    def __post_init__(self) -> None:
        self.transcripts = Transcripts(self.tokenizer)

    def require_images(self, param: str) -> "ImageProcessor":
        """Raises `InvalidRequest`, with `param` as its path, where the model takes no images."""
        if self.image_processor is None:
            raise InvalidRequest(f"`{param}` is an image, and `{self.model_names[0]}` takes no images", param)
        return self.image_processor

    def require_prompt_embeds(self, param: str) -> int:
        """The size of their vectors. Raises `InvalidRequest`, with `param` as its path, where prompts of vectors are not taken."""
        if self.embedding_size is None:
            raise InvalidRequest(f"`{param}` is off: start the engine with --enable-prompt-embeds", param)
        return self.embedding_size

    def token_rules(self, params: "SamplingParams") -> "TokenRules | None":
        """What a request's parameters say of single tokens: takes up to a second. None where the engine's process makes it."""
        return None

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("generate",)

    @abstractmethod
    def make_metrics(self) -> Metrics: ...

    def close(self) -> None:
        self.conformance.close()
        self.responses.close()
        ModelContext.close(self)


@dataclass(slots=True, kw_only=True)
class LocalContext(ServerContext):
    """The engine runs in this process."""

    engine: "Engine"
    grammar_compiler: "GrammarCompiler"

    def token_rules(self, params: "SamplingParams") -> "TokenRules":
        from penstock.engine.sequence_factory import token_rules  # imports torch, which a `RemoteContext` does without

        return token_rules(params, self.tokenizer, self.vocab_size)

    def warm_up(self) -> None:
        ModelContext.warm_up(self)
        self.grammar_compiler.warm_up()

    def make_metrics(self) -> Metrics:
        metrics = Metrics(self.engine.stats, self.model_names[0])
        metrics.registry.register(GrammarCollector(self.grammar_compiler.stats, self.model_names[0]))
        return metrics

    def close(self) -> None:
        self.grammar_compiler.close()
        ServerContext.close(self)


@dataclass(slots=True, kw_only=True)
class RemoteContext(ServerContext):
    """The engine runs in another process, which also compiles constraints and merges the metrics of all processes."""

    engine: "RemoteEngine"

    def make_metrics(self) -> Metrics:
        metrics = Metrics(None, self.model_names[0])
        self.engine.report = lambda: report_of(metrics.registry)
        return metrics

    async def metrics_text(self, metrics: ServerMetrics) -> bytes:
        return await self.engine.merged_metrics()

    def require_images(self, param: str) -> "ImageProcessor":
        raise InvalidRequest(f"`{param}` is an image, which a server with --api-servers does not read", param)


@dataclass(slots=True, kw_only=True)
class PoolingContext(ModelContext):
    """A model that gives numbers for a text: an encoder, a classifier, a cross-encoder."""

    engine: "PoolingEngine"

    @property
    def tasks(self) -> tuple[str, ...]:
        return (*sorted(self.engine.model.tasks),)

    def make_metrics(self) -> RequestMetrics:
        return RequestMetrics(PoolingCollector(self.engine.stats, self.model_names[0]), self.model_names[0])


@dataclass(slots=True, kw_only=True)
class SpeechContext(ModelContext):
    """A model that turns speech into text. Its context is that of the text of a window of audio."""

    engine: "TranscriptionEngine"

    @property
    def tasks(self) -> tuple[str, ...]:
        return ("transcription", "translation") if self.engine.model.tokens.is_multilingual else ("transcription",)

    def make_metrics(self) -> RequestMetrics:
        return RequestMetrics(TranscriptionCollector(self.engine.stats, self.model_names[0]), self.model_names[0])


GENERATES = "a model that generates text"
TRANSCRIBES = "a model that turns speech into text"
SCORING_ROUTES = ("/v1/score", "/v1/rerank")
ROUTES: "dict[PoolingTask, tuple[str, ...]]" = {
    "embed": ("/v1/embeddings", *SCORING_ROUTES, "/pooling"),
    "token_embed": ("/pooling",),
    "score": (*SCORING_ROUTES, "/pooling"),
    "classify": ("/classify", "/pooling"),
    "token_classify": ("/pooling",),
}


def description(model: "PoolingModel") -> str:
    if "score" in model.tasks:
        return "a cross-encoder, which scores pairs of texts"
    if "classify" in model.tasks:
        return f"a classifier with {model.num_labels} labels"
    if "token_classify" in model.tasks:
        return f"a classifier of tokens with {model.num_labels} labels"
    return "an embedding model"


def routes_of(model: "PoolingModel") -> list[str]:
    """Those that serve it, each once."""
    return list(dict.fromkeys(route for task, routes in ROUTES.items() if task in model.tasks for route in routes))


def check_task(context: PoolingContext, *tasks: "PoolingTask") -> None:
    """Raises `InvalidRequest`, naming the routes that do serve the model, where it can do none of these."""
    if not set(tasks) & context.engine.model.tasks:
        raise InvalidRequest(wrong_task(context), "model")


def wrong_task(context: PoolingContext) -> str:
    """The message for a request that a pooling model cannot serve: what the model is, and its routes."""
    model = context.engine.model
    return wrong_model(context.model_names[0], description(model), routes_of(model))


def wrong_model(name: str, what: str, routes: Iterable[str]) -> str:
    return f"`{name}` is {what}; it is served by {', '.join(routes)}"
