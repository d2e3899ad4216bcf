"""From a body's conversation, images, texts or token ids to the prompt: special tokens in messages are read or kept as text, and what the
model said earlier becomes the same tokens again.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Protocol

import jinja2
from jinja2 import nodes
from msgspec import structs

from penstock.engine.errors import ContextLengthExceeded, InvalidRequest
from penstock.engine.multimodal.inputs import ProcessedPrompt, PromptEmbeds, PromptImage
from penstock.engine.text.tokenizer import CHARS_PER_TOKEN, ContentTokenizer
from penstock.serving.context import JobQueue, ModelContext, ServerContext, image_queue, queue_for, rendering_queue
from penstock.serving.images import Fetcher, ImageSource, load_images, take_images
from penstock.serving.requests import ChatCompletionRequest, ChatMessage, CompletionRequest, check_json
from penstock.serving.templates.environment import TemplateEnvironment
from penstock.serving.templates.rendering import RenderedPrompt

RESERVED_KWARGS = frozenset(
    {"chat_template", "messages", "tools", "documents", "tokenize", "add_generation_prompt", "continue_final_message", "self"}
)


def template_kwargs(given: dict[str, Any] | None, reasoning_effort: str | None, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """What templates read beside the conversation. An effort of `none` is also said in the two words that templates without efforts know.

    `defaults` are the server's, and give way to what the request says. Raises `InvalidRequest` for a name that is the request's own: a
    template, above all, must not come in through here.
    """
    kwargs = dict(given or {})
    for name in kwargs:
        if name in RESERVED_KWARGS:
            reserved = ", ".join(sorted(RESERVED_KWARGS))
            raise InvalidRequest(f"`{name}` is not an argument for the template, nor are: {reserved}", f"chat_template_kwargs.{name}")
    if reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", reasoning_effort)
        if reasoning_effort == "none":
            kwargs.setdefault("enable_thinking", False)
            kwargs.setdefault("thinking", False)
    return {**defaults, **kwargs}


class TemplateFields(Protocol):
    """What a body says of the template and of where the prompt ends."""

    @property
    def chat_template(self) -> str | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...


def check_template_fields(context: ModelContext, body: TemplateFields) -> None:
    """Raises `InvalidRequest` for fields that contradict each other or that the operator has not allowed."""
    if body.chat_template is not None and not context.options.trust_request_chat_template:
        raise InvalidRequest(
            "a chat template in the request is refused: start the server with --trust-request-chat-template", "chat_template"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest("Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message")


def check_arguments(messages: Sequence[ChatMessage]) -> None:
    """Raises `InvalidRequest` where the arguments of tool calls, which are JSON in a string, hold more than a body may."""
    functions = [call.get("function") for message in messages for call in message.tool_calls or ()]
    texts = [function.get("arguments") for function in functions if isinstance(function, dict)]
    documents = (text.encode() for text in texts if isinstance(text, str))
    check_json(*documents, what="arguments of tool calls", param="messages")


def render_conversation(
    context: ModelContext,
    body: TemplateFields,
    messages: list[ChatMessage],
    tools: list[dict[str, Any]],
    kwargs: dict[str, Any],
    image_token: str | None = None,
) -> RenderedPrompt:
    """The prompt, by the body's own template where it brings one. Raises `InvalidRequest` for what the template cannot take.

    Where content is text, what it holds of special tokens is marked in the prompt's `text`. Where there are images, it has `image_token`
    for each.
    """
    check_arguments(messages)
    template, tokenizer = context.chat_template, context.content_tokenizer
    if tokenizer is not None:
        source = body.chat_template or template.source_for(tools) or ""
        messages, tools, kwargs = _marked(tokenizer, source, messages, tools, kwargs)
    continues = bool(body.continue_final_message)
    prompt = template.render(
        [structs.asdict(message) for message in messages],
        tools or None,
        add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=kwargs,
        template=body.chat_template,
        image_token=image_token,
    )
    if tokenizer is None:
        return prompt
    return replace(prompt, tail=tokenizer.unmark(prompt.tail), continued=tokenizer.unmark(prompt.continued))


def encode_prompt(context: ModelContext, prompt: RenderedPrompt, *, add_special_tokens: bool) -> list[int]:
    """The token ids of what `render_conversation` gave."""
    tokenizer = context.content_tokenizer or context.tokenizer
    return tokenizer.encode(prompt.text, add_special_tokens=add_special_tokens)


LOOKING = frozenset(
    {"count", "endswith", "find", "index", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition"}
    | {"rsplit", "split", "startswith"}
)


@lru_cache(maxsize=16)
def looked_for(source: str) -> str:
    """All that a chat template looks for in texts, such as the end of the reasoning in earlier answers."""
    try:
        tree = TemplateEnvironment().parse(source)
    except jinja2.TemplateError:  # rendering it raises the error for the client
        return ""
    found: list[nodes.Node] = []
    for compare in tree.find_all(nodes.Compare):
        found += [compare.expr, *(operand.expr for operand in compare.ops)]
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Getattr) and call.node.attr in LOOKING:
            found += call.args
    return "\n".join(node.value for node in found if isinstance(node, nodes.Const) and isinstance(node.value, str))


def _marked(
    tokenizer: ContentTokenizer, source: str, messages: list[ChatMessage], tools: list[dict[str, Any]], kwargs: dict[str, Any]
) -> tuple[list[ChatMessage], list[dict[str, Any]], dict[str, Any]]:
    marked = []
    for index, message in enumerate(messages):
        # The template finds by them what is reasoning in an answer; in other messages they mean nothing.
        kept = tokenizer.markers_in(looked_for(source)) if message.role == "assistant" else frozenset[str]()
        try:
            marked.append(_marked_message(tokenizer, message, kept))
        except InvalidRequest as error:
            raise InvalidRequest(error.message, f"messages[{index}]") from None
    return marked, tokenizer.mark(tools), tokenizer.mark(kwargs)


def _marked_message(tokenizer: ContentTokenizer, message: ChatMessage, kept: frozenset[str]) -> ChatMessage:
    others = {name: tokenizer.mark(getattr(message, name)) for name in ("name", "tool_call_id", "reasoning_content", "reasoning")}
    calls = message.tool_calls and [tokenizer.mark(_plain_call(call)) for call in message.tool_calls]
    return structs.replace(message, content=tokenizer.mark(message.content, kept), tool_calls=calls, **others)


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """The call with arguments in which nothing is escaped that need not be: a template may be given them decoded."""
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str) or "\\" not in arguments:
        return call
    try:
        arguments = json.dumps(json.loads(arguments), ensure_ascii=False)
    except (ValueError, RecursionError):  # stays text
        return call
    return {**call, "function": {**function, "arguments": arguments}}


MAX_PROMPTS = 2048  # OpenAI's, of embeddings


def split_prompts(given: str | list[str | int | list[int]], param: str) -> list[str | list[int]]:
    """The prompts of all four forms that OpenAI has: a string, strings, token ids, lists of these.

    Raises `InvalidRequest` for none, for too many, and for a list of both ids and prompts.
    """
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids:
        position = next(position for position, item in enumerate(given) if isinstance(item, int) != isinstance(given[0], int))
        raise InvalidRequest(f"`{param}` must hold either token ids or prompts, not both", f"{param}[{position}]")
    if not 1 <= len(given) <= MAX_PROMPTS:
        raise InvalidRequest(f"`{param}` must hold from 1 to {MAX_PROMPTS} prompts, got {len(given)}", param)
    return [item for item in given if not isinstance(item, int)]


def path_of(param: str, position: int, count: int) -> str:
    return param if count == 1 else f"{param}[{position}]"


def completion_prompts(
    context: ServerContext, body: CompletionRequest
) -> tuple[list[str | list[int]], list[tuple[PromptEmbeds | PromptImage, ...]]]:
    """The prompts of a completion, of `prompt` or of `prompt_embeds`, and the vectors in each. Raises `InvalidRequest`."""
    if (body.prompt is None) == (body.prompt_embeds is None):
        raise InvalidRequest("a completion needs either `prompt` or `prompt_embeds`", "prompt")
    if body.prompt is not None:
        sources = split_prompts(body.prompt, "prompt")
        return sources, [()] * len(sources)
    size = context.require_prompt_embeds("prompt_embeds")
    if body.echo:
        raise InvalidRequest("`prompt_embeds` are vectors, and `echo` is for text", "echo")
    from penstock.engine.multimodal.vectors import decoded_vectors, prompt_of_vectors  # imports torch

    texts = [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds or []
    if not 1 <= len(texts) <= MAX_PROMPTS:
        raise InvalidRequest(f"`prompt_embeds` must hold from 1 to {MAX_PROMPTS} prompts, got {len(texts)}", "prompt_embeds")
    paths = [path_of("prompt_embeds", position, len(texts)) for position in range(len(texts))]
    prompts = [prompt_of_vectors(decoded_vectors(text, path), size, path) for text, path in zip(texts, paths, strict=True)]
    return [prompt.token_ids for prompt in prompts], [prompt.embeds for prompt in prompts]


def encode_prompts(context: ServerContext, sources: Sequence[str | list[int]], *, add_special_tokens: bool) -> list[list[int]]:
    """Raises `ContextLengthExceeded` with the path of a text that cannot fit the context."""
    for position, source in enumerate(sources):
        if isinstance(source, str):
            check_text_length(context, source, path_of("prompt", position, len(sources)))
    encode = partial(context.tokenizer.encode, add_special_tokens=add_special_tokens)
    return [encode(source) if isinstance(source, str) else source for source in sources]


def prompt_ids(context: ServerContext, body: ChatCompletionRequest, prompt: RenderedPrompt, salt: str) -> list[int]:
    """The prompt's tokens; those of earlier answers are as the model said them.

    Not with a `seed`: answers to the same request are the same then, whatever was said before.
    """

    def encode(text: str) -> list[int]:
        # The template writes the special tokens itself.
        return encode_prompt(context, replace(prompt, text=text), add_special_tokens=bool(body.add_special_tokens))

    if body.seed is not None or body.add_special_tokens:
        return encode(prompt.text)
    return context.transcripts.encode(prompt.text, salt, encode)


def check_text_length(context: ModelContext, text: str, param: str) -> None:
    """Raises `ContextLengthExceeded` for a text that cannot fit the context, without tokenizing all of it."""
    limit = context.max_model_len
    beginning = context.tokenizer.beginning(text, limit)
    if len(beginning) < len(text):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {limit} tokens. However, the first {len(beginning)} of your prompt's "
            f"{len(text)} characters are more than that. Please shorten it.",
            param,
            num_prompt_tokens=limit * len(text) // len(beginning) + 1,
            max_prompt_tokens=limit - 1,
        )


MAX_TEXT = 2**21  # bytes, each of which may become a token; where the context holds more, what fits it


def check_tokenizable(context: ModelContext, text: str, param: str) -> None:
    """Raises `InvalidRequest` for a text, not bounded by the context, that would take too long to tokenize."""
    limit = max(MAX_TEXT, CHARS_PER_TOKEN * context.max_model_len)
    num_bytes = len(text.encode())
    if num_bytes > limit:
        raise InvalidRequest(f"the text has {num_bytes} bytes in UTF-8, and at most {limit} are tokenized at once", param)


def check_prompt_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Raises `InvalidRequest` for a prompt without tokens, and for an id that is not in the vocabulary."""
    if not token_ids:
        raise InvalidRequest("the prompt holds no tokens", param)
    for bad in (min(token_ids), max(token_ids)):
        if not 0 <= bad < vocab_size:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary of {vocab_size} tokens", param)


async def read_images(
    context: ServerContext, body: ChatCompletionRequest, size: int, fetched: dict[str, bytes] | None = None
) -> tuple[list[ImageSource], JobQueue]:
    """The images of a conversation of `size` characters, fetched where they are URLs, and where the rest of it is prepared.

    What is in `fetched`, by URL, is not fetched again, and what is fetched is added. Raises `InvalidRequest`.
    """
    queue = rendering_queue(size, body.chat_template)
    if not any(isinstance(message.content, list) for message in body.messages):
        return [], queue
    images = await context.workers.run(queue_for(size), lambda: take_images(body.messages))
    if not images:
        return [], queue
    context.require_images(images[0].path)
    queue = rendering_queue(size - sum(image.size for image in images), body.chat_template)
    known = {} if fetched is None else fetched
    images = [image if image.url is None else replace(image, given=known.get(image.url, image.url)) for image in images]
    remote = [image for image in images if image.is_remote]
    if remote and not context.options.allow_image_urls:
        message = f"`{remote[0].path}` must be a data URL: this server was started without --allow-image-urls"
        raise InvalidRequest(message, remote[0].path)
    if remote:
        async with context.image_fetches.place():
            files = await Fetcher(context.options.max_body_size).fetch(images)
        known.update(
            {image.url: file.given for image, file in zip(images, files, strict=True) if image.url and isinstance(file.given, bytes)}
        )
        images = files
    return images, image_queue(queue)


def image_token_for(context: ServerContext, images: Sequence[ImageSource]) -> str | None:
    """What the prompt has for each of these images."""
    return context.require_images(images[0].path).image_token if images else None


def with_images(context: ServerContext, token_ids: list[int], images: Sequence[ImageSource], salt: str = "") -> ProcessedPrompt:
    """The prompt with what the model sees of its images, which is remembered for prompts with the same salt. Raises `InvalidRequest`."""
    if not images:
        return ProcessedPrompt(token_ids, ())
    path = images[0].path
    loaded = [image.salted(salt) for image in load_images(images)]
    return context.require_images(path).prepare(token_ids, loaded, path)
