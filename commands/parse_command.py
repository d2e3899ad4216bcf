"""`penstock parse`: the message that the server would answer where a model has written a text."""

import json
import sys
from collections.abc import Iterator
from typing import Any

from penstock.api.chat_protocol import AssistantMessage
from penstock.commands.files import opened
from penstock.commands.parse_arguments import ParseArguments
from penstock.commands.parse_lines import Failure, Flags, LineParser, as_json
from penstock.engine.errors import ConfigurationError
from penstock.plugins.manager import Plugins


def run_parse_command(arguments: ParseArguments) -> int:
    """Prints the message, or one for each line, and returns the exit code. Raises `ConfigurationError` for what cannot be read at all."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    plugins = Plugins.start(
        ["none", *arguments.plugins], arguments.without, reasoning_parser=arguments.reasoning_parser, tool_parser=arguments.tool_parser
    )
    parser = LineParser(plugins, flags_of(arguments, plugins))
    return parse_lines(arguments, parser) if arguments.is_jsonl else parse_text(arguments, parser)


def flags_of(arguments: ParseArguments, plugins: Plugins) -> Flags:
    """What stands for keys that a line does not have."""
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
