"""The contract between what tells calls from text and what reads one call."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol

from penstock.engine.events import SpecialText
from penstock.plugins.automaton import split_symbols
from penstock.plugins.markers import join_pieces


class Progress(Enum):
    """What came of reading on."""

    WAITING = auto()  # for more text
    READ = auto()  # something; there may be more
    OVER = auto()  # the call is complete
    MALFORMED = auto()  # this is no call: only before it has a name


class CallReader(Protocol):
    """Reads one call from a buffer that others have read the beginning of.

    `name` is None until it has been read. Until the call `is_certain`, `head` are the pieces that have been read, which are text if it is
    none after all. A call that was not closed ends where it goes wrong: `left` is what was read then and is text, `end_marker` the marker
    of what is outside that was met instead.
    """

    name: str | None
    is_certain: bool
    head: list[str]
    left: list[str]
    end_marker: str | None

    def read(self) -> Progress: ...

    def settle(self) -> bool:
        """Generation is over: decides what only more text would have decided. True where that leaves something to read."""
        ...

    def finish(self) -> list[str]:
        """Generation is over inside the call: gives back what has been read after `head` and is no part of a call."""
        ...

    def take_arguments(self) -> str:
        """The arguments that have come since the last call of this."""
        ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The markers of what stands around calls, as one call's reader meets them where the call was not closed."""

    markers: tuple[str, ...]
    added_tokens: frozenset[str]

    @property
    def tokens(self) -> tuple[str, ...]:
        """Those that no plain text can be."""
        return tuple(marker for marker in self.markers if self.is_token(marker))

    def is_token(self, marker: str) -> bool:
        return any(token in marker for token in self.added_tokens if token)

    def pieces(self, marker: str) -> list[str]:
        """A marker that was taken for one and is none, as it came."""
        return [marker] if isinstance(marker, SpecialText) else join_pieces(split_symbols(marker, self.added_tokens))
