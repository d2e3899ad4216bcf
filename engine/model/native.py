"""A model's forward pass in one call of native code, for decoders of the most common form (`form.py`).

That a model uses its parts in this way is verified layer by layer against its own code, before the first request.
"""

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.kv_cache.tensors import KVCache
from penstock.engine.model.form import (
    LANES,
    LAYER_NUMBERS,
    LAYER_TENSORS,
    LayerForm,
    LinearForm,
    MixtureForm,
    PreparedDecoder,
    RopeForm,
    UnsuitableModel,
    read_form,
    require,
)
from penstock.engine.model.loader import LoadedModel
from penstock.engine.native.runtime import native_library
from penstock.engine.parallel.group import Group
from penstock.engine.system.process import startup_phase

logger = logging.getLogger(__name__)

HEAD_SIZES = (64, 128, 256)  # of the fast attention kernels
PROMPT_TOKENS = 23  # of one sequence; another has one token
# Relative, of the median row: what rounding in other places amounts to, with room. The default model's layers deviate by up to 0.7 percent,
# of 4 bits by up to 1.6, and without their rotary positions by 23 on average.
MAX_DEVIATION = 3e-2
MAX_FAR_DEVIATION = 0.1  # at the end of the context, where rounded cosines matter most to large scores
ROUNDING = 2**-8  # of a sum that a layer's own code rounds to bfloat16 twice


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_parts", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "order", "strides")),
    )


class _Mixture(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("router", "gate_up", "down")),
        *((name, ctypes.c_int64) for name in ("num_experts", "num_chosen", "normalizes")),
    )


class _Activation(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int64), *((name, ctypes.c_float) for name in ("alpha", "limit")))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("query_key_value", "output", "gate_up", "down")),
        ("mixture", ctypes.POINTER(_Mixture)),
        *((name, ctypes.c_void_p) for name in (*LAYER_TENSORS, "key_cache", "value_cache")),
        *((name, ctypes.c_int64) for name in ("norms_heads_together", "window", "group", "rope")),
        ("activation", _Activation),
        *((name, ctypes.c_float) for name in ("scaling", "softcap", "residual_multiplier")),
    )


class _Rope(ctypes.Structure):
    _fields_ = (("inverse_frequencies", ctypes.c_void_p), ("factor", ctypes.c_float), ("is_interleaved", ctypes.c_int32))


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "block_size")),
        ("has_quantized_cache", ctypes.c_int64),
        ("final_norm", ctypes.c_void_p),
        ("ropes", ctypes.POINTER(_Rope)),
        *((name, ctypes.c_int64) for name in ("num_ropes", "rotary_size")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("key_stops", "adapters", "add_up")),
    )


class _Sums:
    """Sums over the ranks, as native code asks for them."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._error: Exception | None = None
        self._callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)(self._add_up)
        self.address = ctypes.cast(self._callback, ctypes.c_void_p)

    def _add_up(self, address: int, count: int) -> None:
        if self._error is not None:
            return
        memory = (ctypes.c_char * (count * torch.bfloat16.itemsize)).from_address(address)
        try:
            self._group.sum(torch.frombuffer(memory, dtype=torch.bfloat16))
        except Exception as error:  # nothing can be raised through native code
            self._error = error

    def check(self) -> None:
        """Raises what a sum has raised."""
        if self._error is not None:
            raise self._error


class AdapterRuns(Protocol):
    """The adapters of the rows of a batch, as the native code has them."""

    def address(self, kept: Tensor, first_layer: int = 0) -> int:
        """Of `Adapters` in adapters.h, valid until the next call, for the layers from that number on.

        `kept` are the rows that the last layer computes to its end.
        """
        ...


class StatesReader(Protocol):
    """Reads hidden states on their way, for all rows of a batch: before layers of these numbers, and after the final norm."""

    @property
    def layers(self) -> Sequence[int]:
        """Ascending."""
        ...

    @property
    def reads_last(self) -> bool: ...

    def read(self, layer: int | None, states_TH: Tensor) -> None:
        """`states_TH` are written over afterwards. No layer: what the head reads."""
        ...


class NativeDecoder:
    """Replaces the `forward` of a bfloat16 model on the CPU, as the engine calls it.

    Raises `UnsuitableModel` for a model that is not of this form.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache) -> None:
        # The library is looked up last: the first call builds it.
        library = native_library() if loaded.device.type == "cpu" and loaded.dtype == torch.bfloat16 else None
        if library is None:
            raise UnsuitableModel("it takes bfloat16 and the native kernels")
        form = read_form(loaded.model, loaded.config.get_text_config(decoder=True).num_hidden_layers)
        num_kv_heads, head_size, _ = loaded.kv_layout[0].shape
        shapes = {tensor.shape[1:] for tensor in (*cache.keys, *cache.values)}
        rotary_size = 2 * len(form.ropes[0].inverse_frequencies)
        if len(shapes) > 1 or head_size not in HEAD_SIZES or rotary_size > head_size or rotary_size % (2 * LANES):
            raise UnsuitableModel("its heads are of another size")
        query_width = form.layers[0].output.inputs
        if form.layers[0].query_key_value.outputs != query_width + 2 * num_kv_heads * head_size or query_width % (num_kv_heads * head_size):
            raise UnsuitableModel("its heads do not fit its projections")
        widths = (query_width, num_kv_heads * head_size)
        norms_heads_together = [_norms_heads_together(layer, head_size, widths) for layer in form.layers]
        model: Any = loaded.model
        self._library = library
        self._cache = cache  # of whose tensors the native code has the addresses
        self.embedding: nn.Module = model.get_input_embeddings()
        self.head: nn.Module = model.get_output_embeddings()
        self.form = form
        self.adapters: AdapterRuns | None = None  # of the next pass
        self.reader: StatesReader | None = None
        self._hidden_size = form.layers[0].output.outputs
        self._sums = None if loaded.sharding.group.size == 1 else _Sums(loaded.sharding.group)
        windows = [layer.sliding_window or 0 for layer in loaded.kv_layout]
        groups = map(cache.group_of, range(len(windows)))
        # Which the layers have pointers to.
        self._mixtures = [None if layer.mixture is None else _mixture(layer.mixture) for layer in form.layers]
        caches = zip(form.layers, self._mixtures, cache.keys, cache.values, norms_heads_together, windows, groups, strict=True)
        self._layers = (_Layer * len(form.layers))(*(_layer_structure(*parts) for parts in caches))
        self._ropes = (_Rope * len(form.ropes))(*map(_rope, form.ropes))
        self.structure = _Decoder(
            layers=self._layers,
            num_layers=len(form.layers),
            hidden_size=self._hidden_size,
            num_heads=query_width // head_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            block_size=cache.block_size,
            has_quantized_cache=cache.dtype == torch.int8,
            final_norm=form.final_norm.data_ptr(),
            ropes=self._ropes,
            num_ropes=len(form.ropes),
            rotary_size=rotary_size,
            epsilon=form.epsilon,
            add_up=None if self._sums is None else self._sums.address,
        )

    def __call__(
        self,
        input_ids: Tensor | None = None,
        *,
        position_ids: Tensor,
        attention_metadata: AttentionMetadata,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: Tensor | int = 0,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        num_tokens = position_ids.shape[1]
        kept = torch.arange(num_tokens)[-logits_to_keep:] if isinstance(logits_to_keep, int) else logits_to_keep
        hidden_KH = self.hidden(input_ids, position_ids, attention_metadata, kept, inputs_embeds)
        return SimpleNamespace(logits=self.logits(hidden_KH)[None])

    def hidden(
        self,
        input_ids_1T: Tensor | None,
        positions_1T: Tensor,
        metadata: AttentionMetadata,
        kept: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """What the head gets of the rows `kept`: bfloat16 [K, H]."""
        self.structure.key_stops = None if metadata.key_stops_T is None else metadata.key_stops_T.data_ptr()
        self.structure.adapters = None if self.adapters is None else self.adapters.address(kept)
        if inputs_embeds is None:
            assert input_ids_1T is not None
            x_TH = self.embed(input_ids_1T)
        else:
            x_TH = self._multiplied(inputs_embeds)
        run = self.run if self.reader is None else functools.partial(self._run_read, self.reader)
        return run(x_TH, positions_1T, metadata, kept)

    def embed(self, input_ids_1T: Tensor) -> Tensor:
        """Float32 [T, H]."""
        return self._multiplied(self.embedding(input_ids_1T))

    def _multiplied(self, embeds_1TH: Tensor) -> Tensor:
        x_TH = embeds_1TH[0].float()
        return x_TH if self.form.outer.embedding_multiplier == 1.0 else x_TH * self.form.outer.embedding_multiplier

    def logits(self, hidden_KH: Tensor) -> Tensor:
        """Of what `hidden` gives: [K, V]."""
        return self.form.outer.logits(self.head(hidden_KH))

    def part(self, first: int, stop: int) -> _Decoder:
        """The layers [first, stop) for `run`, as if they were all there are."""
        structure = _Decoder.from_buffer_copy(self.structure)
        structure.layers = ctypes.pointer(self._layers[first])
        structure.num_layers = stop - first
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
            metadata.block_tables_PN.data_ptr(),
            x_TH.data_ptr(),
            positions_1T.data_ptr(),
            kept.data_ptr(),
            metadata.block_tables_PN.shape[1],
            len(kept),
        )
        if self._sums is not None:
            self._sums.check()
        return out_KH

    def _run_read(self, reader: StatesReader, x_TH: Tensor, positions_1T: Tensor, metadata: AttentionMetadata, kept: Tensor) -> Tensor:
        """As `run`, with stops where states are read."""

        def run_part(first: int, stop: int, kept: Tensor) -> Tensor:
            part = self.part(first, stop)
            if self.adapters is not None:  # whose updates go by the number of the layer in the part
                part.adapters = self.adapters.address(kept, first)
            return self.run(x_TH, positions_1T, metadata, kept, part)

        rows, first = torch.arange(len(x_TH)), 0
        for layer in reader.layers:
            if first < layer:
                run_part(first, layer, rows)
            reader.read(layer, x_TH)
            first = layer
        if not reader.reads_last:
            return run_part(first, len(self._layers), kept)
        hidden_TH = run_part(first, len(self._layers), rows)
        reader.read(None, hidden_TH)
        return hidden_TH[kept]


def _norms_heads_together(form: LayerForm, head_size: int, widths: tuple[int, int]) -> bool:
    """Whether the norms of queries and keys are of all heads together, rather than of each by itself."""
    sizes = tuple(None if norm is None else len(norm) for norm in (form.query_norm, form.key_norm))
    require(sizes in ((None, None), (head_size, head_size), widths), "its norms of queries and keys are of another size")
    return sizes == widths and sizes != (head_size, head_size)


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _linear(form: LinearForm | None) -> _Linear:
    if form is None:
        return _Linear()
    strides = None if form.strides is None else ctypes.addressof(form.strides)
    return _Linear(form.num_parts, form.inputs, form.outputs, form.address, _address(form.bias), _address(form.order), strides)


def _rope(form: RopeForm) -> _Rope:
    return _Rope(form.inverse_frequencies.data_ptr(), form.factor, form.is_interleaved)


def _mixture(form: MixtureForm) -> _Mixture:
    return _Mixture(_linear(form.router), _linear(form.gate_up), _linear(form.down), form.num_experts, form.num_chosen, form.normalizes)


def _layer_structure(
    form: LayerForm, mixture: _Mixture | None, keys: Tensor, values: Tensor, norms_heads_together: bool, window: int, group: int
) -> _Layer:
    return _Layer(
        query_key_value=_linear(form.query_key_value),
        output=_linear(form.output),
        gate_up=_linear(form.gate_up),
        down=_linear(form.down),
        mixture=None if mixture is None else ctypes.pointer(mixture),
        activation=_Activation(form.activation.kind, form.activation.alpha, form.activation.limit),
        **{name: _address(getattr(form, name)) for name in LAYER_TENSORS},
        key_cache=keys.data_ptr(),
        value_cache=values.data_ptr(),
        norms_heads_together=norms_heads_together,
        window=window,
        group=group,
        **{name: getattr(form, name) for name in LAYER_NUMBERS},
    )


def install_native_decoder(loaded: LoadedModel, cache: KVCache) -> bool:
    """Replaces the model's `forward` by native code where the model is of its form and the two agree.

    To be called before the first request, since it writes to the cache.
    """
    vars(loaded.model).pop("forward", None)  # of an engine that had the model before
    try:
        with _agreed(loaded.sharding.group):
            decoder = NativeDecoder(loaded, cache)
        if not isinstance(loaded.model, PreparedDecoder):
            with startup_phase("verification of native code"), _agreed(loaded.sharding.group):
                verify_native(decoder, loaded, cache)
    except UnsuitableModel as reason:
        logger.info("The model's layers run one by one, not in one call of native code: %s.", reason)
        return False
    loaded.model.forward = decoder
    return True


@contextmanager
def _agreed(group: Group) -> Iterator[None]:
    """Raises `UnsuitableModel` on all ranks where the context does on one."""
    try:
        yield
    except UnsuitableModel:
        group.agree(False)
        raise
    if not group.agree(True):
        raise UnsuitableModel("it is not suitable on another rank")


@torch.inference_mode()
def verify_native(decoder: NativeDecoder, loaded: LoadedModel, cache: KVCache) -> None:
    """Raises `UnsuitableModel` where the embedding, a layer or the head computes something else than the model's own code.

    Each layer gets the input that it got in the model's own pass, so that differences in rounding do not add up.
    """
    block_size = cache.block_size
    num_blocks = -(-PROMPT_TOKENS // block_size)
    if cache.num_blocks <= num_blocks:
        raise UnsuitableModel("the cache is too small to verify it")
    tables_PN = torch.arange(num_blocks + 1, dtype=torch.int32).repeat(2, 1)
    tables_PN[1] += 1
    num_groups = len(cache.groups)
    metadata = AttentionMetadata.pack(
        [0, *range(block_size, block_size + PROMPT_TOKENS)] * num_groups,
        [0, 1, 1 + PROMPT_TOKENS],
        [1, PROMPT_TOKENS],
        [0, 1] * num_groups,
        tables_PN,
        num_decodes=1,
        num_groups=num_groups,
    )
    generator = torch.Generator().manual_seed(0)
    ids_1T = torch.randint(loaded.vocab_size, (1, 1 + PROMPT_TOKENS), generator=generator)
    far = max(loaded.max_model_len - PROMPT_TOKENS, 0)  # some models treat what lies far in another way
    for first, limit in ((0, MAX_DEVIATION), (far, MAX_FAR_DEVIATION)):
        positions_1T = torch.tensor([[first, *range(first, first + PROMPT_TOKENS)]])  # where keys lie is a matter of the cache alone
        for part, deviation in _deviations(positions_1T, decoder, loaded, ids_1T, metadata):
            if not deviation < limit:
                raise UnsuitableModel(f"its {part} gives something else (by {deviation:.1e} from position {first} on)")


def _deviations(
    positions_1T: Tensor, decoder: NativeDecoder, loaded: LoadedModel, ids_1T: Tensor, metadata: AttentionMetadata
) -> Iterator[tuple[str, float]]:
    """How far each part of the model deviates."""
    rows = torch.arange(1 + PROMPT_TOKENS)
    inputs, outputs, logits_TV = _own_pass(decoder.form.modules, loaded.model, ids_1T, positions_1T, metadata)
    yield "embedding", _deviation(decoder.embed(ids_1T), inputs[0])
    for index, (before_TH, expected_TH) in enumerate(zip(inputs, outputs, strict=True)):
        x_TH = before_TH.float().clone()
        normed_TH = decoder.run(x_TH, positions_1T, metadata, rows, decoder.part(index, index + 1))
        yield f"layer {index}", _deviation(x_TH, expected_TH, before_TH)
    yield "head", _deviation(decoder.logits(normed_TH), logits_TV)


def _own_pass(
    layers: list[nn.Module], model: Any, ids_1T: Tensor, positions_1T: Tensor, metadata: AttentionMetadata
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What goes into each layer and what comes out, [T, H], and the logits [T, V]."""
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        hidden_1TH = args[0] if args else kwargs["hidden_states"]
        inputs.append(hidden_1TH[0])
        outputs.append(output[0])

    with ExitStack() as hooks:
        for layer in layers:
            hooks.callback(layer.register_forward_hook(see, with_kwargs=True).remove)
        logits_1TV = model(input_ids=ids_1T, position_ids=positions_1T, use_cache=False, attention_metadata=metadata).logits
    return inputs, outputs, logits_1TV[0]


def _deviation(given_TN: Tensor, expected_TN: Tensor, before_TN: Tensor | None = None) -> float:
    """Of the median row, relative to what was added to `before_TN`."""
    # A few numbers of a few rows can be a thousand times as large as all others, and would hide the rest of a row. And where scores are
    # large, rounding makes a few rows attend elsewhere.
    expected_TN = expected_TN.float()
    errors_TN = (given_TN.float() - expected_TN).abs()
    changes_TN = expected_TN
    if before_TN is not None:
        errors_TN = (errors_TN - expected_TN.abs() * ROUNDING).relu()
        changes_TN = expected_TN - before_TN.float()
    return float((errors_TN.norm(dim=-1) / changes_TN.norm(dim=-1).clamp_min(1e-30)).median())
