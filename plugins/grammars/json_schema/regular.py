"""JSON Schema as a regular expression, where that means the same; the part of a schema that is regular; and which masks are quick."""

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.json_schema import values as json_text
from penstock.plugins.grammars.json_schema.document import resolve
from penstock.plugins.grammars.json_schema.negation import Overlap
from penstock.plugins.grammars.json_schema.values import (
    ANNOTATIONS,
    JSON_TYPES,
    KEYWORDS_OF,
    TRANSLATED,
    Whitespace,
    dumps,
    json_type,
    number,
    string_format,
)
from penstock.plugins.grammars.regex.lark import UnwritableRegex, check_size
from penstock.plugins.grammars.regex.syntax import MisplacedAnchor, RegexError, ecma_dialect, parse, search
from penstock.plugins.grammars.regex.tree import EMPTY, Chars, Either, Literal, Node, Repeat, Sequence, either, optional

MAX_SUBSCHEMAS = 5000
MAX_GIVEN_VALUES = 30_000  # references to their enumerations included
MAX_ONE_OF = 100  # each is compared with each


@dataclass(frozen=True, slots=True)
class Place:
    """A subschema: its path, how deep its value is nested and which references led there."""

    path: str
    depth: int = 0
    references: tuple[str, ...] = ()

    def at(self, *steps: str | int) -> "Place":
        return Place(self._join(steps), self.depth, self.references)

    def inside(self, *steps: str | int) -> "Place":
        return Place(self._join(steps), self.depth + 1, self.references)

    def _join(self, steps: tuple[str | int, ...]) -> str:
        return self.path + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)


def refusal(message: str, place: Place) -> UnsupportedGrammar:
    return UnsupportedGrammar(message, place.path)


def translate(schema: Any, param: str, whitespace: Whitespace) -> Node:
    """The tree whose full matches are the schema's instances. Raises `UnsupportedGrammar`, `param` plus the keyword's path in it."""
    return Translation(schema, param, whitespace).node(schema, Place(param))


class Translation:
    """The walk over one schema; `root` is the document that references lead into."""

    def __init__(self, root: Any, param: str, whitespace: Whitespace) -> None:
        self.root = root
        self.param = param
        self.whitespace = whitespace
        self.num_subschemas = 0
        self.num_values = 0

    def node(self, schema: Any, place: Place) -> Node:
        self.num_subschemas += 1
        if self.num_subschemas > MAX_SUBSCHEMAS:
            raise refusal(f"more than {MAX_SUBSCHEMAS} subschemas, references included", place)
        if schema is True:
            return self.any_value(place)
        if not isinstance(schema, Mapping):
            raise refusal(f"{place.path}: only a schema object is supported here, got {dumps(schema)[:40]}", place)
        keywords = [keyword for keyword in schema if keyword not in ANNOTATIONS and not keyword.startswith("x-")]
        if place.depth == 0 and not place.references:
            keywords = [keyword for keyword in keywords if keyword not in ("$id", "id")]
        for keyword, translate in (("$ref", self.reference), ("anyOf", self.any_of), ("oneOf", self.one_of), ("allOf", self.all_of)):
            if keyword in schema:
                self.allow(keywords, {keyword}, place, f" beside `{keyword}`")
                return translate(schema[keyword], place)
        if "const" in schema or "enum" in schema:
            self.allow(keywords, {"const", "enum", "type"}, place, " beside given values")
            return self.values(schema, place)
        types = self.types(schema, keywords, place)
        families = {"number" if name == "integer" else name for name in types}
        idle = (own for name, own in KEYWORDS_OF.items() if name not in families)  # they say nothing about values of other types
        self.allow(keywords, TRANSLATED.union(*idle), place)
        return either(*(self.typed(name, schema, place) for name in types))

    def typed(self, name: str, schema: Mapping[str, Any], place: Place) -> Node:
        match name:
            case "object":
                return self.object_node(schema, place)
            case "array":
                return self.array_node(schema, place)
            case "string":
                return self.string_node(schema, place)
            case "boolean":
                return json_text.BOOLEAN
            case "null":
                return json_text.NULL
        return number(schema, place.path, is_integer=name == "integer")

    def allow(self, keywords: list[str], allowed: set[str] | frozenset[str], place: Place, where: str = "") -> None:
        for keyword in keywords:
            if keyword not in allowed:
                raise refusal(f"`{keyword}`{where} is not supported", place.at(keyword))

    def types(self, schema: Mapping[str, Any], keywords: list[str], place: Place) -> list[str]:
        """The types to generate. Where none is given, the one that the schema's keywords are about."""
        if "type" not in schema:
            implied = [name for name, own in KEYWORDS_OF.items() if any(keyword in own for keyword in keywords)]
            if len(implied) != 1:
                raise refusal("a schema that allows any JSON value is not supported; give a `type`", place)
            return implied
        given = schema["type"]
        names = [given] if isinstance(given, str) else given
        if not isinstance(names, list) or not names or not all(name in JSON_TYPES for name in names):
            raise refusal(f"`type` must be one or more of {', '.join(JSON_TYPES)}", place.at("type"))
        return [name for name in dict.fromkeys(names) if not (name == "integer" and "number" in names)]

    def reference(self, target: Any, place: Place) -> Node:
        here = place.at("$ref")
        if not isinstance(target, str):
            raise refusal("`$ref` must be a string", here)
        if target in place.references:
            raise refusal(f"the recursive reference {target} is not supported", here)
        steps, schema = resolve(self.root, target, here.path)
        return self.node(schema, Place(Place(self.param).at(*steps).path, place.depth, (*place.references, target)))

    def any_of(self, schemas: Any, place: Place) -> Node:
        return self.alternatives(schemas, place, "anyOf")

    def one_of(self, schemas: Any, place: Place) -> Node:
        if isinstance(schemas, list) and len(schemas) > MAX_ONE_OF:
            raise refusal(f"more than {MAX_ONE_OF} schemas in `oneOf`; use `anyOf`", place.at("oneOf"))
        node = self.alternatives(schemas, place, "oneOf")
        for left, right in itertools.combinations(schemas, 2):
            if not Overlap(self.root).are_disjoint(left, right):
                raise refusal("`oneOf` is supported only where no value can match two of its schemas; use `anyOf`", place.at("oneOf"))
        return node

    def all_of(self, schemas: Any, place: Place) -> Node:
        if not isinstance(schemas, list) or len(schemas) != 1:
            raise refusal("`allOf` is supported only with a single schema", place.at("allOf"))
        return self.node(schemas[0], place.at("allOf", 0))

    def alternatives(self, schemas: Any, place: Place, keyword: str) -> Node:
        if not isinstance(schemas, list) or not schemas:
            raise refusal(f"`{keyword}` must be a non-empty array", place.at(keyword))
        return either(*(self.node(schema, place.at(keyword, i)) for i, schema in enumerate(schemas)))

    def values(self, schema: Mapping[str, Any], place: Place) -> Node:
        values = schema.get("enum", [schema.get("const")])
        if not isinstance(values, list):
            raise refusal("`enum` must be an array", place.at("enum"))
        self.num_values += len(values)
        if self.num_values > MAX_GIVEN_VALUES:
            raise refusal(f"more than {MAX_GIVEN_VALUES} given values, references included", place)
        if "const" in schema:
            values = [value for value in values if value == schema["const"] and json_type(value) == json_type(schema["const"])]
        if "type" in schema:
            types = self.types(schema, [], place)
            values = [value for value in values if json_type(value) in types or (json_type(value) == "integer" and "number" in types)]
        if not values:
            raise refusal("no value satisfies this schema", place)
        return either(*(json_text.value(value, self.whitespace, place.depth) for value in values))

    def string_node(self, schema: Mapping[str, Any], place: Place) -> Node:
        minimum, maximum = self.bounds(schema, "minLength", "maxLength", place)
        special = [keyword for keyword in ("pattern", "format") if keyword in schema]
        if not special:
            return json_text.string(minimum, maximum)
        beside = [keyword for keyword in ("minLength", "maxLength", "format") if keyword in schema and keyword != special[0]]
        if beside:
            raise refusal(f"`{beside[0]}` beside `{special[0]}` is not supported", place.at(beside[0]))
        if special == ["format"]:
            return json_text.quoted(string_format(schema["format"], place.at("format").path))
        return json_text.quoted(json_text.encoded(self.pattern(schema["pattern"], place.at("pattern"))))

    def pattern(self, pattern: Any, place: Place) -> Node:
        if not isinstance(pattern, str):
            raise refusal("`pattern` must be a string", place)
        try:
            tree = search(parse(pattern, ecma_dialect()))
            check_size(tree)
        except (RegexError, UnwritableRegex) as error:
            raise refusal(f"`pattern`: {error}", place) from error
        except MisplacedAnchor as anchor:
            raise refusal(f"`pattern`: an anchor inside the pattern is refused at position {anchor.position}", place) from anchor
        return tree

    def array_node(self, schema: Mapping[str, Any], place: Place) -> Node:
        if schema.get("uniqueItems", False) is not False:
            raise refusal("`uniqueItems` is not supported", place.at("uniqueItems"))
        minimum, maximum = self.bounds(schema, "minItems", "maxItems", place)
        prefix = schema.get("prefixItems", [])
        if not isinstance(prefix, list):
            raise refusal("`prefixItems` must be an array", place.at("prefixItems"))
        if isinstance(schema.get("items"), list):
            raise refusal("`items` must be a schema; its items one by one are `prefixItems`", place.at("items"))
        firsts = [self.node(item, place.inside("prefixItems", i)) for i, item in enumerate(prefix[:maximum])]
        rest = schema.get("items", True)
        if rest is False:
            maximum = min(len(firsts), len(firsts) if maximum is None else maximum)
            if minimum > maximum:
                raise refusal("`minItems` is more than `prefixItems` has", place.at("minItems"))
        comma = self.whitespace.comma(place.depth)
        tail: Node = EMPTY
        num_more = None if maximum is None else maximum - len(firsts)
        if num_more != 0:
            item = self.node(rest, place.inside("items")) if "items" in schema else self.any_value(place)
            num_needed = max(minimum - len(firsts), 0)
            if not firsts:
                first = Sequence(
                    (item, Repeat(Sequence((comma, item)), max(num_needed - 1, 0), None if num_more is None else num_more - 1))
                )
                return self.filled("[]", first, place.depth, is_optional=minimum == 0)
            tail = Repeat(Sequence((comma, item)), num_needed, num_more)
        elif not firsts:
            return self.whitespace.container("[]", None, place.depth)
        for i in reversed(range(1, len(firsts))):
            tail = Sequence((comma, firsts[i], tail))
            if minimum <= i:
                tail = optional(tail)
        return self.filled("[]", Sequence((firsts[0], tail)), place.depth, is_optional=minimum == 0)

    def filled(self, brackets: str, content: Node, depth: int, *, is_optional: bool) -> Node:
        node = self.whitespace.container(brackets, content, depth)
        return either(self.whitespace.container(brackets, None, depth), node) if is_optional else node

    def object_node(self, schema: Mapping[str, Any], place: Place) -> Node:
        properties, required = described(schema, place)
        for name in required:
            if name not in properties:
                raise refusal(f"`required` names {dumps(name)}, which `properties` does not describe", place.at("required"))
        if not properties:
            return self.free_object(schema, place)
        if schema.get("additionalProperties", False) is not False:
            message = "`additionalProperties` beside `properties` is supported only as false"
            raise refusal(message, place.at("additionalProperties"))
        members = []
        are_required = frozenset(required)
        for name, value in properties.items():
            node = self.whitespace.member(json_text.value(name, self.whitespace), self.node(value, place.inside("properties", name)))
            members.append((node, name in are_required))
        return self.filled("{}", object_members(members, self.whitespace.comma(place.depth)), place.depth, is_optional=not required)

    def free_object(self, schema: Mapping[str, Any], place: Place) -> Node:
        """An object without `properties`: empty, or any names with values of one schema."""
        additional = schema.get("additionalProperties", True)
        if additional is False:
            return self.whitespace.container("{}", None, place.depth)
        value = self.any_value(place) if additional is True else self.node(additional, place.inside("additionalProperties"))
        member = self.whitespace.member(json_text.string(), value)
        members = Sequence((member, Repeat(Sequence((self.whitespace.comma(place.depth), member)), 0, None)))
        return self.filled("{}", members, place.depth, is_optional=True)

    def any_value(self, place: Place) -> Node:
        raise refusal("this may hold any JSON value, which is not supported", place)

    def bounds(self, schema: Mapping[str, Any], low: str, high: str, place: Place) -> tuple[int, int | None]:
        for keyword in (low, high):
            bound = schema.get(keyword, 0)
            if isinstance(bound, bool) or not isinstance(bound, int) or bound < 0:
                raise refusal(f"`{keyword}` must be a non-negative integer", place.at(keyword))
        minimum, maximum = schema.get(low, 0), schema.get(high)
        if maximum is not None and maximum < minimum:
            raise refusal(f"`{high}` is less than `{low}`", place.at(high))
        return minimum, maximum


def described(schema: Mapping[str, Any], place: Place) -> tuple[Mapping[str, Any], list[str]]:
    """What an object's schema has as `properties` and as `required`. Raises `UnsupportedGrammar` where they are something else."""
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise refusal("`properties` must be an object", place.at("properties"))
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise refusal("`required` must be an array of strings", place.at("required"))
    return properties, required


def object_members(members: list[tuple[Node, bool]], comma: Node) -> Node:
    """At least one of the members, in order, all required ones among them."""
    first = next((i for i, (_, is_required) in enumerate(members) if is_required), None)
    if first is None:
        return _some([node for node, _ in members], comma)
    before = (optional(Sequence((node, comma))) for node, _ in members[:first])
    after = ((Sequence((comma, node)), is_required) for node, is_required in members[first + 1 :])
    return Sequence((*before, members[first][0], *(node if is_required else optional(node) for node, is_required in after)))


def _some(members: list[Node], comma: Node) -> Node:
    # At least one of the members, in order. Halving keeps the tree at n log n; taking them one by one would make it quadratic.
    if len(members) == 1:
        return members[0]
    left, right = members[: len(members) // 2], members[len(members) // 2 :]
    rest = Sequence(tuple(optional(Sequence((comma, node))) for node in right))
    return either(Sequence((_some(left, comma), rest if right else EMPTY)), _some(right, comma))


MAX_WARNINGS = 200  # of a constraint: more would say no more
MAX_CHARACTERS = 300  # of each: names in a schema may be as long as the whole


def left_out(keyword: str, place: str) -> str:
    """One warning. `place` is the path of what is not enforced."""
    text = f"`{keyword}` at {place}"
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


MAX_COMPARED = 100  # each with each
_COMBINERS = ("anyOf", "oneOf", "allOf")


class LenientSchema:
    """Takes keywords away from one subschema after the other; `warnings` collects each with its path.

    What is left allows every value that the whole schema allows.
    """

    def __init__(self, warnings: list[str]) -> None:
        self._warnings = warnings

    def relaxed(self, schema: Mapping[str, Any], root: Any, path: str) -> Mapping[str, Any]:
        """The subschema at `path` of `root`, its members in their order."""
        kept = {keyword: value for keyword, value in schema.items() if keyword not in ANNOTATIONS and not keyword.startswith("x-")}
        for keyword in [keyword for keyword in kept if not self._is_kept(keyword, kept, root)]:
            self._warn(keyword, path)
            _weaken(keyword, kept)
        return kept

    def _warn(self, keyword: str, path: str) -> None:
        warning = left_out(keyword, f"{path}.{keyword}")
        if len(self._warnings) < MAX_WARNINGS and warning not in self._warnings:
            self._warnings.append(warning)

    def _is_kept(self, keyword: str, schema: Mapping[str, Any], root: Any) -> bool:
        value = schema[keyword]
        if "$ref" in schema:
            return keyword == "$ref"
        if "const" in schema or "enum" in schema:
            return keyword in ("const", "enum", "type")
        has_own = any(other in TRANSLATED for other in schema)
        if keyword in _COMBINERS:
            return (
                not has_own
                and keyword == next(name for name in _COMBINERS if name in schema)
                and _is_exact_combination(keyword, value, root)
            )
        if keyword in ("$id", "id"):
            return True
        return keyword in TRANSLATED and _is_exact(keyword, schema)


def _is_exact(keyword: str, schema: Mapping[str, Any]) -> bool:
    match keyword:
        case "uniqueItems":
            return schema[keyword] is False
        case "pattern":
            pattern = schema[keyword]
            return isinstance(pattern, str) and _is_translated(lambda: check_size(search(parse(pattern, ecma_dialect()))))
        case "format":
            return "pattern" not in schema and _is_translated(lambda: string_format(schema["format"], ""))
        case "minLength" | "maxLength":
            return not {"pattern", "format"} & schema.keys()
        case "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum":
            return _is_translated(lambda: number(schema, "", is_integer=schema.get("type") == "integer"))
        case "items":
            return isinstance(schema[keyword], Mapping | bool)
    return True


def _weaken(keyword: str, schema: dict[str, Any]) -> None:
    """Takes the keyword away, or puts one in its place that says a part of it."""
    value = schema.pop(keyword)
    if schema.keys() - {"$id", "id"} or not isinstance(value, list) or not value:
        return
    if keyword == "oneOf":
        schema["anyOf"] = value
    elif keyword == "allOf":
        schema["allOf"] = value[:1]


def _is_exact_combination(keyword: str, schemas: Any, root: Any) -> bool:
    if not isinstance(schemas, list) or keyword == "anyOf":
        return True
    if keyword == "allOf":
        return len(schemas) == 1
    if len(schemas) > MAX_COMPARED:
        return False
    return all(Overlap(root).are_disjoint(left, right) for left, right in itertools.combinations(schemas, 2))


def _is_translated(translate: Callable[[], object]) -> bool:
    try:
        translate()
    except (UnsupportedGrammar, RegexError, MisplacedAnchor, UnwritableRegex):
        return False
    return True


MAX_QUICK_CHARACTERS = 50_000
MAX_VALUES = 2_000  # that a schema lists, or schemas that it has
MAX_LENGTH = 10_000
# With these, a lexer may have to follow many possibilities at once, or the parser many readings of the same text.
_DEMANDING = frozenset({"patternProperties", "propertyNames", "multipleOf", "not", "allOf", "oneOf", "x-guidance"})
_MAX_BRANCHES = 16
_MAX_PLAIN = 200  # characters of a pattern


def has_quick_masks(spec: GrammarSpec) -> bool:
    """Whether the spec is JSON without patterns but plain ones, many alternatives or anything very large. Others may be quick as well."""
    if spec.kind is GrammarKind.JSON_OBJECT:
        return spec.whitespace_pattern in (None, "")
    if spec.kind is not GrammarKind.JSON_SCHEMA or len(spec.text) > MAX_QUICK_CHARACTERS or spec.whitespace_pattern not in (None, ""):
        return False
    return _is_modest(json.loads(spec.text))


def _is_modest(schema: Any) -> bool:
    num_values = 0
    pending = [schema]
    while pending:
        value = pending.pop()
        num_values += 1
        if isinstance(value, dict):
            if _DEMANDING & value.keys() or any(_is_large(value.get(key)) for key in ("minLength", "maxLength")):
                return False
            if len(value.get("anyOf", ())) > _MAX_BRANCHES or not _has_plain_pattern(value):
                return False
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        if num_values + len(pending) > MAX_VALUES:
            return False
    return True


def _has_plain_pattern(schema: Mapping[str, Any]) -> bool:
    """Whether its pattern, if it has one, says of each place in the string what may be there: `^[A-Z]{3}-[0-9]{4}$`."""
    pattern = schema.get("pattern", "^$")
    if not isinstance(pattern, str) or len(pattern) > _MAX_PLAIN:
        return False
    try:
        return _is_plain(search(parse(pattern, ecma_dialect())))
    except (RegexError, MisplacedAnchor):
        return False


def _is_plain(node: Node) -> bool:
    match node:
        case Sequence(items) | Either(items):
            return all(map(_is_plain, items))
        case Repeat(item, minimum, maximum):
            return minimum == maximum and minimum <= _MAX_PLAIN and isinstance(item, Literal | Chars)
    return isinstance(node, Literal | Chars)


def _is_large(length: Any) -> bool:
    return isinstance(length, (int, float)) and length > MAX_LENGTH
