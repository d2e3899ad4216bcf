# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of `kv_write`; needs Triton to be installed."""

import triton
import triton.language as tl


@triton.jit
def bounded(element: tl.tensor, LARGEST: tl.constexpr) -> tl.tensor:
    """Cut off at LARGEST, unless that is None; NaN stays NaN, and shows that the model has failed."""
    if LARGEST is not None:
        element = element.to(tl.float32)
        element = tl.where(element > LARGEST, LARGEST, tl.where(element < -LARGEST, -LARGEST, element))
    return element


@triton.jit(do_not_specialize_on_alignment=["slot_mapping"])
def kv_write_kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    key_token_stride: tl.tensor,
    key_head_stride: tl.tensor,
    value_token_stride: tl.tensor,
    value_head_stride: tl.tensor,
    key_cache_block_stride: tl.tensor,
    key_cache_token_stride: tl.tensor,
    key_cache_head_stride: tl.tensor,
    value_cache_block_stride: tl.tensor,
    value_cache_token_stride: tl.tensor,
    value_cache_head_stride: tl.tensor,
    NUM_KV_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_ELEMENTS: tl.constexpr,
    VALUE_ELEMENTS: tl.constexpr,
    LARGEST: tl.constexpr,
) -> None:
    """One program: all heads of one token. KEY_ELEMENTS and VALUE_ELEMENTS are heads times head size, padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE

    element = tl.arange(0, KEY_ELEMENTS)
    head = element // KEY_SIZE
    dim = element % KEY_SIZE
    is_element = head < NUM_KV_HEADS
    source = key + token * key_token_stride + head * key_head_stride + dim
    target = key_cache + block * key_cache_block_stride + offset * key_cache_token_stride + head * key_cache_head_stride + dim
    tl.store(target, bounded(tl.load(source, mask=is_element), LARGEST), mask=is_element)

    element = tl.arange(0, VALUE_ELEMENTS)
    head = element // VALUE_SIZE
    dim = element % VALUE_SIZE
    is_element = head < NUM_KV_HEADS
    source = value + token * value_token_stride + head * value_head_stride + dim
    target = value_cache + block * value_cache_block_stride + offset * value_cache_token_stride + head * value_cache_head_stride + dim
    tl.store(target, bounded(tl.load(source, mask=is_element), LARGEST), mask=is_element)
