"""How a family marks up calls that are made of named parameters: the texts between which names and values stand."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from penstock.plugins.schema_types import ANY_TYPE, STRING, Types
from penstock.plugins.schema_values import TextValue


@dataclass(frozen=True, slots=True)
class Tag:
    """What an opening tag says. `is_string` is the format's own word on the parameter's type, where it has one."""

    name: str
    is_string: bool | None = None


class Heads(Enum):
    """Where names stand."""

    TAGS = auto()  # in the opening tags
    LINES = auto()  # after the call's marker, up to the next one or the end of the line; a parameter's in a pair of markers


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterMarkup:
    """`call` opens a call and `call_end` closes it; in between each parameter has a name and, before `value_end`, a value.

    With `Heads.TAGS`, `call` and `parameter` are the beginnings of tags, the rest of which, up to `tag_end`, `read_tag` reads, and `lead`
    is what stands between the call's marker and such a tag, whatever comes before it. With `Heads.LINES`, `name_ends` follow the call's
    name, where there are any, and `name_end` and `value` stand between a parameter's name and its value; before `value`, a type may stand
    between `type_start` and `type_end`.

    `section` is what all calls stand in, `skipped` are markers between calls that say nothing. `implied_ends` end a value that was not
    closed; those that are added tokens do so in all formats. A value may also stand between `literal` and `literal_end`, which nothing
    else ends. Where `may_lack_section`, a call of an offered tool may begin without it; where `is_offered_only`, others are no calls.
    """

    call: str
    call_end: str
    parameter: str
    value_end: str
    read_tag: Callable[[str], Tag | None]
    heads: Heads = Heads.TAGS
    tag_end: str = ">"
    lead: str = ""
    name_ends: tuple[str, ...] = ()
    name_end: str = ""
    type_start: str = ""
    type_end: str = ""
    value: str = ""
    section: str = ""
    section_end: str = ""
    skipped: tuple[str, ...] = ()
    implied_ends: tuple[str, ...] = ()
    literal: str = ""
    literal_end: str = ""
    may_lack_section: bool = False
    is_offered_only: bool = False
    trims_newline: bool = False
    reads_untyped_json: bool = False
    wrappers: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them, the outermost first."""
        tags = (self.section, *self.skipped, self.call, self.lead, *self.name_ends, self.parameter, self.name_end)
        types = (self.type_start, self.type_end)
        ends = (self.literal_end, self.value_end, self.call_end, self.section_end)
        return tuple(marker for marker in (*tags, *types, self.value, self.literal, *ends) if marker)

    def can_write(self, name: str) -> bool:
        """Whether a tool or a parameter of this name is read back as such."""
        if any(mark in name for mark in "<>\n\"'") or name != name.strip():
            return False
        return bool(name)

    def new_value(self, types: Types | None, tag: Tag) -> TextValue:
        """What reads a value of a parameter that has these types by its schema."""
        is_json = tag.is_string is False
        if tag.is_string and (types is None or "string" in types):
            types = STRING
        elif types is None and (is_json or self.reads_untyped_json):
            types, is_json = ANY_TYPE, True
        return TextValue(types, is_json=is_json, trims_newline=self.trims_newline)


_ATTRIBUTE = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))(.*)""", re.DOTALL)
_IS_STRING = re.compile(r"""\bstring\s*=\s*["']?(true|false)\b""", re.IGNORECASE)


def read_bare_tag(text: str) -> Tag | None:
    """`NAME`, what is left of `<function=NAME>`; in quotes also where a model adds them."""
    name = text.strip().strip("\"'")
    return Tag(name) if name else None


def read_attribute_tag(text: str) -> Tag | None:
    """`"NAME"`, what is left of `<invoke name="NAME">`, with a `string="true"` after it in some formats."""
    found = _ATTRIBUTE.fullmatch(text)
    name = "" if found is None else (found[1] or found[2] or found[3] or "").strip()
    if found is None or not name:
        return None
    is_string = _IS_STRING.search(found[4])
    return Tag(name, None if is_string is None else is_string[1].lower() == "true")
