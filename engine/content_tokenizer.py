"""Prompts in which only the chat template writes special tokens: their text in messages is encoded as the text that it is.

The text of an added token in content is broken by a mark before the template is rendered, so that what is still whole in the
rendered prompt is the template's own. That gets another spelling, the only one under which a second copy of the tokenizer knows the token,
the marks are taken out, and the whole is encoded at once: everything else is as in the model's own tokenizer.
"""

import json
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenizers import Tokenizer as Backend

from penstock.engine.errors import InvalidRequest
from penstock.engine.text.tokenizer import Tokenizer

# Noncharacters: Unicode keeps them free for use inside of programs, and no text that is exchanged holds them.
MARK = "\ufdd0"
OWN = "\ufdd1"


class ContentTokenizer:
    """Immutable once made, which takes a second for a large vocabulary; every method may be called from any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        texts = {token.text: token_id for token_id, token in tokenizer.added_tokens.items()}
        longest_first = sorted(texts, key=len, reverse=True)
        self._markers = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._beginnings = frozenset(text[:length] for text in texts for length in range(1, len(text)))
        self._ends = frozenset(text[length:] for text in texts for length in range(1, len(text)))
        self._max_length = max(map(len, texts), default=0)
        self._all_texts = "\n".join(texts)
        self._backend = _renamed(json.loads(tokenizer.serialized()), texts)
        ids = {self._backend.token_to_id(OWN + text): token_id for text, token_id in texts.items()}
        self._original_ids = {renamed: token_id for renamed, token_id in ids.items() if renamed is not None and renamed != token_id}

    def mark(self, value: Any, kept: frozenset[str] = frozenset()) -> Any:
        """The same JSON value with marks in the text of added tokens, but for those `kept`, and at ends that could be a part of one.

        Raises `InvalidRequest` for text that holds what the marks are made of.
        """
        if isinstance(value, str):
            return self._at_ends(self._inside(value, kept))
        if isinstance(value, list):
            return [self.mark(item, kept) for item in value]
        if isinstance(value, Mapping):
            # Templates compare types with words, of which a marker may hold one.
            return {self._inside(name, kept): item if name == "type" else self.mark(item, kept) for name, item in value.items()}
        return value

    def markers_in(self, text: str) -> frozenset[str]:
        """The added tokens whose text it contains."""
        return frozenset(self._markers.findall(text))

    def unmark(self, text: str) -> str:
        return text.replace(MARK, "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a rendered prompt with marks. Raises `InvalidRequest` for lone surrogates."""
        spelled = self.unmark(self._markers.sub(lambda found: OWN + found[0], text))
        try:
            ids: list[int] = self._backend.encode_batch_fast([spelled], add_special_tokens=add_special_tokens)[0].ids
        except TypeError:
            raise InvalidRequest("The text holds a lone surrogate and cannot be encoded as UTF-8") from None
        return [self._original_ids.get(token_id, token_id) for token_id in ids] if self._original_ids else ids

    def _inside(self, text: str, kept: frozenset[str]) -> str:
        if MARK in text or OWN in text:
            raise InvalidRequest(f"The text holds a noncharacter, U+{ord(MARK if MARK in text else OWN):04X}, which is reserved")
        return self._markers.sub(partial(_broken, kept), text)

    def _at_ends(self, text: str) -> str:
        lengths = range(1, min(self._max_length, len(text) + 1))
        # A word alone may be what a template compares with its own, such as the name of a tool.
        is_within = bool(text) and not text.isidentifier() and text in self._all_texts
        begins = is_within or any(text[:length] in self._ends for length in lengths)
        ends = any(text[-length:] in self._beginnings for length in lengths)
        return MARK * begins + text + MARK * ends


def _broken(kept: frozenset[str], found: re.Match[str]) -> str:
    text = found[0]
    return text if text in kept else text[0] + MARK + text[1:]


def _renamed(data: dict[str, Any], markers: Mapping[str, int]) -> Backend:
    """The tokenizer in which these added tokens are known by their `OWN` spelling only."""
    model = data["model"]
    vocab = model.get("vocab")
    merged = {"".join(pair) if isinstance(pair, list) else pair.replace(" ", "", 1) for pair in model.get("merges") or ()}
    for token in data["added_tokens"]:
        text = token["content"]
        if text not in markers:
            continue
        token |= {"content": OWN + text, "normalized": False, "single_word": False}
        if isinstance(vocab, dict) and text in vocab and text not in merged:
            vocab[OWN + text] = vocab.pop(text)
            if model.get("unk_token") == text:
                model["unk_token"] = OWN + text
    if isinstance(vocab, list):  # with their scores, or the tokens alone
        model["vocab"] = [[OWN + entry[0], *entry[1:]] if entry[0] in markers else entry for entry in vocab]
    return Backend.from_str(json.dumps(data))
