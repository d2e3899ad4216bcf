"""Bounds on what a JSON document holds, checked before it is decoded."""

import numpy as np

from penstock.engine.errors import InvalidRequest

SMALL = 2**16  # bytes: holds too few items to matter
MAX_ITEMS = 2_000_000  # members and elements: token ids, most of them; 25 ns each
MAX_KEYS = 100_000  # 400 ns each
MAX_STRINGS = 500_000  # 60 ns each
MAX_BRACKETS = 100_000  # each an object for the garbage collector to walk through

_QUOTE, _BACKSLASH = b'"\\'
_PIECE = 2**20  # bytes looked at together: what is made of them stays in the processor's cache


def check_json(*documents: bytes | bytearray, what: str = "a body", param: str | None = None) -> None:
    """Raises `InvalidRequest` for JSON with more keys, strings, items or brackets, all documents together, than any request needs.

    Counts outside strings only, so that a long text may hold any characters. Invalid JSON may be counted wrongly, and is refused later.
    """
    if sum(map(len, documents)) < SMALL:
        return
    counts = dict.fromkeys(b",:[{", 0)
    num_strings = sum(_count(document, counts) for document in documents)
    brackets = counts[ord("[")] + counts[ord("{")]
    for number, limit, counted in (
        (brackets, MAX_BRACKETS, "opening brackets and braces"),
        (counts[ord(":")], MAX_KEYS, "keys"),
        (num_strings, MAX_STRINGS, "strings"),
        (counts[ord(",")] + brackets, MAX_ITEMS, "items"),
    ):
        if number > limit:
            raise InvalidRequest(f"more than {limit} {counted} in {what} are refused", param)


def _count(document: bytes | bytearray, counts: dict[int, int]) -> int:
    """How many strings there are. Adds how often each of the characters in `counts` occurs outside of them."""
    num_quotes = 0
    for piece in _pieces(document.replace(b"\\\\", b"__")):
        characters = np.frombuffer(piece, dtype=np.uint8)
        is_quote = characters == _QUOTE
        is_quote[1:] &= characters[:-1] != _BACKSLASH
        is_outside = (np.cumsum(is_quote, dtype=np.int32) + num_quotes) % 2 == 0
        num_quotes += int(is_quote.sum())
        for character in counts:
            counts[character] += int(np.count_nonzero((characters == character) & is_outside))
    return num_quotes // 2


def _pieces(document: bytes | bytearray) -> list[bytes | bytearray]:
    """Cut where no piece begins with a quote that a backslash at the end of the one before it escapes."""
    pieces: list[bytes | bytearray] = []
    start = 0
    while start < len(document):
        end = start + _PIECE
        while document[end - 1 : end] == b"\\":
            end += 1
        pieces.append(document[start:end])
        start = end
    return pieces
