"""MiniMax-M2 for clients that take the reasoning apart themselves: all of it is content, and the `<think>` of the prompt is put back."""

from penstock.engine.events import Event, Text
from penstock.engine.format_info import FormatInfo
from penstock.engine.hooks import Register, hookimpl
from penstock.engine.parsing import Phase
from penstock.engine.turn import Turn
from penstock.plugins.start_phase import start_phase


class AppendThink:
    """Gives `<think>` and then the whole answer, markers too. Nothing is reasoning, so constraints hold from the first token."""

    start_marker = "<think>"
    end_marker = "</think>"
    phase = Phase.CONTENT

    def __init__(self, turn: Turn) -> None:
        self._prefix = "" if start_phase(turn) is Phase.CONTENT else self.start_marker

    def feed(self, text: str) -> list[Event]:
        """Takes text as it arrived, however it is cut."""
        if not text:
            return []
        if text in (self.start_marker, self.end_marker):
            text = str(text)  # a marker that is a special token is to be seen here
        prefix, self._prefix = self._prefix, ""
        return [Text(prefix), Text(text)] if prefix else [Text(text)]

    def finish(self) -> list[Event]:
        """Gives the marker even where nothing came after it."""
        prefix, self._prefix = self._prefix, ""
        return [Text(prefix)] if prefix else []


@hookimpl
def register_reasoning_parsers(register: Register) -> None:
    register(
        "minimax_m2_append_think",
        AppendThink,
        FormatInfo(
            models="MiniMax-M2",
            markers=("<think>", "</think>"),
            quirks="Nothing is reasoning: the content is `<think>` and the whole answer. Constraints hold from the first token.",
            aliases=("minimax-m2-append-think", "minimax_append_think", "minimax-append-think"),
            prompt_tail="<think>\n",
            example="Capitals.\n</think>\n\nOslo.",
        ),
    )
