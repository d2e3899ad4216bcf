"""Structural tags: their wire form, and the structure that they describe."""

from collections.abc import Sequence as List
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.structure import Either, FreeText, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import InvalidRequest
from penstock.engine.system.process import examined
from penstock.serving.constraints.schemas import AS_WRITTEN, JsonReading, read_json, schema_spec
from penstock.serving.requests import GrammarDefinition, mistaken_path

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
    """Text to the end of what contains it."""

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


MAX_WORDS = 64  # each is ruled out wherever another one may come first


class Rule(NamedTuple):
    """What must follow where `pattern` comes up."""

    pattern: str
    following: Structure


@dataclass(frozen=True, slots=True)
class Closing:
    """What ends a part: any of the texts, or without any the answer's own end. `param` is their path."""

    ends: tuple[str, ...] = ()
    param: str = ""

    @property
    def structure(self) -> Structure:
        return either([text(end) for end in self.ends]) if self.ends else Literal("")


def text(written: str) -> Structure:
    return Marker(written) if written else Literal("")


def row(*parts: Structure) -> Structure:
    """One part after the other, in as few objects as that takes."""
    flat: list[Structure] = []
    for part in parts:
        if isinstance(part, Sequence):
            flat += part.parts
        elif part != Literal(""):
            flat.append(part)
    if len(flat) == 1:
        return flat[0]
    return Sequence(tuple(flat)) if flat else Literal("")


def either(parts: List[Structure]) -> Structure:
    different = tuple(dict.fromkeys(parts))
    return different[0] if len(different) == 1 else Either(different)


def dispatch(rules: List[Rule], excludes: tuple[str, ...], closing: Closing, *, is_repeated: bool, param: str) -> Structure:
    """Free text with any number of the rules' patterns in it, or one at most, to where `closing` ends it.

    Raises `InvalidRequest` for too many words, and where it is ambiguous which of them comes first.
    """
    if len(rules) + len(closing.ends) + len(excludes) > MAX_WORDS:
        raise InvalidRequest(f"more than {MAX_WORDS} words are looked for in free text", param)
    if "" in closing.ends:
        raise InvalidRequest("free text needs an end that is not empty", closing.param)
    markers = _distinct([*(rule.pattern for rule in rules), *closing.ends, *excludes], param)

    def until(marker: str) -> Structure:
        return TextUntil(marker, tuple(other for other in markers if other != marker))

    last = either([until(end) for end in closing.ends]) if closing.ends else FreeText(markers)
    if not rules:
        return last
    tagged = either([row(until(rule.pattern), rule.following) for rule in rules])
    return row(Repeat(tagged), last) if is_repeated else either([last, row(tagged, closing.structure)])


def _distinct(words: List[str], param: str) -> tuple[str, ...]:
    """Raises `InvalidRequest` for the same word twice, and for one inside another, which could never come up first."""
    by_length = sorted(words, key=len)
    for position, short in enumerate(by_length):
        for word in by_length[position + 1 :]:
            if short in word:
                raise InvalidRequest(f"both {short[:100]!r} and {word[:100]!r} are looked for in free text", param)
    return tuple(words)


MAX_DEPTH = 32


class TagReader:
    """Reads structural tags. All text that is spelled out in them may have added tokens in it.

    `reading` is for the schemas in them.
    """

    def __init__(self, reading: JsonReading = AS_WRITTEN) -> None:
        self._reading = reading

    def read(self, source: str | dict[str, Any], param: str) -> GrammarSpec:
        """The constraint of a tag as an object or as its JSON text, in the old form or the new one.

        Raises `InvalidRequest` with the path of what is malformed, not known, or not possible to express exactly.
        """
        tag = _converted(read_json(source, param) if isinstance(source, str) else source, param)
        if tag.type != "structural_tag":
            raise InvalidRequest(f"`{param}.type` must be `structural_tag`, got {tag.type[:100]!r}", f"{param}.type")
        is_legacy = tag.structures is not None or tag.triggers is not None
        if (tag.format is not None) == is_legacy:
            raise InvalidRequest(f"`{param}` needs either `format`, or `structures` and `triggers`", param)
        structure = self._legacy(tag, param) if tag.format is None else self._format(tag.format, f"{param}.format", Closing(), 0)
        return GrammarSpec(GrammarKind.STRUCTURE, "", param, self._reading.whitespace_pattern, structure=structure)

    def _legacy(self, tag: StructuralTag, param: str) -> Structure:
        missing = next((name for name in ("structures", "triggers") if getattr(tag, name) is None), None)
        if missing is not None:
            raise InvalidRequest(f"`{param}` needs `{missing}`", f"{param}.{missing}")
        tags: list[tuple[str, Structure]] = []
        for index, item in enumerate(tag.structures or ()):
            content = self._schema(item.schema, f"{param}.structures[{index}].schema")
            tags.append((item.begin, row(content, text(item.end))))
        rules = self._rules(tag.triggers or [], tags, param, f"{param}.structures")
        return dispatch(rules, (), Closing(), is_repeated=True, param=param)

    def _format(self, node: Format, path: str, closing: Closing | None, depth: int) -> Structure:
        """The format and what closes it. Without `closing` something else follows, so that free text would have no end."""
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"structural tags may be nested {MAX_DEPTH} deep", path)
        match node:
            case SequenceOf(elements):
                last = len(elements) - 1
                closings = [None] * last + [closing]
                parts = [self._format(part, f"{path}.elements[{i}]", closings[i], depth + 1) for i, part in enumerate(elements)]
                return row(*parts)
            case OneOf(elements):
                return either([self._format(part, f"{path}.elements[{i}]", closing, depth + 1) for i, part in enumerate(elements)])
            case AnyText():
                return self._any_text(node, path, closing)
            case TriggeredTags():
                return self._triggered_tags(node, path, closing, depth)
            case Dispatch():
                return self._dispatch(node, path, closing, depth)
            case _:
                part = self._bounded(node, path, depth)
                return part if closing is None else row(part, closing.structure)

    def _bounded(self, node: Format, path: str, depth: int) -> Structure:
        """A format that ends by itself."""
        match node:
            case ConstString(value):
                return text(value)
            case JsonSchemaContent():
                return self._json_schema(node, path)
            case RegexContent(pattern):
                return Value(GrammarSpec(GrammarKind.REGEX, pattern, f"{path}.pattern"))
            case GrammarContent(grammar):
                return _grammar(grammar, f"{path}.grammar")
            case Tag():
                return row(text(node.begin), self._inside(node, path, depth))
            case TagsWithSeparator():
                return self._tags_with_separator(node, path, depth)
            case Optional(content):
                return Repeat(self._format(content, f"{path}.content", None, depth + 1), 0, 1)
            case Star(content):
                return Repeat(self._format(content, f"{path}.content", None, depth + 1))
            case Plus(content):
                return Repeat(self._format(content, f"{path}.content", None, depth + 1), 1)
            case RepeatOf(minimum, maximum, content):
                if -1 < maximum < minimum:
                    raise InvalidRequest(f"`max` must be at least `min`, got {maximum}", f"{path}.max")
                bound = None if maximum == -1 else maximum
                return Repeat(self._format(content, f"{path}.content", None, depth + 1), minimum, bound)
        raise AssertionError(node)

    def _inside(self, tag: Tag, path: str, depth: int) -> Structure:
        """A tag's content and its end."""
        return self._format(tag.content, f"{path}.content", Closing(tag.ends, f"{path}.end"), depth + 1)

    def _json_schema(self, node: JsonSchemaContent, path: str) -> Structure:
        if node.style != "json":
            raise InvalidRequest(f"`style` must be `json`, got {node.style[:100]!r}", f"{path}.style")
        if node.max_whitespace_cnt is not None:
            raise InvalidRequest("use `whitespace_pattern`", f"{path}.max_whitespace_cnt")
        for name in ("any_order", "excludes"):
            if getattr(node, name):
                raise InvalidRequest(f"`{name}` is not supported in a structural tag", f"{path}.{name}")
        return self._schema(node.json_schema, f"{path}.json_schema")

    def _schema(self, schema: Any, path: str) -> Structure:
        return Value(schema_spec(schema, path, self._reading))

    def _any_text(self, node: AnyText, path: str, closing: Closing | None) -> Structure:
        for name in ("max_tokens", "max_chars"):
            if getattr(node, name) is not None:
                raise InvalidRequest(f"`{name}` is not supported in a structural tag", f"{path}.{name}")
        return dispatch([], _excluded(node.excludes, path), _needed(closing, path), is_repeated=False, param=path)

    def _triggered_tags(self, node: TriggeredTags, path: str, closing: Closing | None, depth: int) -> Structure:
        excludes = _excluded(node.excludes, path)
        tags = [(tag.begin, self._inside(tag, f"{path}.tags[{i}]", depth)) for i, tag in enumerate(node.tags)]
        rules = self._rules(node.triggers, tags, path, f"{path}.tags")
        first = either([row(text(begin), inside) for begin, inside in tags])
        if node.at_least_one and node.stop_after_first:
            return first if closing is None else row(first, closing.structure)
        rest = dispatch(rules, excludes, _needed(closing, path), is_repeated=not node.stop_after_first, param=path)
        return row(first, rest) if node.at_least_one else rest

    def _dispatch(self, node: Dispatch, path: str, closing: Closing | None, depth: int) -> Structure:
        rules: list[Rule] = []
        for index, (pattern, content) in enumerate(node.rules):
            at = f"{path}.rules[{index}]"
            rules.append(Rule(_stated(pattern, f"{at}[0]"), self._format(content, f"{at}[1]", None, depth + 1)))
        return dispatch(rules, _excluded(node.excludes, path), _needed(closing, path), is_repeated=node.loop, param=path)

    def _tags_with_separator(self, node: TagsWithSeparator, path: str, depth: int) -> Structure:
        one = either([self._bounded(tag, f"{path}.tags[{i}]", depth) for i, tag in enumerate(node.tags)])
        some = one if node.stop_after_first else row(one, Repeat(row(text(node.separator), one)))
        return some if node.at_least_one else Repeat(some, 0, 1)

    def _rules(self, triggers: List[str], tags: List[tuple[str, Structure]], path: str, tags_path: str) -> list[Rule]:
        """Each trigger with what may follow it. Raises `InvalidRequest` for a tag that no trigger begins, or two do, and for idle ones."""
        following: dict[str, list[Structure]] = {_stated(trigger, f"{path}.triggers[{i}]"): [] for i, trigger in enumerate(triggers)}
        for index, (begin, inside) in enumerate(tags):
            matching = [trigger for trigger in following if begin.startswith(trigger)]
            if len(matching) != 1:
                message = "one of the triggers must be the beginning of `begin`, and only one"
                raise InvalidRequest(message, f"{tags_path}[{index}].begin")
            following[matching[0]].append(row(text(begin.removeprefix(matching[0])), inside))
        for index, trigger in enumerate(triggers):
            if not following[trigger]:
                raise InvalidRequest("no tag begins with this", f"{path}.triggers[{index}]")
        return [Rule(trigger, either(parts)) for trigger, parts in following.items()]


def _converted(source: Any, param: str) -> StructuralTag:
    try:
        return msgspec.convert(source, examined(StructuralTag))
    except msgspec.ValidationError as error:
        path = mistaken_path(error)
        where = f"{param}.{path}" if path else param
        message = str(error).partition(" - at ")[0]
        if where.endswith(".type"):
            known = ", ".join(sorted(str(kind.__struct_config__.tag) for kind in Format.__args__))
            message = f"{message}: there are {known}"
        raise InvalidRequest(f"`{where}`: {message}", where) from None
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None


def _grammar(grammar: str | GrammarDefinition, path: str) -> Structure:
    """XGrammar's own are EBNF unless they say otherwise."""
    if isinstance(grammar, str):
        return Value(GrammarSpec(GrammarKind.GBNF, grammar, path))
    return Value(GrammarSpec(grammar.kind, grammar.definition, f"{path}.definition"))


def _excluded(words: List[str], path: str) -> tuple[str, ...]:
    return tuple(_stated(word, f"{path}.excludes[{index}]") for index, word in enumerate(dict.fromkeys(words)))


def _stated(word: str, path: str) -> str:
    if not word:
        raise InvalidRequest(f"`{path}` must not be empty", path)
    return word


def _needed(closing: Closing | None, path: str) -> Closing:
    if closing is None:
        raise InvalidRequest("free text has no end here: put it into a `tag`, or last", path)
    return closing
