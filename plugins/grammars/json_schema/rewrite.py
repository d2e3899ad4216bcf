"""Keywords of JSON Schema, rewritten exactly with others that more compilers know; and the search for the keyword that one refuses."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

from penstock.plugins.grammars.json_schema.document import Steps, at, pointer, resolve, subschemas, walk
from penstock.plugins.grammars.json_schema.negation import (
    ALL_TYPES,
    Inexpressible,
    Negation,
    Overlap,
    any_of,
    evaluated,
    same_key,
    types_of,
    values_of,
)
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS, ASSERTIONS, KEYWORDS_OF, PATTERNS, dumps

MAX_ALTERNATIVES = 64
MAX_ARRAYS = 400
MAX_NESTED = 6

# The names that JSON Schema defines; to it, all others are remarks.
DEFINED_FORMATS = frozenset(
    {
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
        *("uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
    }
)
COMPILED_FORMATS = DEFINED_FORMATS - {
    *(
        "idn-email",
        "idn-hostname",
        "uri-reference",
        "iri",
        "iri-reference",
        "uri-template",
        "json-pointer",
        "relative-json-pointer",
        "regex",
    )
}
_DEPENDENCIES = ("dependencies", "dependentRequired", "dependentSchemas")
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
_PATTERNS = {
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9][0-9]*)(?:#|{_POINTER})$",
    # llguidance takes every February for one of 29 days, and any minute for one of 61 seconds.
    **{name: f"^(?:{PATTERNS[name]})$".replace(r"\d", "[0-9]") for name in ("date", "time", "date-time")},
}

Schema = Mapping[str, Any]


_OF_ALL_TYPES = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "$dynamicRef", "$recursiveRef"})

# Keywords that are taken together with the one that they depend on.
_TOGETHER = {
    "if": ("if", "then", "else"),
    "contains": ("contains", "minContains", "maxContains"),
    **dict.fromkeys(("minProperties", "maxProperties"), ("minProperties", "maxProperties")),
    **dict.fromkeys(_DEPENDENCIES, _DEPENDENCIES),
}
_BESIDE = {"then": "if", "else": "if", "minContains": "contains", "maxContains": "contains"}

# What is said with others or not at all.
REWRITTEN = frozenset(
    {
        *("not", "if", "then", "else", "oneOf", *_DEPENDENCIES, "propertyNames", "uniqueItems", "format"),
        *("minProperties", "maxProperties", "contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
    }
)


def unsupported(schema: Schema, keyword: str) -> str:
    """What is said where a keyword cannot be rewritten."""
    if keyword == "oneOf":
        return "`oneOf`: its alternatives may share values, which is not supported"
    if keyword in ("pattern", "patternProperties"):
        return f"`{keyword}`: regex: look-around, including look-ahead and look-behind, is not supported"
    if keyword == "format":
        return f"`format`: {dumps(schema[keyword])[:40]} is not supported"
    return f"`{keyword}` is not supported" + (" beside so many properties" if keyword in ("minProperties", "maxProperties") else "")


def replace_keyword(schema: dict[str, Any], keyword: str, additions: list[Any]) -> None:
    """Puts schemas in a keyword's place. Members keep their order, which decides the order of properties."""
    if (
        keyword == "oneOf"
        and len(additions) == 1
        and isinstance(additions[0], dict)
        and [*additions[0]] == ["anyOf"]
        and "anyOf" not in schema
    ):
        members = [("anyOf", additions[0]["anyOf"]) if name == "oneOf" else (name, value) for name, value in schema.items()]
        schema.clear()
        schema.update(members)
        return
    for name in _TOGETHER.get(keyword, (keyword,)):
        schema.pop(name, None)
    if not additions or not isinstance(schema.get("allOf", []), list):  # which is refused for that
        return
    if keyword == "format" and "pattern" not in schema and "allOf" not in schema:
        schema.update(additions[0])
        return
    if "allOf" in schema and isinstance(schema.get("properties"), dict):
        additions = [{"properties": dict.fromkeys(schema["properties"], True)}, *additions]
    schema["allOf"] = [*schema.get("allOf", []), *additions]


def leave_out(schema: dict[str, Any], keyword: str) -> None:
    del schema[keyword]
    if keyword == "patternProperties":
        schema.pop("additionalProperties", None)  # or else it would speak of the properties that the patterns do


def join_lone_reference(exact: dict[str, Any]) -> None:
    """A reference in `allOf` with nothing beside it, descriptions aside, is a lone reference."""
    parts = [part for part in exact["allOf"] if part is not True and part != {}]
    if len(parts) == 1 and len(exact) == 1 and isinstance(parts[0], dict) and [*parts[0]] == ["$ref"]:
        del exact["allOf"]
        exact["$ref"] = parts[0]["$ref"]


class Rewriting:
    """Of one document. `unknown` are the keywords that its draft does not know."""

    def __init__(self, root: Any, unknown: frozenset[str]) -> None:
        self._unknown = unknown
        self._overlap = Overlap(root)
        self._opposites: dict[int, tuple[Any, list[Any], bool]] = {}
        self._rewrites: dict[str, Callable[[Schema], list[Any] | None]] = {
            "not": self.negated,
            "if": self.conditional,
            "oneOf": self.one_of,
            **dict.fromkeys(_DEPENDENCIES, self.dependent),
            "propertyNames": self.named,
            "uniqueItems": self.unique,
            "minProperties": self.counted,
            "maxProperties": self.counted,
            "format": self.formatted,
            "contains": self.containing,
            "unevaluatedProperties": self.other_properties,
            "unevaluatedItems": self.other_items,
        }

    def additions(self, schema: Schema, keyword: str) -> list[Any] | None:
        """What says the same as the keyword, all of it together; None where it can stay as it is. Raises `Inexpressible`."""
        leading = _BESIDE.get(keyword, keyword)
        if leading not in schema:
            return []  # which says nothing by itself
        return self._rewrites[keyword](schema) if keyword == leading else None  # it goes with that one

    def negated(self, schema: Schema) -> list[Any]:
        return _all_of(self._negation().of(schema["not"]))

    def conditional(self, schema: Schema) -> list[Any]:
        """One for each outcome. Within each other they multiply."""
        if (
            sum("if" in part for _, part in walk({keyword: schema[keyword] for keyword in _TOGETHER["if"] if keyword in schema}))
            > MAX_NESTED
        ):
            raise Inexpressible
        condition, then, otherwise = schema["if"], schema.get("then", True), schema.get("else", True)
        if then is True and otherwise is True:
            return []
        opposite = self._negation().of(condition)
        unmet = [{"allOf": [any_of(opposite), otherwise]}] if opposite else []
        return [any_of([{"allOf": [condition, then]}, *unmet])]

    def one_of(self, schema: Schema) -> list[Any]:
        """The alternatives, each without what another has too.

        Values that avoid another alternative only deep within a member of theirs may be lost with that: none is allowed that should not be.
        """
        parts = schema["oneOf"]
        if not isinstance(parts, list) or len(parts) > MAX_ALTERNATIVES:
            raise Inexpressible
        free = [self._free_types(part) for part in parts]
        alternatives: list[Any] = []
        for place, part in enumerate(parts):
            others = [(rival, free[number]) for number, rival in enumerate(parts) if number != place]
            types = types_of(schema).difference(*(types for _, types in others))
            opposites = [self._outside(rival, part, types) for rival, _ in others if not self._overlap.are_disjoint(part, rival, types)]
            if all(opposites):
                needed = self._overlap.types(part) & types_of(schema)
                if needed & types:
                    demands = [any_of(opposite) for opposite in opposites]
                    alternatives.append(_narrowed(part, None if needed <= types else needed & types, demands))
        return _all_of(alternatives)

    def _free_types(self, schema: Any) -> frozenset[str]:
        """Of which every value satisfies the schema."""
        schema = self._overlap.follow(schema)
        if not isinstance(schema, dict):
            return ALL_TYPES if schema is True else frozenset()
        asserted = {keyword for keyword, value in schema.items() if self._is_assertion(keyword, value)} - ANNOTATIONS
        if asserted & _OF_ALL_TYPES:
            return frozenset()
        return (
            types_of(schema)
            - {name for name, keywords in KEYWORDS_OF.items() if asserted & keywords}
            - ({"number"} if schema.get("type") == "integer" or "integer" in schema.get("type", ()) else set())
        )

    def _outside(self, rival: Any, part: Any, types: frozenset[str]) -> list[Any]:
        """What of the rival's opposite can be met by `part`."""
        if self._overlap.share_the_empty_array_only(part, rival, types):
            return [{"minItems": 1}]
        opposite, is_whole = self._opposite(rival)
        met = [alternative for alternative in opposite if not self._overlap.are_disjoint(part, alternative, types)]
        if not met and not is_whole:
            raise Inexpressible
        return met

    def _opposite(self, schema: Any) -> tuple[list[Any], bool]:
        """With whether it is all of the opposite. Each alternative asks for that of every other."""
        if id(schema) not in self._opposites:
            try:
                opposite, is_whole = self._negation().of(schema), True
            except Inexpressible:
                opposite, is_whole = self._negation(is_partial=True).of(schema), False
            self._opposites[id(schema)] = schema, opposite, is_whole  # with the schema, whose identity is another's once it is gone
        return self._opposites[id(schema)][1:]

    def dependent(self, schema: Schema) -> list[Any]:
        conditions: list[Any] = []
        for keyword in _DEPENDENCIES:
            members = schema.get(keyword, {})
            if keyword in self._unknown:
                continue
            if not isinstance(members, dict):
                raise Inexpressible
            for name, demand in members.items():
                absent = {"properties": {name: False}}
                if isinstance(demand, list):
                    others = [other for other in demand if other != name]
                    present: Any = {"required": [name, *others]} if others else True
                else:
                    present = {"allOf": [{"required": [name]}, demand]} if demand is not True else True
                if present is not True:
                    conditions.append({"anyOf": [absent, present]})
        if 2 ** len(conditions) > MAX_ALTERNATIVES:
            raise Inexpressible
        return conditions

    def named(self, schema: Schema) -> list[Any]:
        names = self._overlap.follow(schema["propertyNames"])
        if isinstance(names, bool):
            return [] if names else [{"maxProperties": 0}]
        if not isinstance(names, dict) or "string" not in types_of({"type": names.get("type", "string")}):
            raise Inexpressible
        asserted = {keyword for keyword, value in names.items() if keyword != "type" and self._is_assertion(keyword, value)} - ANNOTATIONS
        if not asserted:
            return []
        values = values_of(names)
        if values is not None and not asserted - {"enum", "const"}:
            known = dict.fromkeys(name for name in values if isinstance(name, str))
            own = schema.get("properties")
            order = [*(name for name in own if name in known), *known] if isinstance(own, dict) else [*known]
            return [{"properties": dict.fromkeys(order, True), "additionalProperties": False}]
        return [{"patternProperties": {_name_pattern(names, asserted): True}, "additionalProperties": False}]

    def unique(self, schema: Schema) -> list[Any]:
        most = schema.get("maxItems")
        if schema["uniqueItems"] is False or "array" not in types_of(schema) or (isinstance(most, int) and most <= 1):
            return []
        items = self._overlap.follow(schema.get("items"))
        if not isinstance(items, dict) or "prefixItems" in schema:
            raise Inexpressible
        values = values_of(items)
        if values is None and types_of(items) == {"boolean"}:
            values = [True, False]
        if values is None:
            raise Inexpressible
        distinct = list({same_key(value): value for value in values}.values())
        arrays = _arrays(distinct, schema.get("minItems", 0), len(distinct) if most is None else most)
        others = sorted(types_of(schema) - {"array"})
        alternatives = [{"enum": arrays}] if arrays else []
        return _all_of([*alternatives, {"type": others}] if others else alternatives)

    def counted(self, schema: Schema) -> list[Any] | None:
        """Which of the properties that may be missing are there, spelled out: how many others there may be is what is counted then."""
        least, most = schema.get("minProperties", 0), schema.get("maxProperties")
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list) or not isinstance(least, int):
            raise Inexpressible
        optional = [name for name, member in properties.items() if name not in required and member is not False]
        can_have_others = schema.get("additionalProperties", True) is not False or bool(schema.get("patternProperties"))
        num_required = len(set(required))
        enough = max(least - num_required, 0)
        if enough > 1 and can_have_others:
            raise Inexpressible  # a grammar does not know whether two names that it is not given are the same, and counts them twice
        if not optional:
            return None
        count = {keyword: schema[keyword] for keyword in ("minProperties", "maxProperties") if keyword in schema}
        largest = len(optional) if most is None else min(len(optional), most - num_required)
        if most is None and (not enough or math.comb(len(optional), enough) > MAX_ALTERNATIVES):
            if enough:
                raise Inexpressible
            return []
        fewer = _combinations(optional, least=0 if can_have_others else enough, most=enough - 1 if most is None else largest)
        alternatives = [_exactly(present, optional, count) for present in fewer]
        if most is None:  # the first that are there; more may follow
            first = itertools.combinations(optional, enough)
            alternatives += [_exactly(present, optional[: optional.index(present[-1]) + 1], {}) for present in first]
        if len(alternatives) > MAX_ALTERNATIVES:
            raise Inexpressible
        others = sorted(types_of(schema) - {"object"})
        return _all_of([*alternatives, {"type": others}] if others else alternatives)

    def formatted(self, schema: Schema) -> list[Any] | None:
        name = schema["format"]
        if name not in DEFINED_FORMATS or "string" not in types_of(schema):
            return []
        if name in _PATTERNS:
            return [{"pattern": _PATTERNS[name]}]
        if name in COMPILED_FORMATS:
            return None
        raise Inexpressible

    def containing(self, schema: Schema) -> list[Any]:
        if schema["contains"] not in (True, {}):
            raise Inexpressible
        bounds = {"minContains", "maxContains"} & schema.keys() - self._unknown
        said = {keyword: schema[keyword] for keyword in bounds}
        most = {"maxItems": said["maxContains"]} if "maxContains" in said else {}
        return [{"minItems": said.get("minContains", 1), **most}]

    def other_properties(self, schema: Schema) -> list[Any]:
        """Those that nothing speaks of are those beside all that anything speaks of, where that does not depend on the value."""
        if schema["unevaluatedProperties"] is True or (known := evaluated(schema, self._overlap.target)).has_all_properties:
            return []
        patterns = {"patternProperties": known.patterns} if known.patterns else {}
        return [{"properties": known.names, **patterns, "additionalProperties": schema["unevaluatedProperties"]}]

    def other_items(self, schema: Schema) -> list[Any]:
        if schema["unevaluatedItems"] is True or (known := evaluated(schema, self._overlap.target)).has_all_items:
            return []
        return [{"prefixItems": [True] * known.num_items, "items": schema["unevaluatedItems"]}]

    def _negation(self, *, is_partial: bool = False) -> Negation:
        return Negation(self._overlap, self._is_assertion, is_partial=is_partial)

    def _is_assertion(self, keyword: str, value: Any) -> bool:
        return keyword not in self._unknown and not keyword.startswith("x-") and (keyword != "format" or value in DEFINED_FORMATS)


def _name_pattern(names: Schema, asserted: set[str]) -> str:
    """A regex for the names of which one such thing is said."""
    if asserted == {"pattern"}:
        return str(names["pattern"])
    if asserted == {"format"} and names["format"] in PATTERNS:
        return f"^(?:{PATTERNS[names['format']]})$".replace(r"\d", "[0-9]")
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if asserted <= {"minLength", "maxLength"} and isinstance(least, int) and (most == "" or isinstance(most, int)):
        return rf"^[\s\S]{{{least},{most}}}$"
    raise Inexpressible


def _narrowed(part: Any, types: frozenset[str] | None, demands: list[Any]) -> Any:
    """Only values of these types, where any are given, and only such as meet the demands."""
    if types is not None and isinstance(part, dict) and not {"type", "$ref"} & part.keys():
        part = {"type": sorted(types), **part}
    elif types is not None:
        part = {"allOf": [{"type": sorted(types)}, part]}
    return {"allOf": [part, *demands]} if demands else part


def _all_of(alternatives: list[Any]) -> list[Any]:
    return [any_of(alternatives)] if alternatives else [False]


def _arrays(values: list[Any], least: int, most: int) -> list[list[Any]]:
    arrays: list[list[Any]] = []
    for size in range(max(least, 0), min(most, len(values)) + 1):
        for chosen in itertools.permutations(values, size):
            arrays.append([*chosen])
            if len(arrays) > MAX_ARRAYS:
                raise Inexpressible
    return arrays


def _combinations(values: list[str], *, least: int, most: int) -> Iterator[tuple[str, ...]]:
    if sum(math.comb(len(values), size) for size in range(least, most + 1)) > MAX_ALTERNATIVES:
        raise Inexpressible
    for size in range(least, most + 1):
        yield from itertools.combinations(values, size)


def _exactly(present: tuple[str, ...], optional: list[str], count: Schema) -> Any:
    """Of `optional` those that are `present`. Only objects are asked about."""
    absent = {"properties": {name: False for name in optional if name not in present}}
    return {**count, **({"required": [*present]} if present else {}), **absent}


MAX_SECONDS = 0.5

# What the compiler reads as schemas; the others it refuses or passes over whole.
_COMPILED = frozenset(
    {
        *("properties", "patternProperties", "additionalProperties", "items", "prefixItems", "additionalItems"),
        *("anyOf", "oneOf", "allOf"),
    }
)
_BLAMED_LAST = ("items", "$ref", "properties", "type")
_HOME = "penstock-schema"


@dataclass(frozen=True, slots=True)
class Fault:
    """`keyword` of the subschema at `steps` is to blame; None where no single one is. `message` is the compiler's."""

    steps: Steps
    keyword: str | None
    message: str


def find_fault(schema: Any, error_of: Callable[[Any], str | None]) -> Fault | None:
    """The deepest, first thing in `schema` for which `error_of` a schema gives a message; None where there is nothing to blame.

    Where asking takes too long, the place is the deepest one known by then.
    """
    return _Search(schema, error_of).run()


def as_written(fault: Fault, document: Any) -> Fault:
    """The fault in the document from which the schema was rewritten: what is not there is reported at the keyword that it replaces."""
    for end in range(len(fault.steps), -1, -1):
        part = _part(document, fault.steps[:end])
        if not isinstance(part, dict):
            continue
        if end == len(fault.steps) and (fault.keyword is None or fault.keyword in part):
            return fault
        for keyword in part:
            if keyword in REWRITTEN:
                return Fault(fault.steps[:end], keyword, fault.message)
    return Fault((), None, fault.message)


def _part(document: Any, steps: Steps) -> Any:
    """None without one."""
    try:
        return at(document, steps)
    except (KeyError, IndexError, TypeError):
        return None


class _Search:
    """Goes from a schema that is refused to a part that is. References back to what was gone through are taken for any value:
    what is refused then is so on its own account.
    """

    def __init__(self, schema: Any, error_of: Callable[[Any], str | None]) -> None:
        self.schema = schema
        self.error_of = error_of
        self.deadline = time.monotonic() + MAX_SECONDS
        self.visited: set[str] = set()
        self.moved: Any = None

    def run(self) -> Fault | None:
        message = self.error_of(self.schema)
        return None if message is None else self.descend((), self.schema, message)

    def descend(self, steps: Steps, schema: Any, message: str) -> Fault:
        self.visited.add(pointer(steps))
        self.moved = self.move(self.schema)
        for below, child in self.parts(steps, schema):
            if time.monotonic() > self.deadline:
                return Fault(steps, None, message)
            if pointer(below) in self.visited or child is False:  # which is fine wherever another way is left
                continue
            inner = self.error_of(self.document({"$ref": f"#/$defs/{_HOME}{quote(pointer(below))}"}))
            if inner is not None:
                return self.descend(below, child, inner)
        keyword, own_message = self.keyword(schema, message)
        return Fault(steps, keyword, own_message or message)

    def parts(self, steps: Steps, schema: Any) -> list[tuple[Steps, Any]]:
        if not isinstance(schema, dict):
            return []
        parts = [(steps + below, child) for below, child in subschemas(schema) if below[0] in _COMPILED]
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#/"):
            parts.append(resolve(self.schema, unquote(reference), "$ref"))
        return parts

    def keyword(self, schema: Any, message: str) -> tuple[str | None, str | None]:
        """The one that is refused by itself, with the message, or else the first without which the rest is not."""
        if not isinstance(schema, dict):
            return None, None
        if message.startswith("min/maxProperties"):
            return next((keyword for keyword in ("minProperties", "maxProperties") if keyword in schema), None), None
        if message.startswith("circular references"):  # whatever else is left out, it may only be met elsewhere
            return next((keyword for keyword in ("allOf", "oneOf", "anyOf", "$ref") if keyword in schema), None), None
        moved = self.move(schema)
        keywords = [keyword for keyword in moved if keyword in ASSERTIONS]
        for keyword in keywords:
            own = self.error_of(self.document({keyword: moved[keyword]}))
            if own is not None:
                return keyword, own
        for keyword in sorted(keywords, key=lambda keyword: _BLAMED_LAST.index(keyword) if keyword in _BLAMED_LAST else -1):
            rest = {name: value for name, value in moved.items() if name != keyword}
            if self.error_of(self.document(rest)) is None:
                return keyword, None
        return None, None

    def document(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A part as a document of its own, in which the references of the whole still lead somewhere."""
        dialect = {"$schema": self.schema["$schema"]} if isinstance(self.schema, dict) and "$schema" in self.schema else {}
        return {**dialect, **schema, "$defs": {_HOME: self.moved}}

    def move(self, schema: Any) -> Any:
        """With references as they must be when the document is in `$defs` of another."""
        if isinstance(schema, list):
            return [self.move(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        moved = {
            name: self.move(value) for name, value in schema.items() if name not in ("$id", "id", "$schema") or not isinstance(value, str)
        }
        reference = moved.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            if unquote(reference[1:]) in self.visited:
                del moved["$ref"]
            else:
                moved["$ref"] = f"#/$defs/{_HOME}{reference[1:]}"
        return moved
