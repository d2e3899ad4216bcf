"""Which matrices of a model can stay in few bits, as the GGUF file that the model came from has them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.engine.gguf.blocks import read_blocks
from penstock.engine.gguf.row_matching import RowIndex
from penstock.engine.quantization.quantized_weight import QuantizedWeight
from penstock.engine.quantization.stored_weights import leave_out

if TYPE_CHECKING:
    from gguf import ReaderTensor


def take_quantized_matrices(model: PreTrainedModel, file_tensors: "Iterable[ReaderTensor]") -> dict[str, QuantizedWeight]:
    """The matrices of linear layers and embeddings that are, but for the order of rows, matrices of the file, by their names in the model.

    The model is left without them. Conversion renames, transposes, shifts and permutes as each architecture asks. Instead of asking it too,
    this looks at what came out: `model`, whose weights were dequantized and rounded to its type. A matrix that is not exactly what its
    codes stand for stays where it is.
    """
    tensors = {tensor.name: tensor for tensor in file_tensors}
    stored = ((name, read_blocks(tensor)) for name, tensor in tensors.items())
    index = RowIndex((name, weight.dequantized().to(model.dtype)) for name, weight in stored if weight is not None)
    matrices = {}
    for name in [name for name, _ in model.named_parameters()]:
        matrix_OI = model.get_parameter(name).detach()
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding) or matrix_OI.ndim != 2:
            continue
        found = index.find(matrix_OI)
        weight = None if found is None else read_blocks(tensors[found[0]])
        if found is None or weight is None:
            continue
        rows_O = found[1]
        weight = QuantizedWeight(weight.bits, weight.codes_OI[rows_O], weight.scales_OG[rows_O], weight.minimums_OG[rows_O])
        if torch.equal(weight.dequantized().to(matrix_OI.dtype), matrix_OI):
            matrices[name] = weight
            leave_out(model, [name])
    return matrices
