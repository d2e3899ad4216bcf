"""The built-in tool parsers, by the names under which they are registered."""

from collections.abc import Callable
from functools import lru_cache

from penstock.engine.contracts.parsing import FormatInfo, ToolFormat, ToolParser, Turn
from penstock.plugins.manager import Plugins


@lru_cache
def _plugins() -> Plugins:
    return Plugins.start(["none"])


def tool_parser(name: str) -> Callable[[Turn], ToolParser]:
    return _plugins().tool_parsers[name]


def format_info(name: str) -> FormatInfo:
    return _plugins().tool_parsers.infos[name]


def tool_format(name: str, turn: Turn | None = None) -> ToolFormat:
    found = tool_parser(name)(turn or Turn()).tool_format
    assert found is not None
    return found
