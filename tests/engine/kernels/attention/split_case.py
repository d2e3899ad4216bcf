"""Decoding by a plan of splits, as calls that can be sent to the interpreter's process."""

from typing import Any

from torch import Tensor

from penstock.engine.kernels.launch import paged_decode, plan_splits
from penstock.engine.kernels.tuning import decode_tuning


def decode_in_splits(num_wanted: int, min_tiles: int = 1, max_context_len: int | None = None, **arguments: Any) -> Tensor:
    """`paged_decode` by a plan that splits as much as `num_wanted` and `min_tiles` say."""
    query, key_cache, value_cache, lens = (arguments[name] for name in ("query_BHD", "key_cache", "value_cache", "context_lens_B"))
    group_size = query.shape[1] // key_cache.shape[2]
    tuning = decode_tuning(group_size, key_cache.shape[-1], value_cache.shape[-1], query.element_size())
    splits = plan_splits(
        lens,
        num_wanted=num_wanted,
        min_tiles=min_tiles,
        tile_keys=tuning.tile_keys,
        max_context_len=max_context_len or int(lens.max()),
        sliding_window=arguments["sliding_window"],
    )
    return paged_decode(**arguments, splits=splits)


def planned(context_lens_B: Tensor, **bounds: Any) -> tuple[list[list[int]], list[list[int]]]:
    """The items and the merges of a plan."""
    splits = plan_splits(context_lens_B, **bounds)
    assert splits is not None
    (num_items, num_merges, *_), *rows = splits.plan_R4.tolist()
    assert num_items <= splits.max_items
    assert num_merges <= splits.max_merges
    return rows[:num_items], rows[splits.max_items :][:num_merges]
