"""Which matrices of a model can stay in few bits, as the GGUF file that the model came from has them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.engine.gguf_blocks import read_blocks
from penstock.engine.quantized_weight import QuantizedWeight
from penstock.engine.row_matching import RowIndex

if TYPE_CHECKING:
    from gguf import ReaderTensor


def quantized_matrices(model: PreTrainedModel, file_tensors: "Iterable[ReaderTensor]") -> dict[str, QuantizedWeight]:
    """The matrices of linear layers and embeddings that are, but for the order of rows, matrices of the file, by their names in the model.

    Conversion renames, transposes, shifts and permutes as each architecture asks. Instead of asking it too, this looks at what came out:
    `model`, whose weights were dequantized and rounded to its type. A matrix that is not exactly what its codes stand for is left out.
    """
    tensors = {tensor.name: tensor for tensor in file_tensors}
    stored = ((name, read_blocks(tensor)) for name, tensor in tensors.items())
    index = RowIndex((name, weight.dequantized().to(model.dtype)) for name, weight in stored if weight is not None)
    matrices = {}
    for name, parameter in model.named_parameters():
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding) or parameter.ndim != 2:
            continue
        found = index.find(parameter.detach())
        weight = None if found is None else read_blocks(tensors[found[0]])
        if found is None or weight is None:
            continue
        rows_O = found[1]
        weight = QuantizedWeight(weight.bits, weight.codes_OI[rows_O], weight.scales_OG[rows_O], weight.minimums_OG[rows_O])
        if torch.equal(weight.dequantized().to(parameter.dtype), parameter):
            matrices[name] = weight
    return matrices


def other_weights(model: PreTrainedModel, matrices: dict[str, QuantizedWeight]) -> dict[str, torch.Tensor]:
    """The model's weights by name, without these matrices and what is tied to them."""
    left_out = {model.get_parameter(name).data_ptr() for name in matrices}
    return {name: tensor for name, tensor in model.state_dict().items() if tensor.data_ptr() not in left_out}
