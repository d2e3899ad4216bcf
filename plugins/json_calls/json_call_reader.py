"""What reads the text of one tool call in JSON, wherever that stands."""

from typing import Protocol

from penstock.plugins.automaton import MarkerAutomaton


class JsonCallReader(Protocol):
    """Reads one call as it arrives: its name, the id that the format itself gives it, and its arguments.

    `can_start` says that this is a call, and which one: from then on its arguments may be given out. `is_named` says that it is one where
    the answer ends here. `is_refused` says that it may be well-formed and is none, so that nothing in it is taken for one either.
    `is_malformed` at the first character that makes no sense; `left` is what was read before that and is no part of the call.
    """

    name: str | None
    call_id: str | None
    is_malformed: bool
    is_refused: bool

    @property
    def can_start(self) -> bool: ...

    @property
    def is_named(self) -> bool: ...

    @property
    def is_complete(self) -> bool: ...

    @property
    def depth(self) -> int:
        """How many brackets are open."""
        ...

    @property
    def left(self) -> str: ...

    @property
    def num_held(self) -> int:
        """How many characters were read last that a marker in a string may cut off; where the call `is_malformed`, it has."""
        ...

    def watch(self, ends: MarkerAutomaton) -> None:
        """These markers may end the call within a string."""
        ...

    def feed(self, text: str, position: int) -> int:
        """Reads from `position`; returns where it stopped: the end of the text, or of the call, or what is malformed."""
        ...

    def take_arguments(self) -> str:
        """The arguments that have come since the last call of this."""
        ...

    def end_at_marker(self) -> bool:
        """No more comes: whether a marker in a string that is open ended the call, which is malformed then."""
        ...

    def close(self) -> None:
        """The call ends here: arguments that are open are closed, so that they are a JSON document."""
        ...

    def stop(self) -> None:
        """No more comes: arguments that were held back may be taken."""
        ...
