"""A model's decoder layers as plain functions of tensors, for the compiler and its compiled code."""

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from penstock.engine.attention.metadata import AttentionMetadata

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def decoder_layers(model: nn.Module, num_layers: int) -> list[nn.Module]:
    """The layers in order: the one list of modules that is as long as the config says. Empty where there is no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == num_layers]
    return list(lists[0]) if len(lists) == 1 else []


def layer_tensors(layer: nn.Module) -> dict[str, Tensor]:
    """Everything in the layer that a computation reads, the KV cache included."""
    return {**dict(layer.named_parameters()), **dict(layer.named_buffers())}


def layer_kind(layer: nn.Module) -> str:
    """Layers of one kind differ in nothing but their number and what is in their tensors, and share one compiled function."""

    def describe() -> Iterator[str]:
        for name, tensor in layer_tensors(layer).items():
            # How many blocks the cache has does not matter to compiled code.
            shape = tensor.shape[1:] if name.endswith(("key_cache", "value_cache")) else tensor.shape
            yield f"{name} {tuple(shape)} {tensor.dtype}"
        for path, module in layer.named_modules():
            settings = {
                name: setting
                for name, setting in vars(module).items()
                if isinstance(setting, bool | int | float | str) and name not in ("layer_idx", "training") and not name.startswith("_")
            }
            yield f"{path} {type(module).__qualname__} {sorted(settings.items())}"

    return hashlib.sha256("\n".join(describe()).encode()).hexdigest()[:20]


def call_tensors(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among a layer's arguments, in order. Of the attention metadata these are `packed` and the block tables."""
    tensors: list[Tensor] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, tuple):
            tensors += argument
        elif isinstance(argument, AttentionMetadata):
            tensors += (argument.packed, argument.block_tables_PN)
    return tensors


def rebuild_call(args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with other tensors: what `call_tensors` takes apart, put together."""
    remaining = iter(tensors)

    def rebuild(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return next(remaining)
        if isinstance(argument, tuple):
            return tuple(next(remaining) for _ in argument)
        if isinstance(argument, AttentionMetadata):
            return SimpleNamespace(packed=next(remaining), block_tables_PN=next(remaining))
        return argument

    return tuple(rebuild(argument) for argument in args), {name: rebuild(argument) for name, argument in kwargs.items()}


def is_plain(positions: Tensor, embedded: dict[str, Any] | None) -> bool:
    """Whether native code, in place of the model's own, can compute a step: it knows embeddings alone, and positions of one part."""
    return positions.dim() == 2 and (embedded is None or embedded.keys() <= {"inputs_embeds"})


def compute_logits(
    model: "PreTrainedModel",
    input_ids_1T: Tensor,
    positions: Tensor,
    attention: AttentionMetadata,
    kept_K: Tensor,
    embedded: dict[str, Any] | None = None,
) -> Tensor:
    """The logits [K, V] of the flat rows `kept_K`, by positions [1, T], or [3, 1, T] where some have three parts.

    `embedded` are other inputs of the model than the ids: their embeddings, and what else its layers take.
    """
    inputs = {"input_ids": input_ids_1T} if embedded is None else embedded
    forward: Callable[..., Any] = model if is_plain(positions, embedded) else functools.partial(type(model).forward, model)
    output = forward(
        **inputs,
        position_ids=positions,
        use_cache=False,
        logits_to_keep=kept_K,
        attention_metadata=attention,
    )
    logits_KV: Tensor = output.logits[0]
    return logits_KV
