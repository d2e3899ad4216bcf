"""Recurrences of one more token on a GPU: kernels that find states in their slots take the place of the models' own functions.

transformers' code looks these functions up in its modules, hands them the states that the cache gave it, and what comes back to the cache.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.engine.kernels.recurrent import gated_delta_update, state_space_update


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
