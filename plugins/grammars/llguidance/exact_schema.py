"""JSON Schemas for llguidance: keywords that it would silently misread are refused, or made exact first."""

import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import (
    OPTIONS,
    ROOT,
    SCHEMAS_BY_NAME,
    SCHEMAS_IN_LISTS,
    SINGLE_SCHEMAS,
    Identifiers,
    Place,
    SchemaDocument,
    Steps,
    has_given_values,
    path,
    reachable,
    read_document,
    remaining_values,
    resolve,
    steps_of,
    unwritable,
    walk,
    without_endless,
)
from penstock.plugins.grammars.json_schema.negation import Inexpressible
from penstock.plugins.grammars.json_schema.regular import MAX_WARNINGS, left_out
from penstock.plugins.grammars.json_schema.rewrite import REWRITTEN, Rewriting, join_lone_reference, leave_out, replace_keyword, unsupported
from penstock.plugins.grammars.json_schema.values import (
    ASSERTIONS,
    DIALECTS,
    has_lone_references,
    has_unknown_type,
    lone_reference,
    unknown_keywords,
)
from penstock.plugins.grammars.llguidance.matcher import MAX_OPTIONAL_PROPERTIES
from penstock.plugins.grammars.regex.lark import (
    UnwritableRegex,
    check_size,
    has_look_around,
    has_operators,
    may_be_large,
    to_pattern,
)
from penstock.plugins.grammars.regex.syntax import MisplacedAnchor, RegexError, ecma_dialect, full_match, parse, python_dialect, search
from penstock.plugins.grammars.regex.tree import Node

LARGEST_EXACT = 2**53
_LARGEST_BOUND = 2**63 - 1024  # the largest double of 64 bits with a sign


def nearest_bound(bound: int, *, is_lower: bool) -> int | None:
    """The nearest double within, where the bound itself is none; None for one that would leave too little."""
    if abs(bound) <= LARGEST_EXACT:
        return bound
    if abs(bound) > _LARGEST_BOUND and (bound < 0) != is_lower:
        return None
    nearest = float(max(-_LARGEST_BOUND, min(bound, _LARGEST_BOUND)))
    if is_lower and int(nearest) < bound:
        nearest = math.nextafter(nearest, math.inf)
    elif not is_lower and int(nearest) > bound:
        nearest = math.nextafter(nearest, -math.inf)
    return int(nearest)


PREFIX = "penstock-"
_SIMPLE_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_BOUNDS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
_ALL_BOUNDS = frozenset().union(*_BOUNDS)
_SHARED = frozenset({"type", "enum", "pattern", "format", "items", "properties", "required", "additionalProperties", "anyOf", *_ALL_BOUNDS})
_OF_SCHEMAS = frozenset({"anyOf", "items", "additionalProperties", "properties"})


class Definitions:
    """`origins` is where in the client's document a definition's content first occurs.

    Where `are_ground`, only that is shared which refers to nothing else: what it refers to might lead back to it.
    """

    def __init__(self, *, are_ground: bool) -> None:
        self.contents: dict[str, Any] = {}
        self.origins: dict[str, Place] = {}
        self.pending: list[tuple[str, Any]] = []  # what is referred to and has not been read
        self._are_ground = are_ground
        self._names: dict[str, str] = {}
        self._first: dict[str, tuple[dict[str, Any], Place]] = {}
        self._shared: dict[str, dict[str, Any]] = {}
        self._keys: dict[int, tuple[str, dict[str, Any]]] = {}  # with the schema, whose identity is another's once it is gone

    def refer(self, pointer: str, target: Any, place: Place) -> str:
        """A reference to the value at `pointer` in the client's document."""
        if pointer not in self._names:
            self._names[pointer] = name = self._new_name(place)
            self.pending.append((name, target))
        return f"#/$defs/{self._names[pointer]}"

    def share(self, schema: dict[str, Any], place: Place) -> dict[str, Any]:
        """The schema or, from the second one like it on, a reference in its place, also in that of the first.

        It must surely have values: llguidance leaves out a member that has none, but not one behind a reference.
        """
        types = schema.get("type") if len(schema) == 1 else None
        content = types if isinstance(types, str) and types in _SIMPLE_TYPES else self._content(schema)
        if not content:
            return schema
        shared = self._shared.get(content)
        if shared is not None:
            return shared
        if content not in self._first:
            self._first[content] = schema, place
            self._keys[id(schema)] = f"={len(self._keys)}", schema
            return schema
        first, first_place = self._first[content]
        name = self._new_name(first_place)
        self.contents[name] = first.copy()
        first.clear()
        first["$ref"] = f"#/$defs/{name}"
        self._shared[content] = first
        return first

    def _content(self, schema: dict[str, Any]) -> str | None:
        """Equal for schemas that say the same in the same order; None where it is not clear that they have values."""
        if not _SHARED.issuperset(schema):
            return None
        parts = []
        for keyword, value in schema.items():
            if keyword not in _OF_SCHEMAS:
                part: str | None = repr(value)
            elif keyword == "properties":
                members = self._all(value.values()) if isinstance(value, dict) else None
                part = None if members is None else f"{list(value)}{members}"
            elif keyword == "anyOf":
                part = self._all(value) if value and isinstance(value, list) and len(schema) == 1 else None
            else:
                part = self._part(value)
            if part is None:
                return None
            parts.append(f"{keyword}:{part}")
        return ";".join(parts) if _surely_has_values(schema) else None

    def _all(self, schemas: Iterable[Any]) -> str | None:
        parts = []
        keys = self._keys
        for schema in schemas:
            known = keys.get(id(schema))
            part = self._part(schema) if known is None else known[0]
            if part is None:
                return None
            parts.append(part)
        return ",".join(parts)

    def _part(self, schema: Any) -> str | None:
        if isinstance(schema, bool) or not schema:
            return str(schema)
        known = self._keys.get(id(schema))
        if known is not None:
            return known[0]
        return schema["$ref"] if not self._are_ground and isinstance(schema, dict) and [*schema] == ["$ref"] else None

    def _new_name(self, place: Place) -> str:
        name = f"{PREFIX}{len(self.origins)}"
        self.origins[name] = place
        return name


def _surely_has_values(schema: dict[str, Any]) -> bool:
    """Of one whose parts do, where they are not false."""
    if "anyOf" in schema:
        return False not in schema["anyOf"]
    types, values = schema.get("type", []), schema.get("enum")
    if "enum" in schema and (not isinstance(values, list) or not values):
        return False
    if types == []:
        return len(schema) == 1 or "enum" not in schema
    names = types if isinstance(types, list) else [types]
    for name in names:
        if not isinstance(name, str) or name not in _SIMPLE_TYPES:
            return False
    if values is not None:
        return len(schema) == 2 and types == "string" and all(isinstance(value, str) for value in values)
    for low, high in () if _ALL_BOUNDS.isdisjoint(schema) else _BOUNDS:
        bounds = [schema[keyword] for keyword in (low, high) if keyword in schema]
        if not all(isinstance(bound, int) and not isinstance(bound, bool) for bound in bounds) or bounds != sorted(bounds):
            return False
        if bounds and low != "minimum" and bounds[0] < 0:
            return False
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        return False
    if required:
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        if any(properties.get(name, others) is False for name in required):
            return False
    return schema.get("items", True) is not False or not schema.get("minItems")


_ANY_OBJECT = {"type": "object"}
MAX_REWRITTEN = 200
MAX_INLINED = 2000  # subschemas
_DEFINITIONS = frozenset({"$defs", "definitions"})
_NAMES = frozenset({"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
_DESCENDED = (SCHEMAS_BY_NAME | SCHEMAS_IN_LISTS | SINGLE_SCHEMAS) - REWRITTEN
_READ = ASSERTIONS | _NAMES | _DEFINITIONS  # the others say nothing, and llguidance copies them with every schema that contains them
_PLAIN = frozenset({"type", "required", "minLength", "maxLength", "minItems", "maxItems"})  # of which nothing has to be looked at
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class ExactSchema:
    """`content` is what to compile, `warnings` what of a lenient schema is left out.

    `origins` tell the places of definitions in `content` in the client's document.
    """

    content: Any
    warnings: tuple[str, ...] = ()
    origins: Mapping[str, Callable[[], Steps]] = field(default_factory=dict)

    def origin(self, steps: Steps) -> Steps:
        """The origin of the value there in `content`."""
        if len(steps) > 1 and steps[0] == "$defs" and steps[1] in self.origins:
            return self.origins[str(steps[1])]() + steps[2:]
        return steps


def read_schema(spec: GrammarSpec, *, is_inlined: bool = False) -> ExactSchema:
    """The schema to compile, checked and made exact.

    Where `is_inlined`, what `allOf` refers to takes the reference's place: no circle is followed in which other keywords are beside it.
    Raises `UnsupportedGrammar` with the path of what is at fault.
    """
    if spec.kind is GrammarKind.JSON_OBJECT:
        return ExactSchema(_ANY_OBJECT)
    document = read_document(spec.text, spec.param)
    reading = _Reading(document, spec.param, is_lenient=spec.is_lenient, is_inlined=is_inlined)
    content = reading.whole()
    origins = {name: partial(reading.steps, place) for name, place in reading.definitions.origins.items()}
    return ExactSchema(content, tuple(dict.fromkeys(reading.warnings)), origins)


class _Reading:
    """One pass over the schemas of a document; the result shares what it did not change.

    Where all names in it are places, references lead to definitions that are read once they are referred to, and others not at all.
    """

    def __init__(self, document: SchemaDocument, param: str, *, is_lenient: bool, is_inlined: bool) -> None:
        self.root = root = document.content
        self.param = param
        self.has_identifiers = document.identifiers is not Identifiers.NONE
        self.has_one_base = document.identifiers is not Identifiers.OF_PARTS
        self.has_places_only = self.has_one_base and not document.has_anchors
        self.is_lenient = is_lenient
        self.is_inlined = is_inlined
        self.is_looked_through = False
        self.inlined: list[str] = []  # references within each other that are being replaced
        self.targets: dict[str, Any] = {}
        self.num_inlined = 0
        self.written: dict[str, str] = {}  # references as they are in what is compiled
        self.refers = False  # to anything in it
        self.warnings: list[str] = []
        self.num_rewritten = 0
        self.definitions = Definitions(are_ground=is_inlined)
        self.unknown = unknown_keywords(root)
        self.read = _READ - self.unknown - (_DEFINITIONS if self.has_places_only else frozenset())
        self.has_lone_references = has_lone_references(root)
        self.checks: dict[str, Callable[[dict[str, Any], str, Place], None]] = {
            "$ref": self.reference,
            "$schema": self.dialect,
            "const": self.values,
            "enum": self.values,
            "pattern": self.pattern,
            **dict.fromkeys(("patternProperties", "propertyNames"), self.patterns),
            "properties": self.properties,
            **dict.fromkeys((*_LOWER_BOUNDS, *_UPPER_BOUNDS), self.bound),
        }

    @functools.cached_property
    def rewriting(self) -> Rewriting:
        return Rewriting(self.root if self.has_one_base else None, self.unknown)

    def whole(self) -> Any:
        exact = self.exact(self.root, ROOT)
        definitions = self.definitions
        while definitions.pending:
            name, target = definitions.pending.pop()
            definitions.contents[name] = self.exact(target, definitions.origins[name])
        if definitions.contents:
            exact["$defs"] = {**exact.get("$defs", {}), **definitions.contents}
        if self.refers and (blamed := without_endless(exact)) is not None:
            raise self.refusal("no text satisfies it: what it requires leads back to it", ROOT, *blamed)
        return exact

    @cached_property
    def places(self) -> dict[int, Steps]:
        """Of the client's schemas, by their identity: faults in what is put together of them are reported where the client has it."""
        return {id(part): steps for steps, part in walk(self.root)}

    def steps(self, place: Place) -> Steps:
        return steps_of(place, self.places if self.is_inlined or self.is_looked_through else {})

    def inside(self, place: Place) -> Place:
        """Of a schema itself, as the one around another: the root is `ROOT`."""
        around, schema = place[0]
        return place if around or (schema is not self.root and self.steps(place)) else ROOT

    def where(self, place: Place, *below: str | int) -> str:
        return self.param + path(self.steps(place) + below)

    def refusal(self, message: str, place: Place, *below: str | int) -> UnsupportedGrammar:
        return UnsupportedGrammar(message, self.where(place, *below))

    def exact(self, schema: Any, place: Place) -> Any:
        if not isinstance(schema, dict):
            return schema
        original = schema
        if "$ref" in schema and self.has_lone_references and isinstance(schema["$ref"], str):
            schema = lone_reference(schema)
        if has_given_values(schema) and (values := self.remaining_values(schema)) is not None:
            schema = {"enum": values} if values else {"not": {}}
        read = self.read
        exact = {keyword: value for keyword, value in schema.items() if keyword in read}
        if _PLAIN.issuperset(exact):
            return self.definitions.share(exact, place) if self.has_places_only else exact
        if len(exact) == 1 and "$ref" in exact and isinstance(exact["$ref"], str) and exact["$ref"] in self.written:
            return {"$ref": self.written[exact["$ref"]]}
        around = (place, original)
        for keyword, value in exact.items():
            if keyword in _DESCENDED:
                exact[keyword] = self.below(keyword, value, around)
        within = (around,)
        for keyword in [keyword for keyword in exact if keyword in self.checks]:
            self.checks[keyword](exact, keyword, within)
        if isinstance(exact.get("allOf"), list):
            join_lone_reference(exact)
        if ("pattern" in exact or "patternProperties" in exact) and (keyword := _with_look_around(exact)):
            self.give_up(exact, schema, keyword, within)
        if not REWRITTEN.isdisjoint(exact):
            for keyword in [keyword for keyword in exact if keyword in REWRITTEN]:
                if keyword in exact:
                    self.rewrite(exact, schema, keyword, within)
        return self.definitions.share(exact, within) if self.has_places_only and self.inside(within) else exact

    def remaining_values(self, schema: dict[str, Any]) -> list[Any] | None:
        try:
            return remaining_values(schema, REWRITTEN - self.unknown)
        except Exception:  # whatever jsonschema raises for a keyword that is not what it should be: that one is refused by name
            return None

    def below(self, keyword: str, value: Any, around: tuple[Place, Any]) -> Any:
        """A keyword's value, the schemas in it exact."""
        if isinstance(value, dict):
            if keyword in SCHEMAS_BY_NAME:
                exact = self.exact
                return {name: exact(child, (around, keyword, name)) if isinstance(child, dict) else child for name, child in value.items()}
            return self.exact(value, (around, keyword)) if keyword in SINGLE_SCHEMAS else value
        if isinstance(value, list) and keyword in SCHEMAS_IN_LISTS:
            if self.is_inlined and keyword == "allOf":
                return [self.inline(child) for child in value]
            return [self.exact(child, (around, keyword, number)) for number, child in enumerate(value)]
        return value

    def inline(self, schema: Any) -> Any:
        """A part of `allOf`; a reference there as what it leads to."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        can_go_on = self.has_one_base and reference not in self.inlined and self.num_inlined < MAX_INLINED
        if not isinstance(reference, str) or not reference.startswith("#/") or len(schema) > 1 or not can_go_on:
            return self.exact(schema, ROOT)
        if reference not in self.targets:
            self.inlined.append(reference)
            _, target = resolve(self.root, unquote(reference), self.param)
            self.targets[reference] = self.exact(target, ROOT)
            self.inlined.pop()
        self.num_inlined += sum(1 for _ in walk(self.targets[reference]))
        return self.targets[reference]

    def rewrite(self, exact: dict[str, Any], schema: dict[str, Any], keyword: str, place: Place) -> None:
        """Says the keyword with others, where that is exact; else refuses it or, in a lenient schema, leaves it out."""
        if keyword != "format" and not self.is_looked_through:
            self.look_through()
        self.num_rewritten += 1
        num_warnings = len(self.warnings)
        try:
            if self.num_rewritten > MAX_REWRITTEN:
                raise Inexpressible
            additions = self.rewriting.additions(schema, keyword)
            if additions is None:
                return
            at = self.inside(place)
            additions = [self.exact(addition, at) for addition in additions]
        except (Inexpressible, TypeError, AttributeError):  # the last two where a value is not what the keyword takes
            del self.warnings[num_warnings:]
            self.give_up(exact, schema, keyword, place)
            return
        replace_keyword(exact, keyword, additions)

    def look_through(self) -> None:
        """Once, for what is rewritten: there an unknown type would match no value, and no error would say so."""
        self.is_looked_through = True
        if not any(has_unknown_type(part) for _, part in walk(self.root)):
            return
        counting = None if self.has_identifiers else reachable(self.root)
        for steps, schema in walk(self.root):
            if has_unknown_type(schema) and (counting is None or id(schema) in counting):
                raise self.refusal("`type`: no type of JSON", ROOT, *steps, "type")

    def give_up(self, exact: dict[str, Any], schema: dict[str, Any], keyword: str, place: Place) -> None:
        if not self.is_lenient:
            raise self.refusal(unsupported(schema, keyword), place, keyword)
        self.warn(keyword, place, keyword)
        if keyword == "patternProperties":
            leave_out(exact, keyword)
        parts = schema[keyword]
        at = self.inside(place)
        additions = [{"anyOf": [self.exact(part, at) for part in parts]}] if keyword == "oneOf" and isinstance(parts, list) else []
        replace_keyword(exact, keyword, additions)

    def warn(self, keyword: str, place: Place, *below: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(left_out(keyword, self.where(place, *below)))

    def dialect(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        """An unknown one is 2020-12; llguidance would look for what it says."""
        if self.inside(place) or not isinstance(schema[keyword], str) or schema[keyword].removesuffix("#") not in DIALECTS:
            del schema[keyword]

    def reference(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        reference = schema[keyword]
        if not isinstance(reference, str):
            raise self.refusal("a reference must be a string", place, keyword)
        self.refers = True
        if not reference.startswith("#"):
            if not self.has_identifiers or self.is_elsewhere(reference):
                raise self.refusal("a reference to another document is not followed", place, keyword)
            if self.has_places_only and (own := self.within(reference)) is not None:
                reference = schema[keyword] = own
        if reference in self.written:
            schema[keyword] = self.written[reference]
        elif reference.startswith("#/") and self.has_one_base:
            pointed = unquote(reference)
            try:
                steps, target = resolve(self.root, pointed, "")
            except UnsupportedGrammar as error:
                raise self.refusal(str(error), place, keyword) from error
            if self.has_places_only or not REWRITTEN.isdisjoint(steps):
                written = self.definitions.refer(pointed, target, (ROOT, *steps) if steps else ROOT)
            else:
                written = quote(pointed, safe="#/$~")
            schema[keyword] = self.written[reference] = written

    def within(self, reference: str) -> str | None:
        """A reference by the document's own name as one without; None for others."""
        url, fragment = urldefrag(urljoin(self.names[0], reference))
        return f"#{fragment}" if url == urldefrag(self.names[0]).url and (not fragment or fragment.startswith("/")) else None

    def is_elsewhere(self, reference: str) -> bool:
        """Whether it surely leads out of the document. Where parts have bases of their own, relative ones are left to llguidance."""
        try:
            if not self.has_one_base and not urlsplit(reference).scheme:
                return False
            base, names = self.names
            target = urldefrag(urljoin(base, reference)).url
            return target not in names and urlsplit(target).netloc != "json-schema.org"  # whose own schemas llguidance knows
        except ValueError:  # in it or in a name is a host that cannot exist
            return True

    @cached_property
    def names(self) -> tuple[str, frozenset[str]]:
        """The document's own, and those of all that is named in it."""
        given = [part[keyword] for _, part in walk(self.root) for keyword in ("$id", "id") if isinstance(part.get(keyword), str)]
        base = next((self.root[keyword] for keyword in ("$id", "id") if isinstance(self.root.get(keyword), str)), "")
        return base, frozenset(urldefrag(urljoin(base, name)).url for name in given)

    def values(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        pending = [schema[keyword]]
        while pending:
            value = pending.pop()
            if isinstance(value, dict | list):
                pending.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, int) and abs(value) > LARGEST_EXACT:
                raise self.refusal("a whole number beyond 2^53 cannot be asked for exactly", place, keyword)

    def pattern(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        """Rewritten where it would not mean the same, and read where it may be too large; others are left to llguidance."""
        pattern = schema[keyword]
        if not isinstance(pattern, str) or self.leaves_out_large(schema, keyword, pattern, place, keyword):
            return
        if has_operators(pattern) or (has_look_around(pattern) and self.is_regular(pattern)):
            schema[keyword] = f"^(?:{to_pattern(self.tree(pattern, place, keyword))})$"

    def patterns(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        """Those that names have, in `patternProperties` or `propertyNames`."""
        value = schema[keyword]
        if not isinstance(value, dict):
            return
        found = [value["pattern"]] if keyword == "propertyNames" and "pattern" in value else value if keyword != "propertyNames" else ()
        for pattern in found:
            inner = "pattern" if keyword == "propertyNames" else pattern
            if isinstance(pattern, str) and self.leaves_out_large(schema, keyword, pattern, place, keyword, inner):
                return
        if keyword == "patternProperties" and any(map(has_look_around, value)):
            schema[keyword] = {self.without_look_around(pattern): part for pattern, part in value.items()}

    def without_look_around(self, pattern: str) -> str:
        """As it is, where it cannot be said otherwise."""
        if not has_look_around(pattern) or not self.is_regular(pattern):
            return pattern
        return f"^(?:{to_pattern(search(parse(pattern, ecma_dialect())))})$"

    def is_regular(self, pattern: str) -> bool:
        """Whether a pattern with look-around can be said without it."""
        try:
            to_pattern(search(parse(pattern, ecma_dialect())))
        except (RegexError, MisplacedAnchor, UnwritableRegex):
            return False
        return True

    def leaves_out_large(self, schema: dict[str, Any], keyword: str, pattern: str, place: Place, *below: str) -> bool:
        """Whether the pattern is too large, for which the schema of a lenient document loses the keyword, and others are refused."""
        if not may_be_large(pattern) and not has_operators(pattern):
            return False
        try:
            check_size(self.tree(pattern, place, *below))
        except UnwritableRegex as error:
            if not self.is_lenient:
                raise self.refusal(f"regex: {error}", place, *below) from error
        else:
            return False
        self.warn(keyword, place, *below)
        leave_out(schema, keyword)
        return True

    def tree(self, pattern: str, place: Place, *below: str) -> Node:
        try:
            return search(parse(pattern, ecma_dialect()))
        except (RegexError, MisplacedAnchor) as error:
            raise self.refusal(f"regex: {error}", place, *below) from error

    def properties(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        required = schema.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(schema[keyword], dict) and len(schema[keyword]) - num_required > MAX_OPTIONAL_PROPERTIES:
            raise self.refusal(f"more than {MAX_OPTIONAL_PROPERTIES} properties that are not required", place, keyword)

    def bound(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        bound = schema[keyword]
        if not isinstance(bound, int) or abs(bound) <= LARGEST_EXACT:
            return
        nearest = nearest_bound(bound, is_lower=keyword in _LOWER_BOUNDS)
        if nearest is None:
            raise self.refusal("a bound beyond 64 bits", place, keyword)
        schema[keyword] = nearest


def _with_look_around(schema: dict[str, Any]) -> str | None:
    """The keyword, if any."""
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str) and has_look_around(pattern):
        return "pattern"
    return "patternProperties" if isinstance(patterns, dict) and any(map(has_look_around, patterns)) else None


# The engine's own white space is allowed between any two tokens, before commas and colons too; separators bring their own.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
_COMPACT = {"whitespace_flexible": False}


def schema_source(schema: Any, whitespace_pattern: str | None, param: str) -> str:
    """JSON for `%json`: the schema's instances with white space as asked for, and raw UTF-8 in strings."""
    options: dict[str, Any] = _ONE_LINE if whitespace_pattern is None else _COMPACT
    if whitespace_pattern:
        options = {"whitespace_pattern": _whitespace(whitespace_pattern, param)}
    if schema is True:
        schema = {}
    content = {**schema, OPTIONS: options} if isinstance(schema, Mapping) else schema
    try:
        return json.dumps(content, allow_nan=False, check_circular=False)
    except ValueError as error:
        raise unwritable(schema, param) from error


def _whitespace(pattern: str, param: str) -> str:
    try:
        return to_pattern(full_match(parse(pattern, python_dialect())))
    except RegexError as error:
        raise UnsupportedGrammar(f"the pattern for white space: {error}", param) from error
    except MisplacedAnchor as anchor:
        raise UnsupportedGrammar(f"the pattern for white space: {anchor}, at position {anchor.position}", param) from anchor
