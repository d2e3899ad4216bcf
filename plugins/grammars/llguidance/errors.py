"""What llguidance says of a grammar, as one line without the grammar in it."""

import re
from dataclasses import dataclass

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
