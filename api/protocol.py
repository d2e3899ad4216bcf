"""Responses on the wire: bodies and chunks of chat and completions, with usage and log probabilities."""

import codecs
from collections.abc import Sequence
from typing import Protocol

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.deltas import TokenLogprobs
from penstock.serving.constraints.conformance import Conformance
from penstock.serving.messages import Message, TokenCounts, ToolCall


class PromptTokensDetails(Struct):
    cached_tokens: int


class CompletionTokensDetails(Struct):
    reasoning_tokens: int


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


def usage_of(counts: TokenCounts) -> Usage:
    num_prompt_tokens, num_completion_tokens = counts.num_prompt_tokens, counts.num_completion_tokens
    return Usage(
        num_prompt_tokens,
        num_completion_tokens,
        num_prompt_tokens + num_completion_tokens,
        PromptTokensDetails(counts.num_cached_tokens),
        CompletionTokensDetails(counts.num_reasoning_tokens),
    )


class PromptLogprob(Struct):
    """One candidate for one position of the prompt; keyed by token id on the wire. `rank` counts from 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """`content` are the tokens of content and calls; those of the reasoning are apart, where any are shown."""

    content: list[TokenLogprob]
    reasoning_content: list[TokenLogprob] | UnsetType = UNSET


class FunctionDelta(Struct):
    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(Struct):
    """The first one of a call has its id, type and name; the following ones only more of the arguments."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class ChatDelta(Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | UnsetType = UNSET
    structured_output: Conformance | UnsetType = UNSET


class ChatCompletionChunk(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


class AssistantMessage(Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType | None = UNSET
    reasoning: str | UnsetType | None = UNSET
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET

    @classmethod
    def of(cls, message: Message, *, has_reasoning_parser: bool, is_call_forced: bool = False) -> "AssistantMessage":
        """`reasoning_content` is there, if only as null, wherever the server tells reasoning apart. A forced call leaves no content."""
        reasoning, calls = message.reasoning or None, message.tool_calls
        return cls(
            content=message.content or (None if reasoning or calls or is_call_forced else ""),
            reasoning_content=reasoning if has_reasoning_parser else UNSET,
            tool_calls=calls or UNSET,
        )


class ChatChoice(Struct):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: int | str | None
    structured_output: Conformance | UnsetType = UNSET


class ChatCompletion(Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    system_fingerprint: str | None = None


class CompletionLogprobs(Struct):
    """Parallel lists, one entry per token. `text_offset` counts characters from the start of the choice's text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    structured_output: Conformance | UnsetType = UNSET


class Completion(Struct):
    """A whole completion, and also one chunk of a streamed one: OpenAI gives both the same shape."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None


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
