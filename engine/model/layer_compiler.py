"""Compiles a kind of decoder layer ahead of time, as a process: `python -m penstock.engine.model.layer_compiler MODEL DTYPE KIND TARGET`.

A process, because tracing and code generation would hold this interpreter's lock for seconds and every stream would stutter. It builds the
model without its weights, so it costs little memory, and it is run at the lowest priority.
"""

import argparse
import sys
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch._inductor import aoti_compile_and_package, config
from torch.func import functional_call
from transformers import AutoModelForCausalLM, PreTrainedModel

from penstock.engine.attention import interface
from penstock.engine.attention.interface import NUM_HEADER_FIELDS, AttentionMetadata, flatten, keep_latents
from penstock.engine.config import QuantizationMode
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model.compiled_layers import call_tensors, decoder_layers, layer_kind, layer_tensors, rebuild_call
from penstock.engine.model.config import check_servable, read_config
from penstock.engine.model.fused import fuse_linears
from penstock.engine.system.process import making_model
from penstock.engine.weights.checkpoints import stored_weights
from penstock.engine.weights.experts import pack_experts
from penstock.engine.weights.linear import pack_linears
from penstock.engine.weights.quantization import leave_out, put_in_stored, quantize_plain

# An example length that no model has among its sizes, so that the dimensions which vary with it can be found.
NUM_EXAMPLE_TOKENS = 37
MAX_TOKENS = 2**20


class LayerFunction(nn.Module):
    """A layer as a function of its own tensors and of those it is called with."""

    def __init__(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.__dict__["_layer"] = layer  # not a submodule: its parameters are inputs, not part of what is compiled
        self._names = list(layer_tensors(layer))
        self._call = (args, kwargs)

    def forward(self, own: list[Tensor], given: list[Tensor]) -> Tensor:
        args, kwargs = rebuild_call(*self._call, given)
        output = functional_call(self.__dict__["_layer"], dict(zip(self._names, own, strict=True)), args, kwargs)
        if not isinstance(output, Tensor):
            raise TypeError(f"the layer returns {type(output).__name__}, not one tensor")
        return output


def build_skeleton(
    directory: Path, dtype: torch.dtype, quantization: QuantizationMode, block_size: int, trust_remote_code: bool
) -> PreTrainedModel:
    """The model as the engine runs it, on the meta device: shapes and types without memory. `quantization` is resolved."""
    interface.register()
    model_config = read_config(directory, trust_remote_code)
    layout = check_servable(model_config, trust_remote_code)
    weights = stored_weights(directory, model_config)
    with making_model, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            model_config, dtype=dtype, attn_implementation=interface.IMPLEMENTATION, trust_remote_code=trust_remote_code
        )
    put_in_stored(model, weights.read(model.device), leave_out(model, weights.names), quantization, dtype)
    keep_latents(model)
    quantize_plain(model, quantization)
    model.train(False).requires_grad_(False)
    fuse_linears(model)
    pack_linears(model)
    pack_experts(model)
    KVCache(layout, 2, block_size, dtype, torch.device("meta")).attach(model)
    return model


def capture_call(model: nn.Module, layer: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model hands to this layer for a batch of `NUM_EXAMPLE_TOKENS`."""
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    handle = layer.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    tokens = torch.zeros(1, NUM_EXAMPLE_TOKENS, dtype=torch.long, device="meta")
    flat = flatten([-1] * NUM_EXAMPLE_TOKENS, [0], [], [], num_decodes=0)
    tables_PN = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    metadata = AttentionMetadata.view(torch.tensor(flat, device="meta"), flat[:NUM_HEADER_FIELDS], tables_PN)
    with torch.no_grad():
        model(input_ids=tokens, position_ids=tokens, use_cache=False, attention_metadata=metadata)
    handle.remove()
    return calls[0]


def compile_layer(model: nn.Module, layer: nn.Module, target: Path) -> None:
    """Writes the compiled layer to `target`. Raises whatever the compiler raises for a layer that it cannot take."""
    args, kwargs = capture_call(model, layer)
    own = [torch.empty_like(tensor, device="cpu") for tensor in layer_tensors(layer).values()]
    given = [torch.zeros_like(tensor, device="cpu") for tensor in call_tensors(args, kwargs)]
    num_tokens = torch.export.Dim("num_tokens", min=2, max=MAX_TOKENS)
    packed_length = torch.export.Dim("packed_length", min=NUM_HEADER_FIELDS + 2)
    num_blocks = torch.export.Dim("num_blocks", min=2)
    num_tables = torch.export.Dim("num_tables", min=1)
    table_width = torch.export.Dim("table_width", min=1)

    def varying(tensor: Tensor) -> dict[int, Any]:
        if tensor.ndim == 1:
            return {0: packed_length}
        if tensor.dtype == torch.int32:
            return {0: num_tables, 1: table_width}
        return {dim: num_tokens for dim, size in enumerate(tensor.shape) if size == NUM_EXAMPLE_TOKENS}

    shapes = (
        [{0: num_blocks} if name.endswith(("key_cache", "value_cache")) else None for name in layer_tensors(layer)],
        [varying(tensor) for tensor in given],
    )
    with torch.no_grad():
        program = torch.export.export(LayerFunction(layer, args, kwargs), (own, given), dynamic_shapes=shapes, strict=False)
        # Each kind of layer is compiled in a process and a directory of its own: headers compiled beforehand would be used once.
        with config.patch({"cpp.dynamic_threads": True, "aot_inductor.precompile_headers": False}):
            aoti_compile_and_package(program, package_path=str(target))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("dtype", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("kind")
    parser.add_argument("target", type=Path)
    parser.add_argument("--quantization", choices=get_args(QuantizationMode), default="none")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--trust-remote-code", action="store_true")
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    model = build_skeleton(arguments.model, dtype, arguments.quantization, arguments.block_size, arguments.trust_remote_code)
    layers = decoder_layers(model, model.config.get_text_config(decoder=True).num_hidden_layers)
    of_kind = [layer for layer in layers if layer_kind(layer) == arguments.kind]
    if not of_kind:
        sys.exit(f"no layer of the model is of kind {arguments.kind}")
    compile_layer(model, of_kind[0], arguments.target)


if __name__ == "__main__":
    main()
