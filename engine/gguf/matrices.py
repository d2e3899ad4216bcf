"""Which matrices of a model can stay in few bits, as the GGUF file that the model came from has them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.engine.gguf.blocks import dequantized, is_quantized, read_blocks
from penstock.engine.gguf.row_matching import RowIndex
from penstock.engine.layers.quantized import QuantizedWeight
from penstock.engine.quantization import leave_out

if TYPE_CHECKING:
    from gguf import ReaderTensor


def take_quantized_matrices(model: PreTrainedModel, file_tensors: "Iterable[ReaderTensor]") -> dict[str, QuantizedWeight]:
    """The matrices of linear layers and embeddings that are, but for the order of rows, matrices of the file, by their names in the model.

    The model is left without them. Conversion renames, transposes, shifts and permutes as each architecture asks. Instead of asking it too,
    this looks at what came out: `model`, whose weights were dequantized and rounded to its type. A matrix that is not exactly what its
    codes stand for stays where it is.
    """
    tensors = {tensor.name: tensor for tensor in file_tensors if is_quantized(tensor)}
    index = RowIndex((name, dequantized(tensor).to(model.dtype)) for name, tensor in tensors.items())
    matrices = {}
    for name in [name for name, _ in model.named_parameters()]:
        matrix_OI = model.get_parameter(name).detach()
        if not isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Linear | nn.Embedding) or matrix_OI.ndim != 2:
            continue
        found = index.find(matrix_OI)
        if found is None:
            continue
        tensor, rows_O = tensors[found[0]], found[1]
        if torch.equal(dequantized(tensor).to(matrix_OI.dtype)[rows_O], matrix_OI):
            weight = read_blocks(tensor)
            matrices[name] = QuantizedWeight(weight.bits, weight.codes_OI[rows_O], weight.scales_OG[rows_O], weight.minimums_OG[rows_O])
            leave_out(model, [name])
    return matrices
