"""JSON Schemas for llguidance: what it would take silently for something else is refused or made exact first."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.plugins.grammars.json_schema.left_out import MAX_WARNINGS, left_out
from penstock.plugins.grammars.json_schema.schema_document import Identifiers, SchemaDocument, read_document
from penstock.plugins.grammars.json_schema.schema_keywords import (
    ASSERTIONS,
    DIALECTS,
    has_lone_references,
    has_unknown_type,
    lone_reference,
    unknown_keywords,
)
from penstock.plugins.grammars.json_schema.schema_negation import Inexpressible
from penstock.plugins.grammars.json_schema.schema_recursion import without_endless
from penstock.plugins.grammars.json_schema.schema_rewrite import REWRITTEN, Rewriting, join_lone_reference, replace_keyword, unsupported
from penstock.plugins.grammars.json_schema.schema_shape import resolve
from penstock.plugins.grammars.json_schema.schema_walk import (
    ROOT,
    SCHEMAS_BY_NAME,
    SCHEMAS_IN_LISTS,
    SINGLE_SCHEMAS,
    Place,
    Steps,
    path,
    reachable,
    schemas_within,
    steps_of,
    typed_steps,
    walk,
)
from penstock.plugins.grammars.llguidance.definitions import Definitions
from penstock.plugins.grammars.llguidance.limits import MAX_OPTIONAL_PROPERTIES
from penstock.plugins.grammars.llguidance.numbers import LARGEST_EXACT, nearest_bound
from penstock.plugins.grammars.regex.llguidance_regex import (
    UnwritableRegex,
    check_size,
    has_look_around,
    has_operators,
    may_be_large,
    to_pattern,
)
from penstock.plugins.grammars.regex.regex_syntax import RegexError, ecma_dialect, parse
from penstock.plugins.grammars.regex.regular import MisplacedAnchor, Node, search

_ANY_OBJECT = {"type": "object"}
MAX_REWRITTEN = 200
MAX_INLINED = 2000  # subschemas
_DEFINITIONS = frozenset({"$defs", "definitions"})
_NAMES = frozenset({"$schema", "$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"})
_DESCENDED = (SCHEMAS_BY_NAME | SCHEMAS_IN_LISTS | SINGLE_SCHEMAS) - REWRITTEN
_READ = ASSERTIONS | _NAMES | _DEFINITIONS  # the others say nothing, and llguidance copies them with every schema that they stand in
_PLAIN = frozenset({"type", "required", "minLength", "maxLength", "minItems", "maxItems"})  # of which nothing has to be looked at
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")


@dataclass(frozen=True, slots=True)
class ExactSchema:
    """`content` is what to compile, `warnings` what of a lenient schema is left out. `is_inlined` says how references were taken.

    `origins` tell the places of definitions in `content` in the client's document.
    """

    content: Any
    warnings: tuple[str, ...] = ()
    is_inlined: bool = False
    origins: Mapping[str, Callable[[], Steps]] = field(default_factory=dict)

    def origin(self, steps: Steps) -> Steps:
        """Where what stands there in `content` came from."""
        if len(steps) > 1 and steps[0] == "$defs" and steps[1] in self.origins:
            return self.origins[str(steps[1])]() + steps[2:]
        return steps


def read_schema(spec: GrammarSpec, *, is_inlined: bool | None = None) -> ExactSchema:
    """The schema to compile, checked and made exact.

    Where `is_inlined`, what `allOf` refers to stands in the reference's place: no circle is followed in which others stand beside it.
    None is for where llguidance would have to follow one. Raises `UnsupportedGrammar` with the path of what is at fault.
    """
    if spec.kind is GrammarKind.JSON_OBJECT:
        return ExactSchema(_ANY_OBJECT)
    document = read_document(spec.text, spec.param)
    if is_inlined is None:
        is_inlined = document.can_be_circular
    reading = _Reading(document, spec.param, is_lenient=spec.is_lenient, is_inlined=is_inlined)
    content = reading.whole()
    origins = {name: partial(reading.steps, place) for name, place in reading.definitions.origins.items()}
    return ExactSchema(content, tuple(dict.fromkeys(reading.warnings)), is_inlined, origins)


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
        self.rewriting = Rewriting(root if self.has_one_base else None, self.unknown)
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
        """Of the client's schemas, by their identity: what is put together of them is told of where the client has it."""
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
        """Once, for what is rewritten: a type that nobody knows would be one that no value has there, and nobody would say so."""
        self.is_looked_through = True
        if not any(map(has_unknown_type, schemas_within(self.root))):
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
            exact.pop("additionalProperties", None)  # or else it would speak of the properties that the patterns do
        parts = schema[keyword]
        at = self.inside(place)
        additions = [{"anyOf": [self.exact(part, at) for part in parts]}] if keyword == "oneOf" and isinstance(parts, list) else []
        replace_keyword(exact, keyword, additions)

    def warn(self, keyword: str, place: Place, *below: str) -> None:
        if len(self.warnings) < MAX_WARNINGS:
            self.warnings.append(left_out(keyword, self.where(place, *below)))

    def dialect(self, schema: dict[str, Any], keyword: str, place: Place) -> None:
        """One that nobody knows is 2020-12; llguidance would look for what it says."""
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
                at = typed_steps(self.root, steps)
                written = self.definitions.refer(pointed, target, (ROOT, *at) if at else ROOT)
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
        except ValueError:  # in it or in a name is a host that nobody can have
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
        if has_operators(pattern):
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
        del schema[keyword]
        if keyword == "patternProperties":
            schema.pop("additionalProperties", None)  # or else it would speak of the properties that the patterns do
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
