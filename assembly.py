"""Assembles everything that a handler needs from the arguments. Anything that can be refused is refused before the model is loaded."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from penstock.engine.adapters.checkpoint import AdapterConfig
from penstock.engine.adapters.registry import AdapterRegistry
from penstock.engine.build import build_core, image_processor, load, load_draft, load_prepared
from penstock.engine.config import DRAFT, MTP, AdapterSource, EngineConfig
from penstock.engine.constraints.compiler import GrammarCompiler
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.loop import Engine
from penstock.engine.model.config import check_kind, read_config, read_generation_config, recommended_sampling, sampling_defaults
from penstock.engine.model.drafters.configured import check_draft
from penstock.engine.model.loader import CPU_CACHE, free_memory, resolve_device
from penstock.engine.model.prepared import PreparedFiles
from penstock.engine.model.store import model_name, resolve_model
from penstock.engine.native.runtime import build_ahead, choose_kernels, kernels_in_use
from penstock.engine.parallel.rendezvous import leading
from penstock.engine.pooling.files import ModelKind, model_kind
from penstock.engine.system.cache import make_data_directory, redirect_compiler_caches
from penstock.engine.system.process import (
    collect_garbage,
    connection_limit,
    heap_bytes,
    memory_shortage_refused,
    release_heap,
    startup_phase,
    triton_left_out,
)
from penstock.engine.weights.quantization import quantized_layers
from penstock.plugins.manager import NONE, Plugins, Registry
from penstock.serving.context import LocalContext, PoolingContext, SpeechContext, Workers, description
from penstock.serving.models.file import ModelsFile, ModelSpec, check_not_alone, gib
from penstock.serving.models.pool import Expectation, ModelPool, ModelsContext, PoolLimits, Resident
from penstock.serving.models.startup import ModelFiles, context_fields, model_fields, response_store, server_options
from penstock.serving.options import Arguments

if TYPE_CHECKING:
    from penstock.engine.pooling.engine import PoolingEngine
    from penstock.engine.transcription.engine import TranscriptionEngine

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Assembled:
    """A model that generates, and in a few words by what means it is served. `core` is what its engine runs, `directory` has its files."""

    context: LocalContext
    summary: str
    core: EngineCore
    directory: Path


@dataclass(frozen=True, slots=True)
class AssembledPooling:
    """The same of a model that turns text into numbers."""

    context: PoolingContext
    summary: str


@dataclass(frozen=True, slots=True)
class AssembledSpeech:
    """The same of a model that turns speech into text."""

    context: SpeechContext
    summary: str


# What `--runner` calls the kinds of models, and what these do.
KINDS: dict[ModelKind, str] = {
    "generate": "generates text",
    "pooling": "turns text into numbers",
    "transcription": "turns speech into text",
}


def assemble(
    arguments: Arguments, plugins: Plugins, *, is_prepared: bool = False, takes_audio: bool = True
) -> Assembled | AssembledPooling | AssembledSpeech:
    """Fetches and loads the model; takes seconds. Raises `ConfigurationError` for whatever cannot be served as asked.

    With `is_prepared` a model may be loaded without modules of its own, which native code does without, and is prepared for the next time.
    Where it takes no audio, models of speech are refused.
    """
    redirect_compiler_caches()
    connection_limit(arguments.server.max_connections)  # raises where there cannot be as many
    if arguments.server.files_dir is not None:
        make_data_directory(Path(arguments.server.files_dir), "--files-dir")
    if resolve_device(arguments.engine.device).type == "cpu":
        choose_kernels(arguments.engine.native_kernels)
        build_ahead()  # while the model is fetched and converted
    with startup_phase("files and tokenizer"):
        files = ModelFiles.of(arguments)
    kind = model_kind(files.directory)
    if arguments.runner not in ("auto", kind):
        name = model_name(arguments.engine.model)
        raise ConfigurationError(f"--runner {arguments.runner} is for another kind of model: {name} {KINDS[kind]}")
    if kind == "pooling":
        return assemble_pooling(arguments, files)
    if kind == "transcription":
        if not takes_audio:
            check_kind(read_config(files.directory))  # raises
        return assemble_speech(arguments, files)
    return assemble_generation(arguments, plugins, files, is_prepared=is_prepared)


def assemble_generation(arguments: Arguments, plugins: Plugins, files: ModelFiles, *, is_prepared: bool = False) -> Assembled:
    """As `assemble`, of a model that writes text."""
    config, tokenizer = arguments.engine, files.tokenizer
    if config.matryoshka:
        raise ConfigurationError(f"--matryoshka: for models that make embeddings, and {model_name(config.model)} generates text")
    for source in config.adapters:
        with refusing(source):
            AdapterConfig.read(Path(source.path).expanduser())
    if arguments.server.adapter_dir is not None:
        if not Path(arguments.server.adapter_dir).expanduser().is_dir():
            raise ConfigurationError(f"--adapter-dir: there is no directory {arguments.server.adapter_dir}")
        config = replace(config, enable_lora=True)
    prepared = PreparedFiles.of(files.directory, config) if is_prepared else None
    description = None if prepared is None else prepared.read(verify=arguments.verify_weights)
    recommended = own_generation_config(arguments, files.directory) if description is None else description.generation_config
    with startup_phase("chat template"):
        fields = context_fields(arguments, plugins, files)
        fields["default_sampling"] = default_sampling(arguments, recommended, files.directory)
    fields["image_processor"] = image_processor(files.directory, config) if description is None else None
    check_speculation(config, plugins)
    check_draft(config, tokenizer, files.directory)  # raises before the weights are read
    with startup_phase("model"), leading(config, lambda: read_config(files.directory, config.trust_remote_code)) as (group, own):
        config = own
        ready = load_prepared(prepared, description, config) if prepared is not None and description is not None else None
        loaded = ready or load(files.directory, config, group)
        core = build_core(loaded, tokenizer, config, plugins.proposers, load_draft(config, tokenizer, loaded))
    if prepared is not None and ready is None:
        prepare = startup_phase("preparation of the next start")(prepared.write)
        # Beside what is still to be done and the first requests, which need not wait for it. The process does not end before it has ended.
        thread = threading.Thread(target=prepare, args=(loaded, recommended), name="penstock-prepare")
        thread.start()
        core.runner.readers.append(thread)
    compiler = GrammarCompiler(dict(plugins.grammar_backends), tokenizer, core.vocab_size, core.stop_token_ids)
    core.report_unsupported = compiler.report_unsupported
    context = LocalContext(
        **fields,
        engine=Engine(core),
        grammar_compiler=compiler,
        max_model_len=core.max_model_len,
        vocab_size=core.vocab_size,
        stop_token_ids=core.stop_token_ids,
        embedding_size=core.runner.embedder.hidden_size if config.enable_prompt_embeds else None,
        adapters=load_adapters(config, core, fields["model_names"]),
    )
    return Assembled(context, summarize(arguments, context, core), core, files.directory)


def load_adapters(config: EngineConfig, core: EngineCore, model_names: tuple[str, ...]) -> AdapterRegistry:
    """Those of the operator, and what loads others. Raises `ConfigurationError`."""
    adapted = core.runner.adapted
    read = None if adapted is None else adapted.reader.read
    registry = AdapterRegistry(config.max_cpu_loras, reserved_names=model_names, read=read)
    for source in config.adapters:
        assert read is not None
        with refusing(source):
            registry.add(read(source.name, Path(source.path).expanduser()))
    return registry


@contextmanager
def refusing(source: AdapterSource) -> Iterator[None]:
    """Raises `ConfigurationError` where this adapter of the operator's cannot be loaded."""
    try:
        yield
    except InvalidRequest as error:
        raise ConfigurationError(f"--adapter {source.name}={source.path}: {error.message}") from error


def own_generation_config(arguments: Arguments, directory: Path) -> dict[str, Any]:
    """The model's own defaults for sampling, by generation_config's names."""
    return recommended_sampling(read_generation_config(directory, read_config(directory, arguments.engine.trust_remote_code)))


def check_speculation(config: EngineConfig, plugins: Plugins) -> None:
    """Raises `ConfigurationError`, with similar names, for a proposer that is not registered."""
    if config.speculation not in (NONE, DRAFT, MTP):
        plugins.resolve(plugins.proposers, "--speculation", config.speculation, (DRAFT, MTP, NONE))


def default_sampling(arguments: Arguments, recommended: dict[str, Any], directory: Path) -> dict[str, Any]:
    """What holds where a request says nothing. Raises `ConfigurationError`."""
    if arguments.generation_config == "auto" and not (directory / "generation_config.json").is_file():
        log.info("the model has no generation_config.json: where a request does not say how, it samples at temperature 1 up to the context")
    return sampling_defaults(recommended, arguments.generation_config, arguments.override_generation_config)


def assemble_pooling(arguments: Arguments, files: ModelFiles) -> AssembledPooling:
    """As `assemble`, of a model that turns text into numbers."""
    from penstock.engine.pooling.loader import build_pooling_engine

    check_generation_flags(arguments, "pooling")
    fields = model_fields(arguments, files)
    trust = arguments.engine.trust_remote_code
    with leading(arguments.engine, lambda: read_config(files.directory, trust)) as (group, config):
        engine = build_pooling_engine(files.directory, files.tokenizer, config, group)
    context = PoolingContext(**fields, engine=engine, max_model_len=engine.model.max_model_len, vocab_size=engine.model.vocab_size)
    return AssembledPooling(context, summarize_pooling(engine))


def assemble_speech(arguments: Arguments, files: ModelFiles) -> AssembledSpeech:
    """As `assemble`, of a model that turns speech into text."""
    from penstock.engine.transcription.engine import build_transcription_engine
    from penstock.serving.audio import check_libraries

    check_generation_flags(arguments, "transcription")
    if arguments.engine.num_ranks > 1:
        raise ConfigurationError(
            f"--tensor-parallel-size {arguments.engine.tensor_parallel_size}: a model of speech is not shared by ranks"
        )
    check_libraries()
    fields = model_fields(arguments, files)
    engine = build_transcription_engine(files.directory, files.tokenizer, arguments.engine)
    model = engine.model
    context = SpeechContext(**fields, engine=engine, max_model_len=model.max_length, vocab_size=model.config.vocab_size)
    return AssembledSpeech(context, summarize_speech(engine))


def summarize_speech(engine: "TranscriptionEngine") -> str:
    """What the model is, and where it runs."""
    model = engine.model
    languages = f"{len(model.tokens.languages)} languages" if model.tokens.is_multilingual else "English"
    dtype = str(model.dtype).removeprefix("torch.")
    parts = [f"a model of speech in {languages}", f"windows: {model.num_windows} at a time", f"{dtype} on {model.device}"]
    if model.device.type == "cpu":
        parts.append(f"threads: {engine.num_threads}")
    return "; ".join(parts)


def check_generation_flags(arguments: Arguments, kind: ModelKind) -> None:
    """Raises `ConfigurationError` for flags that ask for what only a model that generates can do. A bound that is kept anyway is fine."""
    flags = [option.shown(value) for option, value in arguments.values() if option.asks_for_generation(value)]
    if flags:
        name = model_name(arguments.engine.model)
        raise ConfigurationError(f"{', '.join(flags)}: for models that generate text, and {name} {KINDS[kind]}")


def summarize_pooling(engine: "PoolingEngine") -> str:
    """What the model is, and where it runs."""
    model = engine.model
    parts = [description(model)]
    if model.dimensions is not None:
        parts.append(f"{model.dimensions} dimensions")
    parts += [f"context: {model.max_model_len} tokens", f"{str(model.dtype).removeprefix('torch.')} on {model.device}"]
    if model.device.type == "cpu":
        parts.append(f"threads: {engine.num_threads}")
    return "; ".join(parts)


def summarize(arguments: Arguments, context: LocalContext, core: EngineCore) -> str:
    """Parsers, KV cache, threads, where the model runs and how much of it in few bits."""
    loaded = core.runner.loaded
    cache, blocks = core.runner.cache, core.scheduler.blocks
    num_tokens = blocks.num_tokens(context.max_model_len)
    in_long_contexts = " in contexts of that length" if blocks.has_windows else ""
    in_other_dtype = "" if cache.dtype == loaded.dtype else f" in {str(cache.dtype).removeprefix('torch.')}"
    parts = [
        f"reasoning: {selection(context.plugins.reasoning_parsers)}",
        f"tools: {selection(context.plugins.tool_parsers)}",
        f"context: {context.max_model_len} tokens",
        f"KV cache: {cache.num_bytes / 2**30:.2f} GiB, {num_tokens} tokens{in_long_contexts}{in_other_dtype}",
        f"{str(loaded.dtype).removeprefix('torch.')} on {loaded.device}",
    ]
    parts += [f"{count} layer{'s' if count > 1 else ''} in {kind}" for kind, count in quantized_layers(loaded.model).items()]
    if loaded.device.type == "cpu":
        parts += [f"kernels: {kernels_in_use()}", f"threads: {core.runner.num_threads}"]
    if core.runner.group.size > 1:
        parts.append(f"ranks: {core.runner.group.size}")
    if arguments.engine.draft_model is not None:
        parts.append(f"draft model: {model_name(arguments.engine.draft_model)}")
    return "; ".join(parts)


def selection(registry: Registry[Any]) -> str:
    """The parser in use, and whether the model's own files chose it or showed none."""
    how = " (default)" if registry.is_default else " (auto)" if registry.is_automatic else ""
    return (registry.active or "none") + how


MODELS_SHARE = 0.8  # of the memory that is free at start, for all models
MODELS_WAIT = 300.0  # seconds
BITS_LEFT = {"int4": 0.3, "int8": 0.55}  # of weights with 16 bits, scales included


@dataclass(frozen=True, slots=True)
class AssembledModels:
    """The same of several models, which are loaded as requests ask for them."""

    context: ModelsContext
    summary: str


AnyAssembled: TypeAlias = Assembled | AssembledPooling | AssembledSpeech | AssembledModels


def assemble_models(arguments: Arguments, file: ModelsFile) -> AssembledModels:
    """What serves the models of a file. None of them is loaded yet. Raises `ConfigurationError`."""
    connection_limit(arguments.server.max_connections)
    if arguments.server.files_dir is not None:
        make_data_directory(Path(arguments.server.files_dir), "--files-dir")
    num_bytes = arguments.models_memory or file.num_bytes
    if num_bytes is None:
        num_bytes = int(free_memory(resolve_device(arguments.engine.device)) * MODELS_SHARE)
    waits = (seconds for seconds in (arguments.models_wait, file.wait_seconds, MODELS_WAIT) if seconds is not None)
    limits = PoolLimits(num_bytes=num_bytes, wait_seconds=next(waits), max_waiting=arguments.engine.max_waiting_requests)
    context = ModelsContext(
        engine=ModelPool(file.models, LocalLoader(), limits),
        workers=Workers(),
        options=server_options(arguments),
        responses=response_store(arguments),
    )
    num_pinned = sum(spec.pin for spec in file.models)
    return AssembledModels(context, f"{len(file.models)} models, {num_pinned} of them pinned; up to {gib(num_bytes)} for loaded models")


class LocalLoader:
    """Loads models in this process, in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-load")

    async def fetch(self, spec: ModelSpec) -> Expectation:
        return expectation(spec, await in_daemon_thread(partial(directory_of, spec)))

    async def load(self, spec: ModelSpec) -> Resident:
        resident = await self._run(partial(load_resident, spec))
        await resident.context.engine.start()
        return resident

    async def unload(self, resident: Resident) -> None:
        context = resident.context
        await resident.closing.aclose()
        await context.engine.stop()
        context.close()

    async def free(self) -> None:
        await self._run(collect_garbage)

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Its result, from a thread that the end of the process does not wait for, as it does for those of executors: a download may hang."""
    future: Future[T] = Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="penstock-fetch", daemon=True).start()
    return await asyncio.wrap_future(future)


def directory_of(spec: ModelSpec) -> Path:
    """Fetches and converts the model where it is not here. Raises `ConfigurationError`."""
    config = spec.arguments.engine
    return resolve_model(config.model, config.trust_remote_code, verify=spec.arguments.verify_weights)


def expectation(spec: ModelSpec, directory: Path) -> Expectation:
    """By the files of a model and its options."""
    config, kind = spec.arguments.engine, model_kind(directory)
    check_not_alone(kind)
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors")) * BITS_LEFT.get(config.quantization, 1.0)
    cache = 0 if kind == "pooling" else CPU_CACHE if config.kv_cache_memory is None else config.kv_cache_memory
    return Expectation(int(weights) + cache, kind)


@memory_shortage_refused()
def load_resident(spec: ModelSpec) -> Resident:
    """Loads one of several models. What it takes is measured. Raises `ConfigurationError`."""
    arguments, before = spec.arguments, used_memory()
    if resolve_device(arguments.engine.device).type == "cuda" and arguments.engine.kv_cache_memory is None:
        raise ConfigurationError("give it a kv_cache_memory: by itself, a model on a GPU takes all memory that is free")
    if model_kind(directory_of(spec)) == "pooling":
        arguments = spec.for_pooling()
    plugins = Plugins.asked_for(arguments)
    with triton_left_out(arguments.engine.device):
        assembled = assemble(arguments, plugins, is_prepared=True)
    assembled.context.warm_up()
    release_heap()
    return Resident(assembled.context, max(0, used_memory() - before), assembled.summary)


def used_memory() -> int:
    """The bytes that this process has allocated, on its GPUs as well."""
    return heap_bytes() + sum(torch.cuda.memory_reserved(device) for device in range(torch.cuda.device_count()))
