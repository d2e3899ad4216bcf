"""A model directory turned into a model on its device, checked before its weights are read; and the memory left for the KV cache."""

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import nn

from penstock.engine.adapters.checkpoint import WholeModel
from penstock.engine.attention import interface
from penstock.engine.attention.interface import keep_latents
from penstock.engine.config import CompileMode, Dtype, EngineConfig, QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerKV, kv_layout
from penstock.engine.model.config import check_servable, eos_token_ids, max_model_len, read_config
from penstock.engine.multimodal.vision import VisionTower, is_multimodal, take_apart
from penstock.engine.native.runtime import native_library
from penstock.engine.parallel.group import ALONE, Group
from penstock.engine.parallel.sharding import WITH_ONE, Sharding, check_alike, sharding_of
from penstock.engine.parallel.stages import absent_paths, model_class
from penstock.engine.recurrent.layout import RecurrentLayer, check_options, slot_bytes
from penstock.engine.system.process import making_model, progress_for_terminals, release_heap, startup_phase
from penstock.engine.weights.checkpoints import stored_weights, weight_files
from penstock.engine.weights.quantization import put_in_stored, quantize_plain, quantized_layers, resolve_quantization

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def load_pretrained(
    factory: Any,
    directory: Path,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool,
    is_needed: Callable[[str], bool] = lambda name: True,
    **options: Any,
) -> "PreTrainedModel":
    """What one of transformers' `AutoModel` classes makes of the directory; `is_needed` says of a weight's name whether it must be there.

    Raises `ConfigurationError`.
    """
    if device.type == "cuda" and "distributed_config" not in options:
        # One tensor after the other: a model may be larger than the host's memory, and no whole copy of it waits for its way to the GPU.
        options["device_map"] = {"": device}
    try:
        with making_model, progress_for_terminals():
            model, report = factory.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **options,
            )
    except (
        OSError,
        ValueError,
        TypeError,
        ImportError,
        RuntimeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        SafetensorError,
    ) as error:
        raise ConfigurationError(f"{directory} cannot be loaded: {error}") from error
    # transformers fills what is missing with random numbers and goes on.
    if missing := sorted(filter(is_needed, report["missing_keys"])):
        raise ConfigurationError(f"{directory} lacks {len(missing)} of the model's weights: {', '.join(missing[:3])}, ...")
    loaded: PreTrainedModel = model
    return loaded


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, in eval mode and without gradients, and what the engine needs to know of it.

    `eos_token_ids` end an answer by the model's configs; the tokenizer may know more. `max_model_len` counts prompt and answer. `dtype` is
    of activations and of weights that are not in few bits; `quantization` is what was asked for, or `none` where `auto` came to that.
    `weights_digest` identifies the weights where the KV cache is kept in files. `vision` makes vectors of images, if the model takes any.
    Of a multimodal one, `model` and `config` are those of its language model, and `whole` has its names. Of a model of several ranks,
    `sharding` says what of it is here.
    """

    directory: Path
    model: "PreTrainedModel"
    config: "PretrainedConfig"
    kv_layout: list[LayerKV]
    eos_token_ids: frozenset[int]
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    quantization: QuantizationMode = "none"
    weights_digest: str = ""
    vision: VisionTower | None = None
    whole: WholeModel | None = None
    sharding: Sharding = WITH_ONE

    @property
    def vocab_size(self) -> int:
        """The width of the logits, which may exceed the number of tokens that the tokenizer knows."""
        return int(self.config.vocab_size)

    @property
    def recurrent_layers(self) -> list[RecurrentLayer]:
        """Those that keep states."""
        return [layer.recurrent for layer in self.kv_layout if layer.recurrent is not None]


def load_model(
    directory: Path,
    dtype: Dtype = "auto",
    device: str = "auto",
    *,
    max_len: int | None = None,
    quantization: QuantizationMode = "auto",
    trust_remote_code: bool = False,
    attn_implementation: str = interface.IMPLEMENTATION,
    group: Group = ALONE,
    num_stages: int = 1,
    language_model_only: bool = False,
) -> LoadedModel:
    """Loads a local model directory; `resolve_model` finds it. `max_len` lowers the model's own context length.

    With `language_model_only`, a multimodal model takes no images, and may be of any kind whose language model can be served.

    Each rank of a `group` loads its part: some layers where there are `num_stages`, else a part of each.

    Raises `ConfigurationError` naming what is in the way of a model that cannot be served, before its weights are read; or where none of
    them can be quantized as asked.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    from penstock.engine.weights.stored import StoredWeightsConfig, forget_config

    interface.register()
    config = read_config(directory, trust_remote_code)
    torch_device = resolve_device(device)
    has_latents = attn_implementation == interface.IMPLEMENTATION
    with startup_phase("check of the model"):
        layout = check_servable(config, trust_remote_code, has_latents=has_latents, language_model_only=language_model_only)
    context = max_model_len(config, max_len)
    files = weight_files(directory)  # which are all there
    torch_dtype = resolve_dtype(dtype, torch_device, config.dtype if isinstance(config.dtype, torch.dtype) else None)
    mode = resolve_quantization(quantization, torch_device)
    check_alike(group, files, (directory / "config.json").read_bytes(), torch_dtype, mode, context)
    weights = stored_weights(directory, config)
    stored = StoredWeightsConfig(weights.names, weights.tensor_names, absent_paths)
    sharding = sharding_of(config, group, num_stages=num_stages, trust_remote_code=trust_remote_code)
    options = sharding.options(is_tied=bool(getattr(config, "tie_word_embeddings", False) or stored.names))
    if stored.names:
        options["quantization_config"] = stored
    has_media = is_multimodal(config)
    other_attention = "eager" if language_model_only else "sdpa"  # every class has the former, and nothing is computed there
    factory = AutoModelForImageTextToText if has_media else AutoModelForCausalLM
    model = load_pretrained(
        factory if sharding.stage is None else model_class(config, sharding.stage),
        directory,
        config,
        torch_dtype,
        torch_device,
        trust_remote_code=trust_remote_code,
        attn_implementation={"": other_attention, "text_config": attn_implementation} if has_media else attn_implementation,
        **options,
    )
    if stored.names:
        types = ((stored.renamed[name], weight) for name, weight in weights.read(torch.device("meta")) if name in stored.renamed)
        sharding = sharding.along_blocks(types)
    sharding.localize(model)
    if stored.names:
        forget_config(model)
        named = ((stored.renamed[name], weight) for name, weight in weights.read(model.device) if name in stored.renamed)
        put_in_stored(model, sharding.stored(named), stored.places, mode, torch_dtype)
    vision, whole = None, None
    if has_media:
        whole = WholeModel.of(model)
        model, vision = take_apart(model, language_model_only=language_model_only)
        if vision is not None:
            torch.nn.Module.to(vision.model, torch_device).train(False).requires_grad_(False)
    if has_latents:
        keep_latents(model)
    quantize_plain(model, mode)
    sharding.shard_head(model)
    if mode in ("int4", "int8") and not quantized_layers(model):
        raise ConfigurationError(f"--quantization {quantization}: this model has no layers that can be quantized here: use auto or none")
    torch.nn.Module.to(model, torch_device)
    return LoadedModel(
        directory=directory,
        model=model.train(False).requires_grad_(False),
        config=model.config,
        kv_layout=sharding.layout(layout),
        eos_token_ids=eos_token_ids(config, model.generation_config),
        max_model_len=context,
        dtype=torch_dtype,
        device=torch_device,
        quantization=mode,
        vision=vision,
        whole=whole,
        sharding=sharding,
    )


def in_memory(model: "PreTrainedModel", max_model_len: int, layout: list[LayerKV] | None = None) -> LoadedModel:
    """What `load_model` makes of a directory, of a model that is on its device and in its type already. The model itself is changed.

    `layout` is what `kv_layout` gives for the model's config, where that is known.
    """
    interface.register()
    model.set_attn_implementation(interface.IMPLEMENTATION)
    layout = layout or kv_layout(model.config)
    if any(layer.is_latent for layer in layout):
        keep_latents(model)
    return LoadedModel(
        directory=Path(),
        model=model.train(False).requires_grad_(False),
        config=model.config,
        kv_layout=layout,
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        dtype=model.dtype,
        device=model.device,
    )


def resolve_device(device: str) -> torch.device:
    """`auto` is the GPU where there is one. A GPU always has an index. Raises `ConfigurationError` for a device that is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ConfigurationError(f"--device {device} is not a device: use auto, cpu, cuda or cuda:N") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigurationError(f"--device {device} is not supported: use auto, cpu, cuda or cuda:N")
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"--device {device}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices")
    if resolved.type == "cuda" and resolved.index is None:
        # Without an index, `torch.cuda.set_device` raises, and no tensor's device is equal to this one.
        return torch.device("cuda", torch.cuda.current_device())
    return resolved


def resolve_dtype(dtype: Dtype, device: torch.device, stored: torch.dtype | None) -> torch.dtype:
    """`auto` has 16 bits on a GPU, the stored type if it has; on a CPU it is bfloat16 where there is quick code for it, else float32."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ConfigurationError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.type == "cuda":
        is_half = stored == torch.float16 or torch.cuda.get_device_capability(device) < (8, 0)
        served = torch.float16 if is_half else torch.bfloat16
        if stored == torch.float32:
            name = str(served).removeprefix("torch.")
            logger.info("The weights are stored in float32 and served in %s; --dtype float32 keeps them as they are", name)
        return served
    return torch.bfloat16 if cpu_has_bfloat16() else torch.float32


def cpu_has_bfloat16() -> bool:
    """Whether bfloat16 is quick on this CPU: in torch by instructions for it, else in the native kernels, which read half as much."""
    abilities = torch.cpu.get_capabilities()
    return any(abilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16")) or native_library() is not None


CUDA_SHARE = 0.95  # of what is free beside weights and activations; the rest is for CUDA graphs, and for gaps between tensors
CPU_SHARE = 0.5
FREE_SEQUENCES = 256  # of the full length, that there are blocks for where these take no memory
CPU_CACHE = 2**29  # on a CPU the cache is no faster for being large, and the memory is the user's


def free_memory(device: torch.device) -> int:
    """Bytes that are free on the device now; on the CPU, those that the operating system can make available."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what fusing the weights has left in torch's own cache does not count as free
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def num_cache_blocks(
    wanted: int | None, *, block_bytes: int, blocks_per_sequence: int, device: torch.device, activation_bytes: int = 0
) -> int:
    """How many blocks to reserve: `wanted` bytes' worth, or a default for the device that leaves room for `activation_bytes`.

    Raises `ConfigurationError` where not even one sequence of the full length fits.
    """
    free = free_memory(device)
    if wanted is None:
        wanted = int(max(0, free - activation_bytes) * CUDA_SHARE)
        if device.type == "cpu":
            wanted = int(min(free * CPU_SHARE, max(CPU_CACHE, blocks_per_sequence * block_bytes)))
    elif wanted > free:
        raise ConfigurationError(f"--kv-cache-memory asks for {wanted / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free")
    if not block_bytes:  # no layer has keys and values: blocks only count tokens, for the prefix cache
        return blocks_per_sequence * FREE_SEQUENCES
    num_blocks = wanted // block_bytes
    if num_blocks < blocks_per_sequence:
        needed = blocks_per_sequence * block_bytes / 2**30
        raise ConfigurationError(
            f"the KV cache ({wanted / 2**30:.2f} GiB) cannot hold one sequence of the full length, which takes {needed:.2f} GiB:"
            " lower --max-model-len or raise --kv-cache-memory"
        )
    return num_blocks


SNAPSHOTS = 4  # of states, for each sequence that may run
STATES_SHARE = 0.5  # of free memory; half of it where there are keys and values
CPU_STATES = 2**30
RUNNING_SHARE = 0.75  # of the slots for states, at most, where there are fewer than wanted: without snapshots there is no prefix cache


def num_state_slots(wanted: int | None, *, slot_bytes: int, has_attention: bool, max_num_seqs: int, device: torch.device) -> int:
    """How many sequences' states to reserve, snapshots included. Of `wanted` bytes, keys and values get half if there are any.

    Raises `ConfigurationError` where not even those of one sequence fit.
    """
    share = STATES_SHARE / 2 if has_attention else STATES_SHARE
    most = CPU_STATES if device.type == "cpu" else sys.maxsize
    budget = min(int(free_memory(device) * share), most) if wanted is None else wanted // (2 if has_attention else 1)
    num_slots = min(max_num_seqs * (1 + SNAPSHOTS), budget // slot_bytes)
    if num_slots < 1:
        raise ConfigurationError(
            f"the states of one sequence take {slot_bytes / 2**20:.1f} MiB, and {budget / 2**20:.1f} MiB are for states: "
            "raise --kv-cache-memory"
        )
    return num_slots


def with_states(loaded: LoadedModel, config: EngineConfig) -> tuple[EngineConfig, int]:
    """The options as they hold for the model, and how many slots there are for the states of its recurrent layers: 0 without any.

    No more sequences run than there are slots for.
    """
    layers, device_type = loaded.recurrent_layers, loaded.device.type
    if not layers:
        return config, 0
    check_options(config)
    max_num_seqs, size = config.num_seqs(device_type), slot_bytes(layers, loaded.dtype)
    num_slots = num_state_slots(
        config.kv_cache_memory,
        slot_bytes=size,
        has_attention=any(layer.num_kv_heads for layer in loaded.kv_layout),
        max_num_seqs=max_num_seqs,
        device=loaded.device,
    )
    if config.enable_prefix_caching:
        max_num_seqs = min(max_num_seqs, max(1, int(num_slots * RUNNING_SHARE)))
    max_num_seqs = min(max_num_seqs, num_slots)
    logger.info(
        "%d sequences' states of %.2f MB each, and at least %d snapshots of states for the prefix cache",
        *(max_num_seqs, size / 1e6, num_slots - max_num_seqs),
    )
    if config.speculation != "none":
        logger.info("No draft tokens: recurrent layers cannot undo one that is rejected.")
    memory = None if config.kv_cache_memory is None else config.kv_cache_memory - num_slots * size
    compile: CompileMode = "off" if device_type == "cpu" else config.compile
    return replace(config, max_num_seqs=max_num_seqs, kv_cache_memory=memory, speculation="none", compile=compile), num_slots


def settle_memory(model: nn.Module) -> None:
    """Frees what loading leaves behind: the mapped weight file, which its smallest unpacked tensor keeps in memory, and freed heap."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    release_heap()
