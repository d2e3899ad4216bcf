"""The built-in tool parsers, by the names under which they are registered."""

from collections.abc import Callable
from functools import lru_cache

from penstock.engine.format_info import FormatInfo
from penstock.engine.parsing import ToolParser
from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn
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
