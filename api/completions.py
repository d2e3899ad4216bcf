"""POST /v1/completions."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web
from msgspec import UNSET, UnsetType

from penstock.api.answering import answer, merge
from penstock.api.bodies import client_of, read_admitted_body, served_model
from penstock.api.context import CONTEXT
from penstock.api.logprobs import CompletionLogprobsWriter, TokenWriter
from penstock.api.metrics import begin_timer
from penstock.api.protocol import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    PromptLogprobs,
    Usage,
)
from penstock.engine.deltas import PromptInfo, SequenceDelta, TokenLogprobs
from penstock.engine.errors import InvalidRequest
from penstock.engine.events import Text
from penstock.engine.request import Request
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.serving.constraints.answer_check import AnswerCheck, warning_header
from penstock.serving.constraints.conformance import Conformance
from penstock.serving.constraints.sources import is_large
from penstock.serving.constraints.specs import grammar_spec, open_schema
from penstock.serving.context import ServerContext
from penstock.serving.messages import UsageFold, check_delta
from penstock.serving.preparing import answer_reader, cache_salt, check_streaming, compiled_grammar, logits_processors, special_token_ids
from penstock.serving.prompts import LONG_TEXT, check_prompt_ids, check_text_length, path_of, split_prompts
from penstock.serving.requests import StreamOptions
from penstock.serving.sampling import TokenLimit, beam_search, sampling_params, searched, searched_defaults, token_limit
from penstock.serving.workers import MANY, run


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of the request. `text` is what `echo` gives back."""

    token_ids: list[int]
    text: str


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
        self._usage = UsageFold(n)

    def opening(self) -> list[Completion]:
        return []

    def chunks(self, delta: SequenceDelta) -> list[Completion]:
        choice = self._feed(delta)
        return [] if choice is None else [self._chunk([choice])]

    def closing(self) -> list[Completion]:
        return [self._chunk([], self._usage.usage())] if self._options.include_usage else []

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
        return self._completion(choices, self._usage.usage())

    def _feed(self, delta: SequenceDelta) -> CompletionChoice | None:
        self._usage.feed(delta)
        return self._texts[delta.index].feed(delta, self._usage.prompts.get(delta.index // self._n))

    def _chunk(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None = UNSET) -> Completion:
        if usage is UNSET and self._options.include_usage:
            usage = self._usage.usage() if self._options.continuous_usage_stats else None
        return self._completion(choices, usage)

    def _completion(self, choices: list[CompletionChoice], usage: Usage | UnsetType | None) -> Completion:
        return Completion(self._id, "text_completion", self._created, self._model, choices, usage, self._fingerprint)


MAX_SEQUENCES = 4096  # over all prompts


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continues one prompt or several. The text is the model's own: no parser reads it."""
    context, timer = http.app[CONTEXT], begin_timer(http)
    body, headers = await read_admitted_body(http, CompletionRequest)
    model = served_model(context, body.model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    prompts, requests = await prepare(context, body, request_id, client_of(http))
    n = requests[0].params.n
    hidden = special_token_ids(context.tokenizer) if requests[0].params.skip_special_tokens else frozenset()
    schema = await run(context, lambda: open_schema(body, requests[0].grammar), is_long=is_large(body))
    check = AnswerCheck(context.conformance, schema)
    fingerprint = context.options.system_fingerprint
    fold = CompletionFold(request_id, model, body, prompts, n, context.tokenizer, hidden, check.found, fingerprint)
    streams = [timer.watch(searched(body, context.engine.generate(request))) for request in requests]
    deltas = streams[0] if len(streams) == 1 else merge(streams, n)
    headers |= warning_header(requests[0].grammar)
    return await answer(http, check.watch(deltas), fold, stream=bool(body.stream), headers=headers, interval=body.stream_interval)


async def prepare(
    context: ServerContext, body: CompletionRequest, request_id: str, client: str | None = None
) -> tuple[list[Prompt], list[Request]]:
    """One engine request per prompt. `client` is whom its work is held to. Raises `InvalidRequest` for all that is wrong with the body."""
    check_streaming(body)
    if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
        raise InvalidRequest(f"`max_tokens` must be at least 1 (0 only with `echo`), got {body.max_tokens}", "max_tokens")
    beam = beam_search(body)
    given = await run(context, lambda: split_prompts(body.prompt, "prompt"), is_long=len(body.prompt) > MANY)
    for position, source in enumerate(given):
        if isinstance(source, str):
            await check_text_length(context, source, path_of("prompt", position, len(given)))
    encoded = await encode_all(context, given, add_special_tokens=body.add_special_tokens is not False)
    num_tokens = sum(map(len, encoded))
    is_long = len(given) > MANY or num_tokens > LONG_TEXT
    params = await run(context, lambda: checked_params(context, body, encoded), is_long=is_long)
    prompts = await run(context, lambda: readable_prompts(context, body, given, encoded), is_long=is_long)
    processors = logits_processors(context, body.logits_processors)
    spec = await run(context, lambda: grammar_spec(body, context.options.additional_properties), is_long=is_large(body))
    grammar = await compiled_grammar(context, body, spec, client)
    requests = [
        Request(
            request_id=request_id if len(given) == 1 else f"{request_id}-{position}",
            prompt_token_ids=token_ids,
            params=prompt_params,
            make_answer=answer_reader(context.tokenizer, token_ids, prompt_params),
            grammar=grammar,
            logits_processors=processors,
            priority=body.priority or 0,
            cache_salt=cache_salt(context, body, client),
            beam=beam,
        )
        for position, (token_ids, prompt_params) in enumerate(zip(encoded, params, strict=True))
    ]
    return prompts, requests


def checked_params(context: ServerContext, body: CompletionRequest, encoded: list[list[int]]) -> list[SamplingParams]:
    """Each prompt's: the same object for all that may grow by as many tokens."""
    by_limit: dict[TokenLimit, SamplingParams] = {}
    params: list[SamplingParams] = []
    for position, token_ids in enumerate(encoded):
        path = path_of("prompt", position, len(encoded))
        limit = token_limit(
            body.max_tokens,
            "max_tokens",
            prompt_param=path,
            default=DEFAULT_MAX_TOKENS,
            num_prompt_tokens=len(token_ids),
            max_model_len=context.max_model_len,
        )
        check_prompt_ids(token_ids, context.vocab_size, path)
        if limit not in by_limit:
            by_limit[limit] = completion_sampling_params(context, body, limit)
        params.append(by_limit[limit])
    if params[0].n * len(params) > MAX_SEQUENCES:
        raise InvalidRequest(f"prompts times `n` must be at most {MAX_SEQUENCES}, got {params[0].n * len(params)}", "n")
    return params


def completion_sampling_params(context: ServerContext, body: CompletionRequest, limit: TokenLimit) -> SamplingParams:
    """Where the prompt is echoed with logprobs, its own tokens' are needed too."""
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return sampling_params(
        body,
        limit=limit,
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        defaults=searched_defaults(body, context.default_sampling),
        vocab_size=context.vocab_size,
    )


def readable_prompts(
    context: ServerContext, body: CompletionRequest, given: list[str | list[int]], encoded: list[list[int]]
) -> list[Prompt]:
    """The prompts with the text that `echo` gives back: the client's own, or what its token ids stand for."""
    skip_special_tokens = body.skip_special_tokens is not False

    def text_of(source: str | list[int]) -> str:
        if not body.echo:
            return ""
        return source if isinstance(source, str) else context.tokenizer.decode(source, skip_special_tokens=skip_special_tokens)

    return [Prompt(token_ids, text_of(source)) for source, token_ids in zip(given, encoded, strict=True)]


async def encode_all(context: ServerContext, prompts: list[str | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
    def encode() -> list[list[int]]:
        return [
            context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    return await run(context, encode, is_long=num_characters >= LONG_TEXT or len(prompts) > MANY)
