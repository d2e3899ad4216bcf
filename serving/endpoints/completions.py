"""Completions of prompts."""

import codecs
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial

from msgspec import UNSET, Struct, UnsetType

from penstock.engine.contracts.parsing import Preamble, Reasoning, Text
from penstock.engine.deltas import PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.request import Request
from penstock.serving.context import ServerContext
from penstock.serving.endpoints.answers import (
    Answer,
    ChunkFold,
    PromptLogprobs,
    TokenWriter,
    TransferAnswer,
    Usage,
    clamp,
    merge,
    plan_transfer,
    prompt_logprobs,
    usage_of,
)
from penstock.serving.endpoints.bodies import Caller, served_model
from penstock.serving.messages import Conformance, ExactSampling, check_delta, drop_missing_beams, warning_header
from penstock.serving.observability.metrics import RequestTimer
from penstock.serving.preparing import PreparedCompletion, Prompt, check_logprobs, prepare_completion
from penstock.serving.requests import DEFAULT_MAX_TOKENS, CompletionRequest
from penstock.serving.structured_outputs import make_answer_check


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
    exact_sampling: ExactSampling | UnsetType = UNSET
    preamble: str | UnsetType = UNSET


class Completion(Struct):
    """A whole completion, and also one chunk of a streamed one: OpenAI gives both the same shape."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: str | None = None
    kv_transfer_params: TransferAnswer | UnsetType = UNSET


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


class TextFold:
    """One sequence's steps as completion choices: what a step added, or nothing where its text is held back.

    `hidden` tokens make no text. `found` is what checking complete choices has found, by their index.
    """

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        body: CompletionRequest,
        tokens: TokenWriter,
        hidden: frozenset[int],
        found: Mapping[int, Conformance],
        *,
        shows_preamble: bool,
    ) -> None:
        self._shows_preamble = shows_preamble
        self._index = index
        self._prompt = prompt
        self._body = body
        self._tokens = tokens
        self._found = found
        self._logprobs = CompletionLogprobsWriter(tokens, hidden)
        self._pending: list[tuple[int, TokenLogprobs | None]] = []
        self._is_first = True

    def feed(self, delta: SequenceDelta, prompt: PromptInfo | None) -> CompletionChoice | None:
        """Raises as `check_delta` where the delta says that the sequence was cut off."""
        check_delta(delta)
        text, of_prompt = self._begin(prompt) if self._is_first else ("", UNSET)
        self._is_first = False
        self._pending += [(token.token_id, token) for token in delta.logprobs if not token.is_preamble]
        text += "".join(event.text for event in delta.events if isinstance(event, Text))
        free = "".join(event.text for event in delta.events if isinstance(event, Preamble)) if self._shows_preamble else ""
        if not text and not free and delta.finish_reason is None and of_prompt is UNSET:
            return None
        reason = None if delta.finish_reason is None else str(delta.finish_reason)
        found = UNSET if reason is None else self._found.get(self._index, UNSET)
        exact = UNSET if delta.exact is None else ExactSampling.of(delta.exact)
        return CompletionChoice(self._index, text, self._take_logprobs(), reason, delta.stop_reason, of_prompt, found, exact, free or UNSET)

    def _begin(self, prompt: PromptInfo | None) -> tuple[str, PromptLogprobs | UnsetType]:
        """What the first choice has of the prompt: its text where it is echoed, and its log probabilities."""
        of_prompt = prompt_logprobs(prompt, self._body.prompt_logprobs, self._tokens)
        if not self._body.echo:
            return "", of_prompt
        if prompt is not None and prompt.logprobs is not None:
            self._pending += zip(self._prompt.token_ids, prompt.logprobs, strict=True)
        return self._prompt.text, of_prompt

    def _take_logprobs(self) -> CompletionLogprobs | None:
        if self._body.logprobs is None:
            return None
        entries, self._pending = self._pending, []
        return self._logprobs.write(entries, self._body.logprobs)


def join(whole: CompletionChoice, part: CompletionChoice) -> None:
    """Adds what a later step brought to a choice."""
    whole.text += part.text
    whole.finish_reason = part.finish_reason
    whole.stop_reason = part.stop_reason
    whole.structured_output = part.structured_output
    whole.exact_sampling = part.exact_sampling
    if part.preamble is not UNSET:
        whole.preamble = part.preamble if whole.preamble is UNSET else whole.preamble + part.preamble
    if whole.logprobs is not None and part.logprobs is not None:
        for name in CompletionLogprobs.__struct_fields__:
            getattr(whole.logprobs, name).extend(getattr(part.logprobs, name))


class CompletionFold(ChunkFold):
    """The deltas of one request with one prompt or several: prompt p's sequence s is choice p * n + s."""

    def __init__(
        self,
        context: ServerContext,
        body: CompletionRequest,
        prepared: PreparedCompletion,
        request_id: str,
        model: str,
        found: Mapping[int, Conformance],
    ) -> None:
        params, prompts = prepared.requests[0].params, prepared.prompts
        super().__init__(context, body, request_id, model, params.n)
        hidden = context.tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        self._n = params.n
        self._texts = [
            TextFold(index, prompts[index // self._n], body, self._tokens, hidden, found, shows_preamble=prepared.shows_preamble)
            for index in range(len(prompts) * self._n)
        ]
        self._logprobs = body.logprobs
        self._choices: dict[int, CompletionChoice] = {}

    def chunks(self, delta: SequenceDelta) -> list[Completion]:
        choice = self._read(delta)
        return [] if choice is None else [self._chunk([choice], self._usage_so_far())]

    def text_chunk(self, index: int, event: Text | Reasoning) -> Completion | None:
        if isinstance(event, Reasoning) or self._logprobs is not None or self._stream_options.continuous_usage_stats:
            return None
        return self._chunk([CompletionChoice(index, event.text)], self._usage_so_far())

    def add(self, delta: SequenceDelta) -> None:
        choice = self._read(delta)
        if choice is not None and choice.exact_sampling is not UNSET:
            self._exact[choice.index] = choice.exact_sampling
        if choice is not None and self._choices.setdefault(choice.index, choice) is not choice:
            join(self._choices[choice.index], choice)

    def body(self) -> Completion:
        body = self._chunk([choice for _, choice in sorted(self._choices.items())], usage_of(self._counts))
        body.kv_transfer_params = self.handed_over
        return body

    def _read(self, delta: SequenceDelta) -> CompletionChoice | None:
        self._counts.add(delta)
        return self._texts[delta.index].feed(delta, self._counts.prompts.get(delta.index // self._n))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage, self._fingerprint)


async def answer_completion(context: ServerContext, body: CompletionRequest, size: int, caller: Caller, timer: RequestTimer) -> Answer:
    """Begins to continue one prompt or several. As `answer_chat`. The text is the model's own: no parser reads it."""
    model = timer.model = served_model(context, body.model)
    adapter = context.adapter_of(body.model)
    if body.max_tokens is None and caller.max_tokens is not None and caller.max_tokens < DEFAULT_MAX_TOKENS:
        body.max_tokens = caller.max_tokens
    request_id = f"cmpl-{uuid.uuid4().hex}"
    prepared = await prepare_completion(context, body, size, request_id, caller.client, adapter)
    requests = prepared.requests
    for request in requests:
        request.deadline, request.client_id, request.http_id = caller.deadline, caller.key_name, caller.request_id
    check_logprobs(body, requests)
    if body.kv_transfer_params is not None:
        await plan_transfer(context, body, body.kv_transfer_params, requests)
    check = await make_answer_check(context, body, size, requests[0])
    fold = CompletionFold(context, body, prepared, request_id, model, check.found)

    def deltas_of(request: Request) -> AsyncGenerator[SequenceDelta, None]:
        return timer.watch(drop_missing_beams(body, context.engine.generate(request)), request.params)

    n = requests[0].params.n
    deltas = check.watch(deltas_of(requests[0]) if len(requests) == 1 else merge([partial(deltas_of, request) for request in requests], n))
    headers = warning_header(requests[0].grammar_warnings)
    return Answer(deltas=deltas, fold=fold, is_streamed=bool(body.stream), interval=body.stream_interval, headers=headers)
