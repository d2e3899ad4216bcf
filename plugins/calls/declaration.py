"""What the declaration of every wire format of tool calls says, whatever its calls are made of."""

import re
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from penstock.engine.format_info import Format, FormatInfo
from penstock.engine.parsing import ToolParser
from penstock.engine.tool_format import ToolFormat
from penstock.engine.turn import Turn

SLOT = re.compile(r"\{(\w+)\}")
_TAG = re.compile(r"<[^<>\s]+>")


@dataclass(frozen=True, kw_only=True)
class CallFormat(Format):
    """One wire format of tool calls, declared once: parser, grammar, markers, example and the row in docs/parsers.md follow from it.

    It is registered as the factory of its parsers: `register(row.name, row)`. The fields here are those of `FormatInfo`;
    `markers` and `example` follow from the templates of a subclass where they are not given.
    """

    name: str = ""
    models: str = ""
    quirks: str = ""
    aliases: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    other_signs: tuple[tuple[str, ...], ...] = ()
    counter_signs: tuple[str, ...] = ()
    prompt_tail: str = ""
    markers: tuple[str, ...] = ()
    example: str = ""

    def __deepcopy__(self, memo: object) -> Self:
        return self  # it never changes

    @property
    def info(self) -> FormatInfo:
        """What `register` takes with the parser."""
        return FormatInfo(
            models=self.models,
            markers=self.all_markers,
            quirks=self.quirks,
            aliases=self.aliases,
            signs=self.signs,
            other_signs=self.other_signs,
            counter_signs=self.counter_signs,
            prompt_tail=self.prompt_tail,
            example=self.example or self.written_example(),
        )

    @cached_property
    def all_markers(self) -> tuple[str, ...]:
        """Those that are given, or else those of the templates."""
        return self.markers or self.written_markers()

    @property
    def tool_format(self) -> ToolFormat | None:
        """How calls are written; None for a format that no grammar can be held to."""
        return None

    @abstractmethod
    def __call__(self, turn: Turn) -> ToolParser:
        """The parser of one answer."""

    @abstractmethod
    def written_markers(self) -> tuple[str, ...]:
        """The markers in the templates, in their order."""

    @abstractmethod
    def written_example(self) -> str:
        """A call of `weather` with the city Oslo."""


def tags_of(template: str) -> tuple[str, ...]:
    """The markers in a template that are spelled as tags, each once."""
    return tuple(dict.fromkeys(_TAG.findall(template)))
