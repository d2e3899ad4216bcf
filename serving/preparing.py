"""What chat and completions do alike on the way from a body to an engine `Request`."""

import functools
from collections.abc import Callable

from penstock.engine.errors import InvalidRequest
from penstock.engine.grammar import CompiledGrammar, GrammarSpec
from penstock.engine.hooks import ReasoningParserFactory, ToolParserFactory
from penstock.engine.logits_processor import ChosenProcessor
from penstock.engine.sampling.params import SamplingParams
from penstock.engine.text.answer import Answer
from penstock.engine.text.call_limits import NO_LIMITS, CallLimits
from penstock.engine.text.detokenizer import Detokenizer
from penstock.engine.text.tokenizer import Tokenizer
from penstock.engine.turn import Turn
from penstock.plugins.chosen_processors import chosen_processors
from penstock.serving.constraints.sources import chosen_backend
from penstock.serving.context import ServerContext
from penstock.serving.requests import GenerationFields, LogitsProcessorChoice


def check_streaming(body: GenerationFields) -> None:
    """Raises `InvalidRequest` for options that only make sense with the other value of `stream`."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("Stream options can only be defined when `stream=True`.", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")


def cache_salt(context: ServerContext, body: GenerationFields, client: str | None) -> str:
    """Keeps cached prefixes within one API key where the server has several: a hit would tell one client what another has asked."""
    salt, options = body.cache_salt or "", context.options
    return salt if client is None or len(options.api_keys) < 2 or options.share_prefix_cache else f"{client} {salt}"


async def compiled_grammar(
    context: ServerContext, body: GenerationFields, spec: GrammarSpec | None, client: str | None = None
) -> CompiledGrammar | None:
    """The request's constraint, compiled by the backend that it names or by the first that takes it. Raises `InvalidRequest`."""
    backend = chosen_backend(body, context.plugins.grammar_backends)
    return None if spec is None else await context.compile_grammar.compile(spec, backend, client=client)


def logits_processors(context: ServerContext, choices: list[LogitsProcessorChoice] | None) -> list[ChosenProcessor]:
    """What the engine calls once per sequence. Raises `InvalidRequest` for a name or arguments that are refused."""
    return chosen_processors(context.plugins.logits_processors, [(choice.name, choice.arguments) for choice in choices or ()])


def answer_reader(
    tokenizer: Tokenizer,
    prompt_token_ids: list[int],
    params: SamplingParams,
    *,
    reasoning: ReasoningParserFactory | None = None,
    tools: ToolParserFactory | None = None,
    turn: Turn | None = None,
    call_limits: CallLimits = NO_LIMITS,
) -> Callable[[], Answer]:
    """What the engine calls once per sequence to read its tokens. Without parsers the text is the model's own."""
    start = turn or Turn()

    def make_answer() -> Answer:
        return Answer(
            Detokenizer(tokenizer, prompt_token_ids),
            reasoning(start) if reasoning else None,
            tools(start) if tools else None,
            params.stop,
            params.include_stop_str_in_output,
            params.skip_special_tokens,
            params.min_tokens,
            call_limits,
        )

    return make_answer


@functools.lru_cache(maxsize=8)
def added_token_texts(tokenizer: Tokenizer) -> frozenset[str]:
    return frozenset(token.text for token in tokenizer.added_tokens.values())


@functools.lru_cache(maxsize=8)
def special_token_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(token_id for token_id, token in tokenizer.added_tokens.items() if token.is_special)
