# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of the decode updates of recurrent states, which `recurrent.py` launches. States are read and written where they are."""

import triton
import triton.language as tl


@triton.jit
def normalized_head(vector: tl.tensor) -> tl.tensor:
    """Of length one, by the model's own epsilon."""
    return vector * tl.rsqrt(tl.sum(vector * vector, 0) + 1e-6)


@triton.jit
def gated_delta_kernel(
    output: tl.tensor,  # [rows, value heads, VALUE_SIZE]
    states: tl.tensor,  # float32 [slots, value heads, KEY_SIZE, VALUE_SIZE], of which those of a slot are contiguous
    slots: tl.tensor,  # [rows]
    query: tl.tensor,  # [rows, key heads, KEY_SIZE], as keys
    key: tl.tensor,
    value: tl.tensor,  # [rows, value heads, VALUE_SIZE]
    decay: tl.tensor,  # [rows, value heads]: logarithms, as the next
    beta: tl.tensor,
    state_stride: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    key_row_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_row_stride: tl.tensor,
    value_head_stride: tl.tensor,
    decay_row_stride: tl.tensor,
    beta_row_stride: tl.tensor,
    scaling: tl.tensor,
    GROUP_SIZE: tl.constexpr,  # value heads to a key head
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    KEY_PADDED: tl.constexpr,
    BLOCK_V: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
) -> None:
    """One program: some values of one head of one row. Grid (tiles of values, value heads, rows)."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    keys = tl.arange(0, KEY_PADDED)
    values = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    is_key = keys < KEY_SIZE
    is_value = values < VALUE_SIZE
    is_state = is_key[:, None] & is_value[None, :]
    key_head = head // GROUP_SIZE
    q = tl.load(query + row * query_row_stride + key_head * query_head_stride + keys, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(key + row * key_row_stride + key_head * key_head_stride + keys, mask=is_key, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row_stride + head * value_head_stride + values, mask=is_value, other=0.0).to(tl.float32)
    if IS_NORMALIZED:
        q = normalized_head(q)
        k = normalized_head(k)
    slot = tl.load(slots + row).to(tl.int64)
    place = states + slot * state_stride + head.to(tl.int64) * (KEY_SIZE * VALUE_SIZE) + keys[:, None] * VALUE_SIZE + values[None, :]
    state = tl.load(place, mask=is_state, other=0.0)
    state *= tl.exp(tl.load(decay + row * decay_row_stride + head).to(tl.float32))
    remembered = tl.sum(state * k[:, None], 0)
    delta = (v - remembered) * tl.load(beta + row * beta_row_stride + head).to(tl.float32)
    state += k[:, None] * delta[None, :]
    tl.store(place, state, mask=is_state)
    result = tl.sum(state * (q * scaling)[:, None], 0)
    tl.store(output + (row * tl.num_programs(1) + head) * VALUE_SIZE + values, result, mask=is_value)


@triton.jit
def state_space_kernel(
    output: tl.tensor,  # [rows, heads, HEAD_SIZE]
    states: tl.tensor,  # float32 [slots, heads, HEAD_SIZE, STATE_SIZE], of which those of a slot are contiguous
    slots: tl.tensor,  # [rows]
    x: tl.tensor,  # [rows, heads, HEAD_SIZE]
    steps: tl.tensor,  # [rows, heads]: before bias and softplus
    step_bias: tl.tensor,  # [heads], as those that follow; or None
    decay: tl.tensor,
    skip: tl.tensor,
    inputs: tl.tensor,  # [rows, groups, STATE_SIZE], as outputs
    outputs: tl.tensor,
    gate: tl.tensor,  # as x, or None
    state_stride: tl.tensor,
    x_row_stride: tl.tensor,
    x_head_stride: tl.tensor,
    step_row_stride: tl.tensor,
    step_head_stride: tl.tensor,
    bias_stride: tl.tensor,
    decay_stride: tl.tensor,
    skip_stride: tl.tensor,
    inputs_row_stride: tl.tensor,
    inputs_group_stride: tl.tensor,
    outputs_row_stride: tl.tensor,
    outputs_group_stride: tl.tensor,
    gate_row_stride: tl.tensor,
    gate_head_stride: tl.tensor,
    GROUP_SIZE: tl.constexpr,  # heads to a group
    HEAD_SIZE: tl.constexpr,
    STATE_SIZE: tl.constexpr,
    STATE_PADDED: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """One program: some dimensions of one head of one row. Grid (tiles of dimensions, heads, rows)."""
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    dims = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    numbers = tl.arange(0, STATE_PADDED)
    is_dim = dims < HEAD_SIZE
    is_number = numbers < STATE_SIZE
    is_state = is_dim[:, None] & is_number[None, :]
    group = head // GROUP_SIZE
    own = tl.load(x + row * x_row_stride + head * x_head_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
    step = tl.load(steps + row * step_row_stride + head * step_head_stride).to(tl.float32)
    if step_bias is not None:
        step += tl.load(step_bias + head * bias_stride).to(tl.float32)
    grown = tl.exp(tl.minimum(step, 20.0))
    small = grown * (1.0 - grown * (0.5 - grown * (1.0 / 3.0)))  # where 1 + grown would lose what matters
    step = tl.where(step > 20.0, step, tl.where(grown < 0.01, small, tl.log(1.0 + grown)))
    entering = tl.load(inputs + row * inputs_row_stride + group * inputs_group_stride + numbers, mask=is_number, other=0.0).to(tl.float32)
    leaving = tl.load(outputs + row * outputs_row_stride + group * outputs_group_stride + numbers, mask=is_number, other=0.0).to(tl.float32)
    slot = tl.load(slots + row).to(tl.int64)
    place = states + slot * state_stride + head.to(tl.int64) * (HEAD_SIZE * STATE_SIZE) + dims[:, None] * STATE_SIZE + numbers[None, :]
    state = tl.load(place, mask=is_state, other=0.0) * tl.exp(step * tl.load(decay + head * decay_stride).to(tl.float32))
    state += (step * entering)[None, :] * own[:, None]
    tl.store(place, state, mask=is_state)
    result = tl.sum(state * leaving[None, :], 1)
    if skip is not None:
        result += own * tl.load(skip + head * skip_stride).to(tl.float32)
    if gate is not None:
        open_ = tl.load(gate + row * gate_row_stride + head * gate_head_stride + dims, mask=is_dim, other=0.0).to(tl.float32)
        result *= open_ * tl.sigmoid(open_)
    tl.store(output + (row * tl.num_programs(1) + head) * HEAD_SIZE + dims, result, mask=is_dim)
