"""How a call is named in formats that write its name, and perhaps its id, before arguments in JSON."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

MAX_LENGTH = 512
_FIELD = re.compile(r'\s*[^\s<>{}\[\]"]*\s*')

Identity = tuple[str, str | None]
"""A call's name, and its id where the format has one."""


def name_only(fields: Mapping[str, str]) -> Identity | None:
    """The call is what its field `name` says, and `id` where there is one."""
    return (fields["name"], fields.get("id") or None) if fields["name"] else None


@dataclass(frozen=True, slots=True)
class CallHead:
    """The fields between a call's opening and its arguments: single words with white space around them.

    `fields` has, for each field, the markers that end it, and the field that follows each: None for the arguments. The first field is the
    first. A brace belongs to the arguments that it opens. `identify` makes a call's identity of the fields, or None where they are none.
    """

    fields: Mapping[str, Mapping[str, str | None]]
    identify: Callable[[Mapping[str, str]], Identity | None] = name_only

    @property
    def first(self) -> str:
        return next(iter(self.fields))


def is_field(text: str) -> bool:
    """Whether this may be a field, or the beginning of one. What cannot be one does not become one by more text."""
    return len(text) <= MAX_LENGTH and _FIELD.fullmatch(text) is not None
