"""peft's adapter directories: what they may hold, and the low-rank updates or the tuned prompt that are read from them.

Only LoRA, prompt tuning and p-tuning are read, from safetensors. Whatever else an `adapter_config.json` asks for is refused by its name,
before any weight is read.
"""

import hashlib
import json
import math
import re
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import regex  # type: ignore[import-untyped]
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from penstock.engine.adapters.registry import Adapter
from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.vectors import embeds_at

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**18
MAX_HEADER_BYTES, MAX_HEADER_BYTES_OF_WEIGHT = 2**16, 512  # of a weights file: what else, and for each weight that it is to have
MATCH_SECONDS = 10.0  # for all of an adapter's own patterns
MAX_PATTERN_SIZE = 2**20  # of its characters, as often as its counts of repetition multiplied: compiled it has them all
PREFIX = "base_model.model."  # of every weight's name, before the path of its layer
MAX_BYTES_OF_NUMBER = 8
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
ALL_LINEAR = "all-linear"
# What changes nothing, or is read below; all else that is set in a config is refused.
WITHOUT_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out", "inference_mode", "lora_dropout", "loftq_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
}
READ = {
    *("alpha_pattern", "bias", "exclude_modules", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
    *("peft_type", "r", "rank_pattern", "target_modules", "use_rslora"),
}
LORA = "LORA"  # of the values of `peft_type`
PROMPT_EMBEDDINGS = "prompt_embeddings"
OF_PROMPTS = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "num_attention_heads", "num_layers", "num_transformer_submodules"),
    *("num_virtual_tokens", "peft_type", "peft_version", "revision", "task_type", "token_dim"),
}
# The kinds of tuned prompts, and what a config of each may have besides. All of it is about training: peft saves what comes of it, also of
# the encoder that p-tuning has.
PROMPTS = {
    "PROMPT_TUNING": {"prompt_tuning_init", "prompt_tuning_init_text", "tokenizer_kwargs", "tokenizer_name_or_path"},
    "P_TUNING": {"encoder_dropout", "encoder_hidden_size", "encoder_num_layers", "encoder_reparameterization_type"},
}
OTHER_PROMPTS = {
    "PREFIX_TUNING": "it has keys and values for every layer",
    "MULTITASK_PROMPT_TUNING": "its virtual tokens depend on a task",
    "CPT": "its virtual tokens depend on a context",
}
REASONS = {
    "use_dora": "DoRA is not supported",
    "modules_to_save": "whole modules cannot be replaced, embeddings among them",
    "trainable_token_indices": "embeddings cannot be changed",
    "target_parameters": "only linear layers can be changed, no single parameters, such as those of experts",
    "layer_replication": "the model's layers stay as they are",
    "alora_invocation_tokens": "an adapter applies to the whole prompt",
    "lora_bias": "only the weights of layers can be changed, not their biases",
}
PLAIN_INITS = ("gaussian", "eva", "orthogonal")  # others change the model's own weights


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to a layer's result for x [..., I]: x down^T up^T, where `up_OR` holds the scale as well."""

    down_RI: Tensor
    up_OR: Tensor

    @property
    def rank(self) -> int:
        return len(self.down_RI)


@dataclass(frozen=True, slots=True)
class LayerSize:
    inputs: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Naming:
    """How an adapter names layers: as the model that is served, with `decoder` in place of `own_decoder` at the beginning, or else `rest`
    before the path.
    """

    own_decoder: str
    decoder: str
    rest: str = ""

    def name(self, path: str) -> str:
        """That of a module of the model that is served."""
        prefix = f"{self.own_decoder}."
        return f"{self.decoder}.{path.removeprefix(prefix)}" if path.startswith(prefix) else self.rest + path


@dataclass(frozen=True, slots=True)
class WholeModel:
    """A multimodal model whose language model is served apart from the rest: `namings` are those that adapters have of its layers, `others`
    the names of its other parts, such as the vision tower.
    """

    namings: tuple[Naming, ...]
    others: tuple[str, ...]

    @classmethod
    def of(cls, whole: "PreTrainedModel") -> "WholeModel":
        """Of one that has not been taken apart."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

        decoder: Any = whole.get_decoder()  # type: ignore[no-untyped-call]
        model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder.config)]
        own: str = model_class.base_model_prefix
        path = next(path for path, module in whole.named_modules() if module is decoder)
        name = path.rpartition(".")[2]
        # transformers' own until 4.52 had the language model with its head under this name, and adapters of that time have it still.
        namings = (Naming(own, path), Naming(own, f"{name}.model", f"{name}."))
        children: Any = whole.base_model.named_children()
        return cls(namings, tuple(other for other, module in children if all(part is not decoder for part in module.modules())))

    def other(self, names: Iterable[str]) -> str | None:
        """The first of the names which is that of a module in one of the other parts."""
        parts = "|".join(map(re.escape, self.others))
        return next((name for name in names if re.match(rf"(model\.)?({parts})(\.|$)", name)), None)


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters for one model. May be used in any thread.

    `sizes` are those of the layers that can be changed, by path; `unsuitable` has the paths of other layers, each with the reason.
    `hidden_size` is the model's. `whole` is the multimodal model that it is the language model of: what was trained as a part of that has
    its names.
    """

    sizes: Mapping[str, LayerSize]
    unsuitable: Mapping[str, str]
    dtype: torch.dtype
    max_rank: int
    hidden_size: int
    whole: WholeModel | None = None

    def read(self, name: str, directory: Path, root: Path | None = None) -> Adapter:
        """Raises `InvalidRequest` for whatever is no LoRA adapter or tuned prompt of this model, or not below `root`."""
        if root is None:
            directory = directory.expanduser()
        else:
            root = root.expanduser()
            directory = confined(root / directory, root)
        config = AdapterConfig.read(directory, root)
        if config.is_prompt:
            vectors_NH = self._read_prompt(existing(directory, WEIGHTS_FILE, root), config.num_virtual_tokens)
            return Adapter(name, str(directory), prompt=embeds_at(range(len(vectors_NH)), vectors_NH))
        updates = self._read_weights(existing(directory, WEIGHTS_FILE, root), config)
        return Adapter(name, str(directory), updates, digest_of(updates))

    def adapter_of(self, name: str, weights: Mapping[str, tuple[Tensor, Tensor]]) -> Adapter:
        """Of weights in memory, by path: [rank, inputs] and [outputs, rank], the latter with the scale. Raises `InvalidRequest`."""
        for path, (down_RI, up_OR) in weights.items():
            self._check_shapes(path, len(down_RI), [tuple(down_RI.shape), tuple(up_OR.shape)])
        updates = {path: self._update(path, 1.0, *pair) for path, pair in sorted(weights.items())}
        return Adapter(name, "", updates, digest_of(updates))

    def _read_weights(self, file: Path, config: "AdapterConfig") -> dict[str, LowRank]:
        try:
            # Read rather than mapped: what is mapped and then cut short by another process ends this one.
            with file.open("rb") as opened:
                header = WeightsHeader.read(opened, MAX_HEADER_BYTES + MAX_HEADER_BYTES_OF_WEIGHT * 2 * len(self.sizes))
                targets = self._targets(config, header)
                expected = {PREFIX + name + part for name in targets for part in (DOWN, UP)}
                names = header.shapes.keys()
                if names != expected:
                    stray, lacking = sorted(names - expected), sorted(expected - names)
                    problem = f"has {stray[0]!r}, which is no weight of a target module" if stray else f"lacks {lacking[0]!r}"
                    raise refused(f"its {WEIGHTS_FILE} {problem}")
                for name, path in sorted(targets.items()):  # all of them before the first is read
                    self._check_shapes(path, config.rank_of(name), [header.shapes[PREFIX + name + part] for part in (DOWN, UP)])
                num_bytes = sum(map(math.prod, header.shapes.values())) * MAX_BYTES_OF_NUMBER
                weights = load(header.content + opened.read(num_bytes))
        except (SafetensorError, OSError) as error:
            raise refused(f"its {WEIGHTS_FILE} cannot be read: {error}") from error
        updates = {}
        for name, path in sorted(targets.items()):
            down_RI, up_OR = (weights[PREFIX + name + part] for part in (DOWN, UP))
            updates[path] = self._update(path, config.scale_of(name), down_RI, up_OR)
        return updates

    def _targets(self, config: "AdapterConfig", header: "WeightsHeader") -> dict[str, str]:
        """The paths of the layers that are changed, by the names that the adapter has for them. Raises `InvalidRequest`."""
        changed = {name.removeprefix(PREFIX).removesuffix(DOWN) for name in header.shapes if name.endswith(DOWN)}
        paths = {path: path for path in (*self.sizes, *self.unsuitable)}
        if self.whole is not None:
            # What other parts the target modules name besides says nothing: peft means those that there are weights for.
            if other := self.whole.other(sorted(changed)):
                remedy = f"train it with `exclude_modules='.*({'|'.join(self.whole.others)}).*'`"
                raise refused(f"it changes {other!r}, and only layers of the language model can be changed: {remedy}")
            namings = ({naming.name(path): path for path in paths} for naming in self.whole.namings)
            paths = next((named for named in namings if changed & named.keys()), paths)
        targets = config.targets([name for name, path in paths.items() if path in self.sizes] if config.is_all_linear else [*paths])
        for name in targets:
            if paths[name] in self.unsuitable:
                raise refused(f"it changes {name!r}, and {self.unsuitable[paths[name]]}")
        return {name: paths[name] for name in targets}

    def _read_prompt(self, file: Path, num_virtual_tokens: int) -> Tensor:
        expected = {PROMPT_EMBEDDINGS: (num_virtual_tokens, self.hidden_size)}
        try:
            with file.open("rb") as opened:
                header = WeightsHeader.read(opened, MAX_HEADER_BYTES)
                if header.shapes != expected:
                    found = ", ".join(f"{name} {list(shape)}" for name, shape in list(header.shapes.items())[:3])
                    wanted = f"{PROMPT_EMBEDDINGS} {[num_virtual_tokens, self.hidden_size]}"
                    raise refused(f"its {WEIGHTS_FILE} holds {found}, and it takes {wanted}")
                num_bytes = math.prod(expected[PROMPT_EMBEDDINGS]) * MAX_BYTES_OF_NUMBER
                vectors_NH = load(header.content + opened.read(num_bytes))[PROMPT_EMBEDDINGS]
        except (SafetensorError, OSError) as error:
            raise refused(f"its {WEIGHTS_FILE} cannot be read: {error}") from error
        if vectors_NH.dtype not in DTYPES:
            raise refused(f"its {PROMPT_EMBEDDINGS} are no floating point numbers")
        vectors_NH = vectors_NH.to(self.dtype)
        if not torch.isfinite(vectors_NH).all():
            raise refused(f"its {PROMPT_EMBEDDINGS} are not all finite in {str(self.dtype).removeprefix('torch.')}")
        return vectors_NH

    def _check_shapes(self, path: str, rank: int, shapes: list[tuple[int, ...]]) -> None:
        if rank > self.max_rank:
            raise refused(f"{path!r} has rank {rank}, and --max-lora-rank is {self.max_rank}")
        size = self.sizes[path]
        expected = [(rank, size.inputs), (size.outputs, rank)]
        if shapes != expected:
            raise refused(f"the weights of {path!r} have the shapes {shapes}, and this model with rank {rank} takes {expected}")

    def _update(self, path: str, scale: float, down_RI: Tensor, up_OR: Tensor) -> LowRank:
        if down_RI.dtype not in DTYPES or up_OR.dtype not in DTYPES:
            raise refused(f"the weights of {path!r} are no floating point numbers")
        down_RI, up_OR = down_RI.to(self.dtype, copy=True), (up_OR.float() * scale).to(self.dtype)
        if not (torch.isfinite(down_RI).all() and torch.isfinite(up_OR).all()):
            raise refused(f"the weights of {path!r} are not all finite in {str(self.dtype).removeprefix('torch.')}")
        return LowRank(down_RI.contiguous(), up_OR.contiguous())


class _StoredTensor(msgspec.Struct):
    """An entry of a header, which for metadata has none of this."""

    shape: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightsHeader:
    """The shapes by name in a safetensors file; `content` is the file's beginning up to the first number."""

    content: bytes
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def read(cls, file: BinaryIO, max_bytes: int) -> "WeightsHeader":
        """Raises `InvalidRequest` for a header that is longer, or none."""
        length = file.read(8)
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > max_bytes:  # what is long is decoded under the interpreter's lock
            raise refused(f"its {WEIGHTS_FILE} cannot be read: its header is too large")
        text = file.read(num_bytes)
        try:
            entries = msgspec.json.decode(text, type=dict[str, _StoredTensor])
        except (msgspec.DecodeError, RecursionError) as error:
            raise refused(f"its {WEIGHTS_FILE} cannot be read: its header is broken: {error}") from error
        entries.pop("__metadata__", None)
        return cls(length + text, {name: entry.shape for name, entry in entries.items()})


def confined(path: Path, root: Path) -> Path:
    """The path without links. Raises `InvalidRequest` where it leads out of `root`, or nowhere."""
    try:
        resolved = path.resolve(strict=True)
        if resolved.is_relative_to(root.resolve(strict=True)):
            return resolved
    except (OSError, ValueError, RuntimeError):  # it does not exist, or is no path at all
        pass
    raise refused("there is no such directory, or it leads out of --adapter-dir")


def existing(directory: Path, name: str, root: Path | None) -> Path:
    """Raises `InvalidRequest` where the directory has no such file, or one outside of `root`."""
    file = directory / name
    try:
        if not directory.is_dir():
            raise refused(f"there is no directory {str(directory)!r:.200}")
        is_missing = not file.is_file()
        others = [path.name for path in directory.glob("adapter_model.*")] if is_missing and name == WEIGHTS_FILE else []
    except OSError as error:
        raise refused(f"its {name} cannot be read: {error.strerror}") from error
    if is_missing:
        raise refused(f"it has no {name}" + (f": {', '.join(others)} cannot be read" if others else ""))
    return file if root is None else confined(file, root)


def refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the adapter cannot be loaded: {reason}"[:2000], "lora_path")


def digest_of(updates: Mapping[str, LowRank]) -> bytes:
    """Of what the adapter computes: adapters that differ in anything have different ones."""
    digest = hashlib.blake2b(digest_size=32)
    for path, update in sorted(updates.items()):
        for tensor in (update.down_RI, update.up_OR):
            digest.update(f"{path} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            digest.update(tensor.view(torch.uint8).numpy().data)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The fields of an `adapter_config.json`, of which none asks for what cannot be done."""

    fields: Mapping[str, Any]
    deadline: float = field(default_factory=lambda: time.monotonic() + MATCH_SECONDS)

    @classmethod
    def read(cls, directory: Path, root: Path | None = None) -> "AdapterConfig":
        """Raises `InvalidRequest`."""
        file = existing(directory, CONFIG_FILE, root)
        try:
            with file.open("rb") as opened:
                text = opened.read(MAX_CONFIG_BYTES + 1)
            fields = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not JSON"
            raise refused(f"its {CONFIG_FILE} cannot be read: {reason}") from error
        if not isinstance(fields, dict):
            raise refused(f"its {CONFIG_FILE} is not a JSON object of at most 256 KiB")
        config = cls(fields)
        config._check_kind()
        if config.is_prompt:
            config._check_prompt()
        else:
            config._check_supported()
            config._check_types()
        return config

    @property
    def is_prompt(self) -> bool:
        return bool(self.fields["peft_type"] in PROMPTS)

    @property
    def num_virtual_tokens(self) -> int:
        return int(self.fields["num_virtual_tokens"])

    def _check_kind(self) -> None:
        kind, task = self.fields.get("peft_type"), self.fields.get("task_type")
        if not isinstance(kind, str) or (kind != LORA and kind not in PROMPTS):
            reason = f": {OTHER_PROMPTS[kind]}" if isinstance(kind, str) and kind in OTHER_PROMPTS else ""
            raise refused(f"`peft_type` is {kind!r}, and only {LORA}, {' and '.join(PROMPTS)} are supported{reason}")
        if task not in (None, "CAUSAL_LM"):
            raise refused(f"`task_type` is {task!r}, and only CAUSAL_LM is supported")

    def _check_prompt(self) -> None:
        for name, value in self.fields.items():
            if value and name not in OF_PROMPTS and name not in PROMPTS[self.fields["peft_type"]]:
                raise refused(f"`{name}`: {REASONS.get(name, 'not supported')}")
        number = self.fields.get("num_virtual_tokens")
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise refused(f"`num_virtual_tokens` in its {CONFIG_FILE} is {number!r:.100}")
        if self.fields.get("num_transformer_submodules") not in (None, 1):
            raise refused("`num_transformer_submodules`: only prompts of decoders are supported")

    def _check_supported(self) -> None:
        if self.fields.get("bias", "none") != "none":
            raise refused(f"`bias` is {self.fields['bias']!r}: only the weights of layers can be changed, not their biases")
        init = self.fields.get("init_lora_weights", True)
        if isinstance(init, str) and init not in PLAIN_INITS:
            raise refused(f"`init_lora_weights` is {init!r}, which changes the model's own weights: convert it to a plain adapter")
        for name, value in self.fields.items():
            if value and name not in WITHOUT_EFFECT and name not in READ:
                raise refused(f"`{name}`: {REASONS.get(name, 'not supported')}")

    def _check_types(self) -> None:
        def is_number(value: Any) -> bool:
            return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max

        def is_rank(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value > 0

        def is_pattern(value: Any, is_value: Callable[[Any], bool]) -> bool:
            return isinstance(value, dict) and all(map(is_value, value.values()))

        def are_names(value: Any) -> bool:
            return isinstance(value, str) or (isinstance(value, list) and all(isinstance(item, str) for item in value))

        layers = self.fields.get("layers_to_transform")
        kinds = {
            "r": is_rank(self.fields.get("r")),
            "lora_alpha": is_number(self.fields.get("lora_alpha")),
            "rank_pattern": is_pattern(self.fields.get("rank_pattern") or {}, is_rank),
            "alpha_pattern": is_pattern(self.fields.get("alpha_pattern") or {}, is_number),
            "target_modules": bool(self.fields.get("target_modules")) and are_names(self.fields["target_modules"]),
            "exclude_modules": are_names(self.fields.get("exclude_modules") or []),
            "layers_pattern": are_names(self.fields.get("layers_pattern") or []),
            "layers_to_transform": layers is None or all(isinstance(n, int) for n in (layers if isinstance(layers, list) else [layers])),
        }
        for name, is_right in kinds.items():
            if not is_right:
                raise refused(f"`{name}` in its {CONFIG_FILE} is {self.fields.get(name)!r:.100}")

    def rank_of(self, path: str) -> int:
        return int(self._by_pattern("rank_pattern", path, self.fields["r"]))

    def scale_of(self, path: str) -> float:
        alpha, rank = float(self._by_pattern("alpha_pattern", path, self.fields["lora_alpha"])), self.rank_of(path)
        return alpha / (math.sqrt(rank) if self.fields.get("use_rslora") else rank)

    def _by_pattern(self, name: str, path: str, default: Any) -> Any:
        patterns: dict[str, Any] = self.fields.get(name) or {}
        found = (value for pattern, value in patterns.items() if self._matches(rf"(.*\.)?({pattern})", path))
        return next(found, default)

    @property
    def is_all_linear(self) -> bool:
        """All layers that can be changed: the head, which cannot, is none of those that peft means either."""
        targets = self.fields["target_modules"]
        return isinstance(targets, str) and targets.lower() == ALL_LINEAR

    def targets(self, paths: list[str]) -> set[str]:
        """Those of the paths that peft would change. Raises `InvalidRequest` without one."""
        found = {path for path in paths if self._is_target(path)}
        if not found:
            raise refused(f"its target_modules {self.fields['target_modules']!r:.200} name no layer of this model")
        return found

    def _is_target(self, path: str) -> bool:
        excluded, targets = self.fields.get("exclude_modules") or [], self.fields["target_modules"]
        if self._names_module(excluded, path):
            return False
        if isinstance(targets, str):
            return self.is_all_linear or bool(self._matches(targets, path))
        return path in targets or (self._names_module(targets, path) and self._is_in_layers(path))

    def _is_in_layers(self, path: str) -> bool:
        layers, patterns = self.fields.get("layers_to_transform"), self.fields.get("layers_pattern") or [r"[^.]*"]
        if layers is None or layers == []:
            return True
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            found = self._matches(rf"(?:.*?\.)?(?:{pattern})\.(\d+)\..*", path)
            if found:
                return int(found[1]) in (layers if isinstance(layers, list) else [layers])
        return False

    def _names_module(self, names: list[str] | str, path: str) -> bool:
        """Whether one of the names is the path or its end, or the one pattern matches it."""
        if isinstance(names, str):
            return bool(self._matches(names, path))
        return any(path == name or path.endswith(f".{name}") for name in names)

    def _matches(self, pattern: str, path: str) -> "regex.Match[str] | None":
        return matches(pattern, path, self.deadline - time.monotonic())


def matches(pattern: str, path: str, seconds: float) -> "regex.Match[str] | None":
    """Raises `InvalidRequest` for what is no pattern, or takes too long or too much memory."""
    counts = [int(count) for count in re.findall(r"(?<=[{,])[0-9]+(?=[,}])", pattern)]
    if len(pattern) * math.prod(max(count, 1) for count in counts) > MAX_PATTERN_SIZE:
        raise refused(f"the pattern {pattern!r:.200} is too large")
    try:
        if seconds <= 0:
            raise TimeoutError
        re.compile(pattern)  # peft's own patterns: those of `regex` may refer to themselves, without a bound on memory
        return regex.fullmatch(pattern, path, timeout=seconds, concurrent=True)
    except (re.error, regex.error, TimeoutError, RecursionError, OverflowError) as error:
        raise refused(f"the pattern {pattern!r:.200} cannot be matched: {str(error) or 'it takes too long'}") from error
