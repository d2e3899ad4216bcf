"""Prepared models: what native code computes with, kept in files from which the next start neither builds nor verifies a model again.

A start from these files imports no transformers, which takes longer than all else. They are made of a model whose layers run in native
code, once that has been verified, and hold its layers as the kernels read them. Their directory's name says what they were made from:
another version of anything that the result depends on has another directory.
"""

import glob
import hashlib
import logging
import math
import shutil
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import msgspec
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from penstock import __version__
from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerKV
from penstock.engine.model.form import DecoderForm, OuterForm, PreparedDecoder, PreparedLayer, PreparedMixture, RopeForm
from penstock.engine.model.loader import LoadedModel, resolve_device
from penstock.engine.model.native import NativeDecoder
from penstock.engine.native.runtime import choose_kernels, native_library
from penstock.engine.system.cache import build_once, cache_directory, fault_of
from penstock.engine.system.memory import advise_huge_pages
from penstock.engine.weights import linear
from penstock.engine.weights.experts import GroupedLinear, GroupedPanelLinear, GroupedWeight
from penstock.engine.weights.float8 import Float8Linear, Float8Weight, GroupedFloat8Linear
from penstock.engine.weights.linear import PackedLinear, ScaledEmbedding, embedding_scale, packed_weight

logger = logging.getLogger(__name__)

DESCRIPTION, WEIGHTS = "model.json", "weights.safetensors"
# As `save_file` names them.
TYPES = {"U8": torch.uint8, "I64": torch.int64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
HUGE_PAGE = 2**21
ALIGNMENT = 64  # of a tensor, in bytes: a line of the cache
FREE_DISK = 4  # times the size of the weights, which would not be worth the last of a disk
# Options that the layers depend on are part of the directory's name; those of the second list have no influence on them. With any other
# that is not at its default, transformers builds the model.
OF_THE_LAYERS = ("model", "dtype", "quantization", "max_model_len", "device")
OF_THE_ENGINE = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "kv_cache_memory",
    "enable_prefix_caching",
    "hybrid_kv_cache",
    "kv_events",
    "kv_events_topic",
    "kv_events_replay",
    "max_waiting_requests",
    "max_waiting_tokens",
    "max_queue_time",
    "priority_aging",
    "async_scheduling",
    "speculation",
    "adaptive_speculation",
    "num_threads",
    "pin_threads",
    "seed",
)
# What may be described: beside these, the layers that `linear.py` has, and what they are made of.
LAYERS = [kind for kind in vars(linear).values() if isinstance(kind, type) and issubclass(kind, nn.Module)]
OF_EXPERTS = (PreparedMixture, GroupedLinear, GroupedPanelLinear, GroupedFloat8Linear, GroupedWeight)
KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Embedding, nn.ModuleList, PreparedLayer, Float8Linear, Float8Weight, *OF_EXPERTS, *LAYERS)
}
OF_ANY_MODULE = vars(nn.Module()).keys()


class UnknownModule(Exception):
    """A module that cannot be described; the message names it."""


class Node(msgspec.Struct, forbid_unknown_fields=True):
    """A module: its class, plain attributes, types, and tensors by their names in the file; an empty name stands for None.

    One that has been described before has a number alone, so that what was shared stays so. `packed` is the weight of a `PackedLinear`.
    """

    number: int
    kind: str = ""
    attributes: dict[str, bool | int | float | str | None] = {}
    dtypes: dict[str, str] = {}
    buffers: dict[str, str] = {}
    parameters: dict[str, str] = {}
    packed: str = ""
    modules: dict[str, "Node"] = {}


class Rope(msgspec.Struct, forbid_unknown_fields=True):
    """As `RopeForm`."""

    inverse_frequencies: str
    factor: float
    is_interleaved: bool


class Description(msgspec.Struct, forbid_unknown_fields=True):
    """What is known of a model beside its weights, as `LoadedModel` and `DecoderForm` have it, and its defaults for sampling."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    kv_layout: list[LayerKV]
    quantization: str
    generation_config: dict[str, Any]
    epsilon: float
    final_norm: str
    ropes: list[Rope]
    outer: OuterForm
    embedding: Node
    head: Node
    layers: Node


@dataclass(frozen=True, slots=True)
class PreparedConfig:
    """What the engine asks a model's config for."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int

    def get_text_config(self, decoder: bool = False) -> "PreparedConfig":
        return self


@dataclass(frozen=True, slots=True)
class PreparedFiles:
    """Where a model is prepared, or would be."""

    model_directory: Path
    directory: Path

    @classmethod
    def of(cls, model_directory: Path, config: EngineConfig) -> "PreparedFiles | None":
        """None where the options ask for what takes the model's own layers, or there is no native code."""
        changed = {field.name for field in fields(EngineConfig) if getattr(config, field.name) != _default(field)}
        choose_kernels(config.native_kernels)
        if (
            changed - {*OF_THE_LAYERS, *OF_THE_ENGINE}
            or resolve_device(config.device).type != "cpu"
            or (library := native_library()) is None
        ):
            return None
        place = _digest([str(model_directory), *(str(getattr(config, name)) for name in OF_THE_LAYERS)])
        made_from = _digest([*_versions(), Path(library._name).name, *_stamps(model_directory)])
        return cls(model_directory, cache_directory() / "prepared" / f"{model_directory.name[:64]}-{place}-{made_from}")

    def read(self, *, verify: bool = False) -> Description | None:
        """None where nothing is there, or what is cannot be used; it is then removed. `verify` as of `build_once`.

        Raises `ConfigurationError` where other users could have written it.
        """
        if not self.directory.is_dir():
            return None
        try:
            if (reason := fault_of(self.directory, verify)) is not None:
                raise ValueError(reason)
            return msgspec.json.decode((self.directory / DESCRIPTION).read_bytes(), type=Description)
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            self._discard(error)
            return None

    def load(self, description: Description) -> LoadedModel | None:
        """The model; None where the weights do not fit the description."""
        try:
            model = _Reader(read_tensors(self.directory / WEIGHTS)).decoder(description)
        except (OSError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, msgspec.MsgspecError) as error:
            self._discard(error)
            return None
        return LoadedModel(
            directory=self.model_directory,
            model=cast(Any, model),
            config=cast(Any, model.config),
            kv_layout=description.kv_layout,
            eos_token_ids=frozenset(description.eos_token_ids),
            max_model_len=description.max_model_len,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            quantization=cast(Any, description.quantization),
        )

    def write(self, loaded: LoadedModel, generation_config: dict[str, Any]) -> None:
        """Prepares a model whose layers run in native code, in place of what was made of an earlier version. Others are left alone."""
        decoder = loaded.model.forward
        if not isinstance(decoder, NativeDecoder) or loaded.vision is not None:
            return
        writer = _Writer()
        try:
            description = writer.description(loaded, decoder, generation_config)
        except UnknownModule as reason:
            logger.debug("The model is not prepared for the next start: %s", reason)
            return
        num_bytes = sum(tensor.nbytes for tensor in writer.tensors.values())
        if shutil.disk_usage(_existing(self.directory)).free < FREE_DISK * num_bytes:
            logger.info("The disk has too little room to prepare the model for the next start (%.0f MB)", num_bytes / 1e6)
            return

        def build(scratch: Path) -> None:
            save_file(writer.tensors, scratch / WEIGHTS)
            (scratch / DESCRIPTION).write_bytes(msgspec.json.encode(description))

        try:
            build_once(self.directory, build)
        except ConfigurationError as error:
            logger.info("The model is not prepared for the next start: %s", error)
            return
        for other in self.directory.parent.glob(f"{glob.escape(self.directory.name.rpartition('-')[0])}-*/"):
            if other != self.directory:
                shutil.rmtree(other, ignore_errors=True)

    def _discard(self, reason: Exception) -> None:
        logger.warning("The prepared model in %s cannot be used and is made again: %s", self.directory, reason)
        shutil.rmtree(self.directory, ignore_errors=True)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Those of a safetensors file, side by side in huge pages: in pages of 4 KiB, decoding at one stream takes 1.05 times as long.

    Mapped, the file would be resident beside them while it is read. Raises `OSError`, `ValueError`, `LookupError` or
    `msgspec.MsgspecError` where the file is broken.
    """
    tensors = {}
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        header = msgspec.json.decode(file.read(header_size), type=dict[str, Any])
        header.pop("__metadata__", None)
        sizes = {name: math.prod(entry["shape"]) * TYPES[entry["dtype"]].itemsize for name, entry in header.items()}
        memory = _huge_pages(sum(_aligned(size) for size in sizes.values()), path.stat().st_size)
        place = 0
        for name, entry in sorted(header.items(), key=lambda item: item[1].get("data_offsets", [0])):
            data = memory[place : place + sizes[name]]
            file.seek(8 + header_size + entry["data_offsets"][0])
            if file.readinto(data.numpy().data) != len(data):
                raise ValueError(f"{path.name} ends within {name}")
            tensors[name] = data.view(TYPES[entry["dtype"]]).view(entry["shape"])
            place += _aligned(sizes[name])
    return tensors


def _aligned(num_bytes: int) -> int:
    """With the bytes up to where the next tensor may begin."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _huge_pages(num_bytes: int, file_bytes: int) -> Tensor:
    """Memory that begins at a huge page, and is made of them where the system has any.

    Raises `ValueError` for more bytes than the file can fill.
    """
    if num_bytes > 2 * file_bytes:
        raise ValueError(f"its tensors have {num_bytes} bytes, and the file {file_bytes}")
    memory = torch.empty(num_bytes + HUGE_PAGE, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % HUGE_PAGE :][:num_bytes]
    advise_huge_pages(memory)
    return memory


def _default(field: "Field[Any]") -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _versions() -> list[str]:
    """Of whatever built the model: libraries, the modules beside this one, and those of `engine/weights/`."""
    folders = (Path(__file__).parent, Path(linear.__file__).parent)
    sources = [path.read_text(encoding="utf-8") for folder in folders for path in sorted(folder.glob("*.py"))]
    return [__version__, torch.__version__, version("transformers"), *sources]


def _stamps(directory: Path) -> list[str]:
    """Size and time of modification of each file."""
    paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in paths]


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.parents) if place.exists())


def _describable(embedding: nn.Module) -> nn.Module:
    """An embedding of a model's own class that only multiplies as one of ours."""
    if type(embedding) is nn.Embedding or not isinstance(embedding, nn.Embedding):
        return embedding
    scale = embedding_scale(embedding, embedding.weight.dtype)
    return embedding if scale is None else ScaledEmbedding(embedding.weight, scale)


class _Writer:
    """Describes modules, and collects their tensors by name."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}
        self._numbers: dict[nn.Module, int] = {}

    def description(self, loaded: LoadedModel, decoder: NativeDecoder, generation_config: dict[str, Any]) -> Description:
        """Raises `UnknownModule`."""
        layers = nn.ModuleList(map(PreparedLayer.of, decoder.form.modules, decoder.form.layers))
        return Description(
            vocab_size=loaded.vocab_size,
            max_model_len=loaded.max_model_len,
            eos_token_ids=sorted(loaded.eos_token_ids),
            kv_layout=loaded.kv_layout,
            quantization=loaded.quantization,
            generation_config=generation_config,
            epsilon=decoder.form.epsilon,
            final_norm=self._name_of(decoder.form.final_norm),
            ropes=[Rope(self._name_of(rope.inverse_frequencies), rope.factor, rope.is_interleaved) for rope in decoder.form.ropes],
            outer=decoder.form.outer,
            embedding=self._node(_describable(decoder.embedding)),
            head=self._node(decoder.head),
            layers=self._node(layers),
        )

    def _node(self, module: nn.Module) -> Node:
        if module in self._numbers:
            return Node(self._numbers[module])
        kind = type(module).__name__
        if KINDS.get(kind) is not type(module):
            raise UnknownModule(f"{type(module).__qualname__} is a layer of another kind")
        number = self._numbers[module] = len(self._numbers)
        plain = {name: value for name, value in vars(module).items() if name not in OF_ANY_MODULE}
        dtypes = {name: plain.pop(name) for name, value in list(plain.items()) if isinstance(value, torch.dtype)}
        if unknown := [name for name, value in plain.items() if not (value is None or isinstance(value, bool | int | float | str))]:
            raise UnknownModule(f"{kind}.{unknown[0]} is no plain value")
        return Node(
            number,
            kind,
            attributes=plain,
            dtypes={name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
            # The handle of a packed weight is a number of this process.
            buffers={} if isinstance(module, PackedLinear) else {name: self._name_of(tensor) for name, tensor in module._buffers.items()},
            parameters={name: self._name_of(tensor) for name, tensor in module._parameters.items()},
            packed=self._name_of(packed_weight(module)) if isinstance(module, PackedLinear) else "",
            modules={name: self._node(child) for name, child in module._modules.items() if child is not None},
        )

    def _name_of(self, tensor: Tensor | None) -> str:
        if tensor is None:
            return ""
        if not tensor.is_contiguous() or tensor.is_mkldnn:
            raise UnknownModule("a tensor is laid out in another way")
        place = tensor.data_ptr()
        if place not in self._names:
            self._names[place] = f"t{len(self.tensors)}"
            self.tensors[self._names[place]] = tensor.detach()
        name = self._names[place]
        if self.tensors[name].shape != tensor.shape or self.tensors[name].dtype != tensor.dtype:
            raise UnknownModule("two tensors share a part of their memory")
        return name


class _Reader:
    """Makes modules of their descriptions."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors
        self._modules: dict[int, nn.Module] = {}

    def decoder(self, description: Description) -> PreparedDecoder:
        layers = [layer for layer in self._module(description.layers).children() if isinstance(layer, PreparedLayer)]
        if len(layers) != len(description.kv_layout):
            raise ValueError(f"there are {len(layers)} layers")
        form = DecoderForm(
            modules=[],
            layers=[layer.form() for layer in layers],
            final_norm=self._tensors[description.final_norm],
            epsilon=description.epsilon,
            ropes=[RopeForm(self._tensors[rope.inverse_frequencies], rope.factor, rope.is_interleaved) for rope in description.ropes],
            outer=description.outer,
        )
        config = PreparedConfig(description.vocab_size, form.layers[0].output.outputs, len(layers))
        return PreparedDecoder(config, form, layers, self._module(description.embedding), self._module(description.head))

    def _module(self, node: Node) -> nn.Module:
        if not node.kind:
            return self._modules[node.number]
        module = self._modules[node.number] = KINDS[node.kind].__new__(KINDS[node.kind])
        nn.Module.__init__(module)
        vars(module).update(node.attributes)
        vars(module).update({name: getattr(torch, dtype) for name, dtype in node.dtypes.items()})
        for name, tensor_name in node.buffers.items():
            module.register_buffer(name, self._tensors[tensor_name] if tensor_name else None, persistent=False)
        for name, tensor_name in node.parameters.items():
            module.register_parameter(name, nn.Parameter(self._tensors[tensor_name], requires_grad=False) if tensor_name else None)
        if isinstance(module, PackedLinear):
            module.keep(self._tensors[node.packed])
        for name, child in node.modules.items():
            module.add_module(name, self._module(child))
        return module
