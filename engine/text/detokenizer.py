"""Incremental detokenization: from token ids to the text that is certain."""

import codecs
import copy
from collections.abc import Sequence

from penstock.engine.contracts.parsing import SpecialText, Text
from penstock.engine.text.tokenizer import REPLACEMENT, DecoderKind, Tokenizer

_CONTEXT = 6  # ids kept as context: more than the four that one character can be spread over
_LONGEST_CHARACTER = 4  # bytes, hence tokens


class Detokenizer:
    """Incremental detokenization at a constant cost per token.

    The pieces joined are what decoding prompt and output together, special tokens included, adds to the decoded prompt. An added token's
    text is a `SpecialText` of its own; a character spread over several tokens comes out whole. One difference is meant: where byte tokens
    do not spell UTF-8, the library's byte fallback also removes the whole characters before them; here those stay, as they have been sent.

    `prompt_tail_ids`: the prompt, or at least its last few ids; empty only where the prompt is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._whole_texts = tokenizer.whole_texts
        tail = list(prompt_tail_ids[-_CONTEXT:])
        self._text: _ByteText | _WindowText
        if tokenizer.table.kind is DecoderKind.OPAQUE:
            self._text = _WindowText(tokenizer, tail)
        else:
            self._text = _ByteText(tokenizer, tail)
        self._is_between_characters = self._text.is_between_characters

    def whole_text(self, token_id: int) -> Text | None:
        """What the token adds, where that is known from the token alone: then it is not to be fed. None where it has to be."""
        return self._whole_texts[token_id] if self._is_between_characters else None

    def feed(self, token_id: int) -> list[str]:
        """The pieces of text that are certain now. None is empty; a `SpecialText` is a piece of its own."""
        whole = self.whole_text(token_id)
        if whole is not None:
            return [whole.text]
        token = self._tokenizer.token(token_id)
        if token is None:
            return []  # logits may be wider than the vocabulary
        text = self._text.feed(token)
        self._is_between_characters = self._text.is_between_characters
        added = self._tokenizer.added_tokens.get(token_id)
        if added is None or not text.endswith(added.text):
            return [text] if text else []
        # Before the token's own text: a character that stays incomplete, or the space that some decoders put between tokens.
        before = text.removesuffix(added.text)
        special = SpecialText(added.text, is_hidden=added.is_special)
        return [before, special] if before else [special]

    def copy(self) -> "Detokenizer":
        """An independent copy."""
        other = copy.copy(self)
        other._text = self._text.copy()
        return other

    def has_added(self, text: str) -> bool:
        """Whether the vocabulary holds the text as a token of its own."""
        return text in self._tokenizer.added_texts

    def after(self, token_ids: Sequence[int]) -> "Detokenizer":
        """A detokenizer of what follows these tokens, whose text has been read otherwise."""
        return Detokenizer(self._tokenizer, token_ids)

    def finish(self) -> list[str]:
        """Generation is over: bytes that never became a character are U+FFFD."""
        held = self._text.flush()
        return [held] if held else []


class _ByteText:
    """Text from the table's bytes."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: list[int]) -> None:
        self._table = tokenizer.table
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = True
        self._has_shown_start = False
        for token_id in prompt_tail_ids:
            token = tokenizer.token(token_id)
            if token is not None:
                self.feed(token)
        # A character that the prompt leaves open was shown there as U+FFFD, so it is not shown again when it is complete.
        self._has_shown_start = bool(self._decoder.getstate()[0])

    @property
    def is_between_characters(self) -> bool:
        return not (self._is_first or self._has_shown_start or self._decoder.getstate()[0])

    def feed(self, token: str) -> str:
        text = self._decoder.decode(self._table.bytes_of(token, self._is_first))
        self._is_first = False
        return self._without_shown(text)

    def copy(self) -> "_ByteText":
        other = copy.copy(self)
        other._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        other._decoder.setstate(self._decoder.getstate())
        return other

    def flush(self) -> str:
        return self._without_shown(self._decoder.decode(b"", final=True))

    def _without_shown(self, text: str) -> str:
        if not text or not self._has_shown_start:
            return text
        self._has_shown_start = False
        return text[1:]


class _WindowText:
    """Text from decoding a bounded window of tokens, for decoders whose tokens say little alone."""

    is_between_characters = False  # not known

    def __init__(self, tokenizer: Tokenizer, prompt_tail_ids: list[int]) -> None:
        self._table = tokenizer.table
        tokens = [tokenizer.token(token_id) for token_id in prompt_tail_ids]
        self._context = [token for token in tokens if token is not None]
        self._pending: list[str] = []

    def feed(self, token: str) -> str:
        self._pending.append(token)
        after = self._table.decode(self._context + self._pending)
        if after.endswith(REPLACEMENT) and len(self._pending) < _LONGEST_CHARACTER:
            return ""
        return self._release(after)

    def copy(self) -> "_WindowText":
        other = copy.copy(self)
        other._pending = self._pending.copy()  # the context is never changed in place
        return other

    def flush(self) -> str:
        return self._release(self._table.decode(self._context + self._pending)) if self._pending else ""

    def _release(self, after: str) -> str:
        before = self._table.decode(self._context) if self._context else ""
        self._context = (self._context + self._pending)[-_CONTEXT:]
        self._pending = []
        return after[len(before) :]
