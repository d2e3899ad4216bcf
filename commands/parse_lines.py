"""The lines of `penstock parse --jsonl`: a text and how it is to be read in each, a message for each."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.api.chat_protocol import AssistantMessage
from penstock.api.tools import read_tool
from penstock.commands.written_answer import WrittenAnswer
from penstock.engine.errors import InvalidRequest, PenstockError
from penstock.plugins.manager import Plugins
from penstock.plugins.registry import NONE, Registry


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
