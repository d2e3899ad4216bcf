"""The header of one Harmony message: `<|start|>assistant to=… <|channel|>commentary <|constrain|>json`, up to `<|message|>`."""

from penstock.engine.events import Event, Reasoning, Text

ROLE = "<|start|>assistant"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = "to=functions."
CHANNELS = frozenset({"analysis", "commentary", "final"})

MAX_LENGTH = 600
"""Characters: a tool's name has 256 at most. What is longer is no header, however it goes on."""


class Header:
    """Holds the pieces of a header while it is open, and says what they make.

    `first` is the marker that it begins with and `pieces` what has come of it. `channel` is None where there is none; `recipient` is
    somebody else than a function.
    """

    def __init__(self, first: str, pieces: list[str]) -> None:
        self._opening = pieces
        self._rest: list[str] = []
        self._is_opened_by_role = first == ROLE
        self.channel: str | None = None
        self.recipient: str | None = None
        self.is_valid = True
        self._is_plain = True
        self._after = first
        self._segment: list[str] = []
        self._length = 0

    @property
    def pieces(self) -> list[str]:
        return [*self._opening, *self._rest]

    @property
    def pieces_after_role(self) -> list[str]:
        """What it says of its message: whose it is says nothing."""
        return self._rest if self._is_opened_by_role else self.pieces

    @property
    def is_too_long(self) -> bool:
        return self._length > MAX_LENGTH

    def add(self, pieces: list[str]) -> None:
        """Text between two markers, as it comes."""
        self._rest += pieces
        self._segment += pieces
        self._length += sum(map(len, pieces))

    def mark(self, marker: str) -> None:
        """A marker that belongs to the header: what came before it is complete."""
        self.close()
        self._rest.append(marker)
        self._after = marker

    def close(self) -> None:
        """What has come since the last marker is complete."""
        segment = "".join(self._segment)
        words = segment.split()
        self._segment.clear()
        if self._after == CHANNEL:
            self.channel = words.pop(0).lower() if words else None
            self.is_valid = self.is_valid and self.channel in CHANNELS
        is_plain = not words and not segment[-1:].isspace() and self._after in (ROLE, CHANNEL)
        self._is_plain = self._is_plain and is_plain
        for word in words:
            if word.startswith("to="):
                self.recipient = word[len("to=") :]
            elif self._after == ROLE or "<" in word:
                self.is_valid = False

    def text_if_cut(self) -> list[Event]:
        """A header that stops before its message: nothing is lost with one that says no more than the channel."""
        self.close()
        if self.is_valid and self._is_plain:
            return []
        return [Text(piece) for piece in self.pieces]

    @property
    def kind(self) -> type[Text] | type[Reasoning]:
        """What its message is. What goes to built-in tools is nothing for the reader."""
        if self.channel in (None, "final"):
            return Text
        is_for_user = self.recipient in (None, "user")
        return Text if self.channel == "commentary" and is_for_user else Reasoning
