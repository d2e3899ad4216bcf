"""POST /v1/completions."""

import asyncio
import uuid

from aiohttp import web

from penstock.api.answering import answer
from penstock.api.completion_fold import CompletionFold, Prompt
from penstock.api.completion_protocol import DEFAULT_MAX_TOKENS, CompletionRequest
from penstock.api.context import CONTEXT, ServerContext
from penstock.api.metrics import begin_timer
from penstock.api.preparing import answer_reader, check_streaming, compiled_grammar, logits_processors, special_token_ids
from penstock.api.prompts import LONG_TEXT, check_prompt_ids, read_body, served_model
from penstock.api.sampling import sampling_params, token_limit
from penstock.api.streams import merge
from penstock.engine.errors import InvalidRequest
from penstock.engine.request import Request
from penstock.engine.sampling_params import SamplingParams

MAX_PROMPTS = 2048


async def create_completion(http: web.Request) -> web.StreamResponse:
    """Continues one prompt or several. The text is the model's own: no parser reads it."""
    context = http.app[CONTEXT]
    body, headers = await read_body(http, CompletionRequest)
    model = served_model(context, body.model)
    request_id = f"cmpl-{uuid.uuid4().hex}"
    prompts, requests = await prepare(context, body, request_id)
    n = requests[0].params.n
    hidden = special_token_ids(context.tokenizer) if requests[0].params.skip_special_tokens else frozenset()
    fold = CompletionFold(request_id, model, body, prompts, n, context.tokenizer, hidden)
    timer = begin_timer(http)
    streams = [timer.watch(context.engine.generate(request)) for request in requests]
    deltas = streams[0] if len(streams) == 1 else merge(streams, n)
    return await answer(http, deltas, fold, stream=bool(body.stream), headers=headers)


async def prepare(context: ServerContext, body: CompletionRequest, request_id: str) -> tuple[list[Prompt], list[Request]]:
    """One engine request per prompt. Raises `InvalidRequest` for all that is wrong with the body."""
    check_streaming(body)
    if body.max_tokens is not None and body.max_tokens < (0 if body.echo else 1):
        raise InvalidRequest(f"`max_tokens` must be at least 1 (0 only with `echo`), got {body.max_tokens}", "max_tokens")
    given = split_prompts(body.prompt)
    encoded = await encode_all(context, given, add_special_tokens=body.add_special_tokens is not False)
    grammar = await compiled_grammar(context, body)
    processors = logits_processors(context, body.logits_processors)
    prompts: list[Prompt] = []
    requests: list[Request] = []
    for position, (source, token_ids) in enumerate(zip(given, encoded, strict=True)):
        path = "prompt" if len(given) == 1 else f"prompt[{position}]"
        params = completion_sampling_params(context, body, len(token_ids), path)
        check_prompt_ids(token_ids, context.vocab_size, path)
        prompts.append(Prompt(token_ids, echo_text(context, body, source, params.skip_special_tokens)))
        requests.append(
            Request(
                request_id=request_id if len(given) == 1 else f"{request_id}-{position}",
                prompt_token_ids=token_ids,
                params=params,
                make_answer=answer_reader(context.tokenizer, token_ids, params),
                grammar=grammar,
                logits_processors=processors,
                priority=body.priority or 0,
                cache_salt=body.cache_salt or "",
            )
        )
    return prompts, requests


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of all four forms. Raises `InvalidRequest` for none, for too many, and for a list of both ids and prompts."""
    if isinstance(prompt, str):
        return [prompt]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids and len(ids) == len(prompt):
        return [ids]
    if ids:
        position = next(position for position, item in enumerate(prompt) if isinstance(item, int) != isinstance(prompt[0], int))
        raise InvalidRequest("`prompt` must hold either token ids or prompts, not both", f"prompt[{position}]")
    if not 1 <= len(prompt) <= MAX_PROMPTS:
        raise InvalidRequest(f"`prompt` must hold from 1 to {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    return [item for item in prompt if not isinstance(item, int)]


async def encode_all(context: ServerContext, prompts: list[str | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
    def encode() -> list[list[int]]:
        return [
            context.tokenizer.encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

    if sum(len(prompt) for prompt in prompts if isinstance(prompt, str)) < LONG_TEXT:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(context.workers, encode)


def echo_text(context: ServerContext, body: CompletionRequest, source: str | list[int], skip_special_tokens: bool) -> str:
    if not body.echo:
        return ""
    return source if isinstance(source, str) else context.tokenizer.decode(source, skip_special_tokens=skip_special_tokens)


def completion_sampling_params(context: ServerContext, body: CompletionRequest, num_prompt_tokens: int, path: str) -> SamplingParams:
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        prompt_logprobs = max(body.logprobs, prompt_logprobs or 0)
    return sampling_params(
        body,
        max_tokens=token_limit(
            body.max_tokens,
            "max_tokens",
            prompt_param=path,
            default=DEFAULT_MAX_TOKENS,
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=context.max_model_len,
        ),
        logprobs=body.logprobs,
        prompt_logprobs=prompt_logprobs,
        defaults=context.default_sampling,
        vocab_size=context.vocab_size,
    )
