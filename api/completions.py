"""POST /v1/completions."""

import uuid

from aiohttp import web

from penstock.api.answers.answering import answer
from penstock.api.answers.completion_fold import CompletionFold, Prompt
from penstock.api.answers.streams import merge
from penstock.api.beams import beam_search, searched, searched_defaults
from penstock.api.bodies import read_admitted_body, served_model
from penstock.api.completion_protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from penstock.api.constraints.answer_check import AnswerCheck, warning_header
from penstock.api.constraints.constraint_size import is_large
from penstock.api.constraints.constraints import grammar_spec, open_schema
from penstock.api.context import CONTEXT, ServerContext
from penstock.api.metrics.metrics import begin_timer
from penstock.api.preparing import (
    answer_reader,
    cache_salt,
    check_streaming,
    client_of,
    compiled_grammar,
    logits_processors,
    special_token_ids,
)
from penstock.api.prompts import LONG_TEXT, check_prompt_ids, check_text_length, path_of, split_prompts
from penstock.api.sampling import TokenLimit, sampling_params, token_limit
from penstock.api.workers import MANY, run
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request
from penstock.engine.sampling.params import SamplingParams

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
