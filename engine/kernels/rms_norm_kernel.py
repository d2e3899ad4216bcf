# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of `rms_norm`; needs Triton to be installed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_inner"])
def rms_norm_kernel(
    output: tl.tensor,
    states: tl.tensor,
    weight: tl.tensor,
    epsilon: tl.tensor,
    num_inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
) -> None:
    """One program: one row. Row r of the output is row r % num_inner of row r // num_inner. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED)
    is_dim = dims < SIZE
    source = states + row // num_inner * outer_stride + row % num_inner * inner_stride + dims
    stored = tl.load(source, mask=is_dim, other=0.0)
    number = stored.to(tl.float32)
    number *= tl.rsqrt(tl.sum(number * number, 0) / SIZE + epsilon)
    # Rounded before it is weighted, as the models that this stands in for do.
    number = number.to(stored.dtype).to(tl.float32) * tl.load(weight + dims, mask=is_dim, other=0.0).to(tl.float32)
    tl.store(output + row * SIZE + dims, number, mask=is_dim)
