"""Hugging Face directories whose weights are quantized: what `quantization_config` says of each layer, checked against the weight files.

All is checked by the files' headers, before a weight is read. Then the layers are read one by one.
"""

import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from penstock.engine.errors import ConfigurationError
from penstock.engine.weights.layouts import (
    FLOATS,
    AwqLayout,
    Float8Layout,
    GptqLayout,
    Int8Layout,
    Layout,
    Mxfp4ExpertLayout,
    Mxfp4Layout,
    PackQuantizedLayout,
    Part,
    Shape,
)
from penstock.engine.weights.quantization import StoredWeight, quantized_names, read_quantized

if TYPE_CHECKING:
    from transformers import PretrainedConfig

CONFIG_NAMES = ("quantization_config", "compression_config")  # the latter is what compressed-tensors called it
# Of a tensor `weight`, those that say that it is quantized.
QUANTIZED_DTYPES = ("I8", "U8", "F8_E4M3", "F8_E5M2")
PACKED_NAMES = ("qweight", "weight_packed")
EXPERT_PARTS = ("_proj_blocks", "_proj_scales")  # of all experts of a layer
BATCH_SIZE = 2**26  # numbers that are read before files are closed
REORDERED = (True, "group", "dynamic")  # of `actorder`: the columns of a group are anywhere, and `weight_g_idx` says where
# What a calibration found for activations and the KV cache: checked, and not used. Here activations keep 16 bits or are rounded by scales
# of their own, and `--kv-cache-dtype` says how keys and values are stored.
ACTIVATION_PARTS = {
    **{f"{name}_scale": Part(FLOATS, ((), (1,), (1, 1)), is_optional=True) for name in ("input", "output", "activation")},
    **{f"{name}_zero_point": Part(("I8",), ((), (1,), (1, 1)), is_optional=True) for name in ("input", "output")},
}
CACHE_SCALES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_proj.output_scale", ".v_proj.output_scale")

logger = logging.getLogger(__name__)


class Refused(Exception):
    """The message names the field of `quantization_config`."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Which layers have a layout. `targets` are names, regular expressions after `re:`, or the class `Linear`, which stands for all.

    `is_calibrated` layers have scales of their activations beside their weight.
    """

    layout: Layout
    targets: tuple[str, ...] = ("Linear",)
    is_calibrated: bool = False


@dataclass(frozen=True, slots=True)
class Rules:
    rules: list[Rule]
    ignored: tuple[str, ...] = ()

    def rule(self, layer: str) -> Rule | None:
        """None for a layer that is not to be quantized."""
        if any(_matches(layer, pattern) for pattern in self.ignored):
            return None
        named = [rule for rule in self.rules if any(_matches(layer, target) for target in rule.targets)]
        of_all = [rule for rule in self.rules if "Linear" in rule.targets]
        return next((rule for rule in (*named, *of_all)), None)


def _matches(layer: str, pattern: str) -> bool:
    """Whether the pattern is a regular expression that matches the layer's name, or names the layer or a module that it is in."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], layer) is not None
    return f".{pattern}." in f".{layer}."


class Fields:
    """A part of `quantization_config`, whose fields are asked for by name and type."""

    def __init__(self, content: Mapping[str, Any], path: str = "quantization_config") -> None:
        self.content = content
        self.path = path

    def get(self, name: str, kinds: type | tuple[type, ...], default: Any = None) -> Any:
        """The value, or `default` where it is missing or null. Raises `Refused` for one of another type."""
        value = self.content.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
            raise Refused(f"{self.path}.{name} is {value!r:.100}")
        return value

    def part(self, name: str) -> "Fields":
        return Fields(self.get(name, dict, {}), f"{self.path}.{name}")

    def require(self, name: str, served: Collection[Any], default: Any = None) -> Any:
        """The value, which is one of those that are `served`. Raises `Refused`."""
        value = self.content.get(name)
        value = default if value is None else value
        if not any(value == each and type(value) is type(each) for each in served):
            names = ", ".join(sorted(map(repr, served)))
            raise Refused(f"{self.path}.{name} is {value!r:.100}, and what is served is {names}")
        return value

    def refuse(self, name: str, reason: str) -> None:
        """Raises `Refused` where the field says anything."""
        if self.content.get(name):
            raise Refused(f"{self.path}.{name}: {reason}")

    def names(self, *fields: str) -> tuple[str, ...]:
        """The lists of names in these fields together."""
        names = [name for field in fields for name in self.get(field, list, [])]
        if not all(isinstance(name, str) for name in names):
            raise Refused(f"{self.path}.{fields[0]} is no list of names")
        return tuple(names)

    def group_size(self, name: str = "group_size") -> int | None:
        """None where a group is a whole row."""
        size = self.get(name, int, 128)
        if size < 1 and size != -1:
            raise Refused(f"{self.path}.{name} is {size}")
        return None if size == -1 else int(size)


def _awq(fields: Fields, _: Collection[str]) -> Rules:
    fields.require("bits", [4], fields.content.get("w_bit"))
    fields.require("version", ["gemm", "GEMM"], "gemm")
    fields.require("zero_point", [True], default=True)
    group_size = fields.group_size("group_size" if "group_size" in fields.content else "q_group_size")
    return Rules([Rule(AwqLayout(4, group_size, is_symmetric=False))], fields.names("modules_to_not_convert"))


def _gptq(fields: Fields, _: Collection[str]) -> Rules:
    bits = fields.require("bits", [4, 8])
    stored = fields.require("checkpoint_format", ["gptq", "gptq_v2"], "gptq")
    fields.refuse("dynamic", "settings that differ from layer to layer are not served")
    fields.refuse("is_marlin_format", "Marlin's order of weights is not served")
    fields.require("pack_dtype", ["int32"], "int32")
    is_symmetric = fields.get("sym", bool, True)
    has_order = fields.get("desc_act", bool, False)
    layout = GptqLayout(bits, fields.group_size(), is_symmetric, zero_offset=1 if stored == "gptq" else 0, has_order=has_order)
    return Rules([Rule(layout)], fields.names("modules_to_not_convert", "modules_in_block_to_not_quantize"))


def _fp8(fields: Fields, tensor_names: Collection[str]) -> Rules:
    is_calibrated = fields.require("activation_scheme", ["dynamic", "static"], "dynamic") == "static"
    fields.require("fmt", ["e4m3", "float8_e4m3fn"], "e4m3")
    block = _block(fields, "weight_block_size")
    scale = "weight_scale_inv" if any(name.endswith(".weight_scale_inv") for name in tensor_names) else "weight_scale"
    rule = Rule(Float8Layout(scale, block), is_calibrated=is_calibrated)
    return Rules([rule], fields.names("modules_to_not_convert", "ignored_layers"))


def _mxfp4(fields: Fields, _: Collection[str]) -> Rules:
    return Rules([Rule(Mxfp4ExpertLayout())], fields.names("modules_to_not_convert"))


def _fbgemm_fp8(fields: Fields, _: Collection[str]) -> Rules:
    return Rules([Rule(Float8Layout("weight_scale"))], fields.names("modules_to_not_convert"))


def _block(fields: Fields, name: str) -> tuple[int, int] | None:
    """Rows and columns that have a scale in common."""
    block = fields.get(name, list)
    if block is None:
        return None
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block) or block[1] % 2:
        raise Refused(f"{fields.path}.{name} is {block!r:.100}")
    return block[0], block[1]


def _compressed_tensors(fields: Fields, _: Collection[str]) -> Rules:
    fields.require("quantization_status", ["compressed", "frozen"], "compressed")
    sparsity = fields.part("sparsity_config")
    if sparsity.content:
        sparsity.require("format", ["dense"], "dense")
    fields.refuse("transform_config", "transforms of weights are not served")
    groups = fields.part("config_groups")
    rules = []
    for name in groups.content:
        group = groups.part(name)
        stored = group.content.get("format") or fields.content.get("format")
        rules.append(Rule(_group_layout(group, stored, fields.path), group.names("targets"), _is_calibrated(group)))
    return Rules(rules, fields.names("ignore"))


def _group_layout(group: Fields, stored: object, path: str) -> Layout:
    weights = group.part("weights")
    bits, kind = weights.require("num_bits", [4, 8]), weights.require("type", ["int", "float"], "int")
    is_symmetric = weights.get("symmetric", bool, True)
    match stored, kind, bits:
        case "pack-quantized", "int", _:
            weights.require("strategy", ["group", "channel"])
            group_size = weights.group_size() if weights.content["strategy"] == "group" else None
            has_order = weights.content.get("actorder") in REORDERED
            return PackQuantizedLayout(bits, group_size, is_symmetric, has_order)
        case "int-quantized" | "naive-quantized", "int", 8:
            weights.require("strategy", ["channel", "tensor"])
            return Int8Layout(8, None, is_symmetric)
        case "float-quantized" | "naive-quantized", "float", 8:
            strategy = weights.require("strategy", ["tensor", "channel", "block"])
            return Float8Layout("weight_scale", _block(weights, "block_structure") if strategy == "block" else None)
        case "mxfp4-pack-quantized", "float", 4:
            return Mxfp4Layout()
    raise Refused(f"{path}.format is {stored!r:.100} with {bits}-bit {kind} weights, which is not served")


def _is_calibrated(group: Fields) -> bool:
    """Whether activations are to be rounded by stored scales. Dynamic rounding is left to the kernels."""
    parts = [part for name in ("input_activations", "output_activations") if (part := group.part(name)).content]
    return False in [part.require("dynamic", [True, False, "local"], default=False) for part in parts]


# By `quant_method`.
METHODS: Mapping[str, Callable[[Fields, Collection[str]], Rules]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "mxfp4": _mxfp4,
}


class WeightsInFewBits(Protocol):
    """The matrices that a model's directory holds in few bits, by the names of parameters."""

    @property
    def names(self) -> list[str]: ...

    @property
    def tensor_names(self) -> frozenset[str]:
        """The last parts of the names of tensors that are theirs in the model's own weight files."""
        ...

    def read(self, device: torch.device) -> Iterator[tuple[str, StoredWeight]]:
        """One by one, as tensors of their own; on the meta device with their shapes and nothing in them.

        Raises `ConfigurationError` where the files are broken.
        """
        ...


@dataclass(frozen=True, slots=True)
class ConvertedWeights:
    """Those in the directory that a GGUF file was converted to, if it is one."""

    directory: Path

    @property
    def names(self) -> list[str]:
        return quantized_names(self.directory)

    @property
    def tensor_names(self) -> frozenset[str]:
        return frozenset()

    def read(self, device: torch.device) -> Iterator[tuple[str, StoredWeight]]:
        return read_quantized(self.directory, device)


@dataclass(frozen=True, slots=True)
class Header:
    """Of a tensor in a weight file, or of what it has for expert number `expert`."""

    path: Path
    name: str
    dtype: str
    shape: Shape
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """A quantized layer, by the names in it of its tensors."""

    layout: Layout
    size: tuple[int, int]
    tensors: dict[str, Header]


class Checkpoint:
    """Those of a Hugging Face directory with a `quantization_config`.

    Raises `ConfigurationError` naming the field that is not served, or the tensor that is not what the config says.
    """

    def __init__(self, directory: Path, config: Mapping[str, Any]) -> None:
        self.directory = directory
        headers = _headers(directory)
        fields = Fields(config)
        try:
            rules = METHODS[fields.require("quant_method", METHODS)](fields, headers)
        except (Refused, re.error) as error:
            raise ConfigurationError(f"{directory / 'config.json'}: {error}") from error
        self.layers: dict[str, StoredLayer] = {}
        self.unused_names: frozenset[str] = frozenset()
        try:
            cache_scales = _cache_scales(headers)
            layers = _quantized_layers({name: header for name, header in headers.items() if name not in cache_scales})
            for layer, tensors in layers.items():
                self.layers[layer] = _checked(layer, tensors, rules.rule(layer))
        except (Refused, re.error) as error:
            raise ConfigurationError(f"{directory}: {error}") from error
        if not self.layers:
            raise ConfigurationError(f"{directory}: its config has a quantization_config, and no weight is quantized")
        activation_scales = {name for layer, tensors in layers.items() for name in tensors.keys() - self.layers[layer].tensors.keys()}
        self.unused_names = frozenset(activation_scales | {name.rpartition(".")[2] for name in cache_scales})
        if self.unused_names:
            logger.info(
                "The checkpoint's scales of activations and of the KV cache (%s) are not used: activations keep 16 bits or are rounded by "
                "scales of their own, and --kv-cache-dtype says how keys and values are stored.",
                ", ".join(sorted(self.unused_names)),
            )

    @property
    def names(self) -> list[str]:
        return [f"{layer}.weight" for layer in self.layers]

    @property
    def tensor_names(self) -> frozenset[str]:
        names = {header.name.rpartition(".")[2] for stored in self.layers.values() for header in stored.tensors.values()}
        return frozenset(names - {"bias"}) | self.unused_names

    def read(self, device: torch.device) -> Iterator[tuple[str, StoredWeight]]:
        if device.type == "meta":
            for layer, stored in self.layers.items():
                yield f"{layer}.weight", StoredWeight(stored.layout.outline(*stored.size), stored.layout.name)
            return
        for layers in self._batches():
            with ExitStack() as open_files:
                files: dict[Path, Any] = {}
                for layer in layers:
                    yield f"{layer}.weight", self._read(layer, files, open_files)

    def _batches(self) -> Iterator[list[str]]:
        """Layers to be read before the files are closed: what was read from an open file stays in memory."""
        layers: list[str] = []
        size = 0
        for layer, stored in self.layers.items():
            layers.append(layer)
            size += sum(math.prod(header.shape) for header in stored.tensors.values())
            if size >= BATCH_SIZE:
                yield layers
                layers, size = [], 0
        yield layers

    def _read(self, layer: str, files: dict[Path, Any], open_files: ExitStack) -> StoredWeight:
        stored = self.layers[layer]
        try:
            for header in stored.tensors.values():
                if header.path not in files:
                    files[header.path] = open_files.enter_context(safe_open(header.path, "pt"))
            tensors = {name: _read_tensor(files[header.path], header) for name, header in stored.tensors.items()}
            bias = tensors.pop("bias", None)
            return StoredWeight(stored.layout.read(tensors), stored.layout.name, bias)
        except (OSError, SafetensorError, ValueError, RuntimeError) as error:
            raise ConfigurationError(f"{self.directory}: {layer} cannot be read: {error}") from error


def stored_weights(directory: Path, config: "PretrainedConfig") -> WeightsInFewBits:
    """What the directory holds in few bits, checked as far as headers tell. Takes `quantization_config` off the config.

    transformers would otherwise load the weights in a way of its own.
    """
    found: Mapping[str, Any] | None = None
    for part in (config.get_text_config(), config):
        for name in CONFIG_NAMES:
            found = vars(part).pop(name, None) or found
    if found is None:
        return ConvertedWeights(directory)
    if not isinstance(found, dict):
        raise ConfigurationError(f"{directory / 'config.json'}: quantization_config is {found!r:.100}")
    return Checkpoint(directory, found)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a Hugging Face directory: those of its index, or the one that it has without.

    Raises `ConfigurationError` for an index that is none, and naming the files that are not there.
    """
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.is_file():
        try:
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise ConfigurationError(f"{index} is not an index of weight files: {error}") from error
        if other := [name for name in names if not isinstance(name, str)]:
            raise ConfigurationError(f"{index} is not an index of weight files: {other[0]!r:.100} is no name of a file")
    if missing := sorted(name for name in names if not (directory / name).is_file()):
        hint = "" if index.is_file() else "; weights in other formats than safetensors are not read"
        raise ConfigurationError(f"{directory} lacks {', '.join(missing)}{hint}")
    return [directory / name for name in sorted(names)]


def _headers(directory: Path) -> dict[str, Header]:
    """Of all tensors in the weight files."""
    headers = {}
    try:
        for path in weight_files(directory):
            with safe_open(path, "pt") as file:
                for name in list(file.keys()):
                    part = file.get_slice(name)
                    headers[name] = Header(path, name, part.get_dtype(), tuple(part.get_shape()))
    except (OSError, SafetensorError, ValueError) as error:
        raise ConfigurationError(f"the weight files in {directory} cannot be read: {error}") from error
    return headers


def _cache_scales(headers: Mapping[str, Header]) -> set[str]:
    """The names of the KV cache's scales. Raises `Refused` for those that are none."""
    found = {name: header for name, header in headers.items() if name.endswith(CACHE_SCALES)}
    for name, header in found.items():
        if header.dtype not in FLOATS or math.prod(header.shape[1:]) != 1:
            raise Refused(f"{name} is {header.dtype} of shape {header.shape}, and should be a scale of the KV cache, or one for each head")
    return set(found)


def _quantized_layers(headers: Mapping[str, Header]) -> dict[str, dict[str, Header]]:
    """The tensors of each layer that is quantized. Raises `Refused` for what belongs to none and cannot be ignored."""
    layers: dict[str, dict[str, Header]] = {}
    for name, header in headers.items():
        layer, _, own_name = name.rpartition(".")
        if own_name in PACKED_NAMES or (own_name == "weight" and header.dtype in QUANTIZED_DTYPES):
            layers[layer] = {}
    for name, header in headers.items():
        layer, _, own_name = name.rpartition(".")
        if layer in layers:
            layers[layer][own_name] = header
        elif own_name.endswith(EXPERT_PARTS) and len(header.shape) > 1:
            path, _, part = name.rpartition("_")
            for expert in range(header.shape[0]):
                own = replace(header, shape=header.shape[1:], expert=expert)
                layers.setdefault(f"{path.rpartition('.')[0]}.{expert}.{path.rpartition('.')[2]}", {})[part] = own
    own_names = {name for tensors in layers.values() for name in tensors} - {"weight", "bias"}
    for name in headers:
        layer, _, own_name = name.rpartition(".")
        if own_name in own_names and layer not in layers:
            raise Refused(f"{name} is of a quantized weight, and {layer} has none")
    return layers


def _checked(layer: str, tensors: dict[str, Header], rule: Rule | None) -> StoredLayer:
    """The layer with the tensors that are used. Raises `Refused` where the tensors are not what the layout needs."""
    if rule is None:
        raise Refused(f"{layer} is quantized, and quantization_config leaves it out")
    layout = rule.layout
    if layout.key not in tensors:
        raise Refused(f"{layer}.{layout.key} is missing")
    key_shape = tensors[layout.key].shape
    if len(key_shape) != layout.num_dims:
        raise Refused(f"{layer}.{layout.key} has the shape {key_shape}")
    outputs, inputs = layout.size(key_shape)
    try:
        parts = layout.parts(outputs, inputs)
    except ValueError as error:
        raise Refused(f"{layer}: {error}") from error
    parts["bias"] = Part(FLOATS, ((outputs,),), is_optional=True)
    unused = ACTIVATION_PARTS if rule.is_calibrated else {}
    parts |= unused
    for name, part in parts.items():
        if name not in tensors and not part.is_optional:
            raise Refused(f"{layer}.{name} is missing")
    for name, header in tensors.items():
        if name not in parts:
            raise Refused(f"{layer}.{name} is a tensor that {layout.name} weights of this kind do not have here")
        if header.dtype not in parts[name].dtypes or header.shape not in parts[name].shapes:
            wanted = f"{' or '.join(parts[name].dtypes)} of shape {' or '.join(map(str, parts[name].shapes))}"
            raise Refused(f"{layer}.{name} is {header.dtype} of shape {header.shape}, and should be {wanted}")
    return StoredLayer(layout, (outputs, inputs), {name: header for name, header in tensors.items() if name not in unused})


def _read_tensor(file: Any, header: Header) -> Tensor:
    tensor: Tensor = file.get_tensor(header.name) if header.expert is None else file.get_slice(header.name)[header.expert]
    return tensor
