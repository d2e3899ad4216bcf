"""The states of a model's recurrent layers, and the layers' own code run over the rows of a step, sequences of as many rows at a time.

On a GPU, kernels that find states in their slots take the place of the models' own functions for one more token: transformers' code looks
these functions up in its modules, hands them the states that the cache gave it, and what comes back to the cache.
"""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.kernels.recurrent import gated_delta_update, state_space_update
from penstock.engine.recurrent.layout import CACHE_NAMES, RecurrentLayer, StateShape
from penstock.engine.system.memory import index_on


@dataclass(frozen=True, slots=True)
class SlotStates:
    """The states of a recurrence where they are: those of row i are in slot `slots_N[i]`."""

    states_SX: Tensor
    slots_N: Tensor


class GatedDeltaRule:
    """In place of `torch_recurrent_gated_delta_rule`, which it calls for states that are not in slots."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, initial_state: Any = None, **options: Any
    ) -> tuple[Tensor, Any]:
        """Of [rows, 1, heads, size] and [rows, 1, heads]."""
        if not isinstance(initial_state, SlotStates):
            result: tuple[Tensor, Any] = self._own(query, key, value, g=g, beta=beta, initial_state=initial_state, **options)
            return result
        out = gated_delta_update(
            initial_state.states_SX,
            initial_state.slots_N,
            *(states[:, 0] for states in (query, key, value, g, beta)),
            is_normalized=options["use_qk_l2norm_in_kernel"],
        )
        return out[:, None], initial_state


class StateSpaceUpdate:
    """In place of `mamba2_selective_state_update`, which it calls for states that are not in slots."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own = own

    def __call__(
        self,
        state: Any,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,  # the names are transformers'
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Of [rows, heads, size]; what heads have in common is expanded to that, or by the size of states."""
        if not isinstance(state, SlotStates):
            result: Tensor = self._own(state, hidden_states, dt, A, B, C, D, **options)
            return result
        assert options["dt_softplus"]
        bias = options.get("dt_bias")
        return state_space_update(
            state.states_SX,
            state.slots_N,
            hidden_states,
            dt[:, :, 0],
            A[:, 0, 0],
            B,
            C,
            skip_H=None if D is None else D[:, 0],
            step_bias_H=None if bias is None else bias[:, 0],
            gate_RHD=options.get("z"),
        )


UPDATES = {"torch_recurrent_gated_delta_rule": GatedDeltaRule, "mamba2_selective_state_update": StateSpaceUpdate}


def update_in_slots(mixer: type[nn.Module]) -> bool:
    """Has layers of this class take states in slots for one more token; False where their code calls none of these functions."""
    module = sys.modules[mixer.__module__]
    found = [name for name in UPDATES if hasattr(module, name)]
    for name in found:
        own = getattr(module, name)
        if not isinstance(own, UPDATES[name]):
            setattr(module, name, UPDATES[name](own))
    return bool(found)


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows of a flat batch, from `start` on, that are `num_rows` consecutive tokens of one sequence, whose states are in `slot`.

    `snapshots`, in order, are the slots that the states are copied to after so many of these rows.
    """

    start: int
    num_rows: int
    slot: int
    snapshots: tuple[tuple[int, int], ...] = ()

    def pieces(self) -> "list[Piece]":
        """The rows cut where a snapshot is taken."""
        pieces, start = [], 0
        for stop, snapshot in self.snapshots:
            pieces.append(Piece(self.start + start, stop - start, self.slot, snapshot))
            start = stop
        if start < self.num_rows:
            pieces.append(Piece(self.start + start, self.num_rows - start, self.slot))
        return pieces


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one sequence that a layer computes at once. Its states are then copied to the slot `snapshot`, if there is one."""

    start: int
    num_rows: int
    slot: int
    snapshot: int | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Pieces of different sequences, of equally many rows, that a layer computes in one call."""

    rows: slice | Tensor
    slots: slice | Tensor
    shape: tuple[int, int]
    snapshots: list[tuple[int, int]]

    @classmethod
    def of(cls, pieces: Sequence[Piece], device: torch.device) -> "Group":
        num_rows = pieces[0].num_rows
        return cls(
            _selection([row for piece in pieces for row in range(piece.start, piece.start + num_rows)], device),
            _selection([piece.slot for piece in pieces], device),
            (len(pieces), num_rows),
            [(piece.slot, piece.snapshot) for piece in pieces if piece.snapshot is not None],
        )


def groups_of(rows: Sequence[StateRows], device: torch.device) -> list[Group]:
    """What a layer computes in a step, in order: the first pieces of all sequences, then their second ones, and so on."""
    pieces = [each.pieces() for each in rows]
    groups = []
    for number in range(max(map(len, pieces), default=0)):
        by_length: dict[int, list[Piece]] = {}
        for own in pieces:
            if number < len(own):
                by_length.setdefault(own[number].num_rows, []).append(own[number])
        groups += [Group.of(alike, device) for alike in by_length.values()]
    return groups


def _selection(numbers: list[int], device: torch.device) -> slice | Tensor:
    # Consecutive numbers are a slice, which selects a view instead of a copy.
    first, stop = numbers[0], numbers[-1] + 1
    return slice(first, stop) if numbers == list(range(first, stop)) else index_on(device, numbers)


class RecurrentStates:
    """The states of all recurrent layers, in `num_slots` slots that each hold those of one sequence. Belongs to the model's thread.

    The states of a slot lie side by side, one tensor for each type, so that it is copied at once.

    On a GPU, steps of at most `max_num_rows` decodes read their slots from one tensor, so that a CUDA graph holds them; rows of padding
    have a slot of their own behind the others.
    """

    def __init__(
        self, layers: Sequence[RecurrentLayer], num_slots: int, activations: torch.dtype, device: torch.device, *, max_num_rows: int = 0
    ) -> None:
        self.num_slots = num_slots
        self.is_decode = False  # whether the step's rows are one of each sequence, in order, and then padding
        self._groups: list[Group] = []
        self._device = device
        self._slots_N = torch.full((max_num_rows,), num_slots, device=device) if device.type == "cuda" else None
        self._snapshots: list[tuple[int, int]] = []  # of a step of decodes: slots, and those that they are copied to
        self._layers = list(layers)
        shapes = list(dict.fromkeys((layer.mixer, state) for layer in layers for state in layer.states))
        self.memory: list[Tensor] = []
        self._states: dict[str, dict[StateShape, Tensor]] = {layer.mixer: {} for layer in layers}
        for dtype in dict.fromkeys(state.dtype(activations) for _, state in shapes):
            own = [(mixer, state) for mixer, state in shapes if state.dtype(activations) == dtype]
            sizes = [torch.Size(state.shape).numel() for _, state in own]
            memory_SN = torch.empty(num_slots + (device.type == "cuda"), sum(sizes), dtype=dtype, device=device)
            memory_SN[num_slots:] = 0
            for (mixer, state), part in zip(own, torch.split(memory_SN, sizes, dim=1), strict=True):
                self._states[mixer][state] = part.view(len(memory_SN), *state.shape)
            self.memory.append(memory_SN)

    @property
    def num_bytes(self) -> int:
        return sum(memory.nbytes for memory in self.memory)

    @property
    def is_on_gpu(self) -> bool:
        return self._slots_N is not None

    def install(self, model: nn.Module) -> None:
        """From here on the recurrent layers compute the rows that `begin` is given."""
        for layer in self._layers:
            module: Any = model.get_submodule(layer.mixer)
            module.forward = Mixer(module, self, self._states[layer.mixer])

    def uninstall(self, model: nn.Module) -> None:
        """The layers run their own code again."""
        for layer in self._layers:
            vars(model.get_submodule(layer.mixer)).pop("forward", None)

    def begin(self, rows: Sequence[StateRows]) -> None:
        """The rows of the step that the model computes next; none for one of padding alone. Never waits for the device."""
        self.is_decode = self._slots_N is not None and all(each.num_rows == 1 and each.start == row for row, each in enumerate(rows))
        self._snapshots = []  # those of a step that failed
        if self._slots_N is None or not self.is_decode:
            self._groups = groups_of(rows, self._device)
            return
        self._slots_N.fill_(self.num_slots)
        if rows:
            self._slots_N[: len(rows)].copy_(index_on(self._device, [each.slot for each in rows]))
        self._snapshots = [(each.slot, snapshot) for each in rows for _, snapshot in each.snapshots]

    def groups(self, num_rows: int) -> list[Group]:
        """What each layer computes of a batch of so many rows, in order."""
        if self._slots_N is None or not self.is_decode:
            return self._groups
        return [Group(slice(0, num_rows), self._slots_N[:num_rows], (num_rows, 1), [])]

    def finish(self) -> None:
        """Takes the snapshots that the layers have not taken themselves. Never waits for the device."""
        snapshots, self._snapshots = self._snapshots, []
        if snapshots:
            sources_N, targets_N = index_on(self._device, [slot for pair in zip(*snapshots, strict=True) for slot in pair]).chunk(2)
            for memory_SN in self.memory:
                memory_SN[targets_N] = memory_SN[sources_N]

    def copy(self, source: int | None, target: int) -> None:
        """Copies the states of a slot to another; from None, those before the first token."""
        for memory_SN in self.memory:
            if source is None:
                memory_SN[target].zero_()
            else:
                memory_SN[target].copy_(memory_SN[source])


class Mixer:
    """In place of a recurrent layer's `forward`: runs its own code over the rows of each group, on the states of their sequences.

    Rows that belong to no sequence get zeros.
    """

    def __init__(self, module: nn.Module, owner: RecurrentStates, states: dict[StateShape, Tensor]) -> None:
        forward = type(module).forward
        self._run: Callable[..., Tensor] = forward.__get__(module)
        self._cache_name = next(name for name in CACHE_NAMES if name in inspect.signature(forward).parameters)
        self._owner = owner
        self._takes_slots = owner.is_on_gpu and update_in_slots(type(module))
        self._states: dict[tuple[str, int], Tensor] = {(state.kind, state.number): tensor for state, tensor in states.items()}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """Of [1, T, hidden size]. What other arguments tell of the batch is that of attention."""
        rows_TD = hidden_states[0]
        out_TD = torch.zeros_like(rows_TD)
        for group in self._owner.groups(len(rows_TD)):
            cache = GroupStates(self._states, group, self._takes_slots and self._owner.is_decode)
            rows_BLD = rows_TD[group.rows].view(*group.shape, -1)
            result_BLD = self._run(rows_BLD, **{self._cache_name: cache})
            out_TD[group.rows] = result_BLD.flatten(0, 1)
            cache.write_back()
        return out_TD[None]


@dataclass(slots=True)
class GroupStates:
    """The states of a group's sequences, as a layer's own code asks transformers' cache for them.

    There are always states, those before the first token being zeros: so the code for one more token runs wherever a piece has one row.
    With `in_slots`, it updates recurrences where they are.
    """

    states: dict[tuple[str, int], Tensor]
    group: Group
    in_slots: bool = False
    _own: dict[tuple[str, int], Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self._own = {key: tensor[self.group.slots] for key, tensor in self.states.items() if not (self.in_slots and key[0] == "recurrence")}

    def write_back(self) -> None:
        """Puts what is not a view of the slots back into them, and takes the snapshots."""
        slots = self.group.slots
        for key, tensor in self.states.items():
            if isinstance(slots, Tensor) and key in self._own:
                tensor[slots] = self._own[key]
            for slot, snapshot in self.group.snapshots:
                tensor[snapshot].copy_(tensor[slot])

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor:
        return self._own["convolution", state_idx]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | SlotStates | None:
        key = ("recurrence", state_idx)
        if self.in_slots and key in self.states:
            assert isinstance(self.group.slots, Tensor)
            return SlotStates(self.states[key], self.group.slots)
        return self._own.get(key)

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        """Adds inputs of the convolution; returns all that it is to see."""
        own = self._own["convolution", state_idx]
        seen = torch.cat([own, conv_states], dim=-1)
        own.copy_(seen[..., -own.shape[-1] :])
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor | SlotStates, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor | SlotStates:
        if isinstance(recurrent_states, SlotStates):
            return recurrent_states
        return self._own["recurrence", state_idx].copy_(recurrent_states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return True

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
