"""Decode updates of recurrent states on CUDA: one token for each row, whose states are read and written in their slots by one kernel.

Several rows may have one slot if nothing of it is ever read, as padding has. Sums are in float32. Nothing waits for the device.
"""

import torch
from torch import Tensor

from penstock.engine.kernels.launch import COMPILER_OPTIONS
from penstock.engine.kernels.tuning import next_power_of_two

BLOCK_STATES = 4096  # numbers of a state that a program keeps in registers


def gated_delta_update(
    states_SHKV: Tensor,
    slots_N: Tensor,
    query_NGK: Tensor,
    key_NGK: Tensor,
    value_NHV: Tensor,
    decay_NH: Tensor,
    beta_NH: Tensor,
    *,
    is_normalized: bool,
) -> Tensor:
    """The gated delta rule for one token of each row; [N, H, V], in the type of the values.

    A state decays by the exponential of `decay`; what it remembers for the key moves towards the value, by `beta`; and is read by the query
    over the root of K. With `is_normalized`, queries and keys are scaled to length one first. Each key head is that of H / G value heads.
    Source: Yang et al., Gated Delta Networks (arXiv:2412.06464).
    """
    from penstock.engine.kernels.recurrent_triton import gated_delta_kernel

    num_rows, num_heads, value_size = value_NHV.shape
    key_size = key_NGK.shape[2]
    assert states_SHKV.shape[1:] == (num_heads, key_size, value_size)
    assert states_SHKV[0].is_contiguous()
    query_NGK, key_NGK, value_NHV = (_with_dense_heads(states) for states in (query_NGK, key_NGK, value_NHV))
    decay_NH, beta_NH = _with_dense_heads(decay_NH), _with_dense_heads(beta_NH)
    out_NHV = torch.empty(value_NHV.shape, dtype=value_NHV.dtype, device=value_NHV.device)
    key_padded = next_power_of_two(key_size)
    block_v = max(1, min(next_power_of_two(value_size), BLOCK_STATES // key_padded))
    gated_delta_kernel[(-(-value_size // block_v), num_heads, num_rows)](
        out_NHV,
        states_SHKV,
        slots_N,
        query_NGK,
        key_NGK,
        value_NHV,
        decay_NH,
        beta_NH,
        states_SHKV.stride(0),
        *query_NGK.stride()[:2],
        *key_NGK.stride()[:2],
        *value_NHV.stride()[:2],
        decay_NH.stride(0),
        beta_NH.stride(0),
        key_size**-0.5,
        GROUP_SIZE=num_heads // key_NGK.shape[1],
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        KEY_PADDED=key_padded,
        BLOCK_V=block_v,
        IS_NORMALIZED=is_normalized,
        num_warps=4,
        **COMPILER_OPTIONS,
    )
    return out_NHV


def state_space_update(
    states_SHDN: Tensor,
    slots_R: Tensor,
    x_RHD: Tensor,
    steps_RH: Tensor,
    decay_H: Tensor,
    inputs_RGN: Tensor,
    outputs_RGN: Tensor,
    *,
    skip_H: Tensor | None = None,
    step_bias_H: Tensor | None = None,
    gate_RHD: Tensor | None = None,
) -> Tensor:
    """The recurrence of Mamba 2 for one token of each row; [R, H, D], in the type of `x`.

    A step is the softplus of `steps` and their bias. A state decays by the exponential of the step times `decay`, which is negative, takes
    the step times `inputs` and `x`, and is read by `outputs`; `x` times `skip` is added, and all multiplied by the SiLU of the gate.
    Source: Dao and Gu, Transformers are SSMs (arXiv:2405.21060).
    """
    from penstock.engine.kernels.recurrent_triton import state_space_kernel

    num_rows, num_heads, head_size = x_RHD.shape
    state_size = inputs_RGN.shape[2]
    assert states_SHDN.shape[1:] == (num_heads, head_size, state_size)
    assert states_SHDN[0].is_contiguous()
    x_RHD, inputs_RGN, outputs_RGN = (_with_dense_heads(states) for states in (x_RHD, inputs_RGN, outputs_RGN))
    gate_RHD = None if gate_RHD is None else _with_dense_heads(gate_RHD)
    out_RHD = torch.empty(x_RHD.shape, dtype=x_RHD.dtype, device=x_RHD.device)
    state_padded = next_power_of_two(state_size)
    block_d = max(1, min(next_power_of_two(head_size), BLOCK_STATES // state_padded))
    state_space_kernel[(-(-head_size // block_d), num_heads, num_rows)](
        out_RHD,
        states_SHDN,
        slots_R,
        x_RHD,
        steps_RH,
        step_bias_H,
        decay_H,
        skip_H,
        inputs_RGN,
        outputs_RGN,
        gate_RHD,
        states_SHDN.stride(0),
        *x_RHD.stride()[:2],
        *steps_RH.stride(),
        0 if step_bias_H is None else step_bias_H.stride(0),
        decay_H.stride(0),
        0 if skip_H is None else skip_H.stride(0),
        *inputs_RGN.stride()[:2],
        *outputs_RGN.stride()[:2],
        *((0, 0) if gate_RHD is None else gate_RHD.stride()[:2]),
        GROUP_SIZE=num_heads // inputs_RGN.shape[1],
        HEAD_SIZE=head_size,
        STATE_SIZE=state_size,
        STATE_PADDED=state_padded,
        BLOCK_D=block_d,
        num_warps=4,
        **COMPILER_OPTIONS,
    )
    return out_RHD


def _with_dense_heads(states: Tensor) -> Tensor:
    return states if states.stride(-1) == 1 else states.contiguous()
