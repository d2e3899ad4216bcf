"""JSON Schemas for llguidance: what it would take silently for something else is refused or made exact first."""

import json
import math
import re
from collections.abc import Callable, Mapping
from enum import Enum, auto
from functools import cached_property, lru_cache
from typing import Any
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from penstock.engine.errors import UnsupportedGrammar
from penstock.engine.grammar import GrammarKind, GrammarSpec
from penstock.plugins.grammars.json_document import parse_document
from penstock.plugins.grammars.llguidance_limits import MAX_OPTIONAL_PROPERTIES
from penstock.plugins.grammars.llguidance_regex import MAX_PLACES, UnwritableRegex, check_size, to_pattern
from penstock.plugins.grammars.regex_syntax import RegexError, ecma_dialect, parse, python_dialect
from penstock.plugins.grammars.regular import MisplacedAnchor, Node, full_match, search
from penstock.plugins.grammars.schema_keywords import DIALECTS, has_lone_references, has_unknown_type, lone_reference, unknown_keywords
from penstock.plugins.grammars.schema_negation import Inexpressible
from penstock.plugins.grammars.schema_rewrite import REWRITTEN, Rewriting, replace_keyword, unsupported
from penstock.plugins.grammars.schema_shape import resolve
from penstock.plugins.grammars.schema_walk import Steps, path, pointer, reachable, subschemas, walk

DEFAULT_WHITESPACE = r"[ \t]|\r?\n[ \t]{0,40}"

_ANY_OBJECT = {"type": "object"}
_OPTIONS = "x-guidance"  # what llguidance itself would take from the schema's root
_LARGEST_EXACT = 2**53  # numbers are doubles there
_LARGEST_BOUND = 2**63 - 1024  # the largest double of 64 bits with a sign
_CLASSES = re.compile(r"\\.|\[((?:\\.|[^\]\\])*)\]", re.DOTALL)
_SET_OPERATORS = re.compile(r"(?<!\\)\[|&&|--|~~")  # characters in the classes of JSON Schema's regexes, operators in Rust's
_LOOK_AROUND = re.compile(r"(?<!\\)\(\?<?[=!]")
_COUNTS = re.compile(r"(\d{1,9}),?\}")
_MOVED = "penstock-moved-"
MAX_REWRITTEN = 200
_UNREAD = frozenset({"title", "description", "default", "examples", "$comment"})  # and may be long
_PLAIN = _UNREAD | {"type", "required", "minLength", "maxLength", "minItems", "maxItems"}  # of which nothing has to be looked at
_LOWER_BOUNDS = ("minimum", "exclusiveMinimum")
_UPPER_BOUNDS = ("maximum", "exclusiveMaximum")


def read_schema(spec: GrammarSpec, *, is_inlined: bool = False, is_shared: bool = True) -> tuple[Any, tuple[str, ...]]:
    """The schema to compile, checked and made exact, and what of a lenient one is left out.

    Where `is_inlined`, what `allOf` refers to stands in the reference's place: no circle is followed in which others stand beside it.
    Where `is_shared`, strings that are alike are one definition, which is faster; otherwise all stands where the client has it.
    Raises `UnsupportedGrammar` with the path of what is at fault.
    """
    if spec.kind is GrammarKind.JSON_OBJECT:
        return _ANY_OBJECT, ()
    schema, identifiers = _document(spec.text, spec.param)
    reading = _Reading(schema, spec.param, identifiers, is_lenient=spec.is_lenient, is_inlined=is_inlined, is_shared=is_shared)
    return reading.whole(), tuple(dict.fromkeys(reading.warnings))


@lru_cache(maxsize=1)  # one document is read strictly, leniently and with references inlined, one after the other; no reading changes it
def _document(text: str, param: str) -> tuple[Any, "_Identifiers"]:
    schema = parse_document(text, param)
    _check_text(schema, param)
    if isinstance(schema, dict) and _OPTIONS in schema:
        raise UnsupportedGrammar(f"`{_OPTIONS}` is refused: what it sets is not the schema's to say", f"{param}.{_OPTIONS}")
    return schema, _Identifiers.of(schema, text)


class _Identifiers(Enum):
    """Whether parts of a document have names of their own, from which references count."""

    NONE = auto()
    OF_ROOT = auto()
    OF_PARTS = auto()

    @classmethod
    def of(cls, schema: Any, text: str) -> "_Identifiers":
        if not any(keyword in text for keyword in ('"$id"', '"id"', "\\u")):
            return cls.NONE
        names = ("$id", "id")
        if isinstance(schema, dict) and sum(text.count(f'"{name}"') for name in names) == sum(name in schema for name in names):
            return cls.OF_ROOT if any(isinstance(schema.get(name), str) for name in names) else cls.NONE
        places = [steps for steps, part in walk(schema) if any(isinstance(part.get(keyword), str) for keyword in ("$id", "id"))]
        return cls.OF_PARTS if any(places) else cls.OF_ROOT if places else cls.NONE


def schema_source(schema: Any, whitespace_pattern: str | None, param: str) -> str:
    """JSON for `%json`: the schema's instances with white space as asked for between tokens, and raw UTF-8 in strings."""
    options: dict[str, Any] = {"whitespace_pattern": DEFAULT_WHITESPACE}
    if whitespace_pattern == "":
        options = {"whitespace_flexible": False}
    elif whitespace_pattern is not None:
        options = {"whitespace_pattern": _whitespace(whitespace_pattern, param)}
    if schema is True:
        schema = {}
    return json.dumps({**schema, _OPTIONS: options} if isinstance(schema, Mapping) else schema)


def _whitespace(pattern: str, param: str) -> str:
    try:
        return to_pattern(full_match(parse(pattern, python_dialect())))
    except (RegexError, MisplacedAnchor) as error:
        raise UnsupportedGrammar(f"the pattern for white space: {error}", param) from error


class _Reading:
    """One pass over the schemas of a document; the result shares what it did not change."""

    def __init__(self, root: Any, param: str, identifiers: _Identifiers, *, is_lenient: bool, is_inlined: bool, is_shared: bool) -> None:
        self.root = root
        self.param = param
        self.has_identifiers = identifiers is not _Identifiers.NONE
        self.has_one_base = identifiers is not _Identifiers.OF_PARTS
        self.is_lenient = is_lenient
        self.is_inlined = is_inlined
        self.is_shared = is_shared and self.has_one_base
        self.inlined: list[str] = []  # references within each other that are being replaced
        self.targets: dict[str, Any] = {}
        self.written: dict[str, str] = {}  # references as they are in what is compiled
        self.warnings: list[str] = []
        self.origins: dict[int, Steps] = {id(part): place for place, part in walk(root)} if is_inlined else {}
        self.num_rewritten = 0
        self.definitions: dict[str, tuple[str, Any]] = {}
        self.unknown = unknown_keywords(root)
        self.has_lone_references = has_lone_references(root)
        self.rewriting = Rewriting(root if self.has_one_base else None, self.unknown)
        self.checks: dict[str, Callable[[dict[str, Any], str, Steps], None]] = {
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
        exact = self.exact(self.root, ())
        if self.definitions:
            exact["$defs"] = {**exact.get("$defs", {}), **dict(self.definitions.values())}
        return exact

    def refusal(self, message: str, steps: Steps) -> UnsupportedGrammar:
        return UnsupportedGrammar(message, self.param + path(steps))

    def exact(self, schema: Any, steps: Steps) -> Any:
        if not isinstance(schema, dict):
            return schema
        if _PLAIN.issuperset(schema):
            return schema if _UNREAD.isdisjoint(schema) else {keyword: value for keyword, value in schema.items() if keyword not in _UNREAD}
        steps = self.origins.get(id(schema), steps)
        if self.has_lone_references and isinstance(schema.get("$ref"), str):
            schema = lone_reference(schema)
        exact = {keyword: value for keyword, value in schema.items() if keyword not in _UNREAD and keyword not in self.unknown}
        for below, child in subschemas(schema):
            if below[0] not in exact or below[0] in REWRITTEN:
                continue
            inner = self.inline(child) if self.is_inlined and below[0] == "allOf" else self.exact(child, steps + below)
            if inner is not child:
                _replace(exact, schema, below, inner)
        for keyword in [keyword for keyword in exact if keyword in self.checks]:
            self.checks[keyword](exact, keyword, steps)
        if ("pattern" in exact or "patternProperties" in exact) and (keyword := _with_look_around(exact)):
            self.give_up(exact, schema, keyword, steps)
        for keyword in [keyword for keyword in exact if keyword in REWRITTEN]:
            if keyword in exact:
                self.rewrite(exact, schema, keyword, steps)
        if ("format" in exact or "pattern" in exact) and exact.get("type") == "string" and self.is_shared:
            return self.shared(exact)
        return exact

    def shared(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A reference to one definition for all that are alike: llguidance takes up to a millisecond for a regex wherever it stands."""
        name, _ = self.definitions.setdefault(repr(schema), (f"{_MOVED}{len(self.definitions)}", schema))
        return {"$ref": f"#/$defs/{name}"}

    def inline(self, schema: Any) -> Any:
        """A part of `allOf`; a reference there as what it leads to."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        can_go_on = self.has_one_base and reference not in self.inlined
        if not isinstance(reference, str) or not reference.startswith("#/") or len(schema) > 1 or not can_go_on:
            return self.exact(schema, ())
        if reference not in self.targets:
            self.inlined.append(reference)
            _, target = resolve(self.root, unquote(reference), self.param)
            self.targets[reference] = self.exact(target, ())
            self.inlined.pop()
        return self.targets[reference]

    def rewrite(self, exact: dict[str, Any], schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        """Says the keyword with others, where that is exact; else refuses it or, in a lenient schema, leaves it out."""
        if not self.origins:  # what is put together of the client's schemas is found again where the client has it
            self.origins = {id(part): place for place, part in walk(self.root)}
            self.check_types()
        self.num_rewritten += 1
        num_warnings = len(self.warnings)
        try:
            if self.num_rewritten > MAX_REWRITTEN:
                raise Inexpressible
            additions = self.rewriting.additions(schema, keyword)
            if additions is None:
                return
            additions = [self.exact(addition, steps) for addition in additions]
        except (Inexpressible, TypeError, AttributeError):  # the last two where a value is not what the keyword takes
            del self.warnings[num_warnings:]
            self.give_up(exact, schema, keyword, steps)
            return
        replace_keyword(exact, keyword, additions)

    def check_types(self) -> None:
        """In what is rewritten, a type that nobody knows would be one that no value has, and nobody would say so."""
        for place, schema in walk(self.root):
            if has_unknown_type(schema) and (self.has_identifiers or pointer(place) in self.reachable):
                raise self.refusal("`type`: no type of JSON", (*place, "type"))

    def give_up(self, exact: dict[str, Any], schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        if not self.has_identifiers and pointer(steps) not in self.reachable:
            return
        if not self.is_lenient:
            raise self.refusal(unsupported(schema, keyword), (*steps, keyword))
        self.warnings.append(f"`{keyword}` at {self.param}{path((*steps, keyword))}")
        if keyword == "patternProperties":
            exact.pop("additionalProperties", None)  # or else it would speak of the properties that the patterns do
        parts = schema[keyword]
        additions = [{"anyOf": [self.exact(part, steps) for part in parts]}] if keyword == "oneOf" and isinstance(parts, list) else []
        replace_keyword(exact, keyword, additions)

    @cached_property
    def reachable(self) -> frozenset[str]:
        return reachable(self.root)

    def dialect(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        """One that nobody knows is 2020-12; llguidance would look for what it says."""
        if steps or not isinstance(schema[keyword], str) or schema[keyword].removesuffix("#") not in DIALECTS:
            del schema[keyword]

    def reference(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        reference = schema[keyword]
        if not isinstance(reference, str):
            raise self.refusal("a reference must be a string", (*steps, keyword))
        if not reference.startswith("#") and (not self.has_identifiers or self.is_elsewhere(reference)):
            raise self.refusal("a reference to another document is not followed", (*steps, keyword))
        if reference.startswith("#/") and self.has_one_base:
            if reference not in self.written:
                place, target = resolve(self.root, unquote(reference), self.param + path((*steps, keyword)))
                is_moved = not REWRITTEN.isdisjoint(place)
                written = f"#/$defs/{self.moved(unquote(reference), target)}" if is_moved else quote(unquote(reference), safe="#/$~")
                self.written[reference] = written
            schema[keyword] = self.written[reference]

    def is_elsewhere(self, reference: str) -> bool:
        """Whether it surely leads out of the document. Where parts have bases of their own, relative ones are left to llguidance."""
        if not self.has_one_base and not urlsplit(reference).scheme:
            return False
        base, names = self.names
        target = urldefrag(urljoin(base, reference)).url
        return target not in names and urlsplit(target).netloc != "json-schema.org"  # whose own schemas llguidance knows

    @cached_property
    def names(self) -> tuple[str, frozenset[str]]:
        """The document's own, and those of all that is named in it."""
        given = [part[keyword] for _, part in walk(self.root) for keyword in ("$id", "id") if isinstance(part.get(keyword), str)]
        own = [self.root[keyword] for keyword in ("$id", "id") if isinstance(self.root.get(keyword), str)]
        base = own[0] if own else ""
        return base, frozenset(urldefrag(urljoin(base, name)).url for name in given)

    def moved(self, place: str, target: Any) -> str:
        """The name of a definition that stands for what may not be found any more where it was."""
        if place not in self.definitions:
            name = f"{_MOVED}{len(self.definitions)}"
            self.definitions[place] = name, True
            self.definitions[place] = name, self.exact(target, ())
        return self.definitions[place][0]

    def values(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        pending = [schema[keyword]]
        while pending:
            value = pending.pop()
            if isinstance(value, dict | list):
                pending.extend(value.values() if isinstance(value, dict) else value)
            elif isinstance(value, int) and abs(value) > _LARGEST_EXACT:
                raise self.refusal("a whole number beyond 2^53 cannot be asked for exactly", (*steps, keyword))

    def pattern(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        """Rewritten where it would not mean the same, and read where it may be too large; others are left to llguidance."""
        pattern = schema[keyword]
        if not isinstance(pattern, str) or self.leaves_out_large(schema, keyword, pattern, (*steps, keyword)):
            return
        if _has_operators(pattern):
            schema[keyword] = f"^(?:{to_pattern(self.tree(pattern, (*steps, keyword)))})$"

    def patterns(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        """Those that names have, in `patternProperties` or `propertyNames`."""
        value = schema[keyword]
        if not isinstance(value, dict):
            return
        found = [value["pattern"]] if keyword == "propertyNames" and "pattern" in value else value if keyword != "propertyNames" else ()
        for pattern in found:
            inner = "pattern" if keyword == "propertyNames" else pattern
            if isinstance(pattern, str) and self.leaves_out_large(schema, keyword, pattern, (*steps, keyword, inner)):
                return

    def leaves_out_large(self, schema: dict[str, Any], keyword: str, pattern: str, steps: Steps) -> bool:
        """Whether the pattern is too large, for which the schema of a lenient document loses the keyword, and others are refused."""
        if math.prod(max(int(count), 1) for count in _COUNTS.findall(pattern)) <= MAX_PLACES and not _has_operators(pattern):
            return False
        try:
            check_size(self.tree(pattern, steps))
        except UnwritableRegex as error:
            if not self.is_lenient:
                raise self.refusal(f"regex: {error}", steps) from error
        else:
            return False
        self.warnings.append(f"`{keyword}` at {self.param}{path(steps)}")
        del schema[keyword]
        if keyword == "patternProperties":
            schema.pop("additionalProperties", None)  # or else it would speak of the properties that the patterns do
        return True

    def tree(self, pattern: str, steps: Steps) -> Node:
        try:
            return search(parse(pattern, ecma_dialect()))
        except (RegexError, MisplacedAnchor) as error:
            raise self.refusal(f"regex: {error}", steps) from error

    def properties(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        required = schema.get("required")
        num_required = len(required) if isinstance(required, list) else 0
        if isinstance(schema[keyword], dict) and len(schema[keyword]) - num_required > MAX_OPTIONAL_PROPERTIES:
            raise self.refusal(f"more than {MAX_OPTIONAL_PROPERTIES} properties that are not required", (*steps, keyword))

    def bound(self, schema: dict[str, Any], keyword: str, steps: Steps) -> None:
        """The nearest double within, where the bound itself is none. Whole numbers have 64 bits there."""
        bound = schema[keyword]
        if not isinstance(bound, int) or abs(bound) <= _LARGEST_EXACT:
            return
        is_lower = keyword in _LOWER_BOUNDS
        if bound < -_LARGEST_BOUND and is_lower:
            bound = -_LARGEST_BOUND
        elif bound > _LARGEST_BOUND and not is_lower:
            bound = _LARGEST_BOUND
        elif abs(bound) > _LARGEST_BOUND:
            raise self.refusal("a bound beyond 64 bits", (*steps, keyword))
        nearest = float(bound)
        if is_lower and int(nearest) < bound:
            nearest = math.nextafter(nearest, math.inf)
        elif not is_lower and int(nearest) > bound:
            nearest = math.nextafter(nearest, -math.inf)
        schema[keyword] = int(nearest)


def _has_operators(pattern: str) -> bool:
    return any(_SET_OPERATORS.search(found[1] or "") for found in _CLASSES.finditer(pattern))


def _with_look_around(schema: dict[str, Any]) -> str | None:
    """The keyword, if any."""
    pattern, patterns = schema.get("pattern"), schema.get("patternProperties")
    if isinstance(pattern, str) and _LOOK_AROUND.search(pattern):
        return "pattern"
    return "patternProperties" if isinstance(patterns, dict) and any(map(_LOOK_AROUND.search, patterns)) else None


def _replace(exact: dict[str, Any], original: dict[str, Any], below: Steps, inner: Any) -> None:
    keyword = str(below[0])
    if len(below) == 1:
        exact[keyword] = inner
        return
    members: Any = exact[keyword]
    if members is original[keyword]:
        members = exact[keyword] = members.copy()
    members[below[1]] = inner


def _check_text(document: Any, param: str) -> None:
    """Raises `UnsupportedGrammar` for text and numbers that JSON in UTF-8 cannot hold."""
    try:
        json.dumps(document, ensure_ascii=False, allow_nan=False).encode()
    except ValueError as error:  # UnicodeEncodeError is one
        steps = _unwritable((), document)
        raise UnsupportedGrammar("a lone surrogate or a number out of range", param + path(steps or ())) from error


def _unwritable(steps: Steps, value: Any) -> Steps | None:
    """Where the innermost offending value stands. The document is known not to be deep."""
    if isinstance(value, dict):
        for name, child in value.items():
            found = steps if _is_unwritable(name) else _unwritable((*steps, name), child)
            if found is not None:
                return found
    elif isinstance(value, list):
        for place, child in enumerate(value):
            found = _unwritable((*steps, place), child)
            if found is not None:
                return found
    return steps if _is_unwritable(value) else None


def _is_unwritable(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value)
