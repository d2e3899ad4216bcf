"""Tensor parallelism: which part of each layer a rank has, by transformers' own plan for the model (Shoeybi et al., arXiv:1909.08053).

Of a layer that is sharded by outputs, each rank computes some columns of the result; of one that is sharded by inputs, a part of the sum,
which the ranks then add up. Attention is sharded by heads and an MLP by its inner size, so that each takes one sum.
"""

import functools
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.engine.config import EngineConfig
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerKV
from penstock.engine.multimodal.vision import is_multimodal
from penstock.engine.parallel.group import ALONE, Group
from penstock.engine.parallel.stages import Stage, check_stages, check_stream
from penstock.engine.recurrent.layout import is_recurrent
from penstock.engine.system.process import making_model
from penstock.engine.weights.linear import QuantizedLinear
from penstock.engine.weights.packed import PackedWeight
from penstock.engine.weights.quantization import StoredWeight

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

BY_OUTPUTS, GATHERED, BY_HALVES = "colwise", "colwise_gather_output", "packed_colwise"
BY_INPUTS, SPLIT = "rowwise", "rowwise_split_input"
EXPERTS = "moe_tp_experts"
WHOLE = "replicate"
# transformers' other names for the same, and what concerns training alone.
SYNONYMS = {"colwise_rep": GATHERED, "rowwise_rep": SPLIT, "replicated_with_grad_allreduce": WHOLE}
OF_OUTPUTS, OF_INPUTS = (BY_OUTPUTS, GATHERED, BY_HALVES), (BY_INPUTS, SPLIT)
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value")  # what gives keys, alone or with others
# Where transformers gathers the two halves of an MLP's first product on every rank, since the model's code takes them apart: each rank can
# as well have a part of both.
OF_HALVES = {"gate_up_proj": (GATHERED, BY_HALVES), "down_proj": (SPLIT, BY_INPUTS)}


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is spread over its group. `styles` are those of modules and parameters by their paths, without what every rank has whole.

    `sizes` are the inputs and outputs of the whole linear layers, by path. `head` is the path of the output layer, empty where there is no
    such layer, and `vocab_size` the number of its rows, which all ranks have a part of. In the MLPs at the paths in `units`, parts are of
    so many columns or a multiple. With a `stage`, this rank has some layers whole, and the rest of this is empty.
    """

    group: Group = ALONE
    styles: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    embedding: str = ""
    head: str = ""
    vocab_size: int = 0
    units: Mapping[str, int] = field(default_factory=dict)
    stage: Stage | None = None

    @property
    def num_parts(self) -> int:
        """Of each layer: one where ranks have whole layers."""
        return 1 if self.stage is not None else self.group.size

    def options(self, *, is_tied: bool) -> dict[str, Any]:
        """Has `from_pretrained` read this rank's parts alone. A head that `is_tied` to the embedding is sharded afterwards."""
        if self.num_parts == 1:
            return {}
        from transformers.distributed.configuration_utils import DistributedConfig

        whole = [self.embedding, *([self.head] if is_tied else [])]
        plan = {_pattern(path): style for path, style in self.styles.items()} | dict.fromkeys(whole, WHOLE)
        return {"distributed_config": DistributedConfig(tp_size=self.group.size, tp_plan=plan)}

    def along_blocks(self, weights: Iterable[tuple[str, StoredWeight]]) -> "Sharding":
        """The same, where equal parts of an MLP would end within blocks of its stored weights, with parts that differ by a block.

        Of the weights only the types are looked at. Raises `ConfigurationError` for those of experts.
        """
        if self.num_parts == 1:
            return self
        blocks = {name.removesuffix(".weight"): each.packed for name, each in weights}
        experts = tuple(f"{path}." for path, style in self.styles.items() if style == EXPERTS)
        if of_expert := next((path for path in blocks if path.startswith(experts)), None):
            raise ConfigurationError(
                f"--tensor-parallel-size {self.group.size}: {of_expert} is an expert's in few bits, which is not divided"
            )
        columns = {path: packed.weight_type.columns for path, packed in blocks.items() if isinstance(packed, PackedWeight)}
        layers: dict[str, list[str]] = {}
        for path in self.sizes:
            layers.setdefault(path.rpartition(".")[0], []).append(path)
        units = {}
        for parent, paths in layers.items():
            inputs = [path for path in paths if self.styles[path] == BY_INPUTS]
            is_mlp = not any(path.rpartition(".")[2] in KEY_PROJECTIONS for path in paths)
            if is_mlp and inputs and columns.keys() >= set(paths):
                units[parent] = max(columns[path] for path in inputs)
        return replace(self, units=dict.fromkeys(units, max(units.values(), default=1)))

    def localize(self, model: "PreTrainedModel") -> None:
        """Makes plain layers, of the size of this rank's parts, of what transformers has sharded."""
        if self.num_parts == 1:
            return
        from torch.distributed.tensor import DTensor

        for path, module in model.named_modules():
            if vars(module).pop("_is_hooked", False):
                vars(module).pop("forward", None)  # transformers' own sums
            for name, parameter in list(module._parameters.items()):
                if isinstance(parameter, DTensor):
                    own = parameter.to_local().contiguous()
                    module._parameters[name] = nn.Parameter(own, requires_grad=False)
            style = self.styles.get(path)
            if isinstance(module, nn.Linear) and style in OF_OUTPUTS and path != self.head:
                module.out_features = len(self._rows(path, module.out_features))
            elif isinstance(module, nn.Linear) and style in OF_INPUTS:
                own_columns = self._slice(path, module.in_features)
                module.in_features = own_columns.stop - own_columns.start
                if self.group.rank:  # it is added once
                    module._parameters["bias"] = None
        head: Any = model.get_submodule(self.head) if self.head else None
        if head is not None and head.weight is not None:
            head.out_features = len(head.weight)

    def stored(self, weights: Iterable[tuple[str, StoredWeight]]) -> Iterator[tuple[str, StoredWeight]]:
        """This rank's parts of weights in few bits. Raises `ConfigurationError` for one whose blocks cannot be divided so."""
        for name, weight in weights:
            path = name.removesuffix(".weight")
            yield name, self._part(path, weight) if path in self.styles and path != self.head else weight

    def _part(self, path: str, weight: StoredWeight) -> StoredWeight:
        packed = weight.packed
        if not isinstance(packed, PackedWeight):
            raise ConfigurationError(f"--tensor-parallel-size {self.group.size}: {path} is in {weight.source}, which cannot be divided")
        try:
            if self.styles[path] in OF_INPUTS:
                part = packed.columns(self._slice(path, packed.in_features))
                return replace(weight, packed=part, bias=None if self.group.rank else weight.bias)
            rows = self._rows(path, packed.out_features)
            return replace(weight, packed=packed.rows(rows), bias=None if weight.bias is None else weight.bias[rows])
        except ValueError as error:
            raise ConfigurationError(
                f"--tensor-parallel-size {self.group.size}: {path} ({weight.source}) cannot be divided: {error}"
            ) from error

    def _slice(self, path: str, size: int) -> slice:
        """This rank's part of as many inputs or outputs of the layer there; the last part may be smaller."""
        unit = self.units.get(path.rpartition(".")[0], 1)
        width = -(-size // (unit * self.group.size)) * unit
        return slice(min(self.group.rank * width, size), min((self.group.rank + 1) * width, size))

    def _rows(self, path: str, size: int) -> Tensor:
        """Of a layer's outputs."""
        halves = torch.arange(size).chunk(2 if self.styles[path] == BY_HALVES else 1)
        return torch.cat([half[self._slice(path, len(half))] for half in halves])

    def shard_head(self, model: "PreTrainedModel") -> None:
        """Leaves this rank's rows of an output layer that is whole, as where the embedding has the same weight."""
        head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        if self.num_parts == 1 or head.out_features < self.vocab_size:
            return
        rows = self._slice(self.head, self.vocab_size)
        bias = None if head.bias is None else head.bias.detach()[rows].clone()
        own: nn.Module
        if isinstance(head, QuantizedLinear):
            (weight,) = head.packed
            own = QuantizedLinear([weight.rows(torch.arange(rows.start, rows.stop))], bias)
        else:
            own = nn.Linear(head.in_features, rows.stop - rows.start, bias=bias is not None, device="meta")
            own.weight = nn.Parameter(head.weight.detach()[rows].clone(), requires_grad=False)
            own.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        model.set_submodule(self.head, own)

    def heads_here(self, number: int) -> int:
        """How many heads of a layer's queries, or of its keys, a rank has."""
        of_keys = {style for path, style in self.styles.items() if path.rpartition(".")[2] in KEY_PROJECTIONS}
        return number // self.group.size if of_keys == {BY_OUTPUTS} else number

    def layout(self, layout: list[LayerKV]) -> list[LayerKV]:
        """What a rank keeps of the layers' keys and values, given what one process keeps; of layers of other stages as well."""
        return [replace(layer, num_kv_heads=self.heads_here(layer.num_kv_heads)) for layer in layout]

    def install(self, model: "PreTrainedModel") -> None:
        """Has the layers' results added up or gathered from now on. To be called last: it goes by the modules that are there."""
        if self.num_parts == 1:
            return
        group = self.group
        for path, style in self.styles.items():
            module: Any = _submodule(model, path)
            if module is None:
                continue
            if style == SPLIT:
                module.register_forward_pre_hook(functools.partial(_split, self, path))
            if style in (*OF_INPUTS, EXPERTS):
                module.register_forward_hook(lambda _, args, output: group.sum(output))
            elif style == GATHERED and path != self.head:
                module.register_forward_hook(lambda _, args, output: group.gathered(output, output.shape[-1] * group.size, on_all=True))
        if self.head:
            head: nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
            head.register_forward_hook(lambda _, args, output: group.gathered(output, self.vocab_size, on_all=False))

    def whole_sizes(self, path: str, inputs: int, outputs: int) -> tuple[int, int]:
        """Of a linear layer of which this rank has so much."""
        return self.sizes.get(path, (inputs, outputs))

    def low_rank(self, path: str, down_RI: Tensor, up_OR: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's part of what an adapter adds to the layer."""
        style = self.styles.get(path)
        if style in OF_INPUTS:
            return down_RI[:, self._slice(path, down_RI.shape[1])].contiguous(), up_OR
        return down_RI, up_OR[self._rows(path, len(up_OR))] if style in OF_OUTPUTS else up_OR


WITH_ONE = Sharding()


def _split(sharding: Sharding, path: str, _: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A layer's input, of which every rank has all."""
    return (args[0][..., sharding._slice(path, args[0].shape[-1])], *args[1:])


def _submodule(model: nn.Module, path: str) -> nn.Module | None:
    """None for a parameter."""
    try:
        return model.get_submodule(path)
    except AttributeError:
        return None


def _pattern(path: str) -> str:
    """A path as plans have it, with a star for each number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)


def sharding_of(
    config: "PretrainedConfig", group: Group, *, num_stages: int = 1, trust_remote_code: bool = False, factory: Any = None
) -> Sharding:
    """How the model with this config is spread over the group. `factory` is transformers' class that loads it, by default as a generator.

    Raises `ConfigurationError` naming what cannot be.
    """
    if group.size == 1:
        return WITH_ONE
    if num_stages > 1:
        num_layers = int(config.get_text_config(decoder=True).num_hidden_layers)
        return Sharding(group, stage=Stage(group.rank, num_stages, num_layers))
    from transformers import AutoModelForCausalLM

    with making_model, torch.device("meta"):
        model = (factory or AutoModelForCausalLM).from_config(config, trust_remote_code=trust_remote_code)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    paths = {module: path for path, module in model.named_modules()}
    styles = _styles(model, refuse=functools.partial(_refusal, config, group.size))
    check_sizes(model, styles, group.size, refuse=functools.partial(_refusal, config, group.size))
    linears = {path: module for path, module in model.named_modules() if path in styles and isinstance(module, nn.Linear)}
    return Sharding(
        group,
        styles if head is None else styles | {paths[head]: GATHERED},
        {path: (linear.in_features, linear.out_features) for path, linear in linears.items()},
        embedding=paths[embedding],
        head="" if head is None else paths[head],
        vocab_size=0 if head is None else head.out_features,
    )


def _refusal(config: "PretrainedConfig", size: int, reason: str) -> ConfigurationError:
    name = config.architectures[0] if config.architectures else f"a {config.model_type} model"
    return ConfigurationError(f"--tensor-parallel-size {size}: {name} cannot be shared by ranks: {reason}")


def check_model(config: "PretrainedConfig", options: EngineConfig) -> None:
    """Raises `ConfigurationError` for kinds of models that are not shared in this way, before anything is started."""
    if options.pipeline_parallel_size > 1:
        check_stages(config, options.pipeline_parallel_size)
        check_stream(config, options.pipeline_parallel_size)
        return
    size = options.tensor_parallel_size
    text = config.get_text_config()
    if is_multimodal(config):
        raise _refusal(config, size, "it is a multimodal model, or a part of one")
    if is_recurrent(config):
        raise _refusal(config, size, "it has recurrent layers")
    if getattr(text, "kv_lora_rank", None):
        raise _refusal(config, size, "it has latent attention")
    for name in ("num_attention_heads", "num_key_value_heads"):
        number = getattr(text, name, None)
        if isinstance(number, int) and number % size:
            raise _refusal(config, size, f"its {name}, {number}, cannot be divided by {size}")


def check_alike(group: Group, files: Iterable[Path], *parts: object) -> None:
    """Raises `ConfigurationError` where ranks have weight files of other names or sizes, or are to compute something else."""
    if group.size == 1:
        return
    content = "\0".join([*(f"{path.name} {path.stat().st_size}" for path in files), *map(str, parts)])
    digest = zlib.crc32(content.encode())
    if (group.least(digest), group.least(-digest)) != (digest, -digest):
        raise ConfigurationError("the ranks have different models: their config and weight files must be the same")


def check_options(config: EngineConfig) -> None:
    """Raises `ConfigurationError` for options that are not for models of several ranks."""
    if config.num_ranks == 1:
        if config.distributed_address is not None:
            raise ConfigurationError("--distributed-address: there is one rank: set --tensor-parallel-size or --pipeline-parallel-size")
        return
    stages = config.pipeline_parallel_size
    flag = f"--tensor-parallel-size {config.tensor_parallel_size}" if stages == 1 else f"--pipeline-parallel-size {stages}"
    reasons = {
        "--kv-cache-dir": (config.kv_cache_dir is not None, "each rank has a part of every block, and only rank 0's would be kept"),
        "--kv-transfer-dir": (config.kv_transfer_dir is not None, "each rank has a part of every block"),
        "--compile on": (config.compile == "on", "compiled layers do not wait for other ranks"),
        "--speculation mtp": (config.speculation == "mtp", "the layer that proposes is not shared by ranks: use suffix, ngram or draft"),
    }
    if stages > 1:
        reasons |= {
            "--tensor-parallel-size": (config.tensor_parallel_size > 1, "layers are divided among ranks, or each rank has whole ones"),
            "--adapter": (config.has_adapters, "each rank has the adapted layers of its stage alone"),
            "--speculation draft": (config.speculation == "draft", "a draft model runs one step at a time: use suffix or ngram"),
            "--async-scheduling": (bool(config.async_scheduling), "steps of other sequences are in flight already"),
            "--kv-cache-dtype int8": (config.kv_cache_dtype == "int8", "it takes layers that run in one call of native code"),
            "--trust-remote-code": (config.trust_remote_code, "the layers of such a model are not found"),
        }
    for name, (is_given, reason) in reasons.items():
        if is_given:
            raise ConfigurationError(f"{name} cannot be combined with {flag}: {reason}")


def _styles(model: "PreTrainedModel", refuse: Any) -> dict[str, str]:
    """By the paths of the model's modules and parameters, of those that are sharded."""
    plan: dict[str, str] = dict(model.tp_plan or {})
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    names = [*(path for path, module in model.named_modules() if module is not head), *(name for name, _ in model.named_parameters())]
    styles = {name: SYNONYMS.get(plan[pattern], plan[pattern]) for name in names if (pattern := _pattern(name)) in plan}
    styles = {name: style for name, style in styles.items() if style != WHOLE and style != "embedding_rowwise"}
    if not styles:
        raise refuse("transformers has no plan for it")
    served = {*OF_OUTPUTS, *OF_INPUTS, EXPERTS}
    for name, style in styles.items():
        if style not in served:
            raise refuse(f"the plan for {name} is {style!r}, which is not served")
    is_halved = {name.rpartition(".")[0] for name, style in styles.items() if name.endswith("gate_up_proj") and style == GATHERED}
    for parent in is_halved:
        for name, (theirs, ours) in OF_HALVES.items():
            if styles.get(f"{parent}.{name}") == theirs:
                styles[f"{parent}.{name}"] = ours
    return styles


def check_sizes(model: "PreTrainedModel", styles: Mapping[str, str], size: int, refuse: Any) -> None:
    """Raises what `refuse` makes of a layer that cannot be divided by the number of ranks."""
    for name, parameter in model.named_parameters():
        path = name.rpartition(".")[0]
        style = styles.get(name) or styles.get(path)
        if style in OF_OUTPUTS and not name.endswith("bias"):
            number, what = parameter.shape[-2] // (2 if style == BY_HALVES else 1), "outputs"
        elif style in OF_INPUTS and not name.endswith("bias"):
            number, what = parameter.shape[-1], "inputs"
        else:
            continue
        if number % size:
            raise refuse(f"the {number} {what} of {name.removesuffix('.weight')} cannot be divided by {size}")
