"""`penstock parse`: the message that the server would make of a text."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import msgspec

from penstock.cli.flags import ParseArguments, opened
from penstock.engine.contracts.hooks import ReasoningParserFactory, ToolParserFactory
from penstock.engine.contracts.parsing import SpecialText, Turn
from penstock.engine.deltas import FinishReason, SequenceDelta
from penstock.engine.errors import ConfigurationError, InvalidRequest, PenstockError
from penstock.engine.text.answer import BlankText, ParserChain, visible_events
from penstock.plugins.manager import NONE, Plugins, Registry
from penstock.plugins.markers import join_pieces, split_symbols
from penstock.serving.messages import AssistantMessage, Message, MessageReader
from penstock.serving.tools import read_tool


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenAnswer:
    """`special_tokens` are those that are special tokens in the text; `chunk_sizes`, in characters, begin again when they are used up.

    Of special tokens that no parser has consumed, `shown_tokens` are content and others are left out.
    """

    text: str
    prompt_tail: str = ""
    tools: Sequence[Mapping[str, Any]] = ()
    response_template: Mapping[str, Any] | None = None
    special_tokens: frozenset[str] = frozenset()
    shown_tokens: frozenset[str] = frozenset()
    chunk_sizes: Sequence[int] = ()

    @property
    def turn(self) -> Turn:
        return Turn(
            prompt_tail=self.prompt_tail,
            added_tokens=self.special_tokens,
            tools=self.tools,
            tool_choice="auto",
            response_template=self.response_template,
        )

    def pieces(self) -> Iterator[str]:
        """The text as parsers get it: each special token by itself, and the rest in chunks."""
        sizes = cycle(self.chunk_sizes or (max(len(self.text), 1),))
        for piece in join_pieces(split_symbols(self.text, self.special_tokens)):
            if isinstance(piece, SpecialText):
                yield SpecialText(piece, is_hidden=piece not in self.shown_tokens)
                continue
            start = 0
            while start < len(piece):
                end = start + next(sizes)
                yield piece[start:end]
                start = end

    def message(self, reasoning_parser: ReasoningParserFactory | None, tool_parser: ToolParserFactory | None) -> AssistantMessage:
        """What a whole answer would hold: the same reader over the same chain of parsers."""
        tools = [] if tool_parser is None else [tool_parser(self.turn)]
        chain = ParserChain(tools, reasoning=None if reasoning_parser is None else reasoning_parser(self.turn))
        blank, reader, message = BlankText(), MessageReader(), Message()
        for piece in self.pieces():
            events = blank.feed(visible_events(chain.feed(piece), skip_special_tokens=True))
            message.add(reader.feed(SequenceDelta(0, events=events)))
        events = [*blank.feed(visible_events(chain.finish(), skip_special_tokens=True)), *blank.finish()]
        message.add(reader.feed(SequenceDelta(0, events=events, finish_reason=FinishReason.STOP)))
        return AssistantMessage.of(message, has_reasoning_parser=reasoning_parser is not None)


class Line(msgspec.Struct, kw_only=True):
    """One line, or the flags that stand for what a line leaves out. Keys that it does not know are ignored."""

    text: str
    reasoning_parser: str | None = None
    tool_parser: str | None = None
    tools: list[dict[str, Any]] | None = None
    prompt_tail: str | None = None
    special_tokens: list[str] | None = None
    chunk_sizes: list[int] | None = None


class Flags(Line, kw_only=True):
    """Those for lines that do not say."""

    text: str = ""
    response_template: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Failure:
    """A line that cannot be read, counted from 1, and why."""

    line: int
    message: str


class LineParser:
    """Reads texts with any of the parsers that are loaded."""

    def __init__(self, plugins: Plugins, flags: Flags) -> None:
        self._plugins = plugins
        self._flags = flags

    def messages(self, lines: Iterable[bytes]) -> Iterator[AssistantMessage | Failure]:
        """One for each line that is not blank."""
        for number, content in enumerate(lines, start=1):
            if content.strip():
                yield self._message(number, content)

    def _message(self, number: int, content: bytes) -> AssistantMessage | Failure:
        try:
            return self.message(msgspec.json.decode(content, type=Line))
        except (PenstockError, ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            return Failure(number, " ".join(str(error).split()))
        except Exception as error:  # a parser that raises is what this command is there to find; the other lines are still read
            return Failure(number, f"a parser failed: {type(error).__name__}: {error}")

    def message(self, line: Line) -> AssistantMessage:
        """Raises `PenstockError` or `ValueError` for what cannot be read."""
        flags, plugins = self._flags, self._plugins
        reasoning = self._name(plugins.reasoning_parsers, line.reasoning_parser or flags.reasoning_parser)
        tool = self._name(plugins.tool_parsers, line.tool_parser or flags.tool_parser)
        given_tools, sizes = (flags.tools if line.tools is None else line.tools), (line.chunk_sizes or flags.chunk_sizes or ())
        check_tools(given_tools or ())
        if any(size < 1 for size in sizes):
            raise ValueError("`chunk_sizes` are 1 or more")
        answer = WrittenAnswer(
            text=line.text,
            prompt_tail=self._prompt_tail(reasoning, line),
            tools=given_tools or (),
            response_template=flags.response_template,
            special_tokens=frozenset((flags.special_tokens if line.special_tokens is None else line.special_tokens) or ()),
            shown_tokens=self._markers(reasoning, tool),
            chunk_sizes=sizes,
        )
        return answer.message(
            None if reasoning is None else plugins.reasoning_parsers[reasoning], None if tool is None else plugins.tool_parsers[tool]
        )

    def _name(self, registry: Registry[Any], name: str | None) -> str | None:
        return None if name in (None, NONE) else self._plugins.resolve(registry, f"--{registry.kind.replace(' ', '-')}", name)

    def _markers(self, reasoning: str | None, tool: str | None) -> frozenset[str]:
        """Of both parsers: what is neither reasoning nor a call after all is shown with them."""
        infos = (self._plugins.reasoning_parsers.infos.get(reasoning or ""), self._plugins.tool_parsers.infos.get(tool or ""))
        return frozenset(marker for info in infos if info is not None for marker in info.markers)

    def _prompt_tail(self, reasoning: str | None, line: Line) -> str:
        for given in (line.prompt_tail, self._flags.prompt_tail):
            if given is not None:
                return given
        info = None if reasoning is None else self._plugins.reasoning_parsers.infos.get(reasoning)
        return "" if info is None else info.prompt_tail


def check_tools(tools: Iterable[dict[str, Any]]) -> None:
    """Raises `ValueError` for what the server would refuse, since parsers rely on that."""
    for index, definition in enumerate(tools):
        try:
            read_tool(definition, f"tools[{index}]")
        except InvalidRequest as error:
            raise ValueError(f"`tools[{index}]`: {error}") from error


def as_json(result: AssistantMessage | Failure) -> str:
    """One line: null for what is not there, and an array of calls in any case."""
    if isinstance(result, Failure):
        return json.dumps({"error": {"line": result.line, "message": result.message}}, ensure_ascii=False)
    calls = [{"id": call.id, "name": call.function.name, "arguments": call.function.arguments} for call in result.tool_calls or ()]
    shown = {"reasoning_content": result.reasoning_content or None, "content": result.content, "tool_calls": calls}
    return json.dumps(shown, ensure_ascii=False)


def run_parse_command(arguments: ParseArguments) -> int:
    """Prints the message, or one for each line, and returns the exit code. Raises `ConfigurationError` for what cannot be read at all."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    plugins = Plugins.start(
        ["none", *arguments.plugins], arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
    )
    parser = LineParser(plugins, flags_of(arguments, plugins))
    return parse_lines(arguments, parser) if arguments.is_jsonl else parse_text(arguments, parser)


def flags_of(arguments: ParseArguments, plugins: Plugins) -> Flags:
    """The values of keys that a line does not have."""
    return Flags(
        reasoning_parser=plugins.reasoning_parsers.active,
        tool_parser=plugins.tool_parsers.active,
        tools=None if arguments.tools_path is None else read_tools(arguments.tools_path),
        prompt_tail=arguments.prompt_tail,
        response_template=None if arguments.response_template_path is None else read_response_template(arguments.response_template_path),
        special_tokens=list(arguments.special_tokens),
        chunk_sizes=None if arguments.chunk_size is None else [arguments.chunk_size],
    )


def read_tools(path: str) -> list[dict[str, Any]]:
    tools = read_json(path)
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ConfigurationError(f"{path} holds no tools: they are an array of objects, as in a request")
    return tools


def read_response_template(path: str) -> dict[str, Any]:
    content = read_json(path)
    template = content.get("response_template", content) if isinstance(content, dict) else None
    if not isinstance(template, dict) or "fields" not in template:
        raise ConfigurationError(f"{path} holds no response template: that is an object with `fields`")
    return template


def read_json(path: str) -> Any:
    with opened(path) as file:
        try:
            return json.load(file)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path} is not JSON: {error}") from error


def parse_lines(arguments: ParseArguments, parser: LineParser) -> int:
    has_failed = False
    with opened(arguments.path) as file:
        for result in parser.messages(file):
            has_failed |= isinstance(result, Failure)
            print(as_json(result), flush=True)
    return 1 if has_failed else 0


def parse_text(arguments: ParseArguments, parser: LineParser) -> int:
    with opened(arguments.path) as file:
        try:
            text = file.read().decode()
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{arguments.path} is not UTF-8: {error}") from error
    try:
        message = parser.message(Flags(text=text))
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    print(as_json(message) if arguments.is_json else "\n".join(shown(message)))
    return 0


def shown(message: AssistantMessage) -> Iterator[str]:
    """For people: each part under its name."""
    for name, text in (("reasoning_content", message.reasoning_content), ("content", message.content)):
        if text:
            yield f"[{name}]"
            yield text
    for call in message.tool_calls or ():
        yield f"[tool call {call.id}]"
        yield f"{call.function.name} {call.function.arguments}"
