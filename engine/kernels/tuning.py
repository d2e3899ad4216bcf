"""How the attention kernels are cut into tiles: rules by head size and element size, decided without timing anything at run time."""

from dataclasses import dataclass

COMPILER_OPTIONS = {"enable_fp_fusion": True}  # the default of old; Triton 3.9 warns where it is left open
MIN_DOT_SIZE = 16  # tl.dot takes no dimension smaller
WIDEST_TILE = 64  # keys
PIPELINE_BYTES = (
    64 * 1024
)  # keys and values in flight: leaves an H100 three programs per multiprocessor, and fits the 99 KiB of an Ada chip
PROGRAMS_PER_MULTIPROCESSOR = 2
MAX_SPLITS = 64
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


def next_power_of_two(size: int) -> int:
    """The smallest power of two that is not smaller than `size` (at least 1)."""
    return 1 << max(0, size - 1).bit_length()


def decode_tuning(group_size: int, key_size: int, value_size: int, itemsize: int) -> AttentionTuning:
    """Decode reads much and computes little: few rows, and as many keys in flight as shared memory holds."""
    tile_keys = _tile_keys(key_size, value_size, itemsize)
    tile_bytes = tile_keys * (padded(key_size) + padded(value_size)) * itemsize
    num_buffers = max(1, min(3, PIPELINE_BYTES // tile_bytes))
    return AttentionTuning(tile_rows=padded(group_size), tile_keys=tile_keys, num_warps=4, num_stages=_num_stages(num_buffers))


def prefill_tuning(group_size: int, key_size: int, value_size: int, itemsize: int, max_query_len: int) -> AttentionTuning:
    """Prefill computes much: as many rows as their accumulators leave registers for, but no more than there are queries."""
    tile_keys = _tile_keys(key_size, value_size, itemsize)
    # Products in float32 run outside the tensor cores, where a large tile spills.
    most_rows = min(32, tile_keys) if itemsize > 2 else 2 * tile_keys
    tile_rows = max(min(most_rows, padded(max_query_len * group_size)), padded(group_size))
    num_buffers = 2 if tile_keys == WIDEST_TILE else 1
    return AttentionTuning(tile_rows, tile_keys, num_warps=8 if tile_rows >= 64 else 4, num_stages=_num_stages(num_buffers))


def choose_num_splits(num_programs: int, max_context_len: int, num_multiprocessors: int) -> int:
    """How many parts to cut each sequence's keys into, so that `num_programs` unsplit programs fill the device.

    A power of two, so that the kernels are compiled for few values of it.
    """
    wanted = num_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, num_programs)
    useful = -(-max_context_len // MIN_KEYS_PER_SPLIT)
    return 1 << (max(1, min(wanted, useful, MAX_SPLITS)).bit_length() - 1)


def _tile_keys(key_size: int, value_size: int, itemsize: int) -> int:
    row_bytes = padded(max(key_size, value_size)) * itemsize
    return WIDEST_TILE if row_bytes <= 256 else WIDEST_TILE // 2 if row_bytes <= 512 else WIDEST_TILE // 4


def _num_stages(num_buffers: int) -> int:
    # Keys are read through the block table: the pipeliner spends a second stage per buffer on that indirection.
    return 2 * num_buffers + 1
