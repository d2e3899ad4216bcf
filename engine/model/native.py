"""A model's forward pass in one call of native code, for decoders of the most common form, verified against the model's own code.

x += o(attention(rotate(qkv(norm(x))))), then x += down(silu(gate(norm(x))) * up(norm(x))): Llama, Mistral, Qwen2, Qwen3 and many others.
Parts are found by the names that architectures share. That a model uses them as here is verified layer by layer, before the first request.
"""

import ctypes
import functools
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.kv_cache.cache import KVCache
from penstock.engine.model.compiled_layers import decoder_layers
from penstock.engine.model.fused import FusedPart
from penstock.engine.model.loader import LoadedModel
from penstock.engine.native.library import native_library
from penstock.engine.parallel.group import Group
from penstock.engine.system.process import startup_phase
from penstock.engine.weights.float8 import Float8Linear, Float8Panels
from penstock.engine.weights.linear import PackedLinear, QuantizedLinear, QuantizedPart, packed_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

LAYER_PARTS = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
QUERY_KEY_NORMS = {"q_norm", "k_norm"}
NORMS = {"input_layernorm", "post_attention_layernorm", *QUERY_KEY_NORMS}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}
IS_FLOAT8 = -1  # in place of a number of parts, as in decoder.h
LANES = 16  # the native code takes so many numbers of a row at a time
STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on how long the text is
HEAD_SIZES = (64, 128)  # of the fast attention kernels
PROMPT_TOKENS = 23  # of one sequence; another has one token
# Relative, of the median row: what rounding in other places amounts to, with room. The default model's layers deviate by up to 0.7 percent,
# of 4 bits by up to 1.6, and without their rotary positions by 23 on average.
MAX_DEVIATION = 3e-2
MAX_FAR_DEVIATION = 0.1  # at the end of the context, where rounded cosines matter most to large scores
ROUNDING = 2**-8  # of a sum that a layer's own code rounds to bfloat16 twice


class UnsuitableModel(Exception):
    """The model is not of this form; the message names the part."""


@dataclass(frozen=True, slots=True)
class LinearForm:
    """`weights` are one of bfloat16 in panels or, where there are `parts`, what those point to; `bias` is bfloat16.

    `order`, int64 [inputs], is that of a quantized weight's columns, where it is not that of the inputs.
    """

    inputs: int
    outputs: int
    weights: list[Tensor]
    parts: "ctypes.Array[QuantizedPart] | Float8Panels | None"
    bias: Tensor | None
    order: Tensor | None = None

    @property
    def num_parts(self) -> int:
        """As decoder.h has it."""
        if isinstance(self.parts, Float8Panels):
            return IS_FLOAT8
        return 0 if self.parts is None else len(self.parts)

    @property
    def address(self) -> int:
        return self.weights[0].data_ptr() if self.parts is None else ctypes.addressof(self.parts)

    @property
    def weight_bytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)


@dataclass(frozen=True, slots=True)
class LayerForm:
    """Norms are float32, of heads only where the layer has them."""

    query_key_value: LinearForm
    output: LinearForm
    gate_up: LinearForm
    down: LinearForm
    input_norm: Tensor
    post_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    scaling: float


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """`inverse_frequencies` are those of the rotary positions, float32 [head size / 2]."""

    modules: list[nn.Module]
    layers: list[LayerForm]
    final_norm: Tensor
    epsilon: float
    inverse_frequencies: Tensor
    rope_factor: float


class PreparedLayer(nn.Module):
    """What native code computes a layer with: fused projections, and norms in float32."""

    def __init__(self, query_key_value: nn.Module, output: nn.Module, gate_up: nn.Module, down: nn.Module, form: LayerForm) -> None:
        super().__init__()
        self.query_key_value, self.output, self.gate_up, self.down = query_key_value, output, gate_up, down
        self.scaling = form.scaling
        for name in ("input_norm", "post_norm", "query_norm", "key_norm"):
            self.register_buffer(name, getattr(form, name), persistent=False)

    @classmethod
    def of(cls, layer: Any, form: LayerForm) -> "PreparedLayer":
        """Of a model's own layer, which has this form."""
        attention, mlp = layer.self_attn, layer.mlp
        return cls(attention.q_proj.fused.linear, attention.o_proj, mlp.gate_proj.fused.linear, mlp.down_proj, form)

    def form(self) -> LayerForm:
        parts: dict[str, Any] = {name: read_linear(linear) for name, linear in self.named_children()}
        return LayerForm(**(parts | self._buffers), scaling=self.scaling)


class PreparedDecoder(nn.Module):
    """In place of a model that is computed by native code alone, and was verified in an earlier process."""

    def __init__(self, config: Any, form: DecoderForm, layers: list[PreparedLayer], embedding: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.config, self.form = config, form
        self.layers, self.embedding, self.head = nn.ModuleList(layers), embedding, head

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def read_form(model: "PreTrainedModel | PreparedDecoder", num_layers: int) -> DecoderForm:
    """Raises `UnsuitableModel` where a part is missing, or there is one too many."""
    if isinstance(model, PreparedDecoder):
        return model.form
    modules = decoder_layers(model, num_layers)
    _require(bool(modules), "its layers cannot be told apart")
    layers = [_read_layer(module) for module in modules]
    _require_sizes(layers)
    base: Any = model.get_decoder()  # type: ignore[no-untyped-call]
    rope = getattr(base, "rotary_emb", None)
    frequencies = getattr(rope, "inv_freq", None)
    if not isinstance(frequencies, Tensor) or getattr(rope, "rope_type", None) not in STATIC_ROPES:
        raise UnsuitableModel("its positions are of another kind")
    final_norm = getattr(base, "norm", None)
    norms = [final_norm, *(part for layer in modules for name, part in layer.named_modules() if name.rpartition(".")[2] in NORMS)]
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    epsilon = epsilons.pop()
    if epsilons or epsilon is None:
        raise UnsuitableModel("its norms are of another kind")
    return DecoderForm(
        modules=modules,
        layers=layers,
        final_norm=_weight_of(final_norm, layers[0].output.outputs),
        epsilon=epsilon,
        inverse_frequencies=frequencies.detach().float().contiguous(),
        rope_factor=float(getattr(rope, "attention_scaling", 1.0)),
    )


def _read_layer(layer: Any) -> LayerForm:
    _require_parts(layer, LAYER_PARTS)
    attention, mlp = layer.self_attn, layer.mlp
    has_norms = "q_norm" in attention._modules
    _require_parts(attention, ATTENTION_PARTS | QUERY_KEY_NORMS if has_norms else ATTENTION_PARTS)
    _require_parts(mlp, MLP_PARTS)
    _require(isinstance(mlp.act_fn, nn.SiLU) or type(mlp.act_fn).__name__ == "SiLUActivation", "its activation is another one")
    _require(isinstance(getattr(attention, "scaling", None), float), "its attention says no scaling")
    output, head_size = read_linear(attention.o_proj), getattr(attention, "head_dim", 0)
    return LayerForm(
        query_key_value=_read_fused([attention.q_proj, attention.k_proj, attention.v_proj]),
        output=output,
        gate_up=_read_fused([mlp.gate_proj, mlp.up_proj]),
        down=read_linear(mlp.down_proj),
        input_norm=_weight_of(layer.input_layernorm, output.outputs),
        post_norm=_weight_of(layer.post_attention_layernorm, output.outputs),
        query_norm=_weight_of(attention.q_norm, head_size) if has_norms else None,
        key_norm=_weight_of(attention.k_norm, head_size) if has_norms else None,
        scaling=attention.scaling,
    )


def _read_fused(parts: list[nn.Module]) -> LinearForm:
    wholes = {part.fused for part in parts if isinstance(part, FusedPart)}
    if len(wholes) != 1 or not all(isinstance(part, FusedPart) for part in parts):
        raise UnsuitableModel("its projections are not fused")
    return read_linear(wholes.pop().linear)


def read_linear(linear: nn.Module) -> LinearForm:
    """Raises `UnsuitableModel` for one whose weight the kernels do not read."""
    if isinstance(linear, QuantizedLinear) and (linear.bias is None or linear.bias.dtype == torch.bfloat16):
        blocks = [weight.blocks for weight in linear.packed]
        return LinearForm(linear.in_features, linear.out_features, blocks, linear.native_parts(), linear.bias, linear.order)
    if isinstance(linear, Float8Linear) and (linear.bias is None or linear.bias.dtype == torch.bfloat16):
        weight = linear.weight
        return LinearForm(linear.in_features, linear.out_features, [weight.codes, weight.scales], weight.native(), linear.bias)
    if isinstance(linear, PackedLinear) and not packed_weight(linear).is_mkldnn:
        return LinearForm(linear.in_features, linear.out_features, [packed_weight(linear)], None, linear.bias)
    raise UnsuitableModel(f"{type(linear).__name__} is a linear layer of another kind")


def _require_sizes(layers: list[LayerForm]) -> None:
    # The native code allocates for the first layer's sizes, and processes rows in whole vectors.
    sizes = {
        tuple((linear.inputs, linear.outputs) for linear in (layer.query_key_value, layer.output, layer.gate_up, layer.down))
        for layer in layers
    }
    _require(len(sizes) == 1, "its layers differ in size")
    (hidden_size, _), (_, output_size), (gate_inputs, gate_outputs), (inner_size, down_outputs) = sizes.pop()
    _require(
        {output_size, gate_inputs, down_outputs} == {hidden_size} and gate_outputs == 2 * inner_size, "its sizes do not fit each other"
    )
    _require(hidden_size % LANES == 0 and inner_size % LANES == 0, f"its sizes are no multiples of {LANES}")


def _weight_of(norm: Any, size: int) -> Tensor:
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor) or weight.shape != (size,):
        raise UnsuitableModel(f"{type(norm).__name__} is a norm of another kind")
    return weight.detach().float().contiguous()


def _require_parts(module: nn.Module, names: set[str]) -> None:
    parts = {**module._modules, **module._parameters}
    found = {name for name, part in parts.items() if part is not None}
    _require(found == names, f"{type(module).__name__} has other parts: {', '.join(sorted(found ^ names))}")


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise UnsuitableModel(otherwise)


class _Linear(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_parts", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "order")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _Linear) for name in ("query_key_value", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("input_norm", "post_norm", "query_norm", "key_norm", "key_cache", "value_cache")),
        *((name, ctypes.c_int64) for name in ("window", "group")),
        ("scaling", ctypes.c_float),
    )


class _Decoder(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "block_size")),
        ("has_quantized_cache", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("final_norm", "inverse_frequencies")),
        *((name, ctypes.c_float) for name in ("rope_factor", "epsilon")),
        *((name, ctypes.c_void_p) for name in ("adapters", "add_up")),
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

    def address(self, kept: Tensor) -> int:
        """Of `Adapters` in adapters.h, valid until the next call. `kept` are the rows that the last layer computes to its end."""
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
        self.adapters: AdapterRuns | None = None  # of the next pass
        self.reader: StatesReader | None = None
        self._hidden_size = form.layers[0].output.outputs
        self._sums = None if loaded.sharding.group.size == 1 else _Sums(loaded.sharding.group)
        windows = [layer.sliding_window or 0 for layer in loaded.kv_layout]
        caches = zip(form.layers, cache.keys, cache.values, windows, map(cache.group_of, range(len(windows))), strict=True)
        self._layers = (_Layer * len(form.layers))(*(_layer_structure(*parts) for parts in caches))
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
            inverse_frequencies=form.inverse_frequencies.data_ptr(),
            rope_factor=form.rope_factor,
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
        return SimpleNamespace(logits=self.head(hidden_KH)[None])

    def hidden(
        self,
        input_ids_1T: Tensor | None,
        positions_1T: Tensor,
        metadata: AttentionMetadata,
        kept: Tensor,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """What the head gets of the rows `kept`: bfloat16 [K, H]."""
        assert metadata.key_stops_T is None, "native code attends causally"
        self.structure.adapters = None if self.adapters is None else self.adapters.address(kept)
        if inputs_embeds is None:
            assert input_ids_1T is not None
            x_TH = self.embed(input_ids_1T)
        else:
            x_TH = inputs_embeds[0].float()
        run = self.run if self.reader is None else functools.partial(self._run_read, self.reader)
        return run(x_TH, positions_1T, metadata, kept)

    def embed(self, input_ids_1T: Tensor) -> Tensor:
        """Float32 [T, H]."""
        x_1TH: Tensor = self.embedding(input_ids_1T)
        return x_1TH[0].float()

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
        assert self.adapters is None, "an adapter's updates go by the number of the layer"
        rows, first = torch.arange(len(x_TH)), 0
        for layer in reader.layers:
            if first < layer:
                self.run(x_TH, positions_1T, metadata, rows, self.part(first, layer))
            reader.read(layer, x_TH)
            first = layer
        rest = self.part(first, len(self._layers))
        if not reader.reads_last:
            return self.run(x_TH, positions_1T, metadata, kept, rest)
        hidden_TH = self.run(x_TH, positions_1T, metadata, rows, rest)
        reader.read(None, hidden_TH)
        return hidden_TH[kept]


def _layer_structure(form: LayerForm, keys: Tensor, values: Tensor, window: int, group: int) -> _Layer:
    def address(tensor: Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    def linear(form: LinearForm) -> _Linear:
        return _Linear(form.num_parts, form.inputs, form.outputs, form.address, address(form.bias), address(form.order))

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
        group=group,
        scaling=form.scaling,
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
    yield "head", _deviation(decoder.head(normed_TH), logits_TV)


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
