"""A model's forward pass in one call of native code, for models whose layers are of the most common form.

Between the embedding and the head nothing runs in Python, nothing waits for its lock, and no intermediate result is a tensor.
"""

import ctypes
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.attention.metadata import AttentionMetadata
from penstock.engine.decoder.decoder_form import LayerForm, LinearForm, UnsuitableModel, read_form
from penstock.engine.kv_cache import KVCache
from penstock.engine.loading.model_loader import LoadedModel
from penstock.engine.native.library import native_library

HEAD_SIZES = (64, 128)  # of the fast attention kernels


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bits", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("query_key_value", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm", "key_cache", "value_cache")),
        ("window", ctypes.c_int64),
        ("scaling", ctypes.c_float),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "block_size")),
        *((name, ctypes.c_void_p) for name in ("final_norm", "inverse_frequencies")),
        *((name, ctypes.c_float) for name in ("rope_factor", "epsilon")),
    )


class NativeDecoder:
    """Stands in for the `forward` of a bfloat16 model on the CPU, as the engine calls it.

    Raises `UnsuitableModel` for a model that is not of this form.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        library = native_library()
        if loaded.device.type != "cpu" or loaded.dtype != torch.bfloat16 or library is None or not library.penstock_has_bfloat16_products():
            raise UnsuitableModel("it takes bfloat16, and a processor that multiplies that")
        form = read_form(loaded.model, loaded.config.get_text_config(decoder=True).num_hidden_layers)
        _, _, num_kv_heads, head_size = cache.keys[0].shape
        shapes = {tensor.shape[1:] for tensor in (*cache.keys, *cache.values)}
        if len(shapes) > 1 or head_size not in HEAD_SIZES or form.inverse_frequencies.numel() * 2 != head_size:
            raise UnsuitableModel("its heads are of another size")
        query_width = form.layers[0].output.inputs
        if form.layers[0].query_key_value.outputs != query_width + 2 * num_kv_heads * head_size or query_width % (num_kv_heads * head_size):
            raise UnsuitableModel("its heads do not fit its projections")
        model: Any = loaded.model
        self._library = library
        self._cache = cache  # of whose tensors the native code has the addresses
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        self.form = form
        self._hidden_size = form.layers[0].output.outputs
        windows = [layer.sliding_window or 0 for layer in loaded.kv_layout]
        caches = zip(form.layers, cache.keys, cache.values, windows, strict=True)
        self._layers = (_Layer * len(form.layers))(*(_layer_structure(*parts) for parts in caches))
        self.structure = _Decoder(
            layers=self._layers,
            num_layers=len(form.layers),
            hidden_size=self._hidden_size,
            num_heads=query_width // head_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=cache.block_size,
            final_norm=form.final_norm.data_ptr(),
            inverse_frequencies=form.inverse_frequencies.data_ptr(),
            rope_factor=form.rope_factor,
            epsilon=form.epsilon,
        )

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_metadata: AttentionMetadata,
        logits_to_keep: Tensor | int = 0,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        kept = torch.arange(input_ids.shape[1])[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_KH = self.run(self.embed(input_ids), position_ids, attention_metadata, kept)
        return SimpleNamespace(logits=self.head(hidden_KH)[None])

    def embed(self, input_ids_1T: Tensor) -> Tensor:
        """Float32 [T, H]."""
        x_1TH: Tensor = self.embedding(input_ids_1T)
        return x_1TH[0].float()

    def layer(self, index: int) -> _Decoder:
        """One layer for `run`, as if it were all there are."""
        structure = _Decoder.from_buffer_copy(self.structure)
        structure.layers = ctypes.pointer(self._layers[index])
        structure.num_layers = 1
        return structure

    def run(self, x_TH: Tensor, positions_1T: Tensor, metadata: AttentionMetadata, kept: Tensor, layers: _Decoder | None = None) -> Tensor:
        """The normed output of the last layer for the rows `kept`, which ascend: bfloat16 [K, H].

        `x_TH`, float32 and contiguous, is what goes in. Its first K rows become what came out before the norm; the others mean nothing.
        """
        out_KH = torch.empty(len(kept), self._hidden_size, dtype=torch.bfloat16)
        self._library.penstock_run_decoder(
            out_KH.data_ptr(),
            ctypes.addressof(self.structure if layers is None else layers),
            metadata.packed.data_ptr(),
            x_TH.data_ptr(),
            positions_1T.data_ptr(),
            kept.data_ptr(),
            len(kept),
        )
        return out_KH


def _layer_structure(form: LayerForm, keys: Tensor, values: Tensor, window: int) -> _Layer:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    def linear(form: LinearForm) -> _Linear:
        return _Linear(form.bits, form.inputs, form.outputs, form.weight.data_ptr(), address(form.bias))

    return _Layer(
        query_key_value=linear(form.query_key_value),
        output=linear(form.output),
        gate_up=linear(form.gate_up),
        down=linear(form.down),
        input_norm=form.input_norm.data_ptr(),
        post_norm=form.post_norm.data_ptr(),
        query_norm=address(form.query_norm),
        key_norm=address(form.key_norm),
        key_cache=keys.data_ptr(),
        value_cache=values.data_ptr(),
        window=window,
        scaling=form.scaling,
    )
