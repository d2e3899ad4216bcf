"""From a call of the library to the engine's requests, through the same checks as over HTTP."""

import asyncio
import math
import uuid
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import msgspec
from torch import Tensor

from penstock.engine.adapters.registry import Adapter
from penstock.engine.errors import InvalidRequest
from penstock.engine.multimodal.inputs import LoadedImage, ProcessedPrompt
from penstock.engine.multimodal.vectors import prompt_of_vectors
from penstock.engine.request import AnswerFactory, Request
from penstock.engine.sampling.params import BeamSearchParams
from penstock.engine.text.tokenizer import Tokenizer
from penstock.llm.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput
from penstock.llm.sampling_params import SamplingParams
from penstock.serving import preparing as serving
from penstock.serving.context import JobQueue, ServerContext, image_queue, queue_for
from penstock.serving.messages import ReasoningView
from penstock.serving.preparing import limit_of, logits_processors, preamble_of, prediction_of, with_opening
from penstock.serving.prompts import check_prompt_ids, check_text_length
from penstock.serving.requests import ChatCompletionRequest, ChatMessage, PredictedContent, mistaken_path
from penstock.serving.structured_outputs import answer_mode, compiled, ends_within, measures_pressure, plan_constraint, samples_exactly

if TYPE_CHECKING:
    from PIL.Image import Image


class MultiModalData(TypedDict, total=False):
    """What the image tokens of a prompt stand for: an image of Pillow's, or several in their order."""

    image: "Image | Sequence[Image]"


class TextPrompt(TypedDict, total=False):
    """`cache_salt` keeps prefix-cache hits within prompts that share it. The text has an image token for each image."""

    prompt: str
    multi_modal_data: MultiModalData
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """`prompt`, the text, is only given back."""

    prompt_token_ids: list[int]
    prompt: str
    multi_modal_data: MultiModalData
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """`prompt_embeds` are vectors [tokens, hidden size] in place of the embeddings of tokens; they take `enable_prompt_embeds`."""

    prompt_embeds: Tensor
    cache_salt: str


Prompt = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt
BINARY = (bytes, bytearray, memoryview)  # sequences of integers to Python, and text to the caller
KEYS = ("prompt", "prompt_token_ids", "cache_salt", "multi_modal_data", "prompt_embeds")


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One prompt as it was given: its text, its token ids, or both, and its images. `path` says where, as in `prompts[3]`."""

    path: str
    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str = ""
    images: "tuple[Image, ...]" = ()
    vectors: Tensor | None = None

    def require_text(self) -> None:
        """Raises `InvalidRequest` for what only a model that generates can read."""
        if self.images or self.vectors is not None:
            raise InvalidRequest(f"`{self.path}` holds images or vectors, which are for models that generate text", self.path)


def read_prompts(prompts: Prompt | Sequence[Prompt]) -> list[PromptSource]:
    """Raises `InvalidRequest` for what is no prompt."""
    if isinstance(prompts, str | Mapping) or _are_token_ids(prompts):
        return [read_prompt(prompts, "prompts")]
    if not isinstance(prompts, Sequence) or isinstance(prompts, BINARY):
        raise InvalidRequest(f"`prompts` must be a prompt or a list of them, got {type(prompts).__name__}", "prompts")
    return [read_prompt(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]


def read_prompt(prompt: Any, path: str) -> PromptSource:
    if isinstance(prompt, str):
        return PromptSource(path, text=prompt)
    if isinstance(prompt, Mapping):
        return _from_dict(prompt, path)
    if _are_token_ids(prompt) or _is_empty(prompt):
        return PromptSource(path, token_ids=[int(token_id) for token_id in prompt])
    raise InvalidRequest(f"`{path}` must be a string, a list of token ids, or a dict of one of these, got {_kind(prompt)}", path)


def _from_dict(prompt: Mapping[str, Any], path: str) -> PromptSource:
    for name in prompt:
        if name not in KEYS:
            hint = "; conversations are for `chat`" if name in ("role", "content", "messages") else ""
            raise InvalidRequest(f"`{path}` has the key {name!r}: there are {', '.join(KEYS)}{hint}", f"{path}.{name}")
    text, token_ids, salt, data, vectors = (prompt.get(name) for name in KEYS)
    if text is None and token_ids is None and vectors is None:
        raise InvalidRequest(f"`{path}` needs `prompt` or `prompt_token_ids`, or `prompt_embeds`", path)
    if vectors is not None and not (text is None and token_ids is None and data is None):
        raise InvalidRequest(f"`{path}`: `prompt_embeds` are a prompt of their own", f"{path}.prompt_embeds")
    if not isinstance(text, str | None) or not isinstance(salt, str | None):
        name = "prompt" if not isinstance(text, str | None) else "cache_salt"
        raise InvalidRequest(f"`{path}.{name}` must be a string", f"{path}.{name}")
    if token_ids is not None and not (_are_token_ids(token_ids) or _is_empty(token_ids)):
        message = f"`{path}.prompt_token_ids` must be a list of token ids, got {_kind(token_ids)}"
        raise InvalidRequest(message, f"{path}.prompt_token_ids")
    token_ids = None if token_ids is None else [int(token_id) for token_id in token_ids]
    return PromptSource(path, text, token_ids, salt or "", _images(data, path), vectors)


def _images(data: Any, path: str) -> "tuple[Image, ...]":
    """Those of `multi_modal_data`. Raises `InvalidRequest` for anything else."""
    if data is None:
        return ()
    path = f"{path}.multi_modal_data"
    if not isinstance(data, Mapping) or data.keys() - {"image"}:
        raise InvalidRequest(f"`{path}` must be a dict with the key 'image', the only kind of data that is taken", path)
    from PIL import Image as pillow  # an extra, which only images need

    given = data.get("image")
    images = () if given is None else tuple(given) if isinstance(given, Sequence) else (given,)
    for image in images:
        if not isinstance(image, pillow.Image):
            raise InvalidRequest(
                f"`{path}.image` must be an image of Pillow's or a list of them, got {type(image).__name__}", f"{path}.image"
            )
    return images


def _are_token_ids(values: Any) -> bool:
    """Whether it is a list that holds them, numpy's integers included, and nothing else."""
    is_list = isinstance(values, Sequence) and not isinstance(values, (str, *BINARY)) and len(values) > 0
    return is_list and all(map(_is_integer, values))


def _is_empty(values: Any) -> bool:
    return isinstance(values, list | tuple) and not values


def _is_integer(value: Any) -> bool:
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def _kind(value: Any) -> str:
    """What was given in place of a prompt, for a message: of a list, what keeps it from being one of token ids."""
    kind = type(value).__name__
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if not _is_integer(item):
                return f"a {kind} with {item!r:.40} at [{index}]"
    return kind


T = TypeVar("T")
Message = Mapping[str, Any]
PLAIN = ReasoningView()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that the engine can take, and what of it is to be given back. `path` is where in the call it came from."""

    request: Request
    params: SamplingParams
    path: str
    prompt: str | None = None
    view: ReasoningView = PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How conversations are rendered, and which tools there are."""

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False

    def __post_init__(self) -> None:
        self._require("chat_template", str | None, "Jinja's source")
        self._require("chat_template_kwargs", dict | None, "a dict")
        self._require("tools", list | None, "a list of tools, each a dict")
        self._require("tool_choice", str | dict | None, "a string or a dict")
        self._require("add_generation_prompt", bool, "True or False")
        self._require("continue_final_message", bool, "True or False")

    def _require(self, name: str, kind: Any, what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise InvalidRequest(f"`{name}` must be {what}, got {value!r:.100}", name)


async def prompt_of(context: ServerContext, source: PromptSource) -> ProcessedPrompt:
    """The prompt as the engine takes it.

    Raises `InvalidRequest` for a prompt without tokens, for ids that there are not, and for one that the context cannot hold.
    """

    def encode() -> ProcessedPrompt:
        if source.vectors is not None:
            path = f"{source.path}.prompt_embeds"
            return prompt_of_vectors(source.vectors, context.require_prompt_embeds(path), path)
        token_ids, text = source.token_ids, source.text or ""
        if token_ids is None:
            check_text_length(context, text, source.path)
            token_ids = context.tokenizer.encode(text, add_special_tokens=True)
        check_prompt_ids(token_ids, context.vocab_size, source.path)
        if not source.images:
            return ProcessedPrompt(token_ids, ())
        processor = context.require_images(f"{source.path}.multi_modal_data")
        return processor.prepare(token_ids, [LoadedImage.of(image) for image in source.images], source.path)

    queue = queue_for(len(source.text or "") if source.token_ids is None else 0)
    return await context.workers.run(image_queue(queue) if source.images else queue, encode)


async def prepare_prompt(
    context: ServerContext,
    source: PromptSource,
    params: SamplingParams,
    *,
    request_id: str | None = None,
    priority: int = 0,
    beam: BeamSearchParams | None = None,
    adapter: Adapter | None = None,
) -> Prepared:
    """A text to be continued. No parser reads what the model says. Raises `InvalidRequest`."""
    body = params.constraint_fields()
    mode = answer_mode(body)
    prompt = with_opening(context, await prompt_of(context, source), mode)
    token_ids = prompt.token_ids
    limit_of(context, params, len(token_ids), source.path)
    constraint = await context.workers.run(JobQueue.SHORT, lambda: plan_constraint(context, body, params.bad_words))
    request = Request(
        request_id=request_id or f"gen-{uuid.uuid4().hex}",
        prompt_token_ids=token_ids,
        params=params,
        make_answer=AnswerFactory(context.tokenizer, prompt.text_ids, params),
        grammar=await compiled(context, constraint),
        logits_processors=logits_processors(context, params.processor_choices()),
        priority=priority,
        cache_salt=source.cache_salt,
        embeds=prompt.embeds,
        outputs=tuple(params.additional_outputs),
        with_context_outputs=params.additional_context_outputs,
        beam=beam,
        exact=samples_exactly(body),
        adapter=adapter,
        prediction=prediction_of(context, params.prediction),
        preamble=preamble_of(context, mode, constraint.spec, params, len(token_ids)),
        measures_pressure=measures_pressure(body),
        ends_within=ends_within(body),
    )
    return Prepared(request, params, source.path, source.text, ReasoningView(shows_preamble=mode.shows_preamble))


async def prepare_chat(
    context: ServerContext,
    messages: Sequence[Message],
    params: SamplingParams,
    options: ChatOptions,
    path: str,
    *,
    request_id: str | None = None,
    priority: int = 0,
    adapter: Adapter | None = None,
) -> Prepared:
    """A conversation to be answered, through the code of /v1/chat/completions. Raises `InvalidRequest`."""
    body = chat_body(messages, params, options)
    # Without a parser, tools are only described in the prompt, and the model's calls stay text.
    choices = serving.ChatOptions(params=params, path=path, strict_tools=False, adapter=adapter)
    prepared = await serving.prepare_chat(context, body, _size_of(messages), choices)
    request = prepared.request
    assert isinstance(request.params, SamplingParams)
    request.request_id, request.priority = request_id or request.request_id, priority
    request.outputs, request.with_context_outputs = tuple(params.additional_outputs), params.additional_context_outputs
    text = context.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
    return Prepared(request, request.params, path, text, prepared.view)


def _size_of(messages: Sequence[Message]) -> int:
    """In characters, as far as content that is text goes."""
    return sum(len(message.get("content") or "") for message in messages)


def chat_body(messages: Sequence[Message], params: SamplingParams, options: ChatOptions) -> ChatCompletionRequest:
    """What a client would have sent, as far as the conversation goes: how to sample stays with `params`."""
    try:
        read = msgspec.convert(list(messages), list[ChatMessage])
    except msgspec.ValidationError as error:
        message = str(error).replace("`$", "`messages")
        raise InvalidRequest(message, f"messages{mistaken_path(error) or ''}") from None
    return ChatCompletionRequest(
        messages=read,
        chat_template=options.chat_template,
        chat_template_kwargs=options.chat_template_kwargs,
        tools=options.tools or None,
        tool_choice=options.tool_choice,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        thinking_token_budget=params.thinking_token_budget,
        structured_outputs=params.constraint_fields().structured_outputs,
        logits_processors=params.processor_choices(),
        prediction=None if params.prediction is None else PredictedContent("content", params.prediction),
    )


async def prepare_each(requests: Iterable[tuple[str, Awaitable[Prepared]]]) -> list[Prepared]:
    """All of a call's requests, by where in the call they come from. Raises `InvalidRequest`, naming which of several is at fault."""
    batch = []
    for path, preparing in requests:
        try:
            batch.append(await preparing)
        except InvalidRequest as error:
            raise located(error, path) from None
        await asyncio.sleep(0)  # a batch of thousands must not block the answers to others
    return batch


def one_for_each(given: Any, kind: type[T], name: str, count: int, what: str) -> Sequence[T]:
    """`given` for all of `count`, or one of them for each: `what` they are is said where there are not as many. Raises `InvalidRequest`."""
    if isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence):
        raise InvalidRequest(f"`{name}` must be {kind.__name__}, or a list of them, got {type(given).__name__}", name)
    for index, own in enumerate(given):
        if not isinstance(own, kind):
            raise InvalidRequest(f"`{name}[{index}]` must be {kind.__name__}, got {type(own).__name__}", f"{name}[{index}]")
    if len(given) != count:
        raise InvalidRequest(f"there are {count} {what} and {len(given)} {name}: give one, or one for each", name)
    return given


def located(error: InvalidRequest, path: str) -> InvalidRequest:
    """The same mistake, naming which of several prompts or conversations it is of."""
    if "[" not in path or error.message.startswith(path):
        return error
    inner = error.param if error.param and not error.param.startswith(path) else None
    return type(error)(f"{path}: {error.message}", f"{path}.{inner}" if inner else path)


Priority = int | Sequence[int] | None


def read_priority(given: Any, path: str = "priority") -> int:
    """Raises `InvalidRequest` for what cannot be compared with the priorities of other requests."""
    if not isinstance(given, Integral) or isinstance(given, bool):
        raise InvalidRequest(f"`{path}` must be an integer, of which the lower goes first, got {given!r:.100}", path)
    return int(given)


def read_priorities(given: Any, count: int, what: str) -> list[int]:
    """One for all of `count`, or one for each: `what` they are is said where there are not as many. None is 0. Raises `InvalidRequest`."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        return [0 if given is None else read_priority(given)] * count
    if len(given) != count:
        raise InvalidRequest(f"there are {count} {what} and {len(given)} priorities: give one, or one for each", "priority")
    return [read_priority(own, f"priority[{index}]") for index, own in enumerate(given)]


async def prepare_beams(context: ServerContext, source: PromptSource, params: BeamSearchParams, adapter: Adapter | None = None) -> Prepared:
    """Raises `InvalidRequest`."""
    sampling = params.sampling_params()
    own = SamplingParams(**{name: getattr(sampling, name) for name in type(sampling).__dataclass_fields__})
    return await prepare_prompt(context, source, own, request_id=f"beam-{uuid.uuid4().hex}", beam=params, adapter=adapter)


def beam_output(output: RequestOutput, tokenizer: Tokenizer) -> BeamSearchOutput:
    """vLLM's shape, in which every answer begins with its prompt."""
    prompt = output.prompt if output.prompt is not None else tokenizer.decode(output.prompt_token_ids)
    return BeamSearchOutput(
        [
            BeamSearchSequence(
                output.prompt_token_ids + answer.token_ids,
                prompt + answer.text,
                answer.cumulative_logprob if answer.cumulative_logprob is not None else 0.0,
                answer.beam_score if answer.beam_score is not None else 0.0,
                answer.finish_reason,
                answer.stop_reason,
            )
            for answer in output.outputs
            if answer.beam_score != -math.inf  # fewer were found than were asked for
        ]
    )
