"""A vocabulary as llguidance takes it: tokens as bytes, special ones apart from text, and the canonical tokenization of what is forced.

llguidance asks for a tokenization whenever the grammar leaves only one text, re-entering Python for it; nothing else in it does.
"""

from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from penstock.engine.grammar import Vocabulary

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# Never part of UTF-8: llguidance marks special tokens with it, and takes a token that begins with it for one.
_SPECIAL_MARKER = b"\xff"

# What a text may follow, for tokenizers that put a space before whatever they encode.
_ANCHORS = ("", "\n", ",")

MAX_CACHED_TEXTS = 4096
# Of a longer text the beginning is spelled: a grammar may force 200,000 characters, and asks anew after each token.
MAX_SPELLED = 256


def make_tokenizer(vocabulary: Vocabulary) -> "LLTokenizer":
    """As wide as the logits. In a Lark grammar a special token is `<[id]>`; every stop token is special. Takes about 2 us a token.

    Where `vocabulary` has no `encode`, or one that spells nothing back, grammars need `%llguidance {"no_forcing": true}`: see `can_force`.
    """
    from llguidance import LLTokenizer

    stop_token_ids = sorted(token_id for token_id in vocabulary.stop_token_ids if token_id < vocabulary.size)
    assert stop_token_ids, "a backend without stop tokens has nothing to compile"
    return LLTokenizer(Tokens(vocabulary, stop_token_ids[0]), eos_token=stop_token_ids)  # type: ignore[arg-type]


def can_force(vocabulary: Vocabulary) -> bool:
    """Whether the vocabulary tells which of a text's tokenizations is the canonical one."""
    if vocabulary.encode is None:
        return False
    tokens = Tokens(vocabulary, 0)
    return all(tokens.canonical(probe) is not None for probe in ('{"name": "', "a", " 12"))


class Tokens:
    """What `LLTokenizer` asks of a tokenizer: attributes named as it reads them, and a call that spells a text. It must never raise."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, eos_token_id: int) -> None:
        self._vocabulary = vocabulary
        self._names = {token_id: text for text, token_id in vocabulary.added_token_ids.items()}
        self.eos_token_id = eos_token_id
        self.tokens = [self._bytes(token_id) for token_id in range(vocabulary.size)]
        self.special_token_ids = [token_id for token_id, token in enumerate(self.tokens) if token.startswith(_SPECIAL_MARKER)]
        self._spelled = lru_cache(MAX_CACHED_TEXTS)(self._spell)

    def __call__(self, text: str) -> list[int]:
        return list(self._spelled(text[:MAX_SPELLED]))

    def canonical(self, text: str) -> tuple[int, ...] | None:
        """The tokenizer's own spelling of a text; None where that has added tokens, or other bytes."""
        encode = self._vocabulary.encode
        if encode is None:
            return None
        for anchor in _ANCHORS:
            spelled = self._tail(encode(anchor + text), text.encode())
            if spelled is not None:
                return spelled
        return None

    def _spell(self, text: str) -> tuple[int, ...]:
        return self.canonical(text) or self._greedy(text.encode())

    def _tail(self, token_ids: list[int], data: bytes) -> tuple[int, ...] | None:
        """The last tokens, as many as spell `data`."""
        end = len(data)
        for place in range(len(token_ids) - 1, -1, -1):
            if end == 0:
                return tuple(token_ids[place + 1 :])
            token = self._text(token_ids[place])
            if not token or not data.endswith(token, 0, end):
                return None
            end -= len(token)
        return tuple(token_ids) if end == 0 else None

    def _greedy(self, data: bytes) -> tuple[int, ...]:
        """The longest token each time; what no token spells is left out."""
        ids, longest = self._ids
        token_ids: list[int] = []
        start = 0
        while start < len(data):
            lengths = range(min(longest, len(data) - start), 0, -1)
            found = next((length for length in lengths if data[start : start + length] in ids), None)
            if found is not None:
                token_ids.append(ids[data[start : start + found]])
            start += found or 1
        return tuple(token_ids)

    @cached_property
    def _ids(self) -> tuple[dict[bytes, int], int]:
        ids = {self._text(token_id): token_id for token_id in reversed(range(len(self.tokens)))}
        ids.pop(b"", None)
        return ids, max(map(len, ids), default=0)

    def _text(self, token_id: int) -> bytes:
        """Empty for a token that is not text."""
        token = self.tokens[token_id] if token_id < len(self.tokens) else b""
        return b"" if token.startswith(_SPECIAL_MARKER) else token

    def _bytes(self, token_id: int) -> bytes:
        token = self._vocabulary.token_bytes[token_id] if token_id < len(self._vocabulary.token_bytes) else None
        if token_id in self._names or token_id in self._vocabulary.stop_token_ids:
            name = self._names.get(token_id, f"<{token_id}>")
            return _SPECIAL_MARKER + name.encode("utf-8", "replace")
        return b"" if token is None or _SPECIAL_MARKER in token else token
