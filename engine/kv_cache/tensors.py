"""The paged KV cache's tensors: the layout that a model needs, found by a trial, and the block tables beside them."""

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.engine.attention.cpu import row_size
from penstock.engine.attention.interface import keep_latents, latent_projection
from penstock.engine.config import KVCacheDtype
from penstock.engine.errors import ConfigurationError
from penstock.engine.native.runtime import native_library
from penstock.engine.recurrent.layout import CACHE_NAMES, RecurrentLayer, StateProbe, is_recurrent
from penstock.engine.system.memory import advise_huge_pages, index_on, to_device
from penstock.engine.system.process import making_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FP8_CAPABILITY = (8, 9)
INT8_HEAD_SIZES, INT8_BLOCK_SIZE, INT8_MAX_GROUP = (64, 128), 16, 16  # what the kernels for a cache of int8 are written for
PROBE = "penstock_probe"
NUM_PROBE_TOKENS = 2
# Tensors that a paged attention function knows what to do with. Any other tensor (a position bias, say) changes the result.
UNDERSTOOD_TENSORS = frozenset({"position_ids", "s_aux", "cache_position"})


@dataclass(frozen=True, slots=True)
class LayerKV:
    """The keys and values of one layer for one token: `num_kv_heads` keys of `key_size` and values of `value_size` elements.

    With a `sliding_window` W, a query at position i sees the keys at positions i - W + 1 to i; None: all up to i.
    If `is_latent`, values are the first numbers of the keys and take no memory of their own.
    A layer without attention has no heads. What it keeps of a sequence is in `recurrent`, if it keeps anything.
    """

    num_kv_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None = None
    is_latent: bool = False
    recurrent: RecurrentLayer | None = None

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Bytes per token, keys and values together."""
        return self.num_kv_heads * sum(row_size(size, dtype) for size in self.row_sizes) * dtype.itemsize

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Of the layer's tensors."""
        return (self.key_size,) if self.is_latent else (self.key_size, self.value_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.key_size, self.value_size


NO_KV = LayerKV(0, 0, 0)
MAX_GROUPS = 8  # each has its own block table for every sequence, which costs time in every step


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers, by number, that keep the keys and values of the same tokens, and so share a block table.

    With a `sliding_window`, blocks that have left it are freed.
    """

    layers: tuple[int, ...]
    sliding_window: int | None = None


def layer_groups(layout: list[LayerKV], max_model_len: int, *, is_hybrid: bool = True) -> list[LayerGroup]:
    """Groups of equally many layers with the same window, those without a window first; one group of all layers unless `is_hybrid`.

    A block holds some tokens' keys and values in the layers of one group, so that one pool of blocks serves all groups: neither a few long
    contexts nor many short ones find memory reserved for the other kind. In a group that is not full, the places of the missing layers
    stay unused.
    """
    everything = [LayerGroup(tuple(range(len(layout))))]
    windows = [None if layer.sliding_window is None or layer.sliding_window >= max_model_len else layer.sliding_window for layer in layout]
    kinds: dict[int | None, list[int]] = {window: [] for window in sorted(set(windows), key=lambda window: window or 0)}
    for index, window in enumerate(windows):
        kinds[window].append(index)
    if not is_hybrid or kinds.keys() == {None}:
        return everything
    if len(kinds) == 1:
        return [LayerGroup(everything[0].layers, windows[0])]
    if len({layer.shape for layer in layout}) > 1 or len(kinds) > MAX_GROUPS:
        return everything  # their blocks differ in size
    size = min(map(len, kinds.values()))
    while sum(-(-len(layers) // size) for layers in kinds.values()) > MAX_GROUPS:
        size += 1
    return [
        LayerGroup(tuple(layers[first : first + size]), window) for window, layers in kinds.items() for first in range(0, len(layers), size)
    ]


def block_layers(layout: list[LayerKV], groups: list[LayerGroup]) -> list[LayerKV]:
    """What one block has room for: the layers of the largest group; without those that another rank has, which come last in each."""
    largest = max(len(group.layers) for group in groups)
    places = [[layout[group.layers[place]] for group in groups if place < len(group.layers)] for place in range(largest)]
    return [next((layer for layer in layers if layer.num_kv_heads), layers[0]) for layers in places]


class _Probe:
    """Collects what reaches the attention function, by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, LayerKV] = {}
        self.objections: list[str] = []

    def see(self, module: torch.nn.Module, key: Tensor, value: Tensor, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
        layer_idx = getattr(module, "layer_idx", None)
        if not isinstance(layer_idx, int):
            self.objections.append(f"{type(module).__name__} has no layer_idx")
            return
        if mask is not None:
            self.objections.append(f"layer {layer_idx} builds an attention mask of its own")
        is_causal = kwargs.get("is_causal")
        if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
            self.objections.append(f"layer {layer_idx} is not causal")
        if layer_idx in self.layers:
            self.objections.append(f"layer {layer_idx} attends twice")
        if key.shape[2] != NUM_PROBE_TOKENS:
            self.objections.append(f"layer {layer_idx} attends to {key.shape[2]} keys for {NUM_PROBE_TOKENS} tokens")
        unknown = sorted(name for name, item in kwargs.items() if isinstance(item, Tensor) and name not in UNDERSTOOD_TENSORS)
        if unknown:
            self.objections.append(f"layer {layer_idx} passes {', '.join(unknown)} to attention")
        is_latent = latent_projection(module) is not None
        self.layers[layer_idx] = LayerKV(key.shape[1], key.shape[3], value.shape[3], kwargs.get("sliding_window"), is_latent)


def _note(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    probe = kwargs.get("probe")
    if not isinstance(probe, _Probe):
        raise ConfigurationError("it does not pass keyword arguments on to its attention function")
    probe.see(module, key, value, attention_mask, kwargs)
    batch_size, num_heads, num_tokens, _ = query.shape
    output, latent = query.new_empty(batch_size, num_tokens, num_heads, value.shape[-1]), latent_projection(module)
    return output if latent is None else latent.project_values(output), None


def kv_layout(config: "PretrainedConfig", trust_remote_code: bool = False, *, has_latents: bool = True) -> list[LayerKV]:
    """What each layer keeps in the KV cache, in order. Takes about 0.1 s and hardly any memory, whatever the size of the model.

    With `has_latents`, of layers with latent attention it is what they keep after `keep_latents`.

    Raises `ConfigurationError` where the model does something in attention that the paged KV cache cannot follow.
    """
    from transformers import AttentionInterface, AutoModelForCausalLM

    # The model is built on the meta device and run over two tokens with an attention function that records its arguments. So no table of
    # architectures has to be kept, and the same run shows whether the model hands everything to a registered attention function.
    config = copy.deepcopy(config)
    AttentionInterface.register(PROBE, _note)
    name = f"{config.model_type} model" if not config.architectures else config.architectures[0]
    probe, states = _Probe(), StateProbe()
    try:
        with making_model, torch.device("meta"), torch.inference_mode():
            # Of the ways to run experts only this one has no data-dependent shapes, which the meta device cannot follow.
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation=PROBE, experts_implementation="batched_mm", trust_remote_code=trust_remote_code
            ).eval()
            if has_latents:
                keep_latents(model)
            parameters = inspect.signature(model.forward).parameters
            cache = {name: states for name in CACHE_NAMES if name in parameters} if is_recurrent(config) else {}
            with states.watching(model):
                model(input_ids=torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long), use_cache=False, probe=probe, **cache)
    except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, AttributeError, ConfigurationError) as error:
        traced = _class_name(config)
        raise ConfigurationError(f"{name} cannot be served: the layers of {traced} could not be traced: {error!s:.300}") from error
    if probe.objections:
        raise ConfigurationError(f"{name} cannot be served with a paged KV cache: {probe.objections[0]}")
    num_layers, recurrent = int(config.get_text_config(decoder=True).num_hidden_layers), states.layers()
    if states.objections:
        raise ConfigurationError(f"{name} cannot be served with a pool of states: {states.objections[0]}")
    missing = sorted(set(range(num_layers)) - probe.layers.keys() - recurrent.keys())
    if missing and not is_recurrent(config):  # of these, some have layers without attention or states
        raise ConfigurationError(f"{name} cannot be served: layers {missing} do not use the attention interface")
    return [replace(probe.layers.get(index, NO_KV), recurrent=recurrent.get(index)) for index in range(num_layers)]


def _class_name(config: "PretrainedConfig") -> str:
    """Of the model: as config.json, or else transformers, calls it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return config.architectures[0] if config.architectures else str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "this model"))


class KVCache:
    """One key and one value tensor [num_blocks, block_size, num_kv_heads, head_size] per layer, and the block tables of all sequences.

    Of int8, rows are longer by their scales, and only the kernels know where in a block they lie.

    With several `groups`, a layer of each group shares its tensors with one of every other group: a block is in use in one group at a time.
    The memory is reserved at once but, on the CPU, only becomes resident as blocks are first written.
    Where keys are latents, the value tensor is a view of the key tensor.

    `block_tables_PN`, int32, has for each group a row for each of the `max_num_seqs` sequences that may run, of as many blocks as the
    longest one may have. It belongs to the model's thread, which writes the blocks that a step adds before that step reads them. Entries
    before a sliding window are those of blocks that have been freed.
    """

    def __init__(
        self,
        layout: list[LayerKV],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_num_seqs: int = 256,
        max_blocks: int | None = None,
        groups: list[LayerGroup] | None = None,
    ) -> None:
        def reserve(num_heads: int, size: int) -> Tensor:
            tensor = torch.empty(num_blocks, block_size, num_heads, row_size(size, dtype), dtype=dtype, device=device)
            if device.type == "cpu":  # a long context's blocks lie in more small pages than the processor keeps the addresses of
                advise_huge_pages(tensor)
            return tensor

        self.dtype = dtype
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups or [LayerGroup(tuple(range(len(layout))))]
        self._group_of = {layer: number for number, group in enumerate(self.groups) for layer in group.layers}
        places = {layer: place for group in self.groups for place, layer in enumerate(group.layers)}
        layers = block_layers(layout, self.groups)
        self._tensors = [tuple(reserve(layer.num_kv_heads, size) for size in layer.row_sizes) for layer in layers]
        self._own = [self._tensors[places[layer]] for layer in range(len(layout))]
        self.keys = [tensors[0] for tensors in self._own]
        self.values = [
            tensors[0][..., : layer.value_size] if layer.is_latent else tensors[1] for layer, tensors in zip(layout, self._own, strict=True)
        ]
        width = num_blocks if max_blocks is None else max_blocks
        self.block_tables_PN = torch.zeros(len(self.groups) * max_num_seqs, width, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that take the memory, each once."""
        return [tensor for tensors in self._tensors for tensor in tensors]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def group_of(self, layer: int) -> int:
        """The number of the layer's group."""
        return self._group_of[layer]

    def attach(self, model: nn.Module) -> None:
        """Hangs each layer's tensors on the modules that know its number, where the attention function finds them."""
        for module in model.modules():
            layer_idx = getattr(module, "layer_idx", None)
            if isinstance(layer_idx, int):
                module.register_buffer("key_cache", self.keys[layer_idx], persistent=False)
                has_values = len(self._own[layer_idx]) > 1
                module.register_buffer("value_cache", self.values[layer_idx] if has_values else None, persistent=False)
                # A tensor, not a number: compiled layers that differ in nothing else share their code.
                module.register_buffer("kv_group", torch.tensor(self._group_of[layer_idx]), persistent=False)

    def detach(self, model: nn.Module) -> None:
        """Takes the tensors off the modules again, which then hold nothing of the memory."""
        for module in model.modules():
            if getattr(module, "key_cache", None) is self.keys[getattr(module, "layer_idx", 0)]:
                del module.key_cache, module.value_cache, module.kv_group

    def write_tables(self, updates_3U: Tensor) -> None:
        """Writes entries of the block tables: rows, positions in them, and blocks. Does not wait for the device."""
        if updates_3U.shape[1]:
            rows_U, positions_U, blocks_U = updates_3U
            self.block_tables_PN[rows_U, positions_U] = blocks_U.to(torch.int32)

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Copies whole blocks, (source, target) pairs, in every layer."""
        if not copies:
            return
        sources, targets = to_device(torch.tensor(copies), self.keys[0].device).unbind(1)
        for cache in chain.from_iterable(self._tensors):
            # Not every torch can index floats of 8 bits on a GPU; bytes it can.
            blocks = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
            blocks[targets] = blocks[sources]

    def read_blocks(self, group: int, blocks: Sequence[int]) -> Tensor:
        """The contents of blocks of this group as bytes, [blocks, `payload_bytes`], on the cache's device: by layer, keys first."""
        device = self.keys[0].device
        if device.type == "cpu":  # not by torch, which would use more threads beside those of the model
            return torch.from_numpy(np.concatenate([rows.numpy().take(blocks, 0) for rows in self._rows(group)], 1))
        index = index_on(device, blocks)
        return torch.cat([rows.index_select(0, index) for rows in self._rows(group)], 1)

    def write_blocks(self, group: int, blocks: Sequence[int], contents: Tensor) -> None:
        """The reverse of `read_blocks`, from contents in host memory. Does not wait for the device where that memory is pinned."""
        device = self.keys[0].device
        index, contents = index_on(device, blocks), contents.to(device, non_blocking=True)
        rows = self._rows(group)
        for part, own in zip(rows, torch.split(contents, [part.shape[1] for part in rows], 1), strict=True):
            part.index_copy_(0, index, own)

    def payload_bytes(self, group: int) -> int:
        """Bytes of one block in the layers of this group."""
        return sum(rows.shape[1] for rows in self._rows(group))

    def _rows(self, group: int) -> list[Tensor]:
        """Keys and values of each layer of the group as bytes, a row for each block."""
        tensors = [tensor for layer in self.groups[group].layers for tensor in self._own[layer]]
        return [tensor.flatten(1).view(torch.uint8) for tensor in tensors]


def cache_dtype(wanted: KVCacheDtype, model_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of keys and values. Raises `ConfigurationError` where the device has no kernels for it."""
    if wanted == "auto":
        return model_dtype
    if wanted == "int8":
        if device.type != "cpu":
            raise ConfigurationError(f"--kv-cache-dtype int8: only on a CPU, and the model runs on {device.type}")
        if model_dtype != torch.bfloat16 or native_library() is None:
            raise ConfigurationError("--kv-cache-dtype int8: it takes the native kernels and --dtype bfloat16")
        return torch.int8
    if device.type != "cuda":
        raise ConfigurationError(f"--kv-cache-dtype {wanted}: only on a CUDA GPU, and the model runs on {device.type}")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < FP8_CAPABILITY:
        needed = ".".join(map(str, FP8_CAPABILITY))
        raise ConfigurationError(f"--kv-cache-dtype {wanted}: it takes compute capability {needed}, and this GPU has {major}.{minor}")
    return torch.float8_e4m3fn


def check_int8_cache(layout: list[LayerKV], block_size: int, num_heads: int) -> None:
    """Raises `ConfigurationError` where the kernels for a cache of int8 do not take a model with so many query heads."""
    if any(layer.is_latent for layer in layout):
        raise ConfigurationError("--kv-cache-dtype int8: the keys and values of the model are latents, which are kept in its own type")
    sizes = {size for layer in layout for size in (layer.key_size, layer.value_size)}
    if len(sizes) > 1 or not sizes <= set(INT8_HEAD_SIZES):
        found = ", ".join(map(str, sorted(sizes)))
        raise ConfigurationError(f"--kv-cache-dtype int8: it takes heads of 64 or 128 numbers, and those of the model have {found}")
    if block_size != INT8_BLOCK_SIZE:
        raise ConfigurationError(f"--kv-cache-dtype int8: it takes --block-size {INT8_BLOCK_SIZE}, not {block_size}")
    group = max(num_heads // layer.num_kv_heads for layer in layout)
    if group > INT8_MAX_GROUP:
        raise ConfigurationError(f"--kv-cache-dtype int8: it takes at most {INT8_MAX_GROUP} query heads to a KV head, not {group}")


def block_bytes(layout: list[LayerKV], block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over these layers."""
    return sum(layer.num_bytes(dtype) for layer in layout) * block_size
