"""Log probabilities in their three wire forms: chat's, completions', and the prompt's."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from penstock.api.protocol import CompletionLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from penstock.engine.deltas import TokenLogprobs

LOWEST = -9999.0  # JSON has no -inf


class TokenNames(Protocol):
    """What is asked of the tokenizer."""

    def token_text(self, token_id: int) -> str: ...

    def token_bytes(self, token_id: int) -> bytes | None: ...


def clamp(logprob: float) -> float:
    return max(logprob, LOWEST)


class TokenWriter:
    """Names tokens as the client asked: by their text, or as `token_id:123`, which is never ambiguous."""

    def __init__(self, tokenizer: TokenNames, *, as_token_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_token_ids else self._tokenizer.token_text(token_id)

    def bytes(self, token_id: int) -> bytes:
        """An added token counts with its text, as it appears where special tokens are not skipped."""
        content = self._tokenizer.token_bytes(token_id)
        return self._tokenizer.token_text(token_id).encode() if content is None else content

    def chat(self, token: TokenLogprobs, num_top: int) -> TokenLogprob:
        return TokenLogprob(
            self.name(token.token_id),
            clamp(token.logprob),
            list(self.bytes(token.token_id)),
            [TopLogprob(self.name(other), clamp(logprob), list(self.bytes(other))) for other, logprob in token.top[:num_top]],
        )

    def prompt(self, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
        """One entry per token of the prompt, None for the first. Each holds the token itself and the best `num_top`, keyed by id."""
        return [None if token is None else self._prompt_candidates(token, num_top) for token in logprobs]

    def _prompt_candidates(self, token: TokenLogprobs, num_top: int) -> dict[str, PromptLogprob]:
        candidates = {
            str(other): PromptLogprob(clamp(logprob), rank, self._tokenizer.token_text(other))
            for rank, (other, logprob) in enumerate(token.top[:num_top], start=1)
        }
        candidates[str(token.token_id)] = PromptLogprob(clamp(token.logprob), token.rank, self._tokenizer.token_text(token.token_id))
        return candidates


class CompletionLogprobsWriter:
    """Completions' parallel lists, token by token, with offsets into the choice's text.

    Offsets count whole characters of what the tokens' bytes decode to, so a character made of several tokens counts once.
    `hidden` tokens are named but take no room in the text.
    """

    def __init__(self, tokens: TokenWriter, hidden: frozenset[int]) -> None:
        self._tokens = tokens
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def write(self, entries: Sequence[tuple[int, TokenLogprobs | None]], num_top: int) -> CompletionLogprobs:
        """`entries` are (token id, its logprobs); None for a prompt's first token, which has none."""
        written = CompletionLogprobs([], [], [], [])
        for token_id, token in entries:
            written.text_offset.append(self._offset)
            written.tokens.append(self._tokens.name(token_id))
            written.token_logprobs.append(None if token is None else clamp(token.logprob))
            written.top_logprobs.append(None if token is None else self._top(token, num_top))
            if token_id not in self._hidden:
                self._offset += len(self._decoder.decode(self._tokens.bytes(token_id)))
        return written

    def _top(self, token: TokenLogprobs, num_top: int) -> dict[str, float]:
        """The best `num_top` and the token itself: one more entry than asked for where it is not among them."""
        top: dict[str, float] = {}
        for other, logprob in (*token.top[:num_top], (token.token_id, token.logprob)):
            top.setdefault(self._tokens.name(other), clamp(logprob))
        return top
