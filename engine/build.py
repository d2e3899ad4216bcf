"""Builds the engine from its configuration: loads the model, prepares its layers, captures CUDA graphs and sizes the KV cache."""

import functools
import itertools
import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.adapters.registry import AdapterSlots
from penstock.engine.attention import interface
from penstock.engine.config import MTP, EngineConfig
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarMatcher
from penstock.engine.contracts.hooks import ProposerFactory
from penstock.engine.core import EngineCore
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.block_files import BlockFormat, model_identity, weights_digest
from penstock.engine.kv_cache.blocks import BlockPool, KVCacheManager, max_blocks_held
from penstock.engine.kv_cache.events import check_kv_events, publish_events
from penstock.engine.kv_cache.persistence import check_kv_cache_dir, check_kv_transfer_dir, persistence_of
from penstock.engine.kv_cache.tensors import (
    KVCache,
    LayerGroup,
    LayerKV,
    block_bytes,
    block_layers,
    cache_dtype,
    check_int8_cache,
    layer_groups,
)
from penstock.engine.model.adapted import AdaptedLayers, stack_bytes
from penstock.engine.model.compiled_layers import CompiledLayer, LayerCompilation
from penstock.engine.model.config import answer_tokens, max_model_len, read_config
from penstock.engine.model.cuda_graphs import CudaRecorder, Forward, StepGraphs, mixed_sizes
from penstock.engine.model.drafters.configured import (
    Draft,
    check_draft,
    draft_block_bytes,
    draft_cost,
    drafter_over,
    drafts_read_whole_text,
)
from penstock.engine.model.drafters.eagle import architecture_of_head, load_eagle
from penstock.engine.model.drafters.mtp import load_mtp
from penstock.engine.model.forward import ForwardPass, adapted_logits, compute_logits
from penstock.engine.model.fused import fuse_gates, fuse_linears, fuse_norms, fuse_residuals, fuse_rotary
from penstock.engine.model.loader import LoadedModel, load_model, num_cache_blocks, resolve_device, settle_memory, with_states
from penstock.engine.model.native import install_native_decoder
from penstock.engine.model.prepared import Description, PreparedFiles
from penstock.engine.multimodal.inputs import ImageProcessor
from penstock.engine.multimodal.processor import BlindImageProcessor, check_processor, load_processor, profile_images
from penstock.engine.multimodal.vision import takes_images
from penstock.engine.native.runtime import choose_kernels, loading_threads, native_library, num_model_threads
from penstock.engine.parallel.group import ALONE, Group, Order
from penstock.engine.recurrent.layout import check_options, is_recurrent, slot_bytes
from penstock.engine.recurrent.states import RecurrentStates
from penstock.engine.request import Request
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.scheduling.admission import WaitingQueue
from penstock.engine.scheduling.scheduler import Scheduler
from penstock.engine.scheduling.states import StateScheduler
from penstock.engine.scheduling.step import MIN_MAX_ROWS, speculation_of
from penstock.engine.scripted.file import IMAGE_MARKER, MARKER_IDS
from penstock.engine.speculation.proposers import BUILT_IN
from penstock.engine.system.cpus import place_memory, placement
from penstock.engine.system.memory import CudaHostCopies
from penstock.engine.text.answer import Answer
from penstock.engine.text.streaming import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.weights.experts import pack_experts
from penstock.engine.weights.linear import pack_linears

logger = logging.getLogger(__name__)


def load_prepared(prepared: PreparedFiles, description: Description, config: EngineConfig) -> LoadedModel | None:
    """As `load`, from the files of a prepared model; None where they cannot be used."""
    with loading_threads(config):
        return prepared.load(description)


def load(directory: Path, config: EngineConfig, group: Group = ALONE) -> LoadedModel:
    """Loads the model, or this rank's part of it, with paged attention. Raises `ConfigurationError` for what cannot be served."""
    check_kv_cache_dir(config)
    check_kv_transfer_dir(config)
    check_kv_events(config)
    if is_recurrent(read_config(directory, config.trust_remote_code).get_text_config()):
        check_options(config)
    interface.register()
    choose_kernels(config.native_kernels)
    if resolve_device(config.device).type == "cuda" and find_spec("triton") is None:
        raise ConfigurationError("the attention kernels for CUDA need triton: pip install 'penstock[gpu]'")
    with loading_threads(config):
        loaded = load_model(
            directory,
            config.dtype,
            config.device,
            max_len=config.max_model_len,
            quantization=config.quantization,
            trust_remote_code=config.trust_remote_code,
            group=group,
            num_stages=config.pipeline_parallel_size,
            language_model_only=config.language_model_only,
        )
        if config.kv_cache_dir is not None or config.kv_transfer_dir is not None:
            parts = [loaded.model] if loaded.vision is None else [loaded.model, loaded.vision.model]
            loaded = replace(loaded, weights_digest=" ".join(map(weights_digest, parts)))
        fuse(loaded)
        if loaded.device.type == "cpu":
            native_library()  # built now rather than in the first request
            pack_linears(loaded.model)
            pack_experts(loaded.model)
            settle_memory(loaded.model)
            if loaded.vision is not None:
                settle_memory(loaded.vision.model)
        loaded.sharding.install(loaded.model)
    return loaded


def image_processor(directory: Path, config: EngineConfig) -> ImageProcessor | None:
    """What prepares prompts with images for the model; None where it takes none. Raises `ConfigurationError` as `load_processor`."""
    from penstock.engine.scripted.model import ScriptedConfig

    if config.language_model_only:
        return None
    model_config = read_config(directory, config.trust_remote_code)
    if isinstance(model_config, ScriptedConfig) and model_config.image_tokens:
        return BlindImageProcessor(IMAGE_MARKER, MARKER_IDS[IMAGE_MARKER], model_config.image_tokens)
    if takes_images(model_config):
        processor = load_processor(directory, model_config)
        check_processor(processor, directory)
        return processor
    return None


def fuse(loaded: LoadedModel) -> None:
    """Replaces several operations of the model's own code by one each."""
    fuse_linears(loaded.model)
    if loaded.device.type == "cuda":
        with torch.cuda.device(loaded.device):  # Triton launches on the current one
            fuse_norms(loaded.model)
            fuse_residuals(loaded.model)
            fuse_gates(loaded.model)
            fuse_rotary(loaded.model)


def compiled_layers(loaded: LoadedModel, config: EngineConfig) -> LayerCompilation | None:
    """Installs what has been compiled before; returns what is still to be compiled while the engine serves, if anything is.

    Raises `ConfigurationError` where `compile="on"` and the layers cannot be compiled.
    """
    if config.compile == "off" or (loaded.device.type != "cpu" and config.compile != "on") or loaded.sharding.group.size > 1:
        return None
    compilation = LayerCompilation(loaded, block_size=config.block_size, trust_remote_code=config.trust_remote_code)
    if compilation.is_possible and compilation.is_cached:
        try:
            compilation.install()
            return None
        except RuntimeError as error:  # a file that was cut short
            logger.warning("The decoder layers are compiled again: %s", error)
    if config.compile != "on":
        return compilation if compilation.is_possible else None
    if not (compilation.is_possible and compilation.compile()):
        raise ConfigurationError("--compile on: the decoder layers cannot be compiled here; it takes a CPU model and a C++ compiler")
    compilation.install()
    return None


def max_step_tokens(config: EngineConfig, device_type: str) -> int:
    return max(config.num_batched_tokens(device_type), config.num_seqs(device_type))  # each sequence gets its next token


def graph_share(config: EngineConfig) -> float:
    """How much memory the graphs, which share a pool of their own, keep for activations, as a share of the largest step's."""
    largest = max_step_tokens(config, "cuda")
    return max(mixed_sizes(largest), default=0) / largest if config.compile != "off" else 0.0


def step_graphs(
    loaded: LoadedModel, config: EngineConfig, cache: KVCache, adapted: AdaptedLayers | None
) -> tuple[StepGraphs | None, StepGraphs | None]:
    """Graphs that are still to be captured, where the model is on a GPU: of steps without adapters, and of those with."""
    if loaded.device.type != "cuda" or config.compile == "off" or loaded.sharding.stage is not None:
        return None, None
    recorder = CudaRecorder(loaded.device)
    plain = graphs_of(functools.partial(compute_logits, loaded.model), recorder, loaded, config, cache)
    if adapted is None:
        return plain, None
    return plain, graphs_of(functools.partial(adapted_logits, adapted, loaded.model), recorder, loaded, config, cache)


def graphs_of(forward: Forward, recorder: CudaRecorder, loaded: LoadedModel, config: EngineConfig, cache: KVCache) -> StepGraphs:
    return StepGraphs(
        forward,
        recorder,
        max_num_rows=max(config.num_seqs(loaded.device.type), MIN_MAX_ROWS),
        # Recurrent layers compute prompts one length at a time, which no graph holds.
        max_num_tokens=0 if loaded.recurrent_layers else max_step_tokens(config, loaded.device.type),
        block_tables_PN=cache.block_tables_PN,
        block_size=config.block_size,
        num_groups=len(cache.groups),
        agree=loaded.sharding.group.agree,
    )


def release(core: EngineCore) -> None:
    """Takes the KV cache of an engine that has stopped off its model, which another engine may then be built over.

    The memory is freed with the last reference to the engine.
    """
    if core.runner.drafter is not None:
        core.runner.drafter.release()
    core.runner.group.send(Order.RELEASE)
    release_forward(core.runner.passes)
    if core.runner.states is not None:
        core.runner.states.uninstall(core.runner.loaded.model)


def release_forward(passes: ForwardPass) -> None:
    """The same of what a rank computes."""
    model = passes.loaded.model
    vars(model).pop("forward", None)
    for module in model.modules():
        while isinstance(module.forward, CompiledLayer):
            module.forward.undo()
    passes.cache.detach(model)


def build_core(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    proposers: Mapping[str, ProposerFactory] = BUILT_IN,
    draft: Draft | None = None,
) -> EngineCore:
    """Everything around a loaded model; on a GPU with its kernels compiled and its graphs captured, so that no request waits for that.

    `proposers` are those that the configuration may name, and `draft` is the draft model, or head, where it names one.

    Raises `ConfigurationError` where the KV cache or a step does not fit, or has no kernels.
    """
    config, num_slots = with_states(loaded, config)
    is_gpu = loaded.device.type == "cuda"
    activation_bytes = 0
    if is_gpu:
        activation_bytes = profile_steps(loaded, tokenizer, config)
        activation_bytes += int(activation_bytes * graph_share(config))
        if loaded.vision is not None:  # an image is computed before the step that it is in
            processor = load_processor(loaded.directory, loaded.vision.config)
            activation_bytes = max(activation_bytes, profile_images(processor, loaded.vision, loaded.device))
        activation_bytes += num_slots * slot_bytes(loaded.recurrent_layers, loaded.dtype)
        if config.has_adapters:
            activation_bytes += stack_bytes(loaded, config.max_loras, config.max_lora_rank)
    draft_bytes = 0 if draft is None else draft_block_bytes(draft, loaded, config)
    if draft is not None and config.hybrid_kv_cache and groups_of(loaded, config) != groups_of(loaded, replace(config, speculation="none")):
        logger.info("All layers keep every block, as with --no-hybrid-kv-cache: what makes drafts reads the whole text.")
    loaded.sharding.group.send(Order.SIZE, torch.tensor([activation_bytes]))
    num_blocks = least_blocks(loaded, config, activation_bytes, draft_bytes)
    core = core_over_blocks(loaded, tokenizer, config, num_blocks, proposers, draft, num_slots)
    if is_gpu:
        core.runner.capture_graphs()
    core.publisher = publish_events(config, core.scheduler.pool, loaded.device.type)
    return core


def least_blocks(loaded: LoadedModel, config: EngineConfig, activation_bytes: int, draft_bytes: int = 0) -> int:
    """As many blocks as fit on every rank. Raises `ConfigurationError` as `num_cache_blocks`."""
    groups, group = groups_of(loaded, config), loaded.sharding.group
    num_blocks = num_cache_blocks(
        config.kv_cache_memory,
        block_bytes=block_bytes(block_layers(layout_here(loaded), groups), config.block_size, dtype_of_cache(loaded, config)) + draft_bytes,
        blocks_per_sequence=blocks_per_sequence(loaded, config, groups),
        device=loaded.device,
        activation_bytes=activation_bytes,
    )
    return group.least(num_blocks)


def dtype_of_cache(loaded: LoadedModel, config: EngineConfig) -> torch.dtype:
    """Raises `ConfigurationError` where the configured type is not for this model or device."""
    dtype = cache_dtype(config.kv_cache_dtype, loaded.dtype, loaded.device)
    if dtype == torch.int8:
        num_heads = loaded.sharding.heads_here(loaded.config.get_text_config(decoder=True).num_attention_heads)
        check_int8_cache(loaded.kv_layout, config.block_size, num_heads)
    return dtype


def groups_of(loaded: LoadedModel, config: EngineConfig) -> list[LayerGroup]:
    """The groups of layers that have a block table of their own."""
    groups, stage = layer_groups(loaded.kv_layout, loaded.max_model_len, is_hybrid=config.hybrid_kv_cache), loaded.sharding.stage
    if groups[0].sliding_window is not None and drafts_read_whole_text(config):
        groups = layer_groups(loaded.kv_layout, loaded.max_model_len, is_hybrid=False)
    return groups if stage is None else stage.groups(groups)


def layout_here(loaded: LoadedModel) -> list[LayerKV]:
    """What this rank keeps of the layers' keys and values."""
    stage = loaded.sharding.stage
    return loaded.kv_layout if stage is None else stage.layout(loaded.kv_layout)


def blocks_per_sequence(loaded: LoadedModel, config: EngineConfig, groups: list[LayerGroup]) -> int:
    """The most blocks that a sequence of the full length holds at once."""
    device_type = loaded.device.type
    max_step = max(config.num_batched_tokens(device_type), config.num_seqs(device_type))  # as `Scheduler` has it
    return max_blocks_held([group.sliding_window for group in groups], loaded.max_model_len, max_step, config.block_size)


def core_over_blocks(
    loaded: LoadedModel,
    tokenizer: Tokenizer,
    config: EngineConfig,
    num_blocks: int,
    proposers: Mapping[str, ProposerFactory] = BUILT_IN,
    draft: Draft | None = None,
    num_slots: int = 0,
) -> EngineCore:
    """An engine whose KV cache has so many blocks, and as many slots for the states of recurrent layers."""
    device_type = loaded.device.type
    check_span(loaded, config)
    loaded.sharding.group.send(Order.BUILD, torch.tensor([num_blocks, config.compile != "off"]))
    cache = cache_over(loaded, config, num_blocks)
    windows = [group.sliding_window for group in cache.groups]
    blocks = KVCacheManager(BlockPool(num_blocks, enable_prefix_caching=config.enable_prefix_caching), config.block_size, windows)
    states = None
    if num_slots:
        max_num_rows = max(config.num_seqs(device_type), MIN_MAX_ROWS, ModelRunner.min_tokens)
        states = RecurrentStates(loaded.recurrent_layers, num_slots, loaded.dtype, loaded.device, max_num_rows=max_num_rows)
        states.install(loaded.model)
    may_be_native = device_type == "cpu" and states is None and config.compile != "on" and loaded.sharding.stage is None
    is_native = may_be_native and install_native_decoder(loaded, cache)
    compilation = None if is_native else compiled_layers(loaded, config)
    tokens = answer_tokens(loaded.vocab_size, loaded.eos_token_ids, tokenizer)
    adapted = adapted_layers(loaded, config)
    graphs, adapted_graphs = step_graphs(loaded, config, cache, adapted)
    runner = ModelRunner(
        loaded,
        cache,
        vocab_size=tokens.vocab_size,
        compilation=compilation,
        graphs=graphs,
        drafter=None if draft is None else drafter_over(draft, loaded, cache, config, tokens.vocab_size),
        copies=CudaHostCopies() if device_type == "cuda" and config.is_async(device_type) else None,
        seed=config.seed,
        num_threads=num_model_threads(config),
        pin_threads=config.pin_threads,
        adapted=adapted,
        adapted_graphs=adapted_graphs,
        states=states,
    )
    return EngineCore(
        runner=runner,
        scheduler=Scheduler(
            blocks,
            max_num_seqs=config.num_seqs(device_type),
            max_num_batched_tokens=config.num_batched_tokens(device_type),
            waiting=WaitingQueue(
                max_sequences=config.max_waiting_requests,
                max_tokens=config.num_waiting_tokens(blocks.num_tokens(loaded.max_model_len)),
                max_seconds=config.max_queue_time,
                aging_seconds=config.priority_aging,
            ),
            speculation=speculation_of(
                config,
                device_type,
                tokens.vocab_size,
                proposers,
                0.0 if draft is None else draft_cost(draft, loaded),
                draft.max_model_len if isinstance(draft, LoadedModel) else sys.maxsize,
            ),
            persistence=persistence_of(config, cache, blocks, runner.thread.submit, block_format_of(loaded, config, cache)),
            adapters=AdapterSlots(config.max_loras) if config.has_adapters else None,
            states=None
            if states is None
            else StateScheduler(
                num_slots,
                config.block_size,
                config.num_seqs(device_type),
                runner.copy_states,
                enable_prefix_caching=config.enable_prefix_caching,
            ),
        ),
        tokenizer=tokenizer,
        stop_token_ids=tokens.stop_token_ids,
        max_model_len=loaded.max_model_len,
        vocab_size=tokens.vocab_size,
        is_async=config.is_async(device_type),
        max_in_flight=config.pipeline_parallel_size,
    )


def cache_over(loaded: LoadedModel, config: EngineConfig, num_blocks: int) -> KVCache:
    """The model's KV cache, of so many blocks."""
    device_type = loaded.device.type
    cache = KVCache(
        layout_here(loaded),
        num_blocks,
        config.block_size,
        dtype_of_cache(loaded, config),
        loaded.device,
        max_num_seqs=config.num_seqs(device_type),
        max_blocks=-(-loaded.max_model_len // config.block_size),
        groups=groups_of(loaded, config),
    )
    if device_type == "cpu":
        nodes = placement(num_model_threads(config), config.pin_threads).nodes
        for tensor in (*cache.keys, *cache.values):
            place_memory(tensor.data_ptr(), tensor.nbytes, nodes)
    cache.attach(loaded.model)
    return cache


def forward_over(loaded: LoadedModel, config: EngineConfig, num_blocks: int, *, has_graphs: bool) -> ForwardPass:
    """What another rank than 0 makes while that makes `core_over_blocks`."""
    config = config if has_graphs else replace(config, compile="off")
    cache = cache_over(loaded, config, num_blocks)
    if loaded.device.type == "cpu" and loaded.sharding.stage is None:
        install_native_decoder(loaded, cache)
    adapted = adapted_layers(loaded, config)
    graphs, adapted_graphs = step_graphs(loaded, config, cache, adapted)
    return ForwardPass(loaded, cache, adapted=adapted, graphs=graphs, adapted_graphs=adapted_graphs)


def check_span(loaded: LoadedModel, config: EngineConfig) -> None:
    """Raises `ConfigurationError` where the tokens of an image that have to be computed in one step may find no room in any."""
    span = 0 if loaded.vision is None else loaded.vision.span_size
    num_seqs, num_tokens = config.num_seqs(loaded.device.type), config.num_batched_tokens(loaded.device.type)
    if span and num_tokens < span + num_seqs:
        raise ConfigurationError(
            f"--max-num-batched-tokens {num_tokens}: an image of this model takes {span} tokens, which are computed in one step beside "
            f"{num_seqs} sequences: give {span + num_seqs} or more, or lower --max-num-seqs"
        )


def adapted_layers(loaded: LoadedModel, config: EngineConfig) -> AdaptedLayers | None:
    """None where requests can have no adapters."""
    if not config.has_adapters:
        return None
    max_rows = max(max_step_tokens(config, loaded.device.type), ModelRunner.min_tokens)
    return AdaptedLayers(loaded, num_slots=config.max_loras, max_rank=config.max_lora_rank, max_rows=max_rows)


def load_draft(config: EngineConfig, tokenizer: Tokenizer, loaded: LoadedModel) -> Draft | None:
    """The draft model, or head, that the configuration names. Raises `ConfigurationError` where it cannot be used."""
    directory = check_draft(config, tokenizer, loaded.directory)
    if directory is None:
        return None
    if config.speculation == MTP:
        return load_mtp(loaded)
    architecture = architecture_of_head(directory)
    if architecture is not None and loaded.sharding.group.size > 1:
        raise ConfigurationError(
            "--draft-model: a head reads states of the whole model in one process, which --tensor-parallel-size has not"
        )
    if architecture is not None:
        with loading_threads(config):
            return load_eagle(directory, architecture, loaded)
    context = min(max_model_len(read_config(directory, config.trust_remote_code), None), loaded.max_model_len)
    if context < loaded.max_model_len:
        logger.info("The draft model has a context of %d tokens: beyond it, sequences get no drafts.", context)
    return load(directory, replace(config, max_model_len=context))


def block_format_of(loaded: LoadedModel, config: EngineConfig, cache: KVCache) -> BlockFormat | None:
    """What blocks are when they leave the process; None where they do not."""
    if config.kv_cache_dir is None and config.kv_transfer_dir is None:
        return None
    model = model_identity(loaded.weights_digest, loaded.config, loaded.quantization, loaded.dtype)
    return BlockFormat.of(loaded.kv_layout, cache.groups, block_size=config.block_size, dtype=cache.dtype, model=model)


LONGEST_TILED = 256  # tokens of a prompt: longer ones are computed in the same tiles


class AnyToken(CompiledGrammar, GrammarMatcher):
    """A grammar that allows everything, for steps with masks."""

    num_bytes = 0

    def matcher(self) -> GrammarMatcher:
        return self

    def fill_bitmask(self, row: Tensor) -> None:
        row.fill_(-1)

    def advance(self, token_id: int) -> bool:
        return True

    def rollback(self, num_tokens: int) -> None:
        """It has no state."""

    @property
    def finished(self) -> bool:
        return False


def trial_requests(tokenizer: Tokenizer, *, num_tokens: int, num_rows: int, max_model_len: int) -> list[list[Request]]:
    """Requests to run at once, group after group: steps of so many tokens and so many rows, then prompts and samples of each kind.

    Between them they launch every kernel with every choice of tile that decodes outside of graphs, prompts and sampling have.
    """

    def request(length: int, grammar: CompiledGrammar | None = None, **params: Any) -> Request:
        prompt = [0] * length
        return Request(
            request_id=str(next(numbers)),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=2, ignore_eos=True, **params),
            make_answer=lambda: Answer(Detokenizer(tokenizer, prompt), None, None, (), False, True),
            grammar=grammar,
        )

    numbers = itertools.count()
    longest = min(num_tokens, max(1, max_model_len - 2))
    lengths = [1 << power for power in range(4, LONGEST_TILED.bit_length()) if 1 << power <= longest]
    sampling: dict[str, Any] = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
    return [
        [request(longest, temperature=0.0) for _ in range(-(-num_tokens // longest))],
        [request(1, **sampling) for _ in range(num_rows)],
        *([request(length, temperature=0.0)] for length in lengths),
        [request(1, **sampling, repetition_penalty=1.1, logprobs=1), request(1, AnyToken(), temperature=0.0)],
    ]


def profile_steps(loaded: LoadedModel, tokenizer: Tokenizer, config: EngineConfig) -> int:
    """Runs `trial_requests` over a small cache, which compiles kernels; returns the bytes of activations that the largest step took.

    Raises `ConfigurationError` where a step does not fit in the GPU's memory.
    """
    num_tokens, num_rows = config.num_batched_tokens("cuda"), config.num_seqs("cuda")
    groups = trial_requests(tokenizer, num_tokens=num_tokens, num_rows=num_rows, max_model_len=loaded.max_model_len)
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "compile": "off",
        "speculation": "none",
        "kv_cache_dir": None,
        "kv_transfer_dir": None,
    }
    options |= {"max_waiting_requests": max(map(len, groups)), "max_waiting_tokens": None}
    trial = replace(config, **options)
    num_blocks = max(sum(-(-(len(one.prompt_token_ids) + 2) // config.block_size) for one in group) for group in groups)
    num_blocks *= len(groups_of(loaded, config))
    started = time.monotonic()
    core = None
    try:
        core = core_over_blocks(loaded, tokenizer, trial, num_blocks, num_slots=num_rows if loaded.recurrent_layers else 0)
        torch.cuda.reset_peak_memory_stats(loaded.device)
        before = torch.cuda.memory_allocated(loaded.device)
        for number, group in enumerate(groups, 1):
            for request in group:
                core.add(request)
            while core.has_work:
                core.step()
            logger.info("Kernels: %d of %d kinds of steps have run, after %.0f s", number, len(groups), time.monotonic() - started)
        return torch.cuda.max_memory_allocated(loaded.device) - before
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"steps of {num_tokens} tokens and {num_rows} sequences do not fit in the GPU's memory beside the weights: "
            "lower --max-num-batched-tokens or --max-num-seqs"
        ) from error
    finally:
        if core is not None:
            core.close()
            core.runner.shutdown()
            release(core)
