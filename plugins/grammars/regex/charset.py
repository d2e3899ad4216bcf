"""Sets of characters as sorted ranges of code points.

NUL and the surrogates belong to no set: a text answer holds neither, and NUL is the byte that stands for the end of the text in an index.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from typing import Any

CharSet = tuple[tuple[int, int], ...]  # inclusive, sorted, neither overlapping nor touching
_Run = tuple[int, int, Any]  # from the first to the last, and what each of them is

MAX_CACHED = 1024  # sets come from clients: what is learnt of them must not pile up
_SURROGATES = (0xD800, 0xDFFF)
ANY: CharSet = ((1, _SURROGATES[0] - 1), (_SURROGATES[1] + 1, 0x10FFFF))


def _merge(ranges: Iterable[tuple[int, int]]) -> CharSet:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def charset(*ranges: tuple[int, int]) -> CharSet:
    """The characters in any of the inclusive ranges, less NUL and the surrogates."""
    return intersect(_merge(ranges), ANY)


def of(characters: str) -> CharSet:
    return charset(*((ord(character), ord(character)) for character in characters))


def union(*sets: CharSet) -> CharSet:
    return _merge(span for one in sets for span in one)


@lru_cache(MAX_CACHED)
def complement(chars: CharSet) -> CharSet:
    gaps = []
    start = 1
    for low, high in chars:
        gaps.append((start, low - 1))
        start = high + 1
    gaps.append((start, 0x10FFFF))
    return charset(*((low, high) for low, high in gaps if low <= high))


def intersect(left: CharSet, right: CharSet) -> CharSet:
    shared = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            shared.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(shared)


@cache
def unicode_word() -> CharSet:
    """What Python's `re` matches with `\\w`."""
    return union(_where(str.isalnum), of("_"))


@cache
def unicode_digit() -> CharSet:
    return _where(str.isdecimal)


@cache
def unicode_space() -> CharSet:
    return _where(str.isspace)


ASCII_DIGIT = charset((0x30, 0x39))
ASCII_WORD = union(ASCII_DIGIT, charset((0x41, 0x5A), (0x61, 0x7A)), of("_"))


@lru_cache(MAX_CACHED)
def lead_bytes(chars: CharSet) -> frozenset[int]:
    """The first bytes of the characters' UTF-8 forms."""
    leads: set[int] = set()
    for low, high in chars:
        leads.update(range(_lead(low), _lead(high) + 1))
    return frozenset(leads)


@lru_cache(MAX_CACHED)
def num_utf8_states(chars: CharSet) -> int:
    """How many states an automaton needs inside the characters' UTF-8 forms: distinct tails after one, two and three bytes."""
    runs = _blocks([(low, high, None) for low, high in intersect(chars, charset((0x80, 0x10FFFF)))])
    tails = {tail for _, _, tail in runs}
    # One more byte for what no two-byte form reaches, then for what no three-byte form reaches.
    for first in (0x800 >> 6, 0x10000 >> 12):
        runs = _blocks([(max(low, first), high, tail) for low, high, tail in runs if high >= first])
        tails.update(tail for _, _, tail in runs)
    return len(tails)


def _blocks(runs: list[_Run]) -> list[_Run]:
    """The aligned blocks of 64 that the runs touch, each with what it holds; those that hold the same in a row are one run again."""
    blocks: list[_Run] = []
    for low, high, tail in runs:
        while low <= high:
            block = low >> 6
            if low & 63 == 0 and high - low >= 63:  # whole blocks
                last = ((high + 1) >> 6) - 1
                blocks.append((block, last, ((0, 63, tail),)))
                low = (last + 1) << 6
                continue
            end = min(high, low | 63)
            part = (low & 63, end & 63, tail)
            if blocks and blocks[-1][0] == block:
                blocks[-1] = (block, block, (*blocks[-1][2], part))
            else:
                blocks.append((block, block, (part,)))
            low = end + 1
    joined: list[_Run] = []
    for low, high, tail in blocks:
        if joined and joined[-1][1] + 1 == low and joined[-1][2] == tail:
            joined[-1] = (joined[-1][0], high, tail)
        else:
            joined.append((low, high, tail))
    return joined


def _lead(code_point: int) -> int:
    return chr(code_point).encode()[0]


def _where(is_member: Callable[[str], bool]) -> CharSet:
    return charset(*_merge((point, point) for point in range(0x110000) if is_member(chr(point))))
