"""Low-rank adapters in a model: rows of any adapters in one batch, each with what its own adapter adds to linear layers.

Nothing of it is in the model while no row of a step has an adapter: the replaced `forward` of each layer is there for such steps alone.
"""

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from penstock.engine.adapters.checkpoint import AdapterReader, LayerSize, LowRank
from penstock.engine.adapters.registry import NO_SLOT, Adapter, AdapterRows
from penstock.engine.attention.interface import LatentProjection
from penstock.engine.kernels.launch import add_low_rank
from penstock.engine.kernels.tuning import MIN_DOT_SIZE, next_power_of_two
from penstock.engine.model.compiled_layers import CompiledLayer, decoder_layers
from penstock.engine.model.form import LANES, linear_names
from penstock.engine.model.fused import FusedPart
from penstock.engine.model.loader import LoadedModel
from penstock.engine.model.native import NativeDecoder
from penstock.engine.recurrent.states import Mixer
from penstock.engine.system.memory import index_on, to_device
from penstock.engine.weights.float8 import Float8Linear
from penstock.engine.weights.linear import PackedLinear, QuantizedLinear, reads_weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class Place:
    """Where the result of the layer at `path` is: columns of what `module` computes, some of them if several layers are fused in it."""

    path: str
    module: nn.Module
    size: LayerSize
    first_column: int = 0


def adapter_places(model: "PreTrainedModel", num_layers: int) -> tuple[list[Place], dict[str, str]]:
    """The layers that adapters can change, and of others that they may name the path and why not."""
    inside = {module for layer in decoder_layers(model, num_layers) for module in layer.modules()}
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    modules = dict(model.named_modules())
    places: list[Place] = []
    unsuitable: dict[str, str] = {}
    fused: set[nn.Module] = set()
    recurrent = {path for path, module in modules.items() if isinstance(module.forward, Mixer)}
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        if parent in recurrent and is_linear(module):
            unsuitable[path] = "recurrent layers cannot be changed"
        elif isinstance(module, FusedPart):
            fused.add(module.fused.linear)
            sizes, place = module.fused.sizes, module.position
            size = LayerSize(size_of(module.fused.linear).inputs, sizes[place])
            places.append(Place(path, module.fused.linear, size, sum(sizes[:place])))
        elif isinstance(module, nn.Embedding) or module is head or name == "embed_tokens":
            unsuitable[path] = "embeddings and the output layer cannot be changed"
        elif isinstance(module, LatentProjection):
            unsuitable[path] = "attention over the latent KV cache absorbs it"
        elif not is_linear(module) or module in fused:
            continue
        elif module not in inside:
            unsuitable[path] = "only layers of the decoder can be changed"
        elif ".experts." in path:
            unsuitable[path] = "experts cannot be changed"
        elif reads_weight(type(modules[parent]), name):  # type: ignore[arg-type]
            unsuitable[path] = "the model's code reads its weight"
        else:
            places.append(Place(path, module, size_of(module)))
    return places, unsuitable


def is_linear(module: nn.Module) -> bool:
    return type(module) is nn.Linear or isinstance(module, PackedLinear | QuantizedLinear | Float8Linear) or is_conv1d(module)


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' own linear layer, which GPT-2 has. By its name: transformers takes long to import."""
    return type(module).__name__ == "Conv1D"


def size_of(module: Any) -> LayerSize:
    """Of a linear layer."""
    if is_conv1d(module):
        return LayerSize(module.nx, module.nf)
    return LayerSize(module.in_features, module.out_features)


def outputs_of(module: nn.Module) -> int:
    """Of a linear layer, which may be one of several fused ones."""
    return module.fused.sizes[module.position] if isinstance(module, FusedPart) else size_of(module).outputs


class AdaptedForward:
    """In place of a linear layer's `forward`: adds what the rows' adapters add."""

    def __init__(self, module: nn.Module, places: Sequence[Place], owner: "AdaptedLayers") -> None:
        self._own = module.forward
        self._places = places
        self._owner = owner

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = self._own(x)
        self._owner.add(out.view(-1, out.shape[-1]), x.reshape(-1, x.shape[-1]), self._places)
        return out


class Updates(Protocol):
    """The adapters of a step's rows, as a device adds them to what layers compute."""

    def add(self, out_TO: Tensor, x_TI: Tensor, places: Sequence[Place]) -> None:
        """Adds to a layer's result, which is that of all of its `places`."""
        ...


class RowGroups:
    """On the CPU: two matrix products for the rows of each adapter."""

    def __init__(self, rows: AdapterRows, device: torch.device) -> None:
        by_slot: dict[int, list[int]] = {}
        for row, slot in enumerate(rows.slots):
            by_slot.setdefault(slot, []).append(row)
        by_slot.pop(NO_SLOT, None)
        self._groups = [(index_on(device, own), rows.adapters[slot].updates) for slot, own in by_slot.items()]

    def add(self, out_TO: Tensor, x_TI: Tensor, places: Sequence[Place]) -> None:
        for rows_R, updates in self._groups:
            own = [(place, updates[place.path]) for place in places if place.path in updates]
            x_RI = x_TI[rows_R] if own else x_TI
            for place, update in own:
                added_RO = x_RI @ update.down_RI.T @ update.up_OR.T
                out_TO.narrow(1, place.first_column, place.size.outputs).index_add_(0, rows_R, added_RO)


class SlotStacks:
    """On a GPU: the matrices of all slots, one behind the other, and the slot of each row. Graphs read them where they are."""

    def __init__(self, places: Sequence[Place], num_slots: int, max_rank: int, max_rows: int, like: Tensor) -> None:
        rank = stacked_rank(max_rank)
        self._device = like.device
        self._adapters: list[Adapter | None] = [None] * num_slots
        self._slots_T = torch.full((max_rows,), NO_SLOT, dtype=torch.int64, device=like.device)
        self._stacks = {
            place.path: (like.new_zeros(num_slots, rank, place.size.inputs), like.new_zeros(num_slots, place.size.outputs, rank))
            for place in places
        }

    def load(self, rows: AdapterRows) -> None:
        """Takes the adapters and rows of a step. Never waits for the device."""
        for slot, adapter in rows.adapters.items():
            if self._adapters[slot] is not adapter:
                self._adapters[slot] = None  # until all of it is there
                self._write(slot, adapter)
                self._adapters[slot] = adapter
        self._slots_T.fill_(NO_SLOT)
        self._slots_T[: len(rows.slots)].copy_(index_on(self._device, rows.slots))

    def _write(self, slot: int, adapter: Adapter) -> None:
        for path, (down_SRI, up_SOR) in self._stacks.items():
            down_SRI[slot].zero_()
            up_SOR[slot].zero_()
            update = adapter.updates.get(path)
            if update is not None:
                down_SRI[slot, : update.rank].copy_(to_device(update.down_RI, self._device))
                up_SOR[slot, :, : update.rank].copy_(to_device(update.up_OR, self._device))

    def add(self, out_TO: Tensor, x_TI: Tensor, places: Sequence[Place]) -> None:
        for place in places:
            columns_TO = out_TO.narrow(1, place.first_column, place.size.outputs)
            add_low_rank(columns_TO, x_TI, self._slots_T[: len(x_TI)], *self._stacks[place.path])


def stacked_rank(max_rank: int) -> int:
    """What ranks are padded to in stacks."""
    return max(MIN_DOT_SIZE, next_power_of_two(max_rank))


def stack_bytes(loaded: LoadedModel, num_slots: int, max_rank: int) -> int:
    """The memory that `SlotStacks` takes."""
    places, _ = adapter_places(loaded.model, num_layers_of(loaded))
    sizes = [place.size.inputs + place.size.outputs for place in places]
    return num_slots * stacked_rank(max_rank) * sum(sizes) * loaded.dtype.itemsize


def num_layers_of(loaded: LoadedModel) -> int:
    num_layers: int = loaded.config.get_text_config(decoder=True).num_hidden_layers
    return num_layers


class AdaptedLayers:
    """The layers of one model that adapters can change. Belongs to the thread that runs the model, but for `reader`."""

    def __init__(self, loaded: LoadedModel, *, num_slots: int, max_rank: int, max_rows: int) -> None:
        self._model = loaded.model
        self._device = loaded.device
        self._sharding = loaded.sharding
        self._parts: WeakKeyDictionary[Adapter, Adapter] = WeakKeyDictionary()
        places, unsuitable = adapter_places(loaded.model, num_layers_of(loaded))
        hidden_size = int(loaded.config.get_text_config(decoder=True).hidden_size)
        sizes = {place.path: LayerSize(*self._sharding.whole_sizes(place.path, place.size.inputs, place.size.outputs)) for place in places}
        self.reader = AdapterReader(sizes, unsuitable, loaded.dtype, max_rank, hidden_size, loaded.whole)
        by_module: dict[nn.Module, list[Place]] = {}
        for place in places:
            by_module.setdefault(place.module, []).append(place)
        self._forwards = {module: AdaptedForward(module, own, self) for module, own in by_module.items()}
        self._stacks = None
        if self._device.type == "cuda":
            self._stacks = SlotStacks(places, num_slots, max_rank, max_rows, torch.empty(0, dtype=loaded.dtype, device=self._device))
        self._native: NativeAdapters | None = None
        self._rows = AdapterRows([], {})
        self._updates: Updates | None = self._stacks
        self._num_rows = 0

    def load(self, rows: AdapterRows) -> None:
        """Takes the adapters of the next step."""
        if self._sharding.group.size > 1:
            rows = AdapterRows(rows.slots, {slot: self._part_of(adapter) for slot, adapter in rows.adapters.items()})
        self._rows = rows
        if self._stacks is None:
            self._updates = None
        else:
            self._stacks.load(rows)

    def _part_of(self, adapter: Adapter) -> Adapter:
        """This rank's part of an adapter, the same one each time."""
        if adapter not in self._parts:
            updates = {
                path: LowRank(*self._sharding.low_rank(path, update.down_RI, update.up_OR)) for path, update in adapter.updates.items()
            }
            self._parts[adapter] = replace(adapter, updates=updates)
        return self._parts[adapter]

    @contextmanager
    def installed(self, num_rows: int, *, is_native: bool) -> Iterator[None]:
        """Within the context, the model computes so many rows with the adapters that have been loaded.

        By its own modules, rather than compiled code, or where that `is_native` by the native decoder.
        """
        self._num_rows = num_rows
        native = vars(self._model).get("forward")
        if is_native and isinstance(native, NativeDecoder):
            if self._native is None:
                self._native = NativeAdapters(self._model, native)
            native.adapters = self._native.runs(self._rows)
            try:
                yield
            finally:
                native.adapters = None
            return
        if self._updates is None:
            self._updates = RowGroups(self._rows, self._device)
        with ExitStack() as undo:
            for module in self._model.modules():
                forward = vars(module).get("forward")
                if isinstance(forward, CompiledLayer):
                    del module.forward
                    undo.callback(vars(module).update, {"forward": forward})
            for module, adapted in self._forwards.items():
                vars(module)["forward"] = adapted
                undo.callback(vars(module).pop, "forward")
            yield

    def add(self, out_TO: Tensor, x_TI: Tensor, places: Sequence[Place]) -> None:
        """Adds to a layer's result what the rows' adapters add."""
        if len(x_TI) != self._num_rows:
            raise RuntimeError(f"{places[0].path} computes {len(x_TI)} rows of a batch of {self._num_rows}: its rows have no adapters")
        assert self._updates is not None
        self._updates.add(out_TO, x_TI, places)


NUM_PARTS = (3, 1, 2, 1)  # of the linear layers of the native decoder, as `LayerAdapter` in adapters.h has room for
ROWS_AT_ONCE, RANKS_TOGETHER, STEP = 3, 8, 32  # as in adapters.h


class _LowRank(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("down", "up")),
        *((name, ctypes.c_int64) for name in ("rank", "first", "outputs")),
    )


class _Run(ctypes.Structure):
    _fields_ = (("first", ctypes.c_int64), ("count", ctypes.c_int64), ("layers", ctypes.c_void_p))


class _Adapters(ctypes.Structure):
    _fields_ = (
        ("runs", ctypes.c_void_p),
        ("num_runs", ctypes.c_int64),
        ("kept_runs", ctypes.c_void_p),
        ("num_kept_runs", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class NativeTable:
    """An adapter's updates of all layers, and the memory that they are in."""

    adapter: Adapter
    updates: "ctypes.Array[_LowRank]"
    weights: Tensor


class NativeAdapters:
    """The adapters in slots as the native decoder reads them."""

    def __init__(self, model: "PreTrainedModel", decoder: NativeDecoder) -> None:
        paths = {module: path for path, module in model.named_modules()}
        # Of each layer's linear layers, fused, the paths and sizes. A mixture of experts has none that could be changed.
        self._names = [[[f"{paths[layer]}.{name}" for name in names] for names in linear_names(layer)] for layer in decoder.form.modules]
        modules = {path: module for module, path in paths.items()}
        self._sizes = [[[outputs_of(modules[path]) for path in names] for names in layer] for layer in self._names]
        self._tables: dict[int, NativeTable] = {}

    def table_of(self, slot: int, adapter: Adapter) -> NativeTable:
        table = self._tables.get(slot)
        if table is None or table.adapter is not adapter:
            table = self._tables[slot] = self._make(adapter)
        return table

    def runs(self, rows: AdapterRows) -> "_Runs":
        return _Runs(rows, {slot: self.table_of(slot, adapter) for slot, adapter in rows.adapters.items()})

    def _make(self, adapter: Adapter) -> NativeTable:
        packed = [PackedUpdates.of([adapter.updates.get(path) for path in names]) for names in itertools.chain(*self._names)]
        weights = torch.cat([tensor for updates in packed for tensor in (updates.down, *updates.ups)])
        address = weights.data_ptr()
        entries: list[_LowRank] = []
        for updates, sizes, num_parts in zip(packed, itertools.chain(*self._sizes), itertools.cycle(NUM_PARTS)):
            down, first = address, 0
            address += updates.down.nbytes
            for up, rank, outputs in zip(updates.ups, updates.ranks, sizes, strict=True):
                entries.append(_LowRank(down, address, rank, first, outputs))
                address += up.nbytes
                first += outputs
            entries += [_LowRank()] * (num_parts - len(sizes))
        table = (_LowRank * len(entries))(*entries)
        return NativeTable(adapter, table, weights)


@dataclass(frozen=True, slots=True)
class PackedUpdates:
    """What an adapter adds to layers that are fused in one, as the native code reads it: see `LowRank` in adapters.h."""

    down: Tensor
    ups: list[Tensor]
    ranks: list[int]

    @classmethod
    def of(cls, updates: "Sequence[LowRank | None]") -> "PackedUpdates":
        """None for a layer that is not changed."""
        ranks = [0 if update is None else update.rank + update.rank % 2 for update in updates]
        downs = [padded(update.down_RI, rank) for update, rank in zip(updates, ranks, strict=True) if update is not None]
        nothing = torch.empty(0, dtype=torch.bfloat16)
        ups = [nothing if update is None else packed_up(update.up_OR) for update in updates]
        return cls(packed_down(torch.cat(downs)) if downs else nothing, ups, ranks)


def padded(rows_NM: Tensor, num_rows: int) -> Tensor:
    """With zeros for the rows that it lacks."""
    return nn.functional.pad(rows_NM, (0, 0, 0, num_rows - len(rows_NM)))


def packed_down(down_RI: Tensor) -> Tensor:
    num_inputs = down_RI.shape[1]
    groups_GRI = padded(down_RI, -(-len(down_RI) // RANKS_TOGETHER) * RANKS_TOGETHER).view(-1, RANKS_TOGETHER, num_inputs)
    whole = num_inputs // STEP * STEP
    steps = groups_GRI[:, :, :whole].unflatten(2, (-1, STEP)).transpose(1, 2)  # type: ignore[no-untyped-call]
    return torch.cat([steps.flatten(1), groups_GRI[:, :, whole:].flatten(1)], dim=1).flatten()


def packed_up(up_OR: Tensor) -> Tensor:
    pairs_ORP = padded(up_OR.T, up_OR.shape[1] + up_OR.shape[1] % 2).T.unflatten(1, (-1, 2))  # type: ignore[no-untyped-call]
    return pairs_ORP.unflatten(0, (-1, LANES)).transpose(1, 2).flatten()  # type: ignore[no-any-return]


class _Runs:
    """The `AdapterRuns` of a batch."""

    def __init__(self, rows: AdapterRows, tables: Mapping[int, NativeTable]) -> None:
        self._slots = rows.slots
        self._tables = tables
        self._structure = _Adapters()
        self._held: list[Any] = []

    def address(self, kept: Tensor, first_layer: int = 0) -> int:
        runs = self._runs(self._slots, first_layer)
        kept_runs = self._runs([self._slots[row] for row in kept.tolist()], first_layer)
        self._held = [runs, kept_runs]
        self._structure = _Adapters(ctypes.addressof(runs), len(runs), ctypes.addressof(kept_runs), len(kept_runs))
        return ctypes.addressof(self._structure)

    def _runs(self, slots: Sequence[int], first_layer: int) -> Any:
        runs: list[_Run] = []
        first, skipped = 0, first_layer * sum(NUM_PARTS) * ctypes.sizeof(_LowRank)
        for slot, members in itertools.groupby(slots):
            stop = first + sum(1 for _ in members)
            address = None if slot == NO_SLOT else ctypes.addressof(self._tables[slot].updates) + skipped
            runs += [_Run(start, min(ROWS_AT_ONCE, stop - start), address) for start in range(first, stop, ROWS_AT_ONCE)]
            first = stop
        return (_Run * len(runs))(*runs)
