"""Tiles, warps, stages and splits of the attention kernels, by the sizes of heads and batch."""

from dataclasses import dataclass

MIN_DOT_SIZE = 16  # tl.dot takes no dimension smaller
WIDEST_HEAD = 256  # dimensions in one product; of longer ones, what a power of two leaves over is a product of its own
WIDEST_TILE = 64  # keys
PIPELINE_BYTES = 64 * 1024  # keys and values in flight: leaves an H100 three programs per multiprocessor, and fits an Ada chip's 99 KiB
SPLITS_PER_MULTIPROCESSOR = 4  # so that one more on some than on others is at most a quarter more work
MIN_KEYS_PER_SPLIT = 256  # a shorter split costs more to merge than it saves


@dataclass(frozen=True, slots=True)
class AttentionTuning:
    """The tile of one program: `tile_rows` query rows by `tile_keys` keys, with the compiler's options for it."""

    tile_rows: int
    tile_keys: int
    num_warps: int
    num_stages: int


def padded(size: int) -> int:
    """The power of two that a dimension of a dot product is padded to."""
    return max(MIN_DOT_SIZE, next_power_of_two(size))


def padded_parts(key_size: int) -> tuple[int, int]:
    """What the dimensions of keys are padded to, in one part or, 576 being 512 and 64, in two; the second is 0 where there is one."""
    main = next_power_of_two(key_size + 1) // 2
    return (padded(key_size), 0) if key_size <= WIDEST_HEAD or key_size == main else (main, padded(key_size - main))


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not smaller than `size` (at least 1)."""
    return 1 << max(0, size - 1).bit_length()


def decode_tuning(group_size: int, key_size: int, value_size: int, itemsize: int) -> AttentionTuning:
    """Decode reads much and computes little: few rows, and as many keys in flight as shared memory holds."""
    tile_keys = _tile_keys(key_size, value_size, itemsize)
    tile_bytes = tile_keys * (padded(key_size) + padded(value_size)) * itemsize
    num_buffers = max(1, min(3, PIPELINE_BYTES // tile_bytes))
    return AttentionTuning(tile_rows=padded(group_size), tile_keys=tile_keys, num_warps=4, num_stages=_num_stages(num_buffers))


def prefill_tuning(
    group_size: int, key_size: int, value_size: int, itemsize: int, max_query_len: int, capability: int = 9
) -> AttentionTuning:
    """Prefill computes much: as many rows as their accumulators leave registers for, but no more than there are queries.

    Heads of up to 128 numbers of 16 bits leave a multiprocessor registers and shared memory for two programs: while one waits for its
    products or for keys, the other computes. Chips before `capability` 9 keep the operands of products in registers, too.
    """
    tile_keys = _tile_keys(key_size, value_size, itemsize)
    size = padded(max(key_size, value_size))
    is_small = size <= 128 and itemsize <= 2
    if is_small:
        most_rows = 64
        tile_keys = WIDEST_TILE // 2 if size > 64 and capability < 9 else WIDEST_TILE
    else:
        # Products in float32 run outside the tensor cores, where a large tile spills.
        most_rows = min(32, tile_keys) if itemsize > 2 else 2 * tile_keys
    tile_rows = max(min(most_rows, padded(max_query_len * group_size)), padded(group_size))
    if is_small:
        return AttentionTuning(tile_rows, tile_keys, num_warps=4 if tile_rows <= 64 else 8, num_stages=_num_stages(2 if size <= 64 else 1))
    num_buffers = 2 if tile_keys == WIDEST_TILE else 1
    # Sums over latents of 512 numbers take eight warps' registers.
    return AttentionTuning(tile_rows, tile_keys, num_warps=8 if tile_rows >= 64 or size > 512 else 4, num_stages=_num_stages(num_buffers))


def _tile_keys(key_size: int, value_size: int, itemsize: int) -> int:
    row_bytes = padded(max(key_size, value_size)) * itemsize
    return WIDEST_TILE if row_bytes <= 256 else WIDEST_TILE // 2 if row_bytes <= 512 else WIDEST_TILE // 4


def _num_stages(num_buffers: int) -> int:
    # Keys are read through the block table: the pipeliner spends a second stage per buffer on that indirection.
    return 2 * num_buffers + 1


def split_sizes(num_kv_heads: int, group_size: int, tile_keys: int, num_multiprocessors: int) -> tuple[int, int]:
    """`num_wanted` and `min_tiles` of `plan_splits`: as many splits as fill the device evenly, and the fewest tiles of one."""
    num_wanted = max(1, num_multiprocessors * SPLITS_PER_MULTIPROCESSOR // num_kv_heads)
    min_keys = MIN_KEYS_PER_SPLIT // MIN_DOT_SIZE * padded(group_size)  # what a split writes grows with the group
    return num_wanted, -(-min_keys // tile_keys)
