"""Decides in how many bits a model's weights are served, and sees to it.

In its own precision is how a GGUF file's matrices of few bits are served best: nothing is rounded twice. Others are rounded on request.

There is one copy of a weight, for any number of rows: codes of 4 bits are 2.2 times as fast as bfloat16 at 1 row, and still 1.4 times as
fast at 512 (`benchmarks/linear.py`), so a second copy in bfloat16 for prompts would only take memory.
"""

import logging
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.engine.config import QuantizationMode
from penstock.engine.errors import ConfigurationError
from penstock.engine.layers.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight, can_quantize, quantize_linears, quantized
from penstock.engine.quantization import Places, can_replace, put_in, read_quantized

# Which token comes next, and which expert computes it, suffers most from rounding: with a vocabulary of 4 bits the default model's
# perplexity is 24.4 where it is 22.6 (`benchmarks/quality.py`).
VOCABULARY_BITS = 8
ROUTERS = ("gate", "router", "shared_expert_gate")

logger = logging.getLogger(__name__)


def resolve_quantization(mode: QuantizationMode, device: torch.device) -> QuantizationMode:
    """What was asked for, or `none` where `auto` comes to that. Raises `ConfigurationError` for what the device cannot do."""
    if device.type != "cpu" and mode in ("int4", "int8"):
        raise ConfigurationError(f"--quantization {mode} is for models on the CPU, and this one goes to {device}: use auto or none")
    if mode == "auto" and (device.type != "cpu" or not can_quantize()):
        return "none"
    if mode != "none" and not can_quantize():
        logger.warning("--quantization %s saves memory but is slow here: its kernels take a C++ compiler.", mode)
    return mode


def put_in_stored(model: PreTrainedModel, directory: Path, places: Places, mode: QuantizationMode, dtype: torch.dtype) -> None:
    """Puts in what the model's directory holds in few bits and `leave_out` left out, by a resolved mode.

    A weight of more bits than were asked for is rounded again. One of fewer stays: more bits would not make it better.
    """

    def choose(weight: QuantizedWeight, is_vocabulary: bool) -> QuantizedWeight | None:
        if mode == "none":
            return None
        bits = _bits(mode, is_vocabulary)
        return weight if weight.bits <= bits else quantized(weight.dequantized(), bits)

    put_in(model, places, read_quantized(directory, model.device), choose, dtype)


def quantize_plain(model: PreTrainedModel, mode: QuantizationMode) -> None:
    """Rounds the weights that are in no few bits yet, where a resolved mode says so: of linear layers, and of embeddings tied to them.

    Layers stay as they are that have a number of inputs which is no multiple of 32, that choose experts, or whose weights the model's code
    reads beside calling them; so do experts that are one tensor.
    """
    if mode not in ("int4", "int8"):
        return
    output, embedding = model.get_output_embeddings(), model.get_input_embeddings()  # type: ignore[no-untyped-call]
    is_tied = isinstance(output, nn.Linear) and type(embedding) is nn.Embedding and embedding.weight is output.weight
    quantize_linears(model, _bits(mode, False), skip=(*ROUTERS, *_paths(model, output)))
    quantize_linears(model, _bits(mode, True), skip=ROUTERS)
    rounded = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if is_tied and isinstance(rounded, QuantizedLinear):
        for path in _paths(model, embedding):
            if can_replace(model, path):
                model.set_submodule(path, QuantizedEmbedding(rounded.blocks, model.dtype))


def quantized_layers(model: nn.Module) -> dict[int, int]:
    """How many linear layers are served in how many bits: `{4: 120, 8: 1}`."""
    return dict(sorted(Counter(module.bits for module in model.modules() if isinstance(module, QuantizedLinear)).items()))


def _bits(mode: QuantizationMode, is_vocabulary: bool) -> int:
    return 4 if mode == "int4" and not is_vocabulary else VOCABULARY_BITS


def _paths(model: nn.Module, wanted: nn.Module | None) -> list[str]:
    return [path for path, module in model.named_modules() if module is wanted]
