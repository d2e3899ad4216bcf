"""The tokens of earlier answers as the model said them: the next turn's prompt begins with the same ones."""

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.engine.text.tokenizer import Tokenizer

MAX_BYTES = 2**25
MAX_TRANSCRIPTS = 256  # each is compared with each prompt


class Transcripts:
    """The texts of the last prompts with their answers, and their tokens. Every method may be called from any thread.

    The next turn's prompt begins with the same tokens: a tokenizer spells a text in one way, and a model may have said it in another one.
    Then the prefix cache would end where they differ.

    A prompt that begins with such a text is tokenized from there on only. That gives the tokens of the same text: what follows begins with
    an added token, at which tokenizers split a text before anything else, and no added token lies across the seam.
    """

    def __init__(self, tokenizer: Tokenizer, max_bytes: int = MAX_BYTES) -> None:
        self._tokenizer = tokenizer
        texts, seams = tokenizer.added_token_texts(), tokenizer.added_token_texts(splits_everywhere=True)
        self._seam = re.compile("|".join(map(re.escape, seams)) or r"(?!)")
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._max_length = max(map(len, texts), default=0)
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(self, text: str, salt: str, encode: Callable[[str], list[int]]) -> list[int]:
        """The tokens of a prompt. `encode` gives those of a text; prompts of another `salt` are others'."""
        with self._lock:
            found = [key for key in self._known if key[0] == salt and text.startswith(key[1]) and self._seam.match(text, len(key[1]))]
            if not found:
                token_ids = None
            else:
                longest = max(found, key=lambda key: len(key[1]))
                self._known.move_to_end(longest)
                token_ids = self._known[longest].tolist()
        return encode(text) if token_ids is None else token_ids + encode(text[len(longest[1]) :])

    def add(self, prompt: str, salt: str, prompt_token_ids: Sequence[int], answer_token_ids: Sequence[int]) -> None:
        """Keeps an answer up to the token that ended it, unless it is no text by itself, or could end in the middle of an added token."""
        answer_ids = list(answer_token_ids)
        if answer_ids and (last := self._tokenizer.added_tokens.get(answer_ids[-1])) is not None and last.is_special:
            answer_ids.pop()
        answer = self._text_of(answer_ids)
        if not answer or any(answer[-length:] in self._beginnings for length in range(1, min(self._max_length, len(answer) + 1))):
            return
        key, token_ids = (salt, prompt + answer), array("i", prompt_token_ids)
        token_ids.extend(answer_ids)
        with self._lock:
            self._forget(key)
            self._known[key] = token_ids
            self._num_bytes += _size(key, token_ids)
            while self._num_bytes > self._max_bytes or len(self._known) > MAX_TRANSCRIPTS:
                self._forget(next(iter(self._known)))

    def _text_of(self, token_ids: Sequence[int]) -> str | None:
        added = self._tokenizer.added_tokens
        pieces = [added[each].text.encode() if each in added else self._tokenizer.token_bytes(each) for each in token_ids]
        try:
            return b"".join(piece for piece in pieces if piece is not None).decode() if None not in pieces else None
        except UnicodeDecodeError:
            return None

    def _forget(self, key: tuple[str, str]) -> None:
        if (token_ids := self._known.pop(key, None)) is not None:
            self._num_bytes -= _size(key, token_ids)


def _size(key: tuple[str, str], token_ids: "array[int]") -> int:
    return sys.getsizeof(key[1]) + token_ids.itemsize * len(token_ids)
