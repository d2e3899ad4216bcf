"""How a model writes tool calls, as a grammar needs it: the mirror image of a tool parser."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.grammar import GrammarSpec
from penstock.engine.structure import Structure


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called, and the JSON Schema of its arguments as a constraint: an object, exactly or leniently."""

    name: str
    arguments: GrammarSpec


class ToolFormat(Protocol):
    """The envelope of one wire format. Everything that its grammar allows, its parser reads as calls of these tools."""

    @property
    def opening(self) -> str:
        """The marker, or else the text, with which the first call begins. With `auto` the grammar applies from there on."""
        ...

    def calls(self, tools: Sequence[CallableTool], *, is_single: bool) -> Structure:
        """Everything after `opening`: one call of any of the tools, or, unless `is_single`, one or more."""
        ...
