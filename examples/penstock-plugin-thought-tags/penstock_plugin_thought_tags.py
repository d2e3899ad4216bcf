"""The reasoning parser `thought_tags`: `<thought>why</thought>because`."""

from penstock import Event, MarkerBuffer, Phase, Reasoning, ReasoningParser, Register, Text, Turn, hookimpl


class ThoughtTags(ReasoningParser):
    """Content until `<thought>`, reasoning until `</thought>`, as often as the model likes.

    Where a grammar holds the answer, all that is not reasoning from the start is content.
    """

    start_marker = "<thought>"
    end_marker = "</thought>"

    def __init__(self, turn: Turn) -> None:
        self._buffer = MarkerBuffer(turn.added_tokens)
        self._starts = () if turn.is_constrained else (self.start_marker,)
        # A prompt that ends with an open marker has the model begin inside its reasoning.
        self._is_reasoning = turn.phase(self.start_marker, self.end_marker) is Phase.REASONING

    @property
    def phase(self) -> Phase:
        return Phase.REASONING if self._is_reasoning else Phase.CONTENT

    def feed(self, text: str) -> list[Event]:
        """Gives out all that cannot be part of a marker any more."""
        self._buffer.feed(text)
        events: list[Event] = []
        while True:
            pieces, marker = self._buffer.take_until(*((self.end_marker,) if self._is_reasoning else self._starts))
            events += self._events(pieces)
            if marker is None:
                return events
            self._is_reasoning = not self._is_reasoning

    def finish(self) -> list[Event]:
        """Gives out the start of a marker that the model never completed."""
        return self._events(self._buffer.finish())

    def _events(self, pieces: list[str]) -> list[Event]:
        kind = Reasoning if self._is_reasoning else Text
        return [kind(piece) for piece in pieces]


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register("thought_tags", ThoughtTags)
