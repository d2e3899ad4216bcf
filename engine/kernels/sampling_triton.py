# mypy: disable-error-code="import-untyped,import-not-found,untyped-decorator"
"""Device code of the sampling kernels, which `launch.py` launches."""

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


LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
NO_INDEX: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def numbers(logits: tl.tensor, tokens: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Logits in float32, with +inf for what is not a number: a row that holds any has no token to give."""
    number = tl.load(logits + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    return tl.where(number == number, number, float("inf"))


@triton.jit
def mass_above(
    logits: tl.tensor, vocab_size: tl.tensor, bound: tl.tensor, pivot: tl.tensor, greatest: tl.tensor, scale: tl.tensor, TILE: tl.constexpr
) -> tl.tensor:
    """The weight of all tokens whose logits are at least `bound` and above `pivot`."""
    mass = 0.0
    for start in range(0, vocab_size, TILE):
        number = numbers(logits, start + tl.arange(0, TILE), vocab_size)
        mass += tl.sum(tl.where((number >= bound) & (number > pivot), tl.exp2((number - greatest) * scale), 0.0), 0)
    return mass


@triton.jit(
    do_not_specialize=["logits_stride"],
    # Rows of one tensor, whose alignment depends on the number of columns: three kernels would be compiled instead of one.
    do_not_specialize_on_alignment=["temperatures", "top_ps", "min_ps", "floors", "seeds"],
)
def sample_kernel(
    token_ids: tl.tensor,  # int64 [B]
    is_possible: tl.tensor,  # int8 [B]
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_ps: tl.tensor,
    min_ps: tl.tensor,
    floors: tl.tensor,
    seeds: tl.tensor,
    vocab_size: tl.tensor,
    logits_stride: tl.tensor,
    TILE: tl.constexpr,
) -> None:
    """One program: one row. Weights are those of softmax, over the greatest one. Grid (B,)."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    greatest = float("-inf")
    token = 0
    for start in range(0, vocab_size, TILE):
        number = numbers(logits, start + tl.arange(0, TILE), vocab_size)
        tile_greatest = tl.max(number, 0)
        token = tl.where(tile_greatest > greatest, start + tl.argmax(number, 0), token)
        greatest = tl.maximum(greatest, tile_greatest)
    can_give = (greatest > float("-inf")) & (greatest < float("inf"))
    temperature = tl.load(temperatures + row)
    if can_give & (temperature > 0.0):
        scale = LOG2_E / temperature
        floor = tl.load(floors + row)
        top_p = tl.load(top_ps + row)
        min_p = tl.load(min_ps + row)
        seed = tl.load(seeds + row)
        total = mass_above(logits, vocab_size, floor, float("-inf"), greatest, scale, TILE)
        mass = total
        bound = floor
        if min_p > 0.0:
            bound = tl.maximum(floor, greatest + temperature * tl.log(min_p))
            mass = mass_above(logits, vocab_size, bound, float("-inf"), greatest, scale, TILE)
        pivot = float("-inf")
        draw_number = 0
        is_searching = True
        while is_searching:
            target = tl.rand(seed, draw_number) * mass
            # The tile in which the running sum passes the target; the last one with any weight where rounding keeps it below.
            running = 0.0
            tile_start = 0
            tile_running = 0.0
            is_passed = 0
            for start in range(0, vocab_size, TILE):
                number = numbers(logits, start + tl.arange(0, TILE), vocab_size)
                weight = tl.sum(tl.where((number >= bound) & (number > pivot), tl.exp2((number - greatest) * scale), 0.0), 0)
                is_next = (weight > 0.0) & (is_passed == 0)
                tile_start = tl.where(is_next, start, tile_start)
                tile_running = tl.where(is_next, running, tile_running)
                running += weight
                is_passed = tl.where(is_next & (running > target), 1, is_passed)
            tokens = tile_start + tl.arange(0, TILE)
            number = numbers(logits, tokens, vocab_size)
            weights = tl.where((number >= bound) & (number > pivot), tl.exp2((number - greatest) * scale), 0.0)
            passing = (tl.cumsum(weights, 0) + tile_running > target) & (weights > 0.0)
            first = tl.min(tl.where(passing, tokens, NO_INDEX), 0)
            last = tl.max(tl.where(weights > 0.0, tokens, 0), 0)
            token = tl.where(first == NO_INDEX, last, first)
            is_searching = False
            if top_p < 1.0:
                # Outside the nucleus, and so is all that is no more probable: draw again among the rest.
                drawn = tl.max(tl.where(tokens == token, number, float("-inf")), 0)
                likelier = mass_above(logits, vocab_size, bound, drawn, greatest, scale, TILE)
                if (likelier >= top_p * total) & (likelier > 0.0):
                    is_searching = True
                    pivot = drawn
                    mass = likelier
            draw_number += 1
    tl.store(token_ids + row, token)
    tl.store(is_possible + row, tl.where(can_give, 1, 0))
