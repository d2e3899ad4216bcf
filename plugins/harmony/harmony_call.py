"""One call as Harmony writes it: ` to=functions.NAME`, the rest of the header in any order, and a JSON object as the message."""

from collections.abc import Sequence

from penstock.engine.events import SpecialText
from penstock.plugins.harmony.harmony_header import CHANNEL, ENDS, MAX_LENGTH
from penstock.plugins.json_repair import JsonRepair

_BOUNDARIES = frozenset({*ENDS, "<|start|>", CHANNEL})


class HarmonyCall:
    """What is known of a call. `head` are the pieces of its header so far, which are text where it is none after all."""

    def __init__(self, head: Sequence[str] = ()) -> None:
        self.head = list(head)
        self.arguments = JsonRepair()
        self._words: list[str] = []
        self._is_named = False
        self._length = 0

    @property
    def name(self) -> str:
        """The first word. Empty where there is none."""
        text = "".join(self._words)
        return "" if not text or text[0].isspace() else text.split(maxsplit=1)[0]

    @property
    def is_too_long(self) -> bool:
        return self._length > MAX_LENGTH

    def add(self, pieces: list[str]) -> None:
        """Text of the header between two markers, as it comes."""
        self.head += pieces
        self._length += sum(map(len, pieces))
        if not self._is_named:
            self._words += pieces

    def mark(self, marker: str) -> None:
        """A marker that belongs to the header."""
        self.head.append(marker)
        self._is_named = True

    @property
    def is_over(self) -> bool:
        """Nothing more of the arguments comes: they are complete, or what comes makes no sense."""
        return self.arguments.is_complete or self.arguments.is_malformed

    def feed(self, text: str, position: int) -> int:
        """Reads arguments from `position`; returns where they stopped. A token that ends messages ends them too."""
        if isinstance(text, SpecialText) and text in _BOUNDARIES:
            self.arguments.is_malformed = True
            return position
        return self.arguments.feed(text, position)
