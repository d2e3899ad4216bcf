"""What each token adds to the text, as bytes, worked out from the tokenizer's decoder.

Nearly every decoder in use is local: what a token adds depends on that token alone, and on whether it is the first. Such a decoder is asked
once per token and never again. One that looks further (a suffix at a word's end, neighbours that are merged) is called opaque.
"""

import enum
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = "a"  # stands for "there was text before": no decoder joins anything to it or takes anything from it


class DecoderKind(enum.Enum):
    """How much of a text one token decides."""

    BYTE_LEVEL = "byte_level"  # every token spells bytes
    LOCAL = "local"  # every token spells text, byte tokens aside
    OPAQUE = "opaque"  # only windows of tokens can be decoded


class TokenTable:
    """The bytes of one tokenizer's tokens, kept once asked for. Tokens are given as their entry in the vocabulary."""

    def __init__(self, backend: Backend) -> None:
        self._decoder = backend.decoder
        steps = list(_decoder_steps(self._decoder))
        self.kind = _kind_of(steps)
        self._has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
        self._byte_of = _byte_of_character() if self.kind is DecoderKind.BYTE_LEVEL else {}
        self._later: dict[str, bytes] = {}

    def bytes_of(self, token: str, is_first: bool = False) -> bytes:
        """What `token` adds to the text. `is_first`: there is none before it; some decoders then drop a leading space."""
        if is_first and self.kind is not DecoderKind.BYTE_LEVEL:
            return self._first_bytes_of(token)
        found = self._later.get(token)
        if found is None:
            found = self._later[token] = self._later_bytes_of(token)
        return found

    def decode(self, tokens: list[str]) -> str:
        """The text of a run of tokens, as the tokenizer itself has it."""
        return " ".join(tokens) if self._decoder is None else self._decoder.decode(tokens)

    def _later_bytes_of(self, token: str) -> bytes:
        if self.kind is DecoderKind.BYTE_LEVEL:
            # A token with a character outside the map is one that was added as plain text.
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token)
            return token.encode()
        byte = self._byte_token(token)
        if byte is not None:
            return byte
        return self.decode([_ANCHOR, token]).removeprefix(_ANCHOR).encode()

    def _first_bytes_of(self, token: str) -> bytes:
        byte = self._byte_token(token)
        if byte is not None and not byte.isascii():
            return byte
        return self.decode([token]).encode()

    def _byte_token(self, token: str) -> bytes | None:
        match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
        return bytes([int(match[1], 16)]) if match else None


def _decoder_steps(decoder: Any) -> Iterable[dict[str, Any]]:
    """The decoder's components in order, sequences opened. Without a decoder tokens are joined by spaces, which is local."""
    if decoder is None:
        return
    pending = [json.loads(decoder.__getstate__())]
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending[:0] = step["decoders"]
        else:
            yield step


def _kind_of(steps: list[dict[str, Any]]) -> DecoderKind:
    if [step["type"] for step in steps] == ["ByteLevel"]:
        return DecoderKind.BYTE_LEVEL
    return DecoderKind.LOCAL if all(_is_local(step) for step in steps) else DecoderKind.OPAQUE


def _is_local(step: dict[str, Any]) -> bool:
    match step["type"]:
        case "ByteFallback" | "Fuse" | "Metaspace" | "WordPiece":
            return True
        case "Replace":
            return len(step["pattern"].get("String", "")) == 1  # longer ones may match across tokens
        case "Strip":
            return bool(step["stop"] == 0)
        case _:
            return False


def _byte_of_character() -> dict[str, int]:
    """The printable characters that byte-level BPE (GPT-2's encoder) writes bytes with: its own where it prints, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
