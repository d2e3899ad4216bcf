"""A client's JSON Schema as a document: how it is read and walked, where its references lead, whether they ever end, and the values that it
gives outright.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NoReturn
from urllib.parse import unquote

from penstock.engine.constraints.limits import position
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS, dumps

MAX_DEPTH = 192  # of the document: a schema within another is up to two levels deeper, and a value in it has levels of its own

_CONTAINERS = (dict, list)


def parse_document(text: str, param: str) -> Any:
    """The decoded document, members in the client's order. Raises `UnsupportedGrammar` where it is not JSON or nests too deeply."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise UnsupportedGrammar(f"not valid JSON: {error}", param) from error
    if text.count("{") + text.count("[") <= MAX_DEPTH:
        return document
    level: list[Iterable[Any]] = [[document]]
    for _ in range(MAX_DEPTH + 2):
        inner = [child for members in level for child in members if isinstance(child, _CONTAINERS)]
        level = [child.values() if isinstance(child, dict) else child for child in inner]
        if not level:
            return document
    raise UnsupportedGrammar(f"nested deeper than {MAX_DEPTH}", param)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


Steps = tuple[str | int, ...]  # from the document's root: names and positions
# Of a subschema that is being read: that of the one around it, with that itself, then the steps from there. Written out when reported.
Place = tuple[Any, ...]
ROOT: Place = ()

SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})
SCHEMAS_IN_LISTS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
SINGLE_SCHEMAS = frozenset(
    {
        *("items", "additionalItems", "contains", "unevaluatedItems"),
        *("additionalProperties", "propertyNames", "unevaluatedProperties"),
        *("not", "if", "then", "else"),
    }
)
SCHEMA_KEYWORDS = SCHEMAS_BY_NAME | SCHEMAS_IN_LISTS | SINGLE_SCHEMAS
_SCHEMA_TYPES = (dict, bool)


def subschemas(schema: Any) -> Iterator[tuple[Steps, Any]]:
    """The subschemas one level below, in the schema's order, each with the steps there. Values that are no schemas are passed over."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword not in SCHEMA_KEYWORDS:
            continue
        if isinstance(value, dict) and keyword in SCHEMAS_BY_NAME:
            for name, child in value.items():
                if isinstance(child, _SCHEMA_TYPES):
                    yield (keyword, name), child
        elif isinstance(value, list) and keyword in SCHEMAS_IN_LISTS:
            for place, child in enumerate(value):
                yield (keyword, place), child
        elif keyword in SINGLE_SCHEMAS and isinstance(value, _SCHEMA_TYPES):
            yield (keyword,), value


def steps_of(place: Place, known: Mapping[int, Steps]) -> Steps:
    """A place from the document's root. `known` are those of schemas, by identity."""
    steps: Steps = ()
    while place:
        around, *below = place
        steps = (*below, *steps)
        if not around:
            break
        place, schema = around
        if id(schema) in known:
            return known[id(schema)] + steps
    return steps


def walk(schema: Any) -> Iterator[tuple[Steps, dict[str, Any]]]:
    """Every subschema that is an object, the outermost first."""
    pending: list[tuple[Steps, Any]] = [((), schema)]
    while pending:
        steps, current = pending.pop()
        if isinstance(current, dict):
            yield steps, current
            pending += [(steps + below, child) for below, child in subschemas(current)]


def path(steps: Steps) -> str:
    """As it follows the name of the request's field: `.properties.a.anyOf[0]`."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def pointer(steps: Steps) -> str:
    """A JSON Pointer (RFC 6901)."""
    return "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in steps)


def at(document: Any, steps: Steps) -> Any:
    for step in steps:
        document = document[step]
    return document


def reachable(document: Any) -> frozenset[int]:
    """The identities of the subschemas that count: definitions only where something that counts refers to them."""
    pending: list[Any] = [document]
    found: set[int] = set()
    while pending:
        schema = pending.pop()
        if not isinstance(schema, dict) or id(schema) in found:
            continue
        found.add(id(schema))
        pending += [child for steps, child in subschemas(schema) if steps[0] not in ("$defs", "definitions")]
        reference = schema.get("$ref")
        if isinstance(reference, str):
            with suppress(UnsupportedGrammar):  # which is refused where it is followed
                pending.append(resolve(document, unquote(reference), "")[1])
    return frozenset(found)


OPTIONS = "x-guidance"  # what llguidance itself would take from the schema's root


@dataclass(frozen=True, slots=True)
class SchemaDocument:
    """`has_anchors`: parts of it may be named other than by their place."""

    content: Any
    identifiers: "Identifiers"
    has_anchors: bool


@lru_cache(maxsize=1)  # one document is read strictly, leniently and with references inlined, one after the other; no reading changes it
def read_document(text: str, param: str) -> SchemaDocument:
    schema = parse_document(text, param)
    is_escaped = "\\u" in text  # where a keyword may be spelled otherwise
    if is_escaped or not text.isascii():
        _check_text(schema, param)
    if isinstance(schema, dict) and OPTIONS in schema:
        raise UnsupportedGrammar(f"`{OPTIONS}` is refused: what it sets is not the schema's to say", f"{param}.{OPTIONS}")
    if isinstance(schema, dict) and not isinstance(schema.get("$defs", {}), dict):
        raise UnsupportedGrammar("`$defs` must be an object", f"{param}.$defs")
    has_anchors = is_escaped or '"$anchor"' in text or '"$dynamicAnchor"' in text
    identifiers = Identifiers.of(schema, text) if is_escaped or '"$id"' in text or '"id"' in text else Identifiers.NONE
    return SchemaDocument(schema, identifiers, has_anchors)


class Identifiers(Enum):
    """Whether parts of a document have names of their own, from which references count."""

    NONE = auto()
    OF_ROOT = auto()
    OF_PARTS = auto()

    @classmethod
    def of(cls, schema: Any, text: str) -> "Identifiers":
        names = ("$id", "id")
        if isinstance(schema, dict) and sum(text.count(f'"{name}"') for name in names) == sum(name in schema for name in names):
            return cls.OF_ROOT if any(isinstance(schema.get(name), str) for name in names) else cls.NONE
        named = [part for _, part in walk(schema) if isinstance(part.get("$id"), str) or isinstance(part.get("id"), str)]
        return cls.OF_PARTS if any(part is not schema for part in named) else cls.OF_ROOT if named else cls.NONE


def _check_text(document: Any, param: str) -> None:
    """Raises `UnsupportedGrammar` for text that JSON in UTF-8 cannot hold."""
    try:
        json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise unwritable(document, param) from error


def unwritable(document: Any, param: str) -> UnsupportedGrammar:
    """The refusal of text or a number in the document that JSON cannot hold, with its place."""
    return UnsupportedGrammar("a lone surrogate or a number out of range", param + path(_innermost((), document) or ()))


def _innermost(steps: Steps, value: Any) -> Steps | None:
    """The path of the innermost offending value. The document is known not to be deep."""
    if isinstance(value, dict):
        for name, child in value.items():
            found = steps if _is_unwritable(name) else _innermost((*steps, name), child)
            if found is not None:
                return found
    elif isinstance(value, list):
        for place, child in enumerate(value):
            found = _innermost((*steps, place), child)
            if found is not None:
                return found
    return steps if _is_unwritable(value) else None


def _is_unwritable(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)


def resolve(root: Any, reference: str, param: str) -> tuple[Steps, Any]:
    """The steps of a reference within the document and what they lead to. Raises `UnsupportedGrammar` with `param`."""
    if reference != "#" and not reference.startswith("#/"):
        raise UnsupportedGrammar(f"only references within the schema (#/...) are supported, got {dumps(reference)}", param)
    steps: list[str | int] = []
    target = root
    for written in reference.split("/")[1:]:
        name = written.replace("~1", "/").replace("~0", "~")
        if isinstance(target, Mapping) and name in target:
            target = target[name]
            steps.append(name)
        elif isinstance(target, list) and (place := position(name, len(target))) is not None:
            target = target[place]
            steps.append(place)
        else:
            raise UnsupportedGrammar(f"{dumps(reference)} leads nowhere in this schema", param)
    return tuple(steps), target


_DEFINITION = "#/$defs/"
MAX_ROUNDS = 8  # of looking through all definitions; what takes more is left to be found while it is generated
_DEMANDING = frozenset({"$ref", "allOf", "anyOf", "required", "minItems"})
_OTHER_TYPES = frozenset({"null", "boolean", "integer", "number", "string"})  # whose values hold no others
_HOLDING_OTHERS = ("object", "array")


def without_endless(content: dict[str, Any]) -> Steps | None:
    """Lets no value satisfy the references in `content` that none can: a member that may be left out always is, then.

    Where that leaves the whole without a value, the place of a reference to blame. Definitions are looked for in `$defs` only.
    """
    search = _RecursionSearch(content)
    if not search.endless:
        return None
    if "#" in search.endless:
        return search.blamed(content, ())
    for _, schema in list(walk(content)):
        if schema.get("$ref") in search.endless:
            del schema["$ref"]
            schema["enum"] = []
    return None


class _RecursionSearch:
    def __init__(self, content: dict[str, Any]) -> None:
        targets = {"#": content, **{_DEFINITION + name: schema for name, schema in content.get("$defs", {}).items()}}
        self.endless = set(targets)
        order = [*reversed(targets)]  # a target mostly comes after what refers to it
        for _ in range(MAX_ROUNDS):
            ended = [reference for reference in order if reference in self.endless and self._ends(reference, targets[reference])]
            if not ended:
                return
        self.endless.clear()

    def _ends(self, reference: str, target: Any) -> bool:
        has_end = self.has_end(target)
        if has_end:
            self.endless.discard(reference)
        return has_end

    def has_end(self, schema: Any) -> bool:
        """Whether a value may satisfy it, where none does what is still taken for endless. Bounds and the like are not looked at."""
        if not isinstance(schema, dict):
            return schema is not False
        if _DEMANDING.isdisjoint(schema) and schema.get("type") != []:
            return True
        reference, parts, options = schema.get("$ref"), schema.get("allOf"), schema.get("anyOf")
        if isinstance(reference, str) and reference in self.endless:
            return False
        if isinstance(parts, list) and not all(map(self.has_end, parts)):
            return False
        if isinstance(options, list) and options and not any(map(self.has_end, options)):
            return False
        types = schema.get("type")
        names = [types] if isinstance(types, str) else types
        if not isinstance(names, list) or not _OTHER_TYPES.isdisjoint(names):
            return True
        return any(name not in _HOLDING_OTHERS or self._has_ends(schema, name) for name in names)

    def _has_ends(self, schema: dict[str, Any], name: str) -> bool:
        demanded = self.demanded_members(schema) if name == "object" else self.demanded_items(schema)
        return all(self.has_end(child) for _, child in demanded)

    def demanded_members(self, schema: dict[str, Any]) -> list[tuple[Steps, Any]]:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            return []
        return [(("properties", name), properties[name]) for name in required if isinstance(name, str) and name in properties]

    def demanded_items(self, schema: dict[str, Any]) -> list[tuple[Steps, Any]]:
        least = schema.get("minItems", 0)
        first = schema.get("prefixItems", [])
        items = schema.get("items", True)
        if not isinstance(least, int) or not isinstance(first, list) or isinstance(items, list):
            return []
        demanded: list[tuple[Steps, Any]] = [(("prefixItems", place), child) for place, child in enumerate(first[:least])]
        return [*demanded, (("items",), items)] if least > len(first) else demanded

    def blamed(self, schema: Any, steps: Steps) -> Steps:
        if not isinstance(schema, dict):
            return steps
        if schema.get("$ref") in self.endless:
            return (*steps, "$ref")
        joined = schema.get("allOf", [])
        parts: list[tuple[Steps, Any]] = [(("allOf", place), part) for place, part in enumerate(joined if isinstance(joined, list) else ())]
        for below, child in [*parts, *self.demanded_members(schema), *self.demanded_items(schema)]:
            if not self.has_end(child):
                return self.blamed(child, steps + below)
        return (*steps, "anyOf") if "anyOf" in schema else steps


MAX_CHARACTERS = 20_000  # of the values
MAX_SUBSCHEMAS = 200
# What is no part of what a value has to meet, or means different things by draft, or takes jsonschema long.
_UNJUDGED = frozenset(
    {
        *("$ref", "$dynamicRef", "$recursiveRef", "$id", "id", "$anchor", "format", "dependencies", "items", "additionalItems"),
        *("unevaluatedProperties", "unevaluatedItems", "multipleOf", "exclusiveMinimum", "exclusiveMaximum", "definitions", "$defs"),
    }
)
_QUANTIFIERS = re.compile(r"[*+?{]")


def has_given_values(schema: Mapping[str, Any]) -> bool:
    """Whether values are given beside something else."""
    return len(schema) > 1 - ("allOf" in schema) and next(_givers(schema), None) is not None


def remaining_values(schema: Mapping[str, Any], keywords: frozenset[str]) -> list[Any] | None:
    """Of the values that the schema, or a part of its `allOf`, gives, those that satisfy it; None where that is not found out.

    It is where one of `keywords` occurs, the others being enforced as they are: then only an `enum` has to be enforced. It is the package
    jsonschema that judges the values. No pattern is tried that could take it long, and no reference is followed.
    """
    from jsonschema import Draft202012Validator  # type: ignore[import-untyped]

    values = next(_givers(schema), None)
    parts = [part for _, part in walk(schema)]
    said = {keyword for part in parts for keyword in part if keyword not in ANNOTATIONS}
    if values is None or len(parts) > MAX_SUBSCHEMAS or said & _UNJUDGED or not said & keywords:
        return None
    if len(dumps(values)) > MAX_CHARACTERS or not all(_is_quick(pattern) for part in parts for pattern in _patterns(part)):
        return None
    validator = Draft202012Validator(schema)
    return [value for value in values if validator.is_valid(value)]


def _givers(schema: Mapping[str, Any]) -> Iterator[list[Any]]:
    parts = schema.get("allOf")
    for part in (schema, *(parts if isinstance(parts, list) else ())):
        if isinstance(part, Mapping):
            if "const" in part:
                yield [part["const"]]
            elif isinstance(part.get("enum"), list):
                yield part["enum"]


def _patterns(schema: Mapping[str, Any]) -> Iterator[Any]:
    if "pattern" in schema:
        yield schema["pattern"]
    patterns = schema.get("patternProperties", {})
    yield from patterns if isinstance(patterns, Mapping) else (None,)


def _is_quick(pattern: Any) -> bool:
    """One quantifier at most: Python's `re` then takes no more than the square of the text's length."""
    if not isinstance(pattern, str) or len(_QUANTIFIERS.findall(pattern)) > 1 or "\\" in pattern:
        return False
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
