"""From messages to the prompt's text, and to the part of it that tells a parser where the answer starts."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2
from penstock.api.template_environment import Interruptible, TemplateEnvironment, TemplateTimeout, render_bounded
from penstock.engine.errors import ConfigurationError, InvalidRequest

SHIPPED = Path(__file__).parent / "templates"
TIME_LIMIT_SECONDS = 5.0
RESERVED_VARIABLES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
CONTINUATION_MARK = "\ue000penstock-continue\ue001"  # private-use characters: no text of a client's and no template holds it

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """`tail` is the end of `text`: what the template wrote to open the assistant's turn, with the text being continued if there is any."""

    text: str
    tail: str


class ToolArguments(dict[str, Any]):
    """A call's arguments for templates of both kinds: those that take a mapping, and those that take its JSON text."""

    def __init__(self, text: str, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self._text = text

    def __str__(self) -> str:
        return self._text

    def __add__(self, other: str) -> str:
        return self._text + other

    def __radd__(self, other: str) -> str:
        return other + self._text


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Renders conversations with the served model's template, or with one that came in a request.

    `source` is None where the model has none: then every chat request is refused. `tool_source` is used instead where tools are given.
    `special_tokens` are the template's variables `bos_token`, `eos_token`, ... Templates run on `workers`, each for at most
    `time_limit` seconds.
    """

    source: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None
    workers: Executor | None = None
    time_limit: float = TIME_LIMIT_SECONDS

    def __post_init__(self) -> None:
        for source in (self.source, self.tool_source):
            if source is not None:
                try:
                    compile_template(source)
                except jinja2.TemplateError as error:
                    raise ConfigurationError(f"the chat template is not valid Jinja: {describe(error)}") from error

    async def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> RenderedPrompt:
        """Raises `InvalidRequest` with the template's own message where it refuses the conversation, fails, or takes too long."""
        source = template or self.source_for(tools)
        if source is None:
            raise InvalidRequest(
                "the model has no chat template: use /v1/completions, or start the server with --chat-template", "messages"
            )
        variables = self._variables(tools, template_kwargs)
        call = Interruptible()

        def render_here() -> RenderedPrompt:
            return call.run(lambda: _render(source, messages, variables, add_generation_prompt, continue_final_message))

        loop = asyncio.get_running_loop()
        timer = loop.call_later(self.time_limit, call.interrupt)
        try:
            return await loop.run_in_executor(self.workers, render_here)
        except TemplateTimeout:
            raise InvalidRequest(f"the chat template did not finish within {self.time_limit:g} seconds", "messages") from None
        except RecursionError:
            raise InvalidRequest("the chat template recurses too deeply", "messages") from None
        finally:
            timer.cancel()

    def source_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """The template that a conversation with these tools is rendered with."""
        return self.tool_source if tools and self.tool_source else self.source

    def _variables(self, tools: Sequence[Mapping[str, Any]] | None, template_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        kwargs = template_kwargs or {}
        for name in RESERVED_VARIABLES.intersection(kwargs):
            raise InvalidRequest(f"`{name}` is a field of the request, not one for the template", f"chat_template_kwargs.{name}")
        return {"tools": list(tools) if tools else None, "documents": None, **self.special_tokens, **kwargs}


def load_chat_template(name: str) -> str:
    """The text of a template file, or of a shipped template by its name.

    Raises `ConfigurationError` listing the shipped names where there is neither.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        path = SHIPPED / f"{name}.jinja"
    if name not in shipped_names() and path.parent == SHIPPED:
        raise ConfigurationError(f"no chat template {name!r}: it is neither a file nor one of {', '.join(shipped_names())}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the chat template {name!r}: {error}") from error


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.jinja"))


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    return TemplateEnvironment().from_string(source)


def prepare_message(message: Message, path: str = "messages") -> dict[str, Any]:
    """A message as templates expect it, whatever spelling the client used. `path` is its JSON path.

    `content` is a string, '' where it is absent; reasoning is there under both its names; a tool call's arguments are a mapping.
    """
    prepared = {name: value for name, value in message.items() if value is not None}
    prepared["content"] = _content_text(message.get("content"), f"{path}.content")
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning is not None:
        prepared["reasoning_content"] = prepared["reasoning"] = reasoning
    if isinstance(message.get("tool_calls"), list):
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in message["tool_calls"]]
    return prepared


def _content_text(content: Any, path: str) -> str:
    """Parts are joined by line ends, as vLLM does for templates that take strings."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for index, part in enumerate(content):
        if isinstance(part, Mapping):
            text, kind = part.get("text", part.get("refusal")), part.get("type")
        else:
            text, kind = part, type(part).__name__
        if not isinstance(text, str):
            raise InvalidRequest(f"content parts of type {kind!r} cannot be read by this model", f"{path}[{index}]")
        texts.append(text)
    return "\n".join(texts)


def _prepare_tool_call(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            values = json.loads(arguments or "{}")
        except ValueError:
            values = None  # a truncated call of an earlier answer stays text
        if isinstance(values, dict):
            function["arguments"] = ToolArguments(arguments or "{}", values)
    return {**call, "function": function}


def _render(
    source: str, messages: Sequence[Message], variables: Mapping[str, Any], add_generation_prompt: bool, continue_final_message: bool
) -> RenderedPrompt:
    conversation = [prepare_message(message, f"messages[{index}]") for index, message in enumerate(messages)]
    try:
        template = compile_template(source)
        if continue_final_message:
            return _render_continued(template, conversation, variables)
        closed = _render_once(template, conversation, variables)
        if not add_generation_prompt:
            return RenderedPrompt(closed, "")
        opened = _render_once(template, conversation, variables, add_generation_prompt=True)
        return RenderedPrompt(opened, opened[common_prefix(opened, closed) :])
    except (InvalidRequest, RecursionError):
        raise
    except Exception as error:  # a template is a program: whatever it raises is about this conversation, and the client is told
        raise InvalidRequest(f"the chat template refused the messages: {describe(error)}", "messages") from error


def _render_once(
    template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool = False
) -> str:
    return render_bounded(template, {**variables, "messages": messages, "add_generation_prompt": add_generation_prompt})


def _render_continued(template: jinja2.Template, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> RenderedPrompt:
    """The prompt up to the end of the final message's content, which a mark finds wherever the template puts it."""
    *before, final = messages
    marked = {**final, "content": final["content"] + CONTINUATION_MARK}
    text, mark, _ = _render_once(template, [*before, marked], variables).rpartition(CONTINUATION_MARK)
    if not mark:
        raise InvalidRequest(
            "the chat template does not show the final message's content: it cannot be continued", "continue_final_message"
        )
    try:
        start = common_prefix(text, _render_once(template, before, variables))
    except (jinja2.TemplateError, TypeError, ValueError, LookupError):
        # Some templates refuse what comes before on its own, such as nothing at all.
        return RenderedPrompt(text, final["content"])
    return RenderedPrompt(text, text[start:])


def common_prefix(left: str, right: str) -> int:
    """How many characters the two start with in common."""
    if left.startswith(right):
        return len(right)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def describe(error: Exception) -> str:
    """A template's error as one line; where Jinja knows the line, with it."""
    line = getattr(error, "lineno", None)
    message = str(error) or type(error).__name__
    return f"{message} (line {line})" if line else message
