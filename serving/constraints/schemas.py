"""JSON Schemas of requests: their text, the white space they allow, and the closed reading.

Closed: where a schema names properties of an object and says nothing of others, there are no others.

A pydantic model says nothing of further properties, so as written its schema allows any, and small models go on and on with them. Whatever
the closed schema allows, the schema as written allows too, and every property that it names can still come up.

What counts is the object, not the subschema: `allOf`, references, conditions and alternatives beside `properties` speak of one object, so
it is closed around all the names that any of them has. Alternatives without other keywords are closed one by one.
"""

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NoReturn, TypeVar

from msgspec import Struct

from penstock.engine.constraints.limits import MAX_TEXT
from penstock.engine.contracts.grammar import AdditionalProperties, GrammarKind, GrammarSpec
from penstock.engine.errors import InvalidRequest
from penstock.plugins.grammars.json_schema.document import SCHEMA_KEYWORDS, subschemas
from penstock.plugins.grammars.json_schema.negation import Overlap
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS, ASSERTIONS, has_lone_references, lone_reference, unknown_keywords
from penstock.plugins.grammars.regex.syntax import Dialect, MisplacedAnchor, RegexError, full_match, parse
from penstock.plugins.grammars.regex.tree import (
    Chars,
    CharSet,
    Either,
    Literal,
    Node,
    Repeat,
    Sequence,
    intersect,
    of,
)


def read_json(text: str, param: str) -> Any:
    """The value. Raises `InvalidRequest` for what is not JSON, and for an object with a name in it twice: which of them counts is open."""
    try:
        return json.loads(text, object_pairs_hook=_unique_names, parse_constant=_no_constant)
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"`{param}` is not valid JSON: {str(error)[:200]}", param) from None


def write_json(value: Any, param: str) -> str:
    """The value's text, its members in their order. Raises `InvalidRequest` for what has none, such as halves of surrogate pairs."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except RecursionError:
        raise InvalidRequest(f"`{param}` is nested too deeply", param) from None
    except ValueError as error:
        raise InvalidRequest(f"`{param}` cannot be written as JSON: {str(error)[:200]}", param) from None
    return text


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in members if names.count(name) > 1)
        raise ValueError(f"an object has the name {twice[:100]!r} twice")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


MAX_WHITESPACE_PATTERN = 1000
SPELLED = {" ": " ", "\t": r"\t", "\n": r"\n", "\r": r"\r"}
WHITESPACE = of("".join(SPELLED))
# Shorthands mean what they can mean here: Python's `\s` has characters with which a document is no JSON.
DIALECT = Dialect(dot=WHITESPACE, digit=of("0"), word=of("a"), space=WHITESPACE)


def whitespace_regex(pattern: str, param: str) -> str:
    """The pattern with its sets spelled out; a shorthand for white space is JSON's white space.

    Raises `InvalidRequest` for one that cannot be read, and for one that matches anything else: the answer would not be JSON.
    Here, since a backend would say that the mistake is in the JSON that the pattern is for.
    """
    if len(pattern) > MAX_WHITESPACE_PATTERN:
        raise InvalidRequest(f"`{param}` may have {MAX_WHITESPACE_PATTERN} characters", param)
    try:
        return _written(full_match(parse(pattern, DIALECT)))
    except RegexError as error:
        raise InvalidRequest(f"`{param}`: {error}", param) from None
    except MisplacedAnchor as anchor:
        message = f"`{param}`: {anchor}, at position {anchor.position}"
        raise InvalidRequest(message, param) from None
    except _NotWhitespace:
        message = f"`{param}` allows more between the tokens of JSON than spaces, tabs, line feeds and carriage returns"
        raise InvalidRequest(message, param) from None


class _NotWhitespace(Exception):
    pass


def _written(node: Node) -> str:
    match node:
        case Literal(text):
            return "".join(_class(of(character)) for character in text)
        case Chars(chars):
            return _class(chars)
        case Sequence(items):
            return "".join(map(_written, items))
        case Either(items):
            return f"(?:{'|'.join(map(_written, items))})"
        case Repeat(item, minimum, maximum):
            return f"(?:{_written(item)}){{{minimum},{'' if maximum is None else maximum}}}"
    raise AssertionError("anchors are resolved before a pattern is written")


def _class(chars: CharSet) -> str:
    if not chars or intersect(chars, WHITESPACE) != chars:
        raise _NotWhitespace
    return "[" + "".join(spelled for character, spelled in SPELLED.items() if intersect(of(character), chars)) + "]"


_PARTS_BETWEEN_PAUSES = 10_000
_PAUSE_SECONDS = 0.0005


def check_text(value: Any, param: str) -> None:
    """Raises `InvalidRequest` where the value's JSON is certainly too long for a constraint. For a worker where it may be long."""
    if exceeds(value, MAX_TEXT):
        raise InvalidRequest(f"a constraint of more than {MAX_TEXT} characters is refused", param)


def exceeds(value: Any, limit: int) -> bool:
    """Whether the value is certainly longer than `limit` characters as JSON. No more of it is looked at than this takes.

    Writing it out would hold the interpreter's lock to the end, as every call into C does; this here pauses.
    """
    pending = [value]
    num_characters = num_parts = 0
    while pending:
        part = pending.pop()
        num_parts += 1
        num_characters += 3  # a digit, a comma and a space
        if isinstance(part, str):
            num_characters += len(part)
        elif isinstance(part, dict | list):
            if 3 * len(part) > limit:
                return True
            pending += part if isinstance(part, list) else [*part, *part.values()]
        elif isinstance(part, Struct):
            pending += [getattr(part, field) for field in part.__struct_fields__]
        if num_characters > limit:
            return True
        if num_parts % _PARTS_BETWEEN_PAUSES == 0:
            time.sleep(_PAUSE_SECONDS)
    return False


@dataclass(frozen=True, slots=True)
class JsonReading:
    """`whitespace_pattern` is as in `GrammarSpec`. Where the request itself `is_asking` for the closed reading, there is no other."""

    whitespace_pattern: str | None = None
    additional_properties: AdditionalProperties = "open"
    is_asking: bool = False


AS_WRITTEN = JsonReading()
Spec = TypeVar("Spec", GrammarSpec, GrammarSpec | None)


def in_reading(reading: JsonReading, spec: Callable[[JsonReading], Spec]) -> Spec:
    """The constraint in this reading. Where the closed one was not asked for, it comes with the constraint as it is written."""
    chosen = spec(reading)
    if reading.additional_properties == "open" or reading.is_asking or chosen is None:
        return chosen
    written = spec(replace(reading, additional_properties="open"))
    return chosen if written == chosen else replace(chosen, as_written=written)


def schema_spec(schema: Any, param: str, reading: JsonReading, *, is_lenient: bool = False) -> GrammarSpec:
    """A schema as an object or as its JSON text; its members keep their order, which the answer's follow. Raises `InvalidRequest`."""
    check_text(schema, param)
    if isinstance(schema, str):
        schema = read_json(schema, param)
    if not isinstance(schema, dict | bool):
        raise InvalidRequest(f"`{param}` must be a JSON Schema: an object, or one as a string", param)
    if reading.additional_properties == "closed":
        schema = closed(schema)
    return GrammarSpec(GrammarKind.JSON_SCHEMA, write_json(schema, param), param, reading.whitespace_pattern, is_lenient)


MAX_STEPS = 20_000  # keywords that are read for names, and names that are added: a reference counts each time
MAX_ALTERNATIVES = 64  # of `oneOf`: each is compared with each

_IDENTIFIERS = ("$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor")
_SAYS_OF_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties", "propertyNames"})
_GIVEN = frozenset({"const", "enum"})
_DYNAMIC = frozenset({"$dynamicRef", "$recursiveRef"})
_DEMANDS = frozenset({"dependentRequired", "dependentSchemas", "dependencies"})
_COMBINED = frozenset({"allOf", "anyOf", "oneOf"})
_OF_THE_OBJECT = _COMBINED | _DEMANDS | {"if", "then", "else"}
_REVERSED = frozenset({"not", "if", "contains", "propertyNames"})  # where these allow less, the whole may allow more
_DEFINITIONS = frozenset({"$defs", "definitions"})


class Use(IntEnum):
    """What a subschema is for. Of several uses the highest counts."""

    VALUE = 0  # all that is said of a value: objects are closed
    PART = 1  # one of several schemas of an object, which stays open
    AS_WRITTEN = 2  # others speak of the same values, or what it does not allow counts too


def closed(schema: Any) -> Any:
    """An equal document with what closes its objects added. Members keep their order.

    Left open are objects of given values and those with more `minProperties` than names. A document stays as it is where its parts have
    identifiers, where references are not all JSON Pointers in it, where it is malformed, and where it nests too deeply or is too large.
    """
    try:
        return _Closing(schema).whole()
    except (_NotClosed, RecursionError, TypeError, AttributeError):  # the last two where a value is not what its keyword takes
        return schema


class _NotClosed(Exception):
    """The document stays as it is."""


@dataclass(slots=True)
class _Names:
    """What the schemas of one object name. Values are `True`: what is said of a property is said elsewhere."""

    properties: dict[str, bool] = field(default_factory=dict)
    required: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    least: int = 0  # properties that there have to be
    is_naming: bool = False

    def add(self, keyword: str, value: Any) -> None:
        self.is_naming |= keyword in ("properties", "patternProperties")
        match keyword:
            case "properties":
                self.properties |= dict.fromkeys(value.keys(), True)
            case "patternProperties":
                self.patterns |= dict.fromkeys(value.keys(), True)
            case "required":
                self.required |= dict.fromkeys(value, True)
            case "minProperties":
                self.least = max(self.least, value)

    @property
    def can_close(self) -> bool:
        return self.is_naming and (bool(self.patterns) or self.least <= len(self.properties | self.required))

    def close(self, schema: dict[str, Any]) -> None:
        schema["properties"] = self.properties | self.required | schema.get("properties", {})
        if self.patterns:
            schema["patternProperties"] = self.patterns | schema.get("patternProperties", {})
        schema["additionalProperties"] = False


class _Closing:
    """Of one document: first what each subschema is for, then the document with closed objects."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._has_lone_references = has_lone_references(root)
        self._unknown = unknown_keywords(root)
        self._uses: dict[int, Use] = {}
        self._are_apart: dict[tuple[int, bool], bool] = {}
        self._narrowed: list[dict[str, Any]] = []  # alternatives that are apart once they are closed
        self._num_steps = 0

    @functools.cached_property
    def _overlap(self) -> Overlap:
        return Overlap(self._root)

    def whole(self) -> Any:
        """Raises `_NotClosed`, also where closing a part would change what another means."""
        pending: list[tuple[Any, Use]] = [(self._root, Use.VALUE)]
        while pending:
            schema, use = pending.pop()
            if isinstance(schema, dict) and self._uses.get(id(schema), -1) < use:
                self._uses[id(schema)] = use
                pending += self._inner(schema, use)
        if any(self._uses[id(alternative)] is not Use.VALUE for alternative in self._narrowed):
            raise _NotClosed
        return self._written(self._root)

    def _inner(self, schema: dict[str, Any], use: Use) -> Iterator[tuple[Any, Use]]:
        """The subschemas that count, here and behind a reference, and what each is for."""
        is_named = schema is not self._root and any(isinstance(schema.get(name), str) for name in _IDENTIFIERS)
        if is_named or not _DYNAMIC.isdisjoint(schema):
            raise _NotClosed
        for (keyword, *_), child in subschemas(schema):
            if keyword not in _DEFINITIONS:
                yield child, self._use_below(schema, str(keyword), use)
        if isinstance(reference := schema.get("$ref"), str):
            if (target := self._overlap.target(reference)) is None:
                raise _NotClosed
            yield target, self._use_below(schema, "$ref", use)
        if use is Use.VALUE and self._is_closed_alone(schema):
            yield from ((value, Use.AS_WRITTEN) for value in self._shared_values(schema))

    def _use_below(self, schema: dict[str, Any], keyword: str, use: Use) -> Use:
        if use is Use.AS_WRITTEN or keyword in _REVERSED:
            return Use.AS_WRITTEN
        is_value = use is Use.VALUE
        if keyword not in _OF_THE_OBJECT and keyword != "$ref":
            return Use.VALUE if is_value or keyword == "properties" else Use.AS_WRITTEN
        is_value = is_value and self._says_only(schema, keyword)
        match keyword:
            case "oneOf" if not self._are_alternatives_apart(schema["oneOf"], is_value):
                return Use.AS_WRITTEN
            case "allOf":
                is_value = is_value and len(schema["allOf"]) == 1
        return Use.VALUE if is_value else Use.PART

    def _says_only(self, schema: dict[str, Any], keyword: str) -> bool:
        """Whether nothing beside the keyword speaks of an object's properties."""
        if keyword in _DEMANDS or keyword in ("then", "else"):
            return False
        if "$ref" in schema and self._has_lone_references:
            return keyword == "$ref"
        return not any(other in ASSERTIONS and other not in (keyword, "type") for other in schema)

    def _is_closed_alone(self, schema: dict[str, Any]) -> bool:
        """Whether an object is closed here, and not in what the schema refers to or combines."""
        keywords = [keyword for keyword in ("$ref", *_COMBINED) if keyword in schema]
        return not any(self._use_below(schema, keyword, Use.VALUE) is Use.VALUE for keyword in keywords)

    def _are_alternatives_apart(self, alternatives: Any, are_values: bool) -> bool:
        """Whether none of them, as it will be written, allows what another does as it is: then one matches whichever are narrowed."""
        if not isinstance(alternatives, list) or len(alternatives) > MAX_ALTERNATIVES or "const" in self._unknown:
            return False
        key = id(alternatives), are_values
        if key not in self._are_apart:
            written = [self._as_closed(part) if are_values else part for part in alternatives]
            pairs = itertools.permutations(range(len(alternatives)), 2)
            self._are_apart[key] = all(self._overlap.are_disjoint(written[one], alternatives[other]) for one, other in pairs)
            if are_values and self._are_apart[key]:
                self._narrowed += [part for part in alternatives if isinstance(part, dict)]
        return self._are_apart[key]

    def _as_closed(self, schema: Any) -> Any:
        """Where no other schema speaks of the object; others as they are."""
        schema = self._overlap.follow(schema)
        if not isinstance(schema, dict) or "$ref" in schema or not _OF_THE_OBJECT.isdisjoint(schema):
            return schema
        as_closed = {**schema}
        if (names := self._names(schema)) is not None:
            names.close(as_closed)
        return as_closed

    def _written(self, value: Any) -> Any:
        """Any part of the document: references may lead to schemas anywhere in it."""
        if isinstance(value, list):
            return [self._written(item) for item in value]
        if not isinstance(value, dict):
            return value
        use = self._uses.get(id(value))
        if use is None:
            return {name: self._written(member) for name, member in value.items()}
        return self._written_schema(value, use)

    def _written_schema(self, schema: dict[str, Any], use: Use) -> dict[str, Any]:
        kept = ASSERTIONS if use is Use.AS_WRITTEN else ASSERTIONS - SCHEMA_KEYWORDS
        written = {keyword: value if keyword in kept else self._written(value) for keyword, value in schema.items()}
        if use is Use.VALUE and self._is_closed_here(schema) and (names := self._names(schema)) is not None:
            if "$ref" in written and self._has_lone_references:
                written = lone_reference(written)
                written["allOf"] = [{"$ref": written.pop("$ref")}]
            names.close(written)
        return written

    def _is_closed_here(self, schema: dict[str, Any]) -> bool:
        """Also where what it refers to has to stay open, as it is for something else, too."""
        if self._is_closed_alone(schema):
            return True
        target = self._overlap.target(schema["$ref"]) if isinstance(schema.get("$ref"), str) else None
        return isinstance(target, dict) and self._uses[id(target)] is not Use.VALUE

    def _names(self, schema: dict[str, Any]) -> _Names | None:
        """Those that any schema of the object has; None where it stays open."""
        names = _Names()
        for keyword, value in self._statements(schema, set()):
            if keyword in _SAYS_OF_OTHERS or keyword in _GIVEN:
                return None
            names.add(keyword, value)
        self._count(len(names.properties) + len(names.required))
        return names if names.can_close else None

    def _shared_values(self, schema: dict[str, Any]) -> list[Any]:
        """What several schemas of the object may say of the same property."""
        by_name: dict[str, list[Any]] = {}
        by_pattern: list[Any] = []
        for keyword, value in self._statements(schema, set()):
            if keyword == "properties" and isinstance(value, dict):
                for name, said in value.items():
                    by_name.setdefault(name, []).append(said)
            elif keyword == "patternProperties" and isinstance(value, dict):
                by_pattern += value.values()
        if by_pattern and (by_name or len(by_pattern) > 1):
            return [*by_pattern, *itertools.chain(*by_name.values())]
        return [said for several in by_name.values() if len(several) > 1 for said in several]

    def _statements(self, schema: Any, followed: set[str]) -> Iterator[tuple[str, Any]]:
        """The keywords of all schemas that speak of the object, in the order of the document, which is that of properties."""
        if not isinstance(schema, dict):
            return
        if isinstance(schema.get("$ref"), str) and self._has_lone_references:
            schema = {"$ref": schema["$ref"]}
        for keyword, value in schema.items():
            self._count(1)
            if keyword in ANNOTATIONS or keyword in self._unknown:
                continue
            if keyword == "$ref":
                yield from self._statements_referred(value, followed)
            elif keyword in _COMBINED and isinstance(value, list):
                for part in value:
                    yield from self._statements(part, followed)
            elif keyword in _DEMANDS and isinstance(value, dict):
                yield "required", value
                for demanded in value.values():
                    yield from [("required", demanded)] if isinstance(demanded, list) else self._statements(demanded, followed)
            elif keyword in _OF_THE_OBJECT:
                yield from self._statements(value, followed)
            else:
                yield keyword, value

    def _statements_referred(self, reference: Any, followed: set[str]) -> Iterator[tuple[str, Any]]:
        if reference in followed:
            return
        followed.add(reference)
        if isinstance(reference, str):
            yield from self._statements(self._overlap.target(reference), followed)

    def _count(self, num_steps: int) -> None:
        self._num_steps += num_steps
        if self._num_steps > MAX_STEPS:
            raise _NotClosed
