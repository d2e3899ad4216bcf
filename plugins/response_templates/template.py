"""A checkpoint's own `response_template`: how its answers are read, as its tokenizer config describes it."""

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from penstock.engine.contracts.parsing import SpecialText, Turn
from penstock.engine.errors import ConfigurationError
from penstock.plugins.markers import join_pieces, split_symbols
from penstock.plugins.response_templates.symbol_pattern import Captures, Found, Program, Search

REASONING_FIELDS = ("thinking", "reasoning_content", "reasoning")
CALLS_FIELD = "tool_calls"


@dataclass(frozen=True, slots=True)
class Delimiter:
    """Literals, the longest first, or one pattern; without either there is no delimiter."""

    literals: tuple[str, ...] = ()
    pattern: str | None = None

    def __bool__(self) -> bool:
        return bool(self.literals) or self.pattern is not None

    def add_to(self, program: Program) -> int:
        """Returns how many patterns it adds to the program."""
        for literal in self.literals:
            program.add_literal(literal)
        if self.pattern is not None:
            program.add_pattern(self.pattern)
        return len(self.literals) + (self.pattern is not None)


@dataclass(frozen=True, slots=True)
class Field:
    """One field of the answer. `content` is the name of what reads it, with its `arguments`; `transform` makes the value of that."""

    name: str
    opening: Delimiter
    closing: Delimiter
    content: str
    arguments: Mapping[str, Any]
    join: str
    transform: Any
    transforms_each: bool

    @property
    def is_reasoning(self) -> bool:
        return self.name in REASONING_FIELDS

    @property
    def trims_space(self) -> bool:
        return self.content == "text" and self.arguments.get("strip", True) is not False


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """`implicit` is the field outside all others, of which `fields` are those that something opens."""

    fields: tuple[Field, ...]
    implicit: Field | None
    anchor: Delimiter

    def field(self, *names: str) -> Field | None:
        """The first of these names that the template has."""
        fields = [*self.fields, *([self.implicit] if self.implicit else [])]
        return next((found for name in names for found in fields if found.name == name), None)

    def watched(self, current: Field | None, added_tokens: frozenset[str]) -> "tuple[Program, tuple[Field | None, ...]]":
        """What may come up in `current`, and the field that each opens: None for what closes it."""
        return _watched(self.fields, self.implicit, current, added_tokens)


def template_of(turn: Turn) -> ResponseTemplate:
    """The checkpoint's; without one, a template in which nothing opens anything. Raises `ConfigurationError` for one that is wrong."""
    if turn.response_template is None:
        return ResponseTemplate((), None, Delimiter())
    return _load(json.dumps(turn.response_template))


@lru_cache(maxsize=8)
def _load(text: str) -> ResponseTemplate:
    spec = json.loads(text)
    fields = spec.get("fields") if isinstance(spec, dict) else None
    if not isinstance(fields, dict) or not all(isinstance(one, dict) for one in fields.values()) or spec.get("version", 1) != 1:
        raise ConfigurationError("the model's `response_template` is none of version 1: it has to have `fields`")
    loaded = [_field(name, one) for name, one in fields.items()]
    implicit = [one for one in loaded if not one.opening]
    if len(implicit) > 1:
        raise ConfigurationError("more than one field of the model's `response_template` is without `open`")
    return ResponseTemplate(
        tuple(one for one in loaded if one.opening), implicit[0] if implicit else None, _delimiter(spec, "start_anchor")
    )


def _field(name: str, spec: Mapping[str, Any]) -> Field:
    return Field(
        name=name,
        opening=_delimiter(spec, "open"),
        closing=_delimiter(spec, "close"),
        content=spec.get("content", "text"),
        arguments=spec.get("content_args", {}),
        join=spec.get("join") or "",
        transform=spec.get("transform"),
        transforms_each=bool(spec.get("transform_each")),
    )


def _delimiter(spec: Mapping[str, Any], key: str) -> Delimiter:
    given, pattern = spec.get(key, ()), spec.get(f"{key}_pattern")
    literals = [given] if isinstance(given, str) else list(given)
    if not all(isinstance(one, str) and one for one in literals) or not isinstance(pattern, str | None):
        raise ConfigurationError(f"`{key}` of the model's `response_template` has to be a text or several")
    return Delimiter(tuple(sorted(literals, key=len, reverse=True)), pattern)


@lru_cache(maxsize=64)
def _program(delimiters: tuple[Delimiter, ...], added_tokens: frozenset[str]) -> tuple[Program, tuple[int, ...]]:
    program = Program(added_tokens)
    owners = [place for place, delimiter in enumerate(delimiters) for _ in range(delimiter.add_to(program))]
    return program, tuple(owners)


def _watched(
    fields: Sequence[Field], implicit: Field | None, current: Field | None, added_tokens: frozenset[str]
) -> tuple[Program, tuple[Field | None, ...]]:
    if current is not None and current is not implicit:
        program, owners = _program((current.closing,), added_tokens)
        return program, (None,) * len(owners)
    closing = (implicit.closing,) if implicit is not None else ()
    program, owners = _program((*(one.opening for one in fields), *closing), added_tokens)
    opened = (*fields, None)
    return program, tuple(opened[owner] for owner in owners)


def after_anchor(template: ResponseTemplate, tail: str, added_tokens: frozenset[str]) -> list[str]:
    """The symbols of a prompt's tail that belong to the answer already."""
    symbols = split_symbols(tail, added_tokens)
    program, _ = _program((template.anchor,), added_tokens)
    start = 0
    for found in _matches(program, symbols):
        start = found.end
    return symbols[start:]


def _matches(program: Program, symbols: Sequence[str]) -> Iterator[Found]:
    """One after the other."""
    position = 0
    while program.entries and position <= len(symbols):
        search = Search(program, position)
        while search.found is None and search.position < len(symbols):
            search.feed(symbols[search.position])
        if search.found is None:
            search.finish()
        if search.found is None:
            return
        yield search.found
        position = max(search.found.end, position + 1)


_PLACEHOLDER = re.compile(r"\{(\w+(?:\.\w+)*)\}")
_KEY = re.compile(r"(?<=[{,])\s*(\w+)\s*:")


def parse_content(text: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """The value of a field's text. Raises `ValueError` where it has none, and for what the template itself gets wrong."""
    if name == "json":
        return _json(text, arguments)
    if name == "xml-inline":
        return _tags(text, arguments)
    if name == "kv-lines":
        return _lines(text, arguments)
    stripped = text.strip() if arguments.get("strip", True) else text
    if name == "text":
        return stripped
    if name == "int":
        return int(stripped)
    if name == "float":
        return float(stripped)
    if name == "bool":
        return stripped.lower() in ("true", "1")
    raise ValueError(f"there is no content parser {name!r}")


def transformed(value: Any, transform: Any, captures: Mapping[str, str], *, each: bool) -> Any:
    """The value in the shape that the template gives it. Raises `ValueError` for a placeholder without a value."""
    if transform is None:
        return value
    if not each:
        return _filled(transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("`transform_each` is for lists of objects")
    return [_filled(transform, {**captures, **item}) for item in value]


def _filled(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {key: _filled(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_filled(value, scope) for value in transform]
    placeholder = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if placeholder is None:
        return transform
    value: Any = scope
    for key in placeholder[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"nothing is known for the placeholder {transform}")
        value = value[key]
    return value


def _json(text: str, arguments: Mapping[str, Any]) -> Any:
    """JSON, perhaps with keys without quotation marks and with strings between delimiters of their own."""
    parts = _strings(text, arguments.get("string_delims", []))
    if arguments.get("unquoted_keys"):
        parts = _quoted_keys(parts)
    try:
        return json.loads("".join(json.dumps(part) if is_string else part for part, is_string in parts))
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip() if arguments.get("strip", True) else text
        raise


def _strings(text: str, delimiters: list[list[str]]) -> list[tuple[str, bool]]:
    """The text in parts; those that are strings without what delimits them."""
    parts: list[tuple[str, bool]] = []
    position = 0
    while delimiters:
        found = [(text.find(opening, position), opening, closing) for opening, closing in delimiters]
        start, opening, closing = min((one for one in found if one[0] >= 0), default=(-1, "", ""))
        end = text.find(closing, start + len(opening)) if start >= 0 else -1
        if end < 0:
            break
        parts += [(text[position:start], False), (text[start + len(opening) : end], True)]
        position = end + len(closing)
    return [*parts, (text[position:], False)]


def _quoted_keys(parts: list[tuple[str, bool]]) -> list[tuple[str, bool]]:
    return [(part if is_string else _KEY.sub(r'"\1":', part), is_string) for part, is_string in parts]


def _tags(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What `tag_pattern` finds, by its groups `key` and `value`."""
    program = Program(frozenset())
    program.add_pattern(arguments.get("tag_pattern", ""))
    values: dict[str, Any] = {}
    for found in _matches(program, text):
        groups = groups_of(text, found.captures)
        if "key" not in groups:
            raise ValueError("`tag_pattern` has no group `key`")
        value = _nested(groups.get("value", ""), arguments)
        key = groups["key"]
        if key in values and arguments.get("merge_duplicates"):
            earlier = values[key] if isinstance(values[key], list) else [values[key]]
            value = [*earlier, value]
        values[key] = value
    return values


def groups_of(symbols: Sequence[str], captures: Captures, first: int = 0) -> dict[str, str]:
    """The texts of named groups; of one that was passed several times, the last. The first symbol is at the place `first`."""
    groups: dict[str, str] = {}
    starts: dict[str, int] = {}
    for name, position in captures:
        if name in starts:
            groups[name] = "".join(symbols[starts.pop(name) - first : position - first])
        else:
            starts[name] = position
    return groups


def _lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    separator = arguments.get("kv_sep", ":")
    values: dict[str, Any] = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, found, value = line.partition(separator)
        if found:
            values[key.strip()] = _nested(value.strip(), arguments)
    return values


def _nested(text: str, arguments: Mapping[str, Any]) -> Any:
    parser = arguments.get("value_parser")
    return text if parser is None else parse_content(text, parser.get("name", "text"), parser.get("args", {}))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Text inside one field, or outside all."""

    field: Field | None
    pieces: list[str]


@dataclass(frozen=True, slots=True)
class Opened:
    """A field begins: with the text that opened it, and what its pattern captured there."""

    field: Field
    pieces: list[str]
    groups: dict[str, str]


@dataclass(frozen=True, slots=True)
class Closed:
    """A field ends, with the text that closed it."""

    field: Field
    pieces: list[str]


Part = Stretch | Opened | Closed


class TemplateReader:
    """Gives the parts of an answer, none later than it is certain. Text outside all fields belongs to the implicit field, or to none."""

    def __init__(self, template: ResponseTemplate, added_tokens: frozenset[str]) -> None:
        self.current: Field | None = template.implicit
        self.has_begun = False
        """Whether a field has been opened, or anything but white space has come outside all."""
        self.template = template
        self._added_tokens = added_tokens
        self._waiting: deque[str] = deque()  # symbols that have been looked at and may belong to a delimiter
        self._first = 0  # which symbol of the answer the first waiting one is
        self._watch()

    def _watch(self) -> None:
        program, self._opened = self.template.watched(self.current, self._added_tokens)
        self._search = Search(program, self._first)

    def feed(self, symbols: Iterable[str]) -> list[Part]:
        """Takes characters, and added tokens as a whole."""
        parts: list[Part] = []
        unread = deque(symbols)
        while unread or self._search.found is not None:
            if self._search.found is not None:
                self._take_delimiter(parts, unread)
            else:
                symbol = unread.popleft()
                self._waiting.append(symbol)
                self._search.feed(symbol)
        self._release(self._search.first_open, parts)
        return parts

    def finish(self) -> list[Part]:
        """The answer is over."""
        parts: list[Part] = []
        self._search.finish()
        while self._search.found is not None:
            unread: deque[str] = deque()
            self._take_delimiter(parts, unread)
            parts += self.feed(unread)
            self._search.finish()
        self._release(self._first + len(self._waiting), parts)
        return parts

    def _take_delimiter(self, parts: list[Part], unread: deque[str]) -> None:
        found = self._search.found
        assert found is not None
        self._release(found.start, parts)
        taken = [self._waiting.popleft() for _ in range(found.end - found.start)]
        unread.extendleft(reversed(self._waiting))
        self._waiting.clear()
        self._first = found.end
        opened = self._opened[found.index]
        left = self.current
        if (left is not None and left is not self.template.implicit) or (opened is None and left is not None):
            parts.append(Closed(left, join_pieces(taken)))
        if opened is not None:
            parts.append(Opened(opened, join_pieces(taken), groups_of(taken, found.captures, found.start)))
            self.has_begun = True
        self.current = opened if opened is not None else self.template.implicit
        self._watch()

    def _release(self, end: int, parts: list[Part]) -> None:
        """Emits the waiting symbols before `end`."""
        pieces = [self._waiting.popleft() for _ in range(end - self._first)]
        self._first = end
        if pieces:
            parts.append(Stretch(self.current, join_pieces(pieces)))
            self.has_begun = self.has_begun or any(isinstance(piece, SpecialText) or not piece.isspace() for piece in pieces)
