"""From the token vectors of texts to one vector for each: pooling, and the stages that sentence-transformers has after it."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock.engine.errors import ConfigurationError
from penstock.engine.pooling.files import PoolingMode, StageFiles

Stage = Callable[[Tensor], Tensor]


def pool_rows(states_NLD: Tensor, modes: Sequence[PoolingMode], num_left_out: int = 0) -> Tensor:
    """One vector, float32, for each of N texts of equal length, [N, modes * D]. Their first `num_left_out` tokens do not count."""
    length = states_NLD.shape[1]
    first = num_left_out if num_left_out < length else 0
    states_NLD = states_NLD[:, first:]
    return torch.cat([_pool(states_NLD, mode, first) for mode in modes], dim=-1)


def _pool(states_NLD: Tensor, mode: PoolingMode, first: int) -> Tensor:
    """`first` is the place of the first token in its text."""
    count = states_NLD.shape[1]
    match mode:
        case "cls":
            return states_NLD[:, 0].float()
        case "lasttoken":
            return states_NLD[:, -1].float()
        case "max":
            return states_NLD.amax(1).float()
        case "mean":
            return states_NLD.mean(1, dtype=torch.float32)
        case "mean_sqrt_len_tokens":
            return states_NLD.sum(1, dtype=torch.float32) / math.sqrt(count)
        case "weightedmean":
            weights_L = torch.arange(first + 1, first + count + 1, dtype=torch.float32, device=states_NLD.device)
            return (states_NLD * (weights_L / weights_L.sum())[:, None]).sum(1)


@dataclass(frozen=True, slots=True)
class Dense:
    """A linear layer with an activation."""

    weight_OI: Tensor
    bias_O: Tensor | None
    activation: Stage
    has_residual: bool

    def __call__(self, vectors_BI: Tensor) -> Tensor:
        out = self.activation(nn.functional.linear(vectors_BI, self.weight_OI, self.bias_O))
        return out + vectors_BI if self.has_residual else out


def normalize(vectors_BD: Tensor) -> Tensor:
    return nn.functional.normalize(vectors_BD, dim=-1)


def load_stage(files: StageFiles, device: torch.device) -> Stage:
    """The stage that its files describe, in float32. Raises `ConfigurationError` where they cannot be read."""
    match files.kind:
        case "Normalize":
            return normalize
        case "LayerNorm":
            weights = _load_weights(files, device)
            weight, bias = weights["norm.weight"], weights["norm.bias"]
            return functools.partial(nn.functional.layer_norm, normalized_shape=weight.shape, weight=weight, bias=bias)
        case _:
            weights, config = _load_weights(files, device), files.config
            inputs, outputs = config.get("module_input_name", "sentence_embedding"), config.get("module_output_name")
            if inputs != "sentence_embedding" or outputs not in (None, "sentence_embedding"):
                raise ConfigurationError(f"{files.directory}: a Dense stage over {inputs} is not supported, only over sentence_embedding")
            activation = make_activation(str(config.get("activation_function", "torch.nn.modules.activation.Tanh")))
            return Dense(weights["linear.weight"], weights.get("linear.bias"), activation, bool(config.get("use_residual", False)))


def make_activation(path: str) -> Stage:
    """A class of `torch.nn` by its import path. Raises `ConfigurationError` for anything else: a model's files run no code here."""
    name = path.rpartition(".")[2]
    found = getattr(nn, name, None)
    if not path.startswith("torch.nn.") or not isinstance(found, type) or not issubclass(found, nn.Module):
        raise ConfigurationError(f"the activation {path!r} is not one of torch.nn's")
    activation: Stage = found()
    return activation


def _load_weights(files: StageFiles, device: torch.device) -> dict[str, Tensor]:
    path = files.directory / "model.safetensors"
    if not path.is_file():
        raise ConfigurationError(f"{files.directory} lacks model.safetensors; weights in other formats are not read")
    try:
        return {name: weight.to(device, torch.float32) for name, weight in load_file(path).items()}
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error
