"""What a body may hold before it is decoded: decoding makes every item an object while the interpreter's lock is held."""

import numpy as np

from penstock.engine.errors import InvalidRequest

SMALL = 2**16  # bytes: holds too few items to matter
MAX_ITEMS = 2_000_000  # members and elements: token ids, most of them; 25 ns each
MAX_KEYS = 100_000  # 400 ns each
MAX_STRINGS = 500_000  # 60 ns each
MAX_BRACKETS = 250_000  # each an object for the garbage collector to walk through

_QUOTE, _BACKSLASH = b'"\\'
_PIECE = 2**20  # bytes looked at together: what is made of them stays in the processor's cache


def check_body(body: bytes) -> None:
    """Raises `InvalidRequest` for JSON with more keys, strings, items or brackets than any request needs.

    Counts outside strings only, so that a long text may hold any characters. Invalid JSON may be counted wrongly, and is refused later.
    """
    if len(body) < SMALL:
        return
    counts = dict.fromkeys(b",:[{", 0)
    num_quotes = 0
    for piece in _pieces(body.replace(b"\\\\", b"__")):
        characters = np.frombuffer(piece, dtype=np.uint8)
        is_quote = characters == _QUOTE
        is_quote[1:] &= characters[:-1] != _BACKSLASH
        is_outside = (np.cumsum(is_quote, dtype=np.int32) + num_quotes) % 2 == 0
        num_quotes += int(is_quote.sum())
        for character in counts:
            counts[character] += int(np.count_nonzero((characters == character) & is_outside))
    brackets = counts[ord("[")] + counts[ord("{")]
    for number, limit, what in (
        (brackets, MAX_BRACKETS, "opening brackets and braces"),
        (counts[ord(":")], MAX_KEYS, "keys"),
        (num_quotes // 2, MAX_STRINGS, "strings"),
        (counts[ord(",")] + brackets, MAX_ITEMS, "items"),
    ):
        if number > limit:
            raise InvalidRequest(f"a body with more than {limit} {what} is refused")


def _pieces(body: bytes) -> list[bytes]:
    """Cut where no piece begins with a quote that a backslash at the end of the one before it escapes."""
    pieces: list[bytes] = []
    start = 0
    while start < len(body):
        end = start + _PIECE
        while body[end - 1 : end] == b"\\":
            end += 1
        pieces.append(body[start:end])
        start = end
    return pieces
