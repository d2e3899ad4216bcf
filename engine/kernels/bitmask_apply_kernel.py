# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of `bitmask_apply`; needs Triton to be installed."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_words", "logits_stride", "bitmask_stride"])
def bitmask_apply_kernel(
    logits: tl.tensor,
    bitmask: tl.tensor,
    rows: tl.tensor,
    vocab_size: tl.tensor,
    num_words: tl.tensor,
    logits_stride: tl.tensor,
    bitmask_stride: tl.tensor,
    TILE_WORDS: tl.constexpr,
) -> None:
    """One program: TILE_WORDS * 32 tokens of one masked row. Only what is forbidden is written; no logit is read. Grid (R, tiles)."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + index).to(tl.int64)
    words = tl.program_id(1) * TILE_WORDS + tl.arange(0, TILE_WORDS)
    # Tokens past the end of the bitmask are padding of the vocabulary: forbidden.
    packed = tl.load(bitmask + index * bitmask_stride + words, mask=words < num_words, other=0)
    bits = tl.arange(0, 32)
    is_allowed = (packed[:, None] >> bits[None, :]) & 1
    tokens = words[:, None] * 32 + bits[None, :]
    forbidden = tl.full([TILE_WORDS, 32], float("-inf"), tl.float32)
    tl.store(logits + row * logits_stride + tokens, forbidden, mask=(is_allowed == 0) & (tokens < vocab_size))
