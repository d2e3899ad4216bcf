"""From texts, token ids or a conversation to inputs of a pooling model, scores of pairs of texts, and metrics of both."""

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.pooling.encoder import EncoderInput
from penstock.engine.pooling.engine import (
    EncodedText,
    PoolingEngine,
    PoolingOutput,
    Score,
    ScoreLimits,
    check_counts,
    paired,
    pool_all,
    scoring_of,
)
from penstock.engine.pooling.model import PoolingParams
from penstock.serving.context import PoolingContext, check_task, prompt_queue, queue_for
from penstock.serving.observability.metrics import RequestMetrics
from penstock.serving.prompts import (
    MAX_PROMPTS,
    check_prompt_ids,
    check_template_fields,
    check_text_length,
    render_conversation,
    split_prompts,
    template_kwargs,
)
from penstock.serving.requests import CacheSalt, Messages, RequestFields

# A string, a list of strings, token ids, or a list of lists of token ids.
PoolingSource = str | list[str | int | list[int]]


class PoolingTimer:
    """One request's counts, from what it has pooled. `on_output` is called with each output as it comes."""

    __slots__ = ("_metrics", "_on_output", "_start", "model", "num_prompt_tokens")

    def __init__(self, metrics: RequestMetrics, arrived: float, on_output: Callable[[PoolingOutput], None] | None = None) -> None:
        self._metrics = metrics
        self._start = arrived
        self._on_output = on_output
        self.model: str | None = None
        self.num_prompt_tokens = 0

    @property
    def num_generation_tokens(self) -> int:
        return 0

    @property
    def summary(self) -> str:
        return f"prompt={self.num_prompt_tokens}"

    @property
    def fields(self) -> dict[str, Any]:
        return {"model": self.model, "prompt_tokens": self.num_prompt_tokens}

    async def pool(
        self,
        engine: PoolingEngine,
        inputs: Sequence[EncodedText],
        params: PoolingParams | Sequence[PoolingParams],
        *,
        priority: int | Sequence[int] | None,
    ) -> list[PoolingOutput]:
        """As `pool_all`; each output is counted as it comes."""
        return await pool_all(engine, inputs, params, priority=priority or 0, on_output=self._observe)

    def _observe(self, output: PoolingOutput) -> None:
        num_tokens = len(output.prompt_token_ids)
        self.num_prompt_tokens += num_tokens
        self._metrics.prompt_tokens.observe(num_tokens)
        self._metrics.e2e_latency.observe(time.monotonic() - self._start)
        self._metrics.count_finished("stop")
        if self._on_output is not None:
            self._on_output(output)


class PoolingFields(RequestFields, kw_only=True):
    """`truncate_prompt_tokens` cuts each input to so many tokens, and with -1 to what the model takes; without it none is cut.

    `cache_salt` always holds: no request finds anything of another's, since no cache is kept between them.
    """

    cache_salt: CacheSalt | None = None
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None


class InputFields(PoolingFields, kw_only=True):
    """Either `input` or, as vLLM has it, `messages` that the model's chat template makes one input of.

    `prompt_name` names one of the instructions in the model's sentence-transformers files, to be put before each text. `input_type` says
    what the texts are for, in the words of Cohere's and NVIDIA's clients: it chooses the instruction where the model has one for that.
    """

    input: PoolingSource | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    prompt_name: str | None = None
    input_type: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class PoolingUsage(Struct):
    """Nothing is generated: `total_tokens` are those of the prompts."""

    prompt_tokens: int
    total_tokens: int


# The names under which models keep an instruction, by the words that clients have for it.
QUERY, DOCUMENT = ("query", "search_query"), ("document", "passage", "search_document")
PROMPT_NAMES = dict.fromkeys(QUERY, QUERY) | dict.fromkeys(DOCUMENT, DOCUMENT)
LONE_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class EncodingOptions:
    """`max_tokens` cuts what is longer; None: nothing is cut. `prompt_name` names an instruction of the model's."""

    max_tokens: int | None = None
    add_special_tokens: bool = True
    prompt_name: str | None = None


async def read_inputs(context: PoolingContext, body: InputFields, size: int) -> list[EncodedText]:
    """The body's `input`, or its `messages` as one. Raises `InvalidRequest` with the path of the input that is wrong."""
    queue = prompt_queue(size, is_conversation=body.messages is not None, template=body.chat_template)
    return await context.workers.run(queue, lambda: plan_inputs(context, body))


def plan_inputs(context: PoolingContext, body: InputFields) -> list[EncodedText]:
    if (body.input is None) == (body.messages is None):
        raise InvalidRequest("give either `input` or `messages`", "input")
    if body.messages is None:
        source, param, add_special_tokens = "" if body.input is None else body.input, "input", body.add_special_tokens is not False
    else:
        source, param, add_special_tokens = rendered(context, body), "messages", body.add_special_tokens is True
    given = split_prompts(source, param)
    is_list = not isinstance(source, str) and not isinstance(source[0], int)
    paths = [f"{param}[{position}]" if is_list else param for position in range(len(given))]
    options = EncodingOptions(token_limit(context, body.truncate_prompt_tokens), add_special_tokens, prompt_name(context, body))
    return encode_inputs(context, given, paths, options)


def prompt_name(context: PoolingContext, body: InputFields) -> str | None:
    """The one that is asked for, or the one that the model has for this type of input; None where it has none."""
    if body.prompt_name is not None or body.input_type is None:
        return body.prompt_name
    prompts = context.engine.model.files.prompts or {}
    return next((name for name in PROMPT_NAMES.get(body.input_type, (body.input_type,)) if name in prompts), None)


def encode_inputs(
    context: PoolingContext, given: Sequence[str | list[int]], paths: Sequence[str], options: EncodingOptions
) -> list[EncodedText]:
    """Texts, or token ids as they are. Raises `InvalidRequest` with the path of one that is empty, too long or no text of this model's."""
    texts = [(item, path) for item, path in zip(given, paths, strict=True) if isinstance(item, str)]
    check_texts(context, texts, is_cut=options.max_tokens is not None)
    inputs = encoding(lambda: [encoded(context, item, options) for item in given])
    check_inputs(context, inputs, paths)
    return inputs


def rendered(context: PoolingContext, body: InputFields) -> str:
    """The conversation as the model's template writes it, without the start of an answer unless the body asks for that."""
    check_template_fields(context, body)
    if not (body.chat_template or context.chat_template.source):
        raise InvalidRequest("the model has no chat template: give `input`, or start the server with --chat-template", "messages")
    if body.add_generation_prompt is None:
        body.add_generation_prompt = False
    kwargs = template_kwargs(body.chat_template_kwargs, None, context.options.default_chat_template_kwargs)
    return render_conversation(context, body, body.messages or [], [], kwargs).text


def token_limit(context: PoolingContext, asked: int | None) -> int | None:
    """What `truncate_prompt_tokens` comes to: None where nothing is to be cut."""
    if asked is None or asked > 0:
        return asked
    if asked != -1:
        message = f"`truncate_prompt_tokens` must be at least 1, or -1 for as many as the model takes, got {asked}"
        raise InvalidRequest(message, "truncate_prompt_tokens")
    return context.max_model_len


def check_texts(context: PoolingContext, texts: Sequence[tuple[str, str]], *, is_cut: bool) -> None:
    """Texts with their paths: raises `InvalidRequest` for one that is empty, cannot be encoded, or is too long to count its tokens."""
    for text, path in texts:
        if not text:
            raise InvalidRequest("the text is empty", path)
        if not text.isascii() and LONE_SURROGATE.search(text):
            raise InvalidRequest("the text holds a lone surrogate and cannot be encoded as UTF-8", path)
        if not is_cut:
            check_text_length(context, text, path)


def encoding(call: Callable[[], list[EncodedText]]) -> list[EncodedText]:
    """For texts that have been checked: nothing but the limit can be wrong with them."""
    try:
        return call()
    except InvalidRequest as error:
        raise InvalidRequest(error.message, error.param or "truncate_prompt_tokens") from None


def check_inputs(context: PoolingContext, inputs: Sequence[EncodedText], paths: Sequence[str]) -> None:
    """Raises `InvalidRequest` for one without tokens, too long for the model, or with ids that it does not know."""
    for item, path in zip(inputs, paths, strict=True):
        check_length(context, len(item.tokens.token_ids), path)
        check_prompt_ids(item.tokens.token_ids, context.vocab_size, path)


def check_length(context: PoolingContext, num_tokens: int, path: str) -> None:
    if num_tokens > context.max_model_len:
        raise ContextLengthExceeded(
            f"This model's maximum context length is {context.max_model_len} tokens. However, this input has {num_tokens}. "
            "Please shorten it, or have it cut with `truncate_prompt_tokens`.",
            path,
        )


def usage_of(inputs: Sequence[EncodedText]) -> PoolingUsage:
    num_tokens = sum(len(item.tokens.token_ids) for item in inputs)
    return PoolingUsage(num_tokens, num_tokens)


def encoded(context: PoolingContext, source: str | list[int], options: EncodingOptions) -> EncodedText:
    """A text without special tokens has all that there is to be written in it already, instructions included."""
    if isinstance(source, list):
        return EncodedText(EncoderInput(source[: options.max_tokens]))
    if not options.add_special_tokens:
        return EncodedText(EncoderInput(context.tokenizer.encode(source, add_special_tokens=False)[: options.max_tokens]))
    return context.engine.encode(source, max_tokens=options.max_tokens, prompt_name=options.prompt_name)


NUMBERS_PER_SCORE = 8  # what a score costs, in the numbers that go over the wire in that time
MAX_CHARACTERS = 2**24  # as many as a body may have: a text that is in many pairs is tokenized for each of them


@dataclass(frozen=True, slots=True)
class Side:
    """The texts on one side of the pairs, and what they are called in the body."""

    param: str
    texts: list[str]
    is_list: bool = True

    @classmethod
    def of(cls, param: str, given: str | list[str]) -> "Side":
        return cls(param, [given], is_list=False) if isinstance(given, str) else cls(param, given)

    @property
    def paths(self) -> list[str]:
        return [f"{self.param}[{position}]" if self.is_list else self.param for position in range(len(self.texts))]


def check_size(first: Side, second: Side) -> None:
    """Raises `InvalidRequest` for more than one request over HTTP may ask for."""
    if len(second.texts) > MAX_PROMPTS:
        raise InvalidRequest(f"`{second.param}` must hold at most {MAX_PROMPTS} texts, got {len(second.texts)}", second.param)
    if len(first.texts) == 1 and len(second.texts) * len(first.texts[0]) > MAX_CHARACTERS:
        raise InvalidRequest(f"the text is too long to be paired with {len(second.texts)} others", first.paths[0])


async def score_pairs(
    context: PoolingContext, timer: PoolingTimer, first: Side, second: Side, limits: ScoreLimits, priority: int | None
) -> tuple[list[Score], PoolingUsage]:
    """Scores in the order of the second side. Raises `InvalidRequest` with the path of the text that is wrong, before anything runs."""
    check_task(context, "score", "embed")
    check_counts(len(first.texts), len(second.texts), first.param, second.param)
    scoring = scoring_of(context.engine.model.tasks)

    def plan() -> list[EncodedText]:
        for side in (first, second):
            is_cut = limits.max_tokens is not None or (side is second and limits.max_second is not None)
            check_texts(context, list(zip(side.texts, side.paths, strict=True)), is_cut=is_cut)
        inputs = encoding(lambda: scoring.inputs(context.engine, first.texts, second.texts, limits))
        check_inputs(context, inputs, input_paths(inputs, first, second))
        return inputs

    # A text that is in every pair is tokenized for each of them.
    size = sum(map(len, second.texts)) + sum(map(len, first.texts)) * (len(second.texts) if len(first.texts) == 1 else 1)
    inputs = await context.workers.run(queue_for(size), plan)
    outputs = await timer.pool(context.engine, inputs, scoring.params, priority=priority)
    scores = await context.workers.run(queue_for(NUMBERS_PER_SCORE * len(outputs)), lambda: scoring.scores(outputs, len(first.texts)))
    return scores, usage_of(inputs)


def input_paths(inputs: Sequence[EncodedText], first: Side, second: Side) -> list[str]:
    """Of each input the text that it is made of, and of a pair the longer one."""
    if inputs[0].tokens.token_type_ids is None:
        return first.paths + second.paths
    sides = paired(list(zip(first.texts, first.paths, strict=True)), list(zip(second.texts, second.paths, strict=True)))
    return [max(pair, key=lambda item: len(item[0]))[1] for pair in sides]
