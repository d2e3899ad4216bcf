"""POST /v1/completions."""

import time
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web
from msgspec import UNSET, UnsetType

from penstock.api.answering import answer, merge
from penstock.api.bodies import client_of, read_admitted_body, served_model
from penstock.api.context import CONTEXT, begin_timer
from penstock.api.protocol import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionLogprobsWriter,
    PromptLogprobs,
    TokenWriter,
    Usage,
    usage_of,
)
from penstock.engine.contracts.parsing import Text
from penstock.engine.deltas import PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.sequence import Request
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.constraints.conformance import Conformance, warning_header
from penstock.serving.messages import TokenCounts, check_delta
from penstock.serving.preparing import Prompt, answer_check, prepare_completion, special_token_ids
from penstock.serving.requests import CompletionRequest, StreamOptions, searched


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionView:
    """What of a sequence the client wants to see. `hidden` tokens make no text.

    `num_top` and `num_prompt_top` count alternatives; None where the client asked for no logprobs.
    """

    echo: bool
    num_top: int | None
    num_prompt_top: int | None
    tokens: TokenWriter
    hidden: frozenset[int]


class TextFold:
    """One sequence's steps as completion choices: what a step added, or nothing where its text is held back."""

    def __init__(self, index: int, prompt: Prompt, view: CompletionView, found: Mapping[int, Conformance]) -> None:
        self._index = index
        self._found = found
        self._prompt = prompt
        self._view = view
        self._logprobs = CompletionLogprobsWriter(view.tokens, view.hidden)
        self._pending: list[tuple[int, TokenLogprobs | None]] = []
        self._is_first = True

    def feed(self, delta: SequenceDelta, prompt: PromptInfo | None) -> CompletionChoice | None:
        """Raises `GenerationFailed` or `EngineUnavailable` where the delta says that the sequence was cut off."""
        check_delta(delta)
        text = self._echo(prompt) if self._is_first else ""
        prompt_logprobs = self._prompt_logprobs(prompt) if self._is_first else UNSET
        self._is_first = False
        self._pending += [(token.token_id, token) for token in delta.logprobs]
        text += "".join(event.text for event in delta.events if isinstance(event, Text))
        if not text and delta.finish_reason is None and prompt_logprobs is UNSET:
            return None
        reason = None if delta.finish_reason is None else str(delta.finish_reason)
        found = UNSET if reason is None else self._found.get(self._index, UNSET)
        return CompletionChoice(self._index, text, self._take_logprobs(), reason, delta.stop_reason, prompt_logprobs, found)

    def _echo(self, prompt: PromptInfo | None) -> str:
        if not self._view.echo:
            return ""
        if prompt is not None and prompt.logprobs is not None:
            self._pending += zip(self._prompt.token_ids, prompt.logprobs, strict=True)
        return self._prompt.text

    def _prompt_logprobs(self, prompt: PromptInfo | None) -> PromptLogprobs | UnsetType:
        if self._view.num_prompt_top is None or prompt is None or prompt.logprobs is None:
            return UNSET
        return self._view.tokens.prompt(prompt.logprobs, self._view.num_prompt_top)

    def _take_logprobs(self) -> CompletionLogprobs | None:
        if self._view.num_top is None:
            return None
        entries, self._pending = self._pending, []
        return self._logprobs.write(entries, self._view.num_top)


def join(whole: CompletionChoice, part: CompletionChoice) -> None:
    """Adds what a later step brought to a choice."""
    whole.text += part.text
    whole.finish_reason = part.finish_reason
    whole.stop_reason = part.stop_reason
    whole.structured_output = part.structured_output
    if whole.logprobs is not None and part.logprobs is not None:
        for name in CompletionLogprobs.__struct_fields__:
            getattr(whole.logprobs, name).extend(getattr(part.logprobs, name))


class CompletionFold:
    """The deltas of one request with one prompt or several: prompt p's sequence s is choice p * n + s."""

    def __init__(
        self,
        request_id: str,
        model: str,
        body: CompletionRequest,
        prompts: Sequence[Prompt],
        n: int,
        tokenizer: Tokenizer,
        hidden: frozenset[int],
        found: Mapping[int, Conformance],
        fingerprint: str | None = None,
    ) -> None:
        self._id, self._created, self._model, self._fingerprint = request_id, int(time.time()), model, fingerprint
        self._options = body.stream_options or StreamOptions()
        view = CompletionView(
            echo=bool(body.echo),
            num_top=body.logprobs,
            num_prompt_top=body.prompt_logprobs,
            tokens=TokenWriter(tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids)),
            hidden=hidden,
        )
        self.is_long = body.prompt_logprobs is not None or (bool(body.echo) and body.logprobs is not None)
        self._n = n
        self._texts = [TextFold(index, prompts[index // n], view, found) for index in range(len(prompts) * n)]
        self._choices: dict[int, CompletionChoice] = {}
        self._counts = TokenCounts(n)

    def opening(self) -> list[Completion]:
        return []

    def chunks(self, delta: SequenceDelta) -> list[Completion]:
        choice = self._feed(delta)
        return [] if choice is None else [self._chunk([choice])]

    def closing(self) -> list[Completion]:
        return [self._chunk([], usage_of(self._counts))] if self._options.include_usage else []

    def add(self, delta: SequenceDelta) -> None:
        choice = self._feed(delta)
        if choice is None:
            return
        if choice.index in self._choices:
            join(self._choices[choice.index], choice)
        else:
            self._choices[choice.index] = choice

    def body(self) -> Completion:
        choices = [choice for _, choice in sorted(self._choices.items())]
        return self._completion(choices, usage_of(self._counts))

    def _feed(self, delta: SequenceDelta) -> CompletionChoice | None:
        self._counts.add(delta)
        return self._texts[delta.index].feed(delta, self._counts.prompts.get(delta.index // self._n))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None = UNSET) -> Completion:
        if usage is UNSET and self._options.include_usage:
            usage = usage_of(self._counts) if self._options.continuous_usage_stats else None
        return self._completion(choices, usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage, self._fingerprint)


MAX_SEQUENCES = 4096  # over all prompts


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continues one prompt or several. The text is the model's own: no parser reads it."""
    context, timer = http.app[CONTEXT], begin_timer(http)
    body, size, headers = await read_admitted_body(http, CompletionRequest)
    model = served_model(context, body.model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    prepared = await prepare_completion(context, body, size, request_id, client_of(http))
    requests, params, grammar = prepared.requests, prepared.requests[0].params, prepared.requests[0].grammar
    hidden = special_token_ids(context.tokenizer) if params.skip_special_tokens else frozenset()
    check = await answer_check(context, body, size, grammar)
    fingerprint = context.system_fingerprint
    fold = CompletionFold(request_id, model, body, prepared.prompts, params.n, context.tokenizer, hidden, check.found, fingerprint)

    def deltas_of(request: Request) -> AsyncGenerator[SequenceDelta, None]:
        return timer.watch(searched(body, context.engine.generate(request)))

    deltas = deltas_of(requests[0]) if len(requests) == 1 else merge([partial(deltas_of, request) for request in requests], params.n)
    headers |= warning_header(grammar)
    return await answer(http, check.watch(deltas), fold, stream=bool(body.stream), headers=headers, interval=body.stream_interval)
