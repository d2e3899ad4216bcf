"""The opposite of a JSON Schema without `not`, and whether two schemas can share a value."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.plugins.grammars.json_schema.values import ANNOTATIONS, dumps, json_type
from penstock.plugins.grammars.regex.automaton import OversizedAutomaton, intersection
from penstock.plugins.grammars.regex.lark import UnwritableRegex, to_pattern
from penstock.plugins.grammars.regex.syntax import MisplacedAnchor, RegexError, ecma_dialect, parse, search
from penstock.plugins.grammars.regex.tree import Either

TYPES = ("null", "boolean", "number", "string", "array", "object")  # whole numbers are among the numbers
ALL_TYPES = frozenset(TYPES)
MAX_OVERLAP_DEPTH = 12
MAX_STEPS = 10_000  # of some microseconds, for all of a document: alternatives within alternatives multiply
VALUES_PER_STEP = 50

Schema = Mapping[str, Any]


def types_of(schema: Schema) -> frozenset[str]:
    """Those that `type` and the given values leave."""
    given = schema.get("type", [*TYPES])
    names = given if isinstance(given, list) else [given]
    types = frozenset("number" if name == "integer" else name for name in names)
    values = values_of(schema)
    return types if values is None else types & {"number" if (name := json_type(value)) == "integer" else name for value in values}


def values_of(schema: Schema) -> list[Any] | None:
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def same_key(value: Any) -> str:
    """Equal for what JSON Schema calls equal: 1.0 is 1, and members have no order."""
    match value:
        case float() if value.is_integer():
            return dumps(int(value))
        case list():
            return "[" + ",".join(map(same_key, value)) + "]"
        case dict():
            return "{" + ",".join(sorted(f"{dumps(name)}:{same_key(item)}" for name, item in value.items())) + "}"
    return dumps(value)


class Overlap:
    """Compares schemas of one document, through their references."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._num_steps = 0
        self._keys: dict[int, tuple[list[Any], frozenset[str]]] = {}
        self._types: dict[int, tuple[Schema, frozenset[str]]] = {}
        self._targets: dict[str, Any] = {}

    def can_go_on(self, num_steps: int = 1) -> bool:
        """Counts steps; False where there have been too many."""
        self._num_steps += num_steps
        return self._num_steps <= MAX_STEPS

    def follow(self, schema: Any) -> Any:
        """The target of a lone reference; anything else as it is."""
        for _ in range(MAX_OVERLAP_DEPTH):
            if not isinstance(schema, dict) or not isinstance(reference := schema.get("$ref"), str) or _has_more(schema):
                return schema
            target = self.target(reference)
            if target is None:
                return schema
            schema = target
        return True

    def target(self, reference: str) -> Any:
        """None where it leads nowhere in this document."""
        if reference not in self._targets:
            try:
                _, self._targets[reference] = resolve(self.root, unquote(reference), "")
            except UnsupportedGrammar:
                return None
        return self._targets[reference]

    def _beside(self, schema: Schema) -> Any:
        """The target of a reference with keywords beside it; any value, if it is not known."""
        target = self.target(schema["$ref"]) if isinstance(schema["$ref"], str) else None
        return True if target is None else target

    def types(self, schema: Any, depth: int = 0) -> frozenset[str]:
        """No fewer than the values of the schema have."""
        schema = self.follow(schema)
        if not isinstance(schema, dict) or depth > MAX_OVERLAP_DEPTH or not self.can_go_on(_cost(schema)):
            return frozenset() if schema is False else ALL_TYPES
        types = types_of(schema)
        if "$ref" in schema:
            types &= self.types(self._beside(schema), depth + 1)
        for keyword in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list) and parts:
                of_parts = [self.types(part, depth + 1) for part in parts]
                types &= frozenset.intersection(*of_parts) if keyword == "allOf" else frozenset.union(*of_parts)
        return types

    def are_disjoint(self, left: Any, right: Any, types: frozenset[str] = ALL_TYPES, depth: int = 0) -> bool:
        """True only where no value of these types satisfies both."""
        left, right = self.follow(left), self.follow(right)
        if left is False or right is False:
            return True
        if not isinstance(left, dict) or not isinstance(right, dict) or depth > MAX_OVERLAP_DEPTH or not self.can_go_on(_cost(left)):
            return False
        for one, other in ((left, right), (right, left)):
            for keyword in ("anyOf", "oneOf"):
                parts = one.get(keyword)
                if isinstance(parts, list) and all(self.are_disjoint(part, other, types, depth + 1) for part in parts):
                    return True
            parts = one.get("allOf")
            if isinstance(parts, list) and any(self.are_disjoint(part, other, types, depth + 1) for part in parts):
                return True
            if "$ref" in one and self.are_disjoint(self._beside(one), other, types, depth + 1):
                return True
        shared = self._all_types(left) & self._all_types(right) & types
        if not shared:
            return True
        left_values, right_values = values_of(left), values_of(right)
        if left_values is not None and right_values is not None:
            return self._keys_of(left_values).isdisjoint(self._keys_of(right_values))
        if shared == {"array"}:
            return (_least(left) > 0 or _least(right) > 0) and self._have_disjoint_items(left, right, depth)
        return shared == {"object"} and self._have_disjoint_members(left, right, depth)

    def share_the_empty_array_only(self, left: Any, right: Any, types: frozenset[str]) -> bool:
        """Whether no other value of these types satisfies both."""
        left, right = self.follow(left), self.follow(right)
        if not isinstance(left, dict) or not isinstance(right, dict):
            return False
        return self._all_types(left) & self._all_types(right) & types == {"array"} and self._have_disjoint_items(left, right, 0)

    def _have_disjoint_items(self, left: Schema, right: Schema, depth: int) -> bool:
        if not all(isinstance(schema.get("items"), dict) and "prefixItems" not in schema for schema in (left, right)):
            return False
        return self.are_disjoint(left["items"], right["items"], depth=depth + 1)

    def _all_types(self, schema: Schema) -> frozenset[str]:
        if id(schema) not in self._types:
            self._types[id(schema)] = schema, self.types(schema)  # with the schema, whose identity is another's once it is gone
        return self._types[id(schema)][1]

    def _keys_of(self, values: list[Any]) -> frozenset[str]:
        if len(values) == 1:
            return frozenset(map(same_key, values))
        if id(values) not in self._keys:
            self._keys[id(values)] = values, frozenset(map(same_key, values))  # with the list, as above
        return self._keys[id(values)][1]

    def _have_disjoint_members(self, left: Schema, right: Schema, depth: int) -> bool:
        names = {name for schema in (left, right) for name in schema.get("required", ()) if isinstance(name, str)}
        return any(self.are_disjoint(_member(left, name), _member(right, name), depth=depth + 1) for name in names)


def _has_more(schema: Schema) -> bool:
    """Than a reference."""
    return len(schema) > 1 and any(keyword != "$ref" and keyword not in ANNOTATIONS for keyword in schema)


def _cost(schema: Schema) -> int:
    """In steps."""
    return 1 + len(values_of(schema) or ()) // VALUES_PER_STEP


def _least(schema: Schema) -> int:
    least = schema.get("minItems", 0)
    return least if isinstance(least, int) else 0


def _member(schema: Schema, name: str) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, dict) and name in properties:
        return properties[name]
    return True if schema.get("patternProperties") else schema.get("additionalProperties", True)


MAX_ALTERNATIVES = 200
MAX_CHARACTERS = 2000
MAX_LENGTH = 100
CHARACTERS_PER_STEP = 10
MAX_DEPTH = 16

_OPPOSITE_BOUNDS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}
_SIZES = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_CODE_POINTS = re.compile(r"\\x\{([0-9a-f]+)\}")
_NO_ASSERTIONS = ANNOTATIONS | {"$id", "id", "$anchor", "if", "then", "else", "contentEncoding", "contentMediaType"}


class Inexpressible(Exception):
    """The opposite cannot be written with the keywords that are left."""


class Negation:
    """Of schemas of one document. `is_assertion` says of a keyword and its value whether they demand anything at all.

    With `is_partial`, alternatives within an object that cannot be written are left out: what is left is forbidden still.
    """

    def __init__(self, overlap: Overlap, is_assertion: Callable[[str, Any], bool], *, is_partial: bool = False) -> None:
        self._overlap = overlap
        self._is_assertion = is_assertion
        self._is_partial = is_partial
        self._num_alternatives = 0
        self._num_members = 0  # within each other, of those whose opposite is being written

    def of(self, schema: Any, depth: int = 0) -> list[Any]:
        """None where the schema allows everything. Raises `Inexpressible`."""
        if schema is True or schema is False:
            return [] if schema else [True]
        if not isinstance(schema, dict) or depth > MAX_DEPTH or not self._overlap.can_go_on():
            raise Inexpressible
        asserted = [keyword for keyword, value in schema.items() if keyword not in _NO_ASSERTIONS and self._is_assertion(keyword, value)]
        if "$ref" in schema:
            target = self._overlap.follow(schema)
            if asserted != ["$ref"] or (isinstance(target, dict) and "$ref" in target):
                raise Inexpressible  # keywords beside a reference count in some drafts only
            return self.of(target, depth + 1)
        alternatives: list[Any] = []
        for keyword in asserted:
            try:
                alternatives += self._of_keyword(keyword, schema, depth)
            except Inexpressible:
                if not self._is_partial or not self._num_members:
                    raise
        if "if" in schema and self._is_assertion("if", schema["if"]):
            alternatives += self._of_condition(schema, depth)
        self._num_alternatives += len(alternatives)
        if self._num_alternatives > MAX_ALTERNATIVES:
            raise Inexpressible
        return alternatives

    def _of_keyword(self, keyword: str, schema: dict[str, Any], depth: int) -> list[Any]:
        value = schema[keyword]
        if keyword in _OPPOSITE_BOUNDS and isinstance(value, int | float) and not isinstance(value, bool):
            if any(isinstance(schema.get(name), bool) for name in _OPPOSITE_BOUNDS):
                raise Inexpressible  # draft 4's `exclusiveMinimum: true`
            return [{"type": "number", _OPPOSITE_BOUNDS[keyword]: value}]
        if keyword in _SIZES and isinstance(value, int):
            type_name, opposite, step = _SIZES[keyword]
            return [{"type": type_name, opposite: value + step}] if value + step >= 0 else []
        match keyword, value:
            case "type", str() | list():
                return _other_types([value] if isinstance(value, str) else value, is_partial=self._is_partial and self._num_members > 0)
            case ("const", _) | ("enum", list()):
                values = values_of({keyword: value}) or []
                if not self._overlap.can_go_on(sum(len(text) for text in values if isinstance(text, str)) // CHARACTERS_PER_STEP):
                    raise Inexpressible
                return _other_values(values)
            case "required", list():
                return [{"type": "object", "properties": {name: False}} for name in value]
            case "properties", dict():
                return self._of_properties(value, depth)
            case (("additionalProperties" | "patternProperties"), _) if self._is_partial:
                return []
            case (("additionalProperties" | "items"), _) if value is True or value == {}:
                return []
            case "pattern", str():
                return _other_matches(value)
            case "not", _:
                return [value]
            case "allOf", list():
                return [alternative for part in value for alternative in self.of(part, depth + 1)]
            case (("anyOf" | "oneOf"), list()):
                return self._of_alternatives(keyword, value, depth)
        raise Inexpressible

    def _of_properties(self, properties: dict[str, Any], depth: int) -> list[Any]:
        if self._is_partial and self._num_members:
            return []  # what is left out anyway need not be written at length
        self._num_members += 1
        try:
            opposites = {name: self._of_member(schema, depth) for name, schema in properties.items()}
        finally:
            self._num_members -= 1
        return [
            {"type": "object", "properties": {name: any_of(opposite)}, "required": [name]}
            for name, opposite in opposites.items()
            if opposite
        ]

    def _of_member(self, schema: Any, depth: int) -> list[Any]:
        try:
            return self.of(schema, depth + 1)
        except Inexpressible:
            if not self._is_partial:
                raise
            return []

    def _of_alternatives(self, keyword: str, schemas: list[Any], depth: int) -> list[Any]:
        several = [
            {"allOf": [left, right]}
            for place, right in enumerate(schemas if keyword == "oneOf" else [])
            for left in schemas[:place]
            if not self._overlap.are_disjoint(left, right)
        ]
        opposites = [self.of(schema, depth + 1) for schema in schemas]
        return ([{"allOf": [any_of(opposite) for opposite in opposites]}] if all(opposites) else []) + several

    def _of_condition(self, schema: dict[str, Any], depth: int) -> list[Any]:
        alternatives: list[Any] = []
        opposite_then = self.of(schema.get("then", True), depth + 1)
        if opposite_then:
            alternatives.append({"allOf": [schema["if"], any_of(opposite_then)]})
        opposite_else = self.of(schema.get("else", True), depth + 1)
        opposite_if = self.of(schema["if"], depth + 1) if opposite_else else []
        if opposite_if:
            alternatives.append({"allOf": [any_of(opposite_if), any_of(opposite_else)]})
        return alternatives


def any_of(schemas: list[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _other_types(names: list[Any], *, is_partial: bool) -> list[Any]:
    others = [name for name in TYPES if name not in names]
    if "integer" in names and "number" in others:
        if not is_partial:
            raise Inexpressible  # numbers that are not whole
        others.remove("number")
    return [{"type": others}] if others else []


def _other_values(values: list[Any]) -> list[Any]:
    by_type: dict[str, list[Any]] = {}
    for value in {same_key(value): value for value in values}.values():
        name = json_type(value)
        by_type.setdefault("number" if name == "integer" else name, []).append(value)
    alternatives: list[Any] = [{"type": others}] if (others := [name for name in TYPES if name not in by_type]) else []
    for name, given in by_type.items():
        match name:
            case "boolean":
                alternatives += [{"const": not given[0]}] if len(given) == 1 else []
            case "string":
                alternatives.append({"type": "string", "pattern": _other_strings(given)})
            case "number":
                alternatives += _other_numbers(sorted(given))
            case "array" | "object":
                if any(given):
                    raise Inexpressible
                alternatives.append({"type": name, "minItems" if name == "array" else "minProperties": 1})
    return alternatives


def _other_numbers(values: list[float]) -> list[Any]:
    between = [{"exclusiveMinimum": low, "exclusiveMaximum": high} for low, high in itertools.pairwise(values)]
    spans = [{"exclusiveMaximum": values[0]}, *between, {"exclusiveMinimum": values[-1]}]
    return [{"type": "number", **span} for span in spans]


def _other_matches(pattern: str) -> list[Any]:
    """Strings in which the regex is not found, if there are any."""
    try:
        node = intersection([(search(parse(pattern, ecma_dialect())), False)])
        if node == Either(()):
            return []
        # As one of JSON Schema's patterns, since it is read again; the eight digits are read alike here and by llguidance.
        written = _CODE_POINTS.sub(lambda found: f"\\U{int(found[1], 16):08x}", to_pattern(node))
        return [{"type": "string", "pattern": f"^(?:{written})$"}]
    except (RegexError, MisplacedAnchor, OversizedAutomaton, UnwritableRegex):
        raise Inexpressible from None


def _other_strings(values: list[str]) -> str:
    """A regex for every string but these."""
    if sum(map(len, values)) > MAX_CHARACTERS or max(map(len, values)) > MAX_LENGTH:
        raise Inexpressible
    tree: dict[str, Any] = {}
    for value in values:
        node = tree
        for character in value:
            node = node.setdefault(character, {})
        node[""] = True
    return f"^{_outside(tree)}$"


def _outside(node: dict[str, Any]) -> str:
    children = {character: child for character, child in node.items() if character}
    others = "".join(map(_escaped, children))
    ways = [rf"[^{others}][\s\S]*" if others else r"[\s\S]+"]
    ways += [_escaped(character) + _outside(child) for character, child in children.items()]
    return f"(?:{'|'.join(ways)})" + ("" if "" in node else "?")


def _escaped(character: str) -> str:
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else character


_CONDITIONAL = ("anyOf", "oneOf", "if", "then", "else", "dependentSchemas")
_DYNAMIC = ("$dynamicRef", "$recursiveRef")


@dataclass(slots=True)
class Evaluated:
    """Names and patterns of properties, and how many items from the first on. `has_all_…` where the schema says something of all others."""

    names: dict[str, bool] = field(default_factory=dict)
    patterns: dict[str, bool] = field(default_factory=dict)
    has_all_properties: bool = False
    num_items: int = 0
    has_all_items: bool = False

    def covers(self, other: "Evaluated") -> bool:
        return (
            other.names.keys() <= self.names.keys()
            and other.patterns.keys() <= self.patterns.keys()
            and other.num_items <= self.num_items
            and not (other.has_all_properties or other.has_all_items)
        )


def evaluated(schema: Any, target: Callable[[str], Any]) -> Evaluated:
    """Without what the schema's own `unevaluated…` keywords speak of. `target` is what a reference leads to, or None.

    Raises `Inexpressible` where it depends on the value.
    """
    found, parts = Evaluated(), Evaluated()
    if isinstance(schema, dict):
        _collect(schema, target, found, parts, (), is_outermost=True)
    if not found.covers(parts):
        raise Inexpressible
    return found


def _collect(
    schema: Any, target: Callable[[str], Any], found: Evaluated, parts: Evaluated, within: tuple[str, ...], *, is_outermost: bool = False
) -> None:
    """`parts` takes what is said under conditions, `within` are references that are being followed."""
    if not isinstance(schema, dict):
        return
    if any(keyword in schema for keyword in _DYNAMIC) or "contains" in schema:
        raise Inexpressible
    found.names |= dict.fromkeys(schema.get("properties", {}), True)
    found.patterns |= dict.fromkeys(schema.get("patternProperties", {}), True)
    for items in (schema.get("prefixItems"), schema.get("items")):
        found.num_items = max(found.num_items, len(items) if isinstance(items, list) else 0)
    found.has_all_properties |= "additionalProperties" in schema or ("unevaluatedProperties" in schema and not is_outermost)
    found.has_all_items |= isinstance(schema.get("items"), dict | bool) or "additionalItems" in schema
    found.has_all_items |= "unevaluatedItems" in schema and not is_outermost
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference not in within:
        referred = target(reference)
        if referred is None:
            raise Inexpressible
        _collect(referred, target, found, parts, (*within, reference))
    for part in schema.get("allOf", []):
        _collect(part, target, found, parts, within)
    for part in _conditional(schema):
        _collect(part, target, parts, parts, within)


def _conditional(schema: dict[str, Any]) -> Iterator[Any]:
    for keyword in _CONDITIONAL:
        part = schema.get(keyword)
        if isinstance(part, list):
            yield from part
        elif keyword == "dependentSchemas" and isinstance(part, dict):
            yield from part.values()
        else:
            yield part
