"""Structural tags on the wire, as XGrammar defines them. The kinds of format that are not here are refused by name."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from penstock.api.common_protocol import GrammarDefinition

MAX_ELEMENTS = 256
Count = Annotated[int, Meta(ge=0, le=10_000)]


class _Format(Struct, tag_field="type", forbid_unknown_fields=True):
    """A format is an object; its `type` says which."""


class ConstString(_Format, tag="const_string"):
    value: str


class JsonSchemaContent(_Format, tag="json_schema"):
    json_schema: bool | dict[str, Any]
    style: str = "json"
    any_order: bool = False
    max_whitespace_cnt: int | None = None
    excludes: list[str] = []


class RegexContent(_Format, tag="regex"):
    pattern: str


class GrammarContent(_Format, tag="grammar"):
    grammar: str | GrammarDefinition


class AnyText(_Format, tag="any_text"):
    """Text to the end of what it stands in."""

    excludes: list[str] = []
    max_tokens: int | None = None
    max_chars: int | None = None


class SequenceOf(_Format, tag="sequence"):
    elements: Annotated[list["Format"], Meta(min_length=1, max_length=MAX_ELEMENTS)]


class OneOf(_Format, tag="or"):
    elements: Annotated[list["Format"], Meta(min_length=1, max_length=MAX_ELEMENTS)]


class Tag(_Format, tag="tag"):
    begin: str
    content: "Format"
    end: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_ELEMENTS)]

    @property
    def ends(self) -> tuple[str, ...]:
        return (self.end,) if isinstance(self.end, str) else tuple(dict.fromkeys(self.end))


Tags = Annotated[list[Tag], Meta(min_length=1, max_length=MAX_ELEMENTS)]


class TriggeredTags(_Format, tag="triggered_tags"):
    """Free text in which a trigger, the beginning of some tags' `begin`, must go on as one of them."""

    triggers: Annotated[list[str], Meta(min_length=1, max_length=MAX_ELEMENTS)]
    tags: Tags
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class Dispatch(_Format, tag="dispatch"):
    """Free text in which each pattern must be followed by its format."""

    rules: Annotated[list[tuple[str, "Format"]], Meta(min_length=1, max_length=MAX_ELEMENTS)]
    loop: bool = True
    excludes: list[str] = []


class TagsWithSeparator(_Format, tag="tags_with_separator"):
    tags: Tags
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


class Optional(_Format, tag="optional"):
    content: "Format"


class Star(_Format, tag="star"):
    content: "Format"


class Plus(_Format, tag="plus"):
    content: "Format"


class RepeatOf(_Format, tag="repeat"):
    """`max` -1 is no bound."""

    min: Count
    max: Annotated[int, Meta(ge=-1, le=10_000)]
    content: "Format"


Format = (
    ConstString
    | JsonSchemaContent
    | RegexContent
    | GrammarContent
    | AnyText
    | SequenceOf
    | OneOf
    | Tag
    | TriggeredTags
    | Dispatch
    | TagsWithSeparator
    | Optional
    | Star
    | Plus
    | RepeatOf
)


class LegacyTag(Struct, forbid_unknown_fields=True):
    begin: str
    end: str
    schema: Any = True


class StructuralTag(Struct, forbid_unknown_fields=True):
    """Either `format`, or both of `structures` and `triggers`, which mean triggered tags with JSON in them."""

    type: str = "structural_tag"
    format: Format | None = None
    structures: Annotated[list[LegacyTag], Meta(min_length=1, max_length=MAX_ELEMENTS)] | None = None
    triggers: Annotated[list[str], Meta(min_length=1, max_length=MAX_ELEMENTS)] | None = None
