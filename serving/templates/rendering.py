"""Chat templates: from messages in any spelling to the prompt's text, and to the part of it that tells a parser where the answer starts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import takewhile
from operator import call
from pathlib import Path
from typing import Any

import jinja2

from penstock.engine.errors import ConfigurationError, InvalidRequest, JobLimitExceeded
from penstock.engine.system.sandbox import Limits, Sandbox
from penstock.serving.templates.environment import ADDRESS, Interruptible, TemplateEnvironment, TemplateTimeout, render_bounded
from penstock.serving.tools import ToolArguments, ToolPrompt, with_instructions, with_results

Message = Mapping[str, Any]
SHIPPED = Path(__file__).parent
TIME_LIMIT_SECONDS = 5.0
SANDBOX_LIMITS = Limits(cpu_seconds=TIME_LIMIT_SECONDS, memory_bytes=2**28)
NUM_SANDBOX_PROCESSES = 2
MAX_MESSAGE = 1000
MARK = "\ue000penstock-mark\ue001"  # private-use characters: no text of a client's and no template holds it
IMAGE = "\ue000penstock-image\ue001"  # in content, for an image; one that a client writes has no image, which is refused
PROBE = "penstock_probe"  # in JSON as it is, whatever a template escapes there


TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
OPTIONAL = ("name", "tool_calls", "tool_call_id")


def prepare_messages(messages: Sequence[Message], *, knows_developer: bool = True, takes_images: bool = False) -> list[dict[str, Any]]:
    """Messages as templates expect them, whatever spelling the client used: with the fields that templates know and that are set.

    `content` is a string, '' where it is absent; reasoning is there under both its names; a tool call's arguments are a mapping.
    `developer` is OpenAI's newer word for `system`; a template that does not know it is given the older one. Where it `takes_images`, a
    part `image` is a mark in the content.
    Raises `InvalidRequest` for an empty conversation and for content that is not text, with its path.
    """
    if not messages:
        raise InvalidRequest("`messages` must hold at least one message", "messages")
    return [_prepare_message(message, f"messages[{index}]", knows_developer, takes_images) for index, message in enumerate(messages)]


def _prepare_message(message: Message, path: str, knows_developer: bool, takes_images: bool) -> dict[str, Any]:
    role = "system" if message["role"] == "developer" and not knows_developer else message["role"]
    prepared: dict[str, Any] = {"role": role, "content": _content_text(message.get("content"), f"{path}.content", takes_images)}
    prepared |= {name: value for name in OPTIONAL if (value := message.get(name))}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(reasoning, str):
        prepared["reasoning_content"] = prepared["reasoning"] = reasoning
    if "tool_calls" in prepared:
        prepared["tool_calls"] = [_prepare_tool_call(call) for call in prepared["tool_calls"]]
    return prepared


def _content_text(content: Any, path: str, takes_images: bool) -> str:
    # Texts are joined by line ends, as vLLM does for templates that take strings.
    if content is None or isinstance(content, str):
        return content or ""
    joined = "\n".join(_part_text(part, f"{path}[{index}]", takes_images) for index, part in enumerate(content))
    return joined.replace(f"\n{IMAGE}", IMAGE).replace(f"{IMAGE}\n", IMAGE) if takes_images else joined


def _part_text(part: Mapping[str, Any], path: str, takes_images: bool) -> str:
    kind = part.get("type")
    if kind == "image" and takes_images:
        return IMAGE
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        message = f"`{path}` is of type {str(kind)[:100]!r}: only text can be read, and images by models that take them"
        raise InvalidRequest(message, path)
    text = part.get(TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise InvalidRequest(f"`{path}.{TEXT_PARTS[kind]}` must be a string", f"{path}.{TEXT_PARTS[kind]}")
    return text


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


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """`tail` is the end of `text`: what the template wrote to open the assistant's turn, with the text being continued if there is any.

    `continued` is that text as the client wrote it.
    """

    text: str
    tail: str
    continued: str = ""


def template_sandbox(limits: Limits = SANDBOX_LIMITS) -> Sandbox:
    """Where templates of requests are rendered. Its processes start with the first one, or by `prestart`."""
    return Sandbox("rendering the chat template", limits, num_processes=NUM_SANDBOX_PROCESSES, initializer=prepare_sandbox)


def prepare_sandbox() -> None:
    """What the first template in a process would import and compile."""
    render_prompt("{{ messages[0].content }}", [{"role": "user", "content": ""}], {})


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """Renders conversations with the served model's template, or with one that came in a request.

    `source` is None where the model has none: then every chat request is refused. `tool_source` is used instead where tools are given.
    `special_tokens` are the template's variables `bos_token`, `eos_token`, ... `tool_prompt` tells of tools, calls and results where the
    template does not. The model's templates run in the thread that renders, each for at most `time_limit` seconds; those that come in
    requests run in `sandbox`.
    """

    source: str | None
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    tool_source: str | None = None
    tool_prompt: ToolPrompt = field(default_factory=ToolPrompt)
    time_limit: float = TIME_LIMIT_SECONDS
    sandbox: Sandbox = field(default_factory=template_sandbox)

    def __post_init__(self) -> None:
        for source in (self.source, self.tool_source):
            if source is not None:
                try:
                    compile_template(source)
                except jinja2.TemplateError as error:
                    raise ConfigurationError(f"the chat template is not valid Jinja: {describe(error)}") from error

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        template: str | None = None,
        image_token: str | None = None,
    ) -> RenderedPrompt:
        """Raises `InvalidRequest` with the template's own message where it refuses the conversation, fails, or takes too long.

        `template` came in the request. With an `image_token` there may be images: parts `image`, for each of which it is in the prompt.
        Raises `QueueFull` and `EngineUnavailable` as `Sandbox.run` where there is one.
        """
        source = template or self.source_for(tools)
        if source is None:
            raise InvalidRequest(
                "the model has no chat template: use /v1/completions, or start the server with --chat-template", "messages"
            )

        def render(run: Callable[..., Any], param: str) -> RenderedPrompt:
            knows_developer, takes_images = "developer" in source, image_token is not None
            prepared = prepare_messages(messages, knows_developer=knows_developer, takes_images=takes_images)
            described = list(tools or ())
            if has_tools(prepared, described):
                shown: Shown = run(shown_by, source, self._special_tokens)
                prepared, described = self._with_tools(source, prepared, described, shown)
            earlier = prepared[:-1] if continue_final_message else prepared
            if any(map(has_outer_space, earlier)):
                seams: Seams = run(seams_in, source, self._special_tokens)
                prepared[: len(earlier)] = map(seams.without, earlier)
            variables = self._variables(described, template_kwargs or {})
            images: Images | None = None
            if image_token is not None:
                images = run(images_in, source, self._special_tokens, image_token)
                prepared = images.placed(prepared)
            options = (add_generation_prompt, continue_final_message, param, images)
            prompt: RenderedPrompt = run(render_prompt, source, prepared, variables, *options)
            return prompt

        try:
            if template:
                return render(self.sandbox.run_blocking, "chat_template")
            return Interruptible().run(lambda: render(call, "messages"), self.time_limit)
        except JobLimitExceeded as limit:
            raise InvalidRequest(limit.message, "chat_template") from None
        except TemplateTimeout:
            raise InvalidRequest(f"the chat template did not finish within {self.time_limit:g} seconds", "messages") from None
        except RecursionError:
            raise InvalidRequest("the messages are nested too deeply", "messages") from None

    def prestart(self) -> None:
        """Starts the processes for templates that come in requests, and returns."""
        self.sandbox.prestart()

    def close(self) -> None:
        self.sandbox.close()

    @property
    def takes_late_system(self) -> bool:
        """Whether a system message may be anywhere in the conversation."""
        sources = [source for source in (self.source, self.tool_source) if source is not None]
        return all(shows_late_system(source, self._special_tokens) for source in sources)

    @property
    def _special_tokens(self) -> tuple[tuple[str, str], ...]:
        return tuple(sorted(self.special_tokens.items()))

    def _variables(self, tools: list[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return {"tools": tools or None, "documents": None, **self.special_tokens, **template_kwargs}

    def _with_tools(
        self, source: str, messages: list[dict[str, Any]], tools: list[Mapping[str, Any]], shown: "Shown"
    ) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
        """The conversation and the tools for the template: what it would leave out is in the conversation."""
        prompt = self.tool_prompt
        replaces = prompt.replaces(source)
        if replaces or not shown.calls:
            messages = prompt.with_calls(messages)
        if replaces or not shown.results:
            messages = with_results(messages)
        if tools and prompt.form and (replaces or not shown.tools):
            messages, tools = with_instructions(messages, prompt.instructions(tools), has_system=shown.system), []
        return messages, tools

    def source_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """The template that a conversation with these tools is rendered with."""
        return self.tool_source if tools and self.tool_source else self.source


def load_chat_template(name: str) -> str:
    """The text of a template file, or of a shipped template by its name.

    Raises `ConfigurationError` listing the shipped names where there is neither.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        if name not in shipped_names():
            raise ConfigurationError(f"no chat template {name!r}: it is neither a file nor one of {', '.join(shipped_names())}")
        path = SHIPPED / f"{name}.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read the chat template {name!r}: {error}") from error


def with_open_reasoning(source: str, start: str, end: str) -> str:
    """The template, with answers that start inside the reasoning. `enable_thinking=false` closes it at once."""
    opened, closed = (json.dumps(text, ensure_ascii=False) for text in (f"{start}\n", f"\n{end}\n\n"))
    return (
        source.removesuffix("\n")
        + f"{{{{ {opened} if add_generation_prompt else '' }}}}"
        + f"{{{{ {closed} if add_generation_prompt and enable_thinking is defined and enable_thinking is false else '' }}}}"
    )


def shipped_names() -> list[str]:
    return sorted(path.stem for path in SHIPPED.glob("*.jinja"))


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    return TemplateEnvironment().from_string(source)


@lru_cache(maxsize=16)
def wants_parts(source: str) -> bool:
    """Whether a template shows content only where it is a list of parts, as those of some multimodal models do."""

    def shows(content: object) -> bool:
        try:
            text = render_bounded(compile_template(source), {"messages": [{"role": "user", "content": content}]})
        except (jinja2.TemplateError, TypeError, ValueError, LookupError):
            return False
        return MARK in text

    return not shows(MARK) and shows([{"type": "text", "text": MARK}])


@dataclass(frozen=True, slots=True)
class Shown:
    """What of a conversation with tools a template writes into the prompt: a system message, the tools, and earlier calls and results.

    A template without tools that writes whatever role there is does not know that of results: its model never saw it.
    """

    system: bool
    tools: bool
    calls: bool
    results: bool


@lru_cache(maxsize=16)
def shown_by(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Shown:
    """Found out by rendering; a template that fails at the simplest of conversations, for other reasons, is taken to show all."""
    user = {"role": "user", "content": "Hello"}
    function = {"name": PROBE, "description": PROBE, "parameters": {"type": "object", "properties": {"x": {"type": "string"}}}}
    arguments = {"name": "f", "arguments": json.dumps({"x": PROBE})}
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "probe0000", "type": "function", "function": arguments}]}
    result = {"role": "tool", "tool_call_id": "probe0000", "name": "f", "content": "42"}
    variables = {"tools": None, "documents": None, **dict(special_tokens)}

    def text(*messages: Message, **others: Any) -> str:
        prepared = prepare_messages(messages)
        try:
            return _Rendering(source, prepared, variables | others).text(prepared)
        except Exception:  # a template is a program: it refuses this conversation, in whatever way
            return ""

    if not text(user):
        return Shown(system=True, tools=True, calls=True, results=True)
    with_result, with_other = (text(user, calls, {**result, "role": role}) for role in ("tool", PROBE))
    has_tools = PROBE in text(user, tools=[{"type": "function", "function": function}])
    return Shown(
        system=PROBE in text({"role": "system", "content": PROBE}, user),
        tools=has_tools,
        calls=PROBE in with_result,
        results="42" in with_result and (has_tools or with_result.replace("tool", PROBE) != with_other),
    )


@lru_cache(maxsize=16)
def shows_late_system(source: str, special_tokens: tuple[tuple[str, str], ...]) -> bool:
    """Whether a template writes a system message that is not the first one: many refuse it, and some leave it out."""
    said = [{"role": role, "content": PROBE if role == "system" else "Hello"} for role in ("user", "assistant", "user", "system")]
    try:
        return PROBE in _Rendering(source, said, {"tools": None, "documents": None, **dict(special_tokens)}).text(said)
    except Exception:  # a template is a program: it refuses this conversation, in whatever way
        return False


@dataclass(frozen=True, slots=True)
class Seams:
    """White space that a template writes before and after the reasoning and the content of an answer, where calls follow the content.

    A model that was trained on the template writes it too, and parsers leave it in the message. Without it there, a history has it once,
    as it was generated, so that the next turn finds its prefix in the cache.
    """

    before_reasoning: str = ""
    after_reasoning: str = ""
    before_content: str = ""
    after_content: str = ""

    def without(self, message: dict[str, Any]) -> dict[str, Any]:
        """The message as the template takes it."""
        if message["role"] != "assistant":
            return message
        message, content = dict(message), message["content"]
        if reasoning := message.get("reasoning_content"):
            reasoning = reasoning.removeprefix(self.before_reasoning).removesuffix(self.after_reasoning)
            message["reasoning_content"] = message["reasoning"] = reasoning
            content = content.removeprefix(self.before_content)
        message["content"] = content.removesuffix(self.after_content) if message.get("tool_calls") else content
        return message


def has_outer_space(message: Message) -> bool:
    """Whether a part of an answer begins or ends with white space."""
    parts = (message["content"], message.get("reasoning_content", "")) if message["role"] == "assistant" else ()
    return any(part != part.strip() for part in parts)


@lru_cache(maxsize=16)
def seams_in(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Seams:
    """Found out by rendering. A template without reasoning, or that fails, has no white space around it."""
    reasoning, content = f"{PROBE}_reasoning", f"{PROBE}_content"
    call = {"id": "probe0000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = {"role": "assistant", "reasoning_content": reasoning, "content": content, "tool_calls": [call]}
    prepared = prepare_messages([{"role": "user", "content": "Hello"}, answer])
    try:
        text = _Rendering(source, prepared, {"tools": None, "documents": None, **dict(special_tokens)}).text(prepared)
    except Exception:  # a template is a program: it refuses this conversation, in whatever way
        return Seams()
    has_reasoning = reasoning in text
    return Seams(
        before_reasoning=space_around(text, reasoning)[0],
        after_reasoning=space_around(text, reasoning)[1],
        before_content=space_around(text, content)[0] if has_reasoning else "",
        after_content=space_around(text, content)[1],
    )


@dataclass(frozen=True, slots=True)
class Images:
    """How a template is given images: in parts, in the messages of some roles, or by their token in the text."""

    token: str
    roles_with_parts: frozenset[str] = frozenset()

    def placed(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The conversation with the images of tools' results in the user's message after them, where a template shows those alone."""
        if "tool" in self.roles_with_parts or "user" not in self.roles_with_parts:
            return messages
        written: list[dict[str, Any]] = []
        waiting = ""
        for message in [*messages, None]:
            if waiting and (message is None or message["role"] != "tool"):
                if message is not None and message["role"] == "user":
                    message = {**message, "content": waiting + message["content"]}
                else:
                    written.append({"role": "user", "content": waiting})
                waiting = ""
            if message is not None and message["role"] == "tool":
                waiting += IMAGE * message["content"].count(IMAGE)
                message = {**message, "content": message["content"].replace(IMAGE, "")}
            if message is not None:
                written.append(message)
        return written

    def content(self, message: Message) -> str | list[dict[str, Any]]:
        """As the template takes it."""
        content: str = message["content"]
        if IMAGE not in content:
            return content
        if message["role"] not in self.roles_with_parts:
            return content.replace(IMAGE, f"{self.token}\n").removesuffix("\n")
        texts = [{"type": "text", "text": text} for text in content.split(IMAGE)]
        parts = [part for text in texts for part in ({"type": "image"}, text)][1:]
        return [part for part in parts if part.get("text") != ""]


@lru_cache(maxsize=16)
def images_in(source: str, special_tokens: tuple[tuple[str, str], ...], token: str) -> Images:
    """Found out by rendering."""
    call = {"id": "probe0000", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user: Message = {"role": "user", "content": IMAGE + PROBE}
    calls: Message = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "probe0000", "name": "f", "content": IMAGE + PROBE}
    roles = set[str]()
    conversations: dict[str, list[Message]] = {"user": [user], "tool": [{**user, "content": "Hello"}, calls, result]}
    for role, messages in conversations.items():
        rendering = _Rendering(
            source, [], {"tools": None, "documents": None, **dict(special_tokens)}, images=Images(token, frozenset({role}))
        )
        try:
            text = rendering.text(prepare_messages(messages))
        except Exception:  # a template is a program: it refuses this conversation, in whatever way
            continue
        if token in text and "'type'" not in text:  # else the list is there as Python writes it
            roles.add(role)
    return Images(token, frozenset(roles))


def space_around(text: str, part: str) -> tuple[str, str]:
    """The white space before and after a part of a text; none where it is not there."""
    before, found, after = text.partition(part)
    return (before[len(before.rstrip()) :], after[: len(after) - len(after.lstrip())]) if found else ("", "")


def render_prompt(
    source: str,
    messages: list[dict[str, Any]],
    variables: Mapping[str, Any],
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    param: str = "messages",
    images: Images | None = None,
) -> RenderedPrompt:
    """The prompt of prepared messages. Raises `InvalidRequest` for whatever the template raises; `param` is the field at fault."""
    return _Rendering(source, messages, variables, param, images).run(add_generation_prompt, continue_final_message)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """One conversation and one template, rendered as often as it takes to find out where the answer starts."""

    source: str
    messages: list[dict[str, Any]]
    variables: Mapping[str, Any]
    param: str = "messages"
    images: Images | None = None

    def run(self, add_generation_prompt: bool, continue_final_message: bool) -> RenderedPrompt:
        try:
            if continue_final_message:
                return self.continued()
            return self.opened() if add_generation_prompt else RenderedPrompt(self.text(self.messages), "")
        except (InvalidRequest, MemoryError):
            raise
        except RecursionError:
            raise InvalidRequest("the chat template recurses too deeply", self.param) from None
        except Exception as error:  # a template is a program: whatever it raises is about this conversation, and goes to the client
            raise InvalidRequest(f"the chat template refused the messages: {describe(error)}", self.param) from error

    def opened(self) -> RenderedPrompt:
        """The prompt with its generation prompt; the tail is what that has added.

        Some templates open the assistant's turn without being asked to: there the tail is what follows the last message's content.
        """
        closed = self.text(self.messages)
        opened = self.text(self.messages, add_generation_prompt=True)
        if opened != closed:
            return RenderedPrompt(opened, opened[common_prefix(opened, closed) :])
        _, mark, tail = self.text(self.marked(), add_generation_prompt=True).rpartition(MARK)
        return RenderedPrompt(opened, tail if mark and opened.endswith(tail) else "")

    def continued(self) -> RenderedPrompt:
        """The prompt up to the end of the final message's content, which a mark finds wherever the template puts it."""
        text, mark, _ = self.text(self.marked()).rpartition(MARK)
        if not mark:
            raise InvalidRequest("the chat template leaves out the final message, so it cannot be continued", "continue_final_message")
        content = self.messages[-1]["content"]
        try:
            start = common_prefix(text, self.text(self.messages[:-1]))
        except (jinja2.TemplateError, TypeError, ValueError, LookupError):
            # Some templates refuse what comes before on its own, such as nothing at all.
            return RenderedPrompt(text, content, content)
        return RenderedPrompt(text, text[start:], content)

    def marked(self) -> list[dict[str, Any]]:
        """The messages with a mark after the last one's content."""
        *before, final = self.messages
        return [*before, {**final, "content": final["content"] + MARK}]

    def text(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        if (images := self.images) is not None:
            messages = [message | {"content": images.content(message)} for message in messages]
        if wants_parts(self.source):
            messages = [
                message if isinstance(message["content"], list) else message | {"content": [{"type": "text", "text": message["content"]}]}
                for message in messages
            ]
        variables = {**self.variables, "messages": messages, "add_generation_prompt": add_generation_prompt}
        return render_bounded(compile_template(self.source), variables)


def has_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are tools, or were in earlier turns."""
    return bool(tools) or any(message["role"] == "tool" or "tool_calls" in message for message in messages)


def common_prefix(left: str, right: str) -> int:
    """How many characters the two start with in common."""
    if left.startswith(right):
        return len(right)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def describe(error: Exception) -> str:
    """A template's error; where Jinja knows the line, with it. It may quote objects by their address, and texts of any length."""
    line = getattr(error, "lineno", None)
    message = ADDRESS.sub("", str(error))[:MAX_MESSAGE] or type(error).__name__
    return f"{message} (line {line})" if line else message
