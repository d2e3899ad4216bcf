"""Two tool parsers one after the other."""

from penstock.engine.contracts.parsing import Event, Text, ToolParser, Turn
from penstock.plugins.calls.json_stream import CallEnvelope, JsonStream
from penstock.plugins.calls.stream import ParsersInTurn
from penstock.testing import read


class InBrackets(ToolParser):
    """Inside a call from `[` to `]`."""

    is_in_call = False

    def feed(self, text: str) -> list[Event]:
        for character in text:
            self.is_in_call = character == "[" or (self.is_in_call and character != "]")
        return [Text(text)]

    def finish(self) -> list[Event]:
        return []


def test_no_text_overtakes_what_the_first_parser_holds_when_the_second_one_begins_a_call() -> None:
    text = "[[CALL [/CALL][Ce[CALL"
    for pieces in ([text], list(text), [text[:2], text[2:]]):
        parser = ParsersInTurn(JsonStream(Turn(tool_choice="auto"), CallEnvelope(openings=("[CALL]", "Call"))), InBrackets)
        assert read(parser, pieces) == [Text(text)]
