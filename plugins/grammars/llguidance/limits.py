"""The limits of one grammar in llguidance, and what its error messages mean."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLParserLimits

# Each takes four items in a row of the parser; the time to compile grows with their square.
MAX_OPTIONAL_PROPERTIES = 1500
MAX_ITEMS_IN_ROW = 2000  # of other grammars, which may begin a row with every character: 4 ms each

# Of the CPU, for what is done on the event loop. In an ambiguous grammar it grows with the third power of the text.
MAX_STEP_SECONDS = 0.01
TOO_SLOW = "a step of this grammar takes too long"


def parser_limits(*, is_schema: bool = False) -> "LLParserLimits":
    """Errors do not quote the grammar, which is the client's. Rows of a schema are long, but there are few of them."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=4 * MAX_OPTIONAL_PROPERTIES + 1000 if is_schema else MAX_ITEMS_IN_ROW,
        initial_lexer_fuel=500_000,
        step_lexer_fuel=200_000,
        step_max_items=100_000 if is_schema else 50_000,
        max_lexer_states=25_000,  # of 1 to 2 kB, shared by all answers with one grammar; the collection's schemas need a tenth
        max_grammar_size=500_000,
        verbose_errors=False,
    )


_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ")
_JSON_SCHEMA = "failed to compile JSON schema: "
_UNIMPLEMENTED = "Unimplemented keys: "
_LIMITS = ("fuel", "too large", "too complex", "too many", "limit", "stack level")
MAX_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Complaint:
    """`line` and `column` count from 1; None where the message names no place."""

    message: str
    line: int | None = None
    column: int | None = None

    @property
    def is_about_size(self) -> bool:
        return any(word in self.message.lower() for word in _LIMITS)


def read_complaint(text: str) -> Complaint:
    """Takes the place off the front, and the quoted grammar and the state off the end."""
    place = _PLACE.match(text)
    message = (text[place.end() :] if place else text).removeprefix(_JSON_SCHEMA)
    # A regex is quoted first, then what is wrong with it.
    _, _, reason = message.partition("\nerror: ")
    message = (f"regex: {reason}" if reason else message).partition("\n")[0].partition("; following special tokens")[0]
    if "panic" in message.lower():
        message = "llguidance failed on it"
    elif message.startswith(_UNIMPLEMENTED):
        keyword = message.split('"')[1]
        message = f"`{keyword}` is not supported"
    elif message.startswith("NoExtension"):
        message = "no text satisfies it, or none that this model's tokens can spell"
    elif "Regex is empty" in message:  # and what is quoted of it is the client's
        message = "no string has its pattern, format and lengths together"
    elif message.startswith("oneOf constraints"):
        message = "its alternatives may share values, which is not supported"
    message = message.partition(": json-schema:")[0].strip()
    return Complaint(message[:MAX_LENGTH], *(map(int, place.groups()) if place else ()))
