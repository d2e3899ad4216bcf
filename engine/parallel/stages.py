"""Pipeline parallelism: which layers a rank has, and how hidden states go from one rank to the next (Huang et al., arXiv:1811.06965).

Rank 0 has the embedding, the first layers, the final norm and the output layer. The last rank returns the hidden states of the rows that
are turned into logits. Each rank computes the steps in the order in which rank 0 begins them, and works on one while the next rank has the
one before.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerGroup, LayerKV
from penstock.engine.multimodal.vision import is_multimodal
from penstock.engine.parallel.group import Group
from penstock.engine.recurrent.layout import is_recurrent
from penstock.engine.system.process import making_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

FLAG = "--pipeline-parallel-size"
TRIAL = "penstock_stages"


@dataclass(frozen=True, slots=True)
class Stage:
    """The layers of one rank, of the `num_layers` of the model."""

    rank: int
    size: int
    num_layers: int

    @property
    def layers(self) -> range:
        """As many for each rank, or one more for the last ones, since rank 0 has the output layer as well."""
        return range(self.rank * self.num_layers // self.size, (self.rank + 1) * self.num_layers // self.size)

    def layout(self, layout: list[LayerKV]) -> list[LayerKV]:
        """What this rank keeps of the layers' keys and values, given what one process keeps: nothing of other ranks' layers."""
        return [
            layer if number in self.layers else replace(layer, num_kv_heads=0, key_size=0, value_size=0)
            for number, layer in enumerate(layout)
        ]

    def groups(self, groups: list[LayerGroup]) -> list[LayerGroup]:
        """The groups of all ranks, in each of which this rank's layers come first: only these take room in a block."""
        return [replace(group, layers=tuple(sorted(group.layers, key=lambda layer: (layer not in self.layers, layer)))) for group in groups]


class Absent(nn.Module):
    """In the place of a layer, or of an embedding, of another rank. It gives what it gets.

    The model's code finds the layer's settings here, such as which mask it takes.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        own = ("training", "layer_idx")
        vars(self).update({name: value for name, value in vars(module).items() if not name.startswith("_") and name not in own})

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


class Inlet(Absent):
    """What is in front of the first layer that is computed: it gives `states` [1, T, H], whatever it gets."""

    states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        assert self.states is not None, "hidden states are there before the model is called"
        return self.states


def absent_paths(model: nn.Module) -> tuple[str, ...]:
    """What the names of the parameters begin with that another rank has."""
    return tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, Absent))


def layer_list(model: nn.Module, num_layers: int) -> tuple[nn.Module, str]:
    """The module that has the list of the decoder's layers, and its name there. Raises `ConfigurationError` without exactly one."""
    found = [
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers
    ]
    if len(found) != 1:
        raise ConfigurationError(f"{FLAG}: {type(model).__name__} has no one list of its {num_layers} layers")
    return found[0]


def cut(model: "PreTrainedModel", stage: Stage) -> None:
    """Leaves this rank's layers in a model without weights. To be called before these are loaded, so that no others are read."""
    parent, name = layer_list(model, stage.num_layers)
    layers: Any = getattr(parent, name)
    for number in range(stage.num_layers):
        if number not in stage.layers:
            kind = Inlet if number == stage.layers.start - 1 else Absent
            layers[number] = kind(layers[number])
    if stage.rank:
        paths = {module: path for path, module in model.named_modules()}
        for module in (model.get_input_embeddings(), model.get_output_embeddings()):  # type: ignore[no-untyped-call]
            if module is not None:
                model.set_submodule(paths[module], Absent(nn.Module()))
        any_model: Any = model
        any_model.all_tied_weights_keys = {}
        any_model._tied_weights_keys = None


def model_class(config: "PretrainedConfig", stage: Stage) -> Any:
    """transformers' class for the config, of which `from_pretrained` loads this rank's part. Raises `ConfigurationError` without one."""
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise ConfigurationError(f"{FLAG}: a {config.model_type} model is not one of transformers' own")
    whole: Any = mapping[type(config)]

    class Part(whole):  # type: ignore[misc]
        _keys_to_ignore_on_load_unexpected = (".",)  # those of other ranks

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            cut(self, stage)

    Part.__name__, Part.__qualname__, Part.__module__ = whole.__name__, whole.__qualname__, whole.__module__
    return Part


class Pipeline:
    """One rank's part of the model's forward pass. Belongs to the thread that runs the model."""

    def __init__(self, model: "PreTrainedModel", stage: Stage, group: Group, dtype: torch.dtype, device: torch.device) -> None:
        self._model: Any = model
        self._stage, self._group = stage, group
        self._dtype, self._device = dtype, device
        self._hidden_size = int(model.config.get_text_config(decoder=True).hidden_size)
        self._vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self._parent, self._name = layer_list(model, stage.num_layers)
        layers: Any = getattr(self._parent, self._name)
        self._inlet: Any = layers[stage.layers.start - 1] if stage.rank else Inlet(layers[0])
        # For the final norm and the output layer alone, on rank 0.
        self._passed = nn.ModuleList([self._inlet, *map(Absent, list(layers)[1:])]) if stage.rank == 0 else None
        layers[stage.layers.stop - 1].register_forward_hook(self._send)
        self._kept: Tensor | None = None

    def compute(self, input_ids_1T: Tensor, positions: Tensor, attention: AttentionMetadata, kept_K: Tensor, given: dict[str, Any]) -> None:
        """Computes this rank's layers and sends what comes out on. `given` are other inputs of rank 0 than the ids, if any."""
        num_tokens = input_ids_1T.shape[1]
        if self._stage.rank:
            states = torch.empty(1, num_tokens, self._hidden_size, dtype=self._dtype, device=self._device)
            self._inlet.states = self._group.receive_from(self._stage.rank - 1, states)
            given = {"inputs_embeds": states[:, :1].new_zeros(1, 1, 1).expand_as(states)}
        self._kept = kept_K
        inputs = given or {"input_ids": input_ids_1T}
        self._model.get_decoder()(**inputs, position_ids=positions, use_cache=False, attention_metadata=attention)
        self._inlet.states = self._kept = None

    def _send(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Sends the states after this rank's last layer; to rank 0 only those of the rows that logits are made of."""
        if self._kept is None:
            return
        if self._stage.rank + 1 < self._stage.size:
            self._group.send_to(self._stage.rank + 1, output.to(self._dtype))
        elif len(self._kept):
            self._group.send_to(0, output[0, self._kept].to(self._dtype))

    def logits(self, num_rows: int) -> Tensor:
        """On rank 0, the logits [K, V] of the oldest step that has been begun and not been asked for. Waits for the other ranks."""
        if not num_rows:
            return torch.empty(0, self._vocab_size, dtype=self._dtype, device=self._device)
        rows = torch.empty(num_rows, self._hidden_size, dtype=self._dtype, device=self._device)
        self._inlet.states = self._group.receive_from(self._stage.size - 1, rows)[None]
        inputs = {"inputs_embeds": rows.new_zeros(1, 1, 1).expand(1, num_rows, self._hidden_size)}
        positions = torch.zeros(1, num_rows, dtype=torch.int64, device=self._device)
        with self._without_layers():
            logits_KV: Tensor = self._model(**inputs, position_ids=positions, use_cache=False).logits[0]
        self._inlet.states = None
        return logits_KV

    @contextmanager
    def _without_layers(self) -> Iterator[None]:
        layers = self._parent._modules[self._name]
        self._parent._modules[self._name] = self._passed
        try:
            yield
        finally:
            self._parent._modules[self._name] = layers


def check_stages(config: "PretrainedConfig", size: int) -> None:
    """Raises `ConfigurationError` for models that are not cut into so many stages, before anything is started."""
    text = config.get_text_config(decoder=True)
    name = config.architectures[0] if config.architectures else f"a {config.model_type} model"

    def refuse(reason: str) -> ConfigurationError:
        return ConfigurationError(f"{FLAG} {size}: {name} cannot be cut into stages: {reason}")

    if is_multimodal(config):
        raise refuse("it is a multimodal model, or a part of one")
    if is_recurrent(config):
        raise refuse("it has recurrent layers")
    if text.num_hidden_layers < size:
        raise refuse(f"it has {text.num_hidden_layers} layers")


def _no_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    batch_size, num_heads, num_tokens, _ = query.shape
    return query.new_empty(batch_size, num_tokens, num_heads, value.shape[-1]), None


def check_stream(config: "PretrainedConfig", size: int) -> None:
    """Raises `ConfigurationError` where more than one tensor of hidden states goes from layer to layer, as a pass on no device shows."""
    from transformers import AttentionInterface, AutoModelForCausalLM

    AttentionInterface.register(TRIAL, _no_attention)
    num_layers = int(config.get_text_config(decoder=True).num_hidden_layers)
    with making_model, torch.device("meta"), torch.inference_mode():
        # Of the ways to run experts only this one has no data-dependent shapes, which the meta device cannot follow.
        model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, attn_implementation=TRIAL, experts_implementation="batched_mm"
        ).eval()
        parent, name = layer_list(model, num_layers)
        layers: Any = getattr(parent, name)
        before: list[Any] = [None]
        others: set[str] = set()

        def see(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            given = args[0] if args else kwargs.get("hidden_states")
            if before[0] is not None and given is not before[0]:
                others.add("a layer gets something else than what the layer before gives")
            beside = (*args[1:], *(value for name, value in kwargs.items() if name not in ("hidden_states", "position_embeddings")))
            if any(isinstance(value, Tensor) and value.is_floating_point() for value in beside):
                others.add("a layer gets other states than those of the layer before")
            if not isinstance(output, Tensor) or not isinstance(given, Tensor) or output.shape != given.shape:
                others.add("a layer gives more than hidden states")
            before[0] = output

        for layer in layers:
            layer.register_forward_hook(see, with_kwargs=True)
        try:
            model.get_decoder()(input_ids=torch.zeros(1, 2, dtype=torch.long), use_cache=False)
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:
            raise ConfigurationError(f"{FLAG} {size}: a trial run of the model's layers failed: {error}") from error
    if others:
        raise ConfigurationError(f"{FLAG} {size}: {type(model).__name__} cannot be cut into stages: {min(others)}")
