"""Takes a text through a grammar as a model would say it: token by token, each one looked up in the mask first."""

import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.engine.grammar import CompiledGrammar, Vocabulary
from penstock.engine.grammars.bitmask import BITS_PER_WORD, allocate_bitmask


@dataclass(slots=True)
class Walk:
    """How far a text came. `refused_at` is the index of the token that was not allowed, the number of tokens where the end was not.

    `contradiction` says in words where the matcher's mask and the matcher itself disagreed. `mask_seconds` has an entry for each mask.
    """

    num_tokens: int
    refused_at: int | None = None
    contradiction: str | None = None
    mask_seconds: list[float] = field(default_factory=list)

    @property
    def is_accepted(self) -> bool:
        return self.refused_at is None and self.contradiction is None


class Walker:
    """Spells texts in one vocabulary's tokens and walks them through grammars over it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._row = allocate_bitmask(1, vocabulary.size)[0]
        self._words = self._row.numpy()  # the same memory
        self._tokens_by_start: dict[bytes, list[tuple[bytes, int]]] = defaultdict(list)
        for token_id, data in enumerate(vocabulary.token_bytes):
            if data and token_id not in vocabulary.stop_token_ids:
                self._tokens_by_start[data[:2]].append((data, token_id))
        for tokens in self._tokens_by_start.values():
            tokens.sort(key=lambda token: -len(token[0]))

    def spell(self, text: str) -> list[int]:
        """The tokenizer's own token ids where they spell this text and nothing else, otherwise the longest tokens from left to right.

        A tokenizer may put a blank in front, or take a part of the text for an added token. Raises `ValueError` where no tokens spell it.
        """
        data = text.encode()
        if self._vocabulary.encode is not None:
            token_ids = self._vocabulary.encode(text)
            if b"".join(self._bytes(token_id) for token_id in token_ids) == data:
                return token_ids
        return list(self._longest_tokens(data))

    def walk(self, grammar: CompiledGrammar, token_ids: list[int]) -> Walk:
        """A token counts as accepted where its bit is set and the matcher then takes it; the text, where a stop token may follow."""
        matcher = grammar.matcher()
        walk = Walk(len(token_ids))
        for position, token_id in enumerate([*token_ids, None]):
            started = time.perf_counter()
            matcher.fill_bitmask(self._row)
            walk.mask_seconds.append(time.perf_counter() - started)
            if token_id is None:
                if not any(self._is_set(stop) for stop in self._vocabulary.stop_token_ids if stop < self._vocabulary.size):
                    walk.refused_at = position
            elif not self._is_set(token_id):
                walk.refused_at = position
                break
            elif not matcher.advance(token_id):
                walk.contradiction = f"the mask allows token {position}, but the matcher does not take it"
                break
        return walk

    def text(self, token_ids: list[int]) -> str:
        """For showing."""
        return b"".join(self._bytes(token_id) for token_id in token_ids).decode(errors="replace")

    def _is_set(self, token_id: int) -> bool:
        word, bit = divmod(token_id, BITS_PER_WORD)
        return bool(int(self._words[word]) >> bit & 1)

    def _bytes(self, token_id: int) -> bytes:
        known = self._vocabulary.token_bytes
        return (known[token_id] if token_id < len(known) else None) or b"\0"  # never part of JSON

    def _longest_tokens(self, data: bytes) -> Iterator[int]:
        position = 0
        while position < len(data):
            starts = (data[position : position + 2], data[position : position + 1])
            found = next(
                (token for start in starts for token in self._tokens_by_start.get(start, ()) if data.startswith(token[0], position)), None
            )
            if found is None:
                raise ValueError(f"no token spells byte {data[position]:#04x}")
            yield found[1]
            position += len(found[0])
