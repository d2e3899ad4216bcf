"""The limits on a constraint's size, checked before any backend sees it.

Backends have limits of their own for short texts that expand to large grammars. These bound the work of reading a constraint, in terms that
the client knows. Nothing that reads a document recurses: it may be nested as deeply as its author likes.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from itertools import islice
from typing import Any, NoReturn
from urllib.parse import unquote

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.structure import Either, Literal, Marker, Repeat, Sequence, Structure, TextUntil, Value
from penstock.engine.errors import UnsupportedGrammar

MAX_TEXT = 2**20  # characters, of all texts of a constraint together
MAX_GRAMMAR = 2**16
MAX_REGEX = 4096
MAX_REGEXES = 2**16  # all of a constraint's together
MAX_DEPTH = 64
MAX_DEPTH_BEHIND_REFERENCES = 256  # objects within each other; engines recurse, and one that has no stack left ends the whole process
MAX_RULES = 1000  # for the same reason: each may lead to the next
MAX_REPEATS = 2000  # `?`, `*`, `+` and counts in a grammar: engines take the square of them
MAX_INTERSECTIONS = 64
MAX_SET = 2048
MAX_SCHEMAS_IN_GRAMMAR = 512
MAX_JOINED_PATTERNS = 8  # that one text has to match together: the automaton for all of them is as large as their product
MAX_DIVISOR_BITS = 17  # an automaton remembers the remainder
MAX_DIVISORS = 200_000  # all of them together: 30 us each
MAX_PROPERTIES = 5_000
MAX_COMPOSITE_CHOICES = 5_000  # arrays and objects
MAX_COMPOSITE_VALUES = 20_000  # in given arrays and objects: 30 us each in engines, and at some time all of their stack
MAX_SCHEMAS = 20_000
MAX_VALUES = 200_000
MAX_CHOICES = 10_000  # of `enum` and choices, all together
MAX_CHOICE_TEXT = 2**18
MAX_PARTS = 10_000
MAX_CONSTRAINED_PARTS = 512
SMALL_TEXT = 2**17
SMALL_PARTS = 200

_SCHEMA = frozenset(
    {
        *("items", "additionalItems", "additionalProperties", "unevaluatedItems", "unevaluatedProperties", "contains", "propertyNames"),
        *("not", "if", "then", "else", "contentSchema"),
    }
)
_SCHEMAS = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"})

# Lexemes of Lark and GBNF that may hold what outside them means something else.
_LEXEMES = re.compile(
    r"""(?P<comment>//[^\n]*|\#[^\n]*)|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<regex>/(?:\\.|[^/\\\n])+/)|(?P<set>\[(?:\\.|[^\]\\\n])*\])|[?*+&~{]""",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class _Path:
    """A JSON path, written out only for an error."""

    parent: "_Path | str"
    step: str | int

    def __str__(self) -> str:
        steps: list[str] = []
        path: _Path | str = self
        while isinstance(path, _Path):
            steps.append(f"[{path.step}]" if isinstance(path.step, int) else f".{path.step}")
            path = path.parent
        return path + "".join(reversed(steps))


def num_characters(spec: GrammarSpec) -> int:
    """Of all texts in the constraint. Raises `UnsupportedGrammar` where it is made of too many parts to be looked at."""
    total = 0
    for own in specs_of(spec):
        total += len(own.text) + len(own.whitespace_pattern or "")
        if own.structure is not None:
            total += sum(_num_literal(part) for part in parts_of(own.structure, own.param))
    return total


def is_small(spec: GrammarSpec) -> bool:
    """Whether looking at all of it takes less than a millisecond."""
    parts = [] if spec.structure is None else list(islice(parts_of(spec.structure, ""), SMALL_PARTS))
    num_characters = len(spec.text) + sum(len(part.spec.text) if isinstance(part, Value) else _num_literal(part) for part in parts)
    return len(parts) < SMALL_PARTS and num_characters < SMALL_TEXT


def check_size(spec: GrammarSpec) -> None:
    """Takes up to 10 ms, for thousands of parts. Raises `UnsupportedGrammar`."""
    if num_characters(spec) > MAX_TEXT:
        _refuse(f"a constraint of more than {MAX_TEXT} characters", spec.param)


def check_limits(spec: GrammarSpec) -> None:
    """Takes milliseconds for what is large. Raises `UnsupportedGrammar`, which names what is too much, the limit and the JSON path."""
    check_size(spec)
    budget = _Budget()
    for own in specs_of(spec):
        if own.whitespace_pattern is not None:
            budget.add_regex(own.whitespace_pattern, own.param)
        match own.kind:
            case GrammarKind.JSON_SCHEMA:
                document = _decoded(own)
                check_document(document, own.param, budget)
            case GrammarKind.CHOICE:
                budget.add_choices(_decoded(own), own.param)
            case GrammarKind.REGEX:
                budget.add_regex(own.text, own.param)
            case GrammarKind.LARK | GrammarKind.GBNF:
                check_grammar(own, budget)


def check_document(schema: Any, param: str, budget: "_Budget") -> None:
    budget.add_schema(schema, param)
    check_references(schema, param)
    try:
        if JoinedKeywords(schema, num_patterns).most() > MAX_JOINED_PATTERNS:
            _refuse(f"a schema in which `allOf` joins more than {MAX_JOINED_PATTERNS} patterns and formats", param)
        if JoinedKeywords(schema, divisor_bits).most() > MAX_DIVISOR_BITS:
            _refuse(f"a `multipleOf`, or several joined, that comes to more than {MAX_DIVISOR_BITS} bits", param)
    except RecursionError:
        _refuse("a schema whose references follow each other that far", param)


def check_grammar(spec: GrammarSpec, budget: "_Budget") -> None:
    """Lexemes are looked for as in Lark; in GBNF a slash is a mistake."""
    if len(spec.text) > MAX_GRAMMAR:
        _refuse(f"a grammar of more than {MAX_GRAMMAR} characters", spec.param)
    is_lark = spec.kind is GrammarKind.LARK
    if (_num_rules(spec.text) if is_lark else spec.text.count("::=")) > MAX_RULES:
        _refuse(f"a grammar of more than {MAX_RULES} rules", spec.param)
    num_intersections = 0
    num_repeats = len(re.findall(r"[?*+]|\{\s*\d", spec.text))
    for found in _LEXEMES.finditer(spec.text):
        text = found[0]
        num_intersections += text in ("&", "~")
        if found.lastgroup in ("string", "comment"):
            num_repeats -= len(re.findall(r"[?*+]|\{\s*\d", text))
        elif found.lastgroup == "regex" and is_lark:
            budget.add_regex(text[1:-1], spec.param)
        elif found.lastgroup == "set" and len(text) > MAX_SET:
            _refuse(f"a set of more than {MAX_SET} characters", spec.param)
    if num_intersections > MAX_INTERSECTIONS:
        _refuse(f"a grammar with more than {MAX_INTERSECTIONS} times `&` or `~`", spec.param)
    if num_repeats > MAX_REPEATS:
        _refuse(f"a grammar with more than {MAX_REPEATS} repeats", spec.param)
    if is_lark:
        for schema in _schemas_in(spec):
            check_document(schema, spec.param, budget)


def _schemas_in(spec: GrammarSpec) -> Iterator[Any]:
    """Everything that may be a schema, in comments as well as in rules."""
    num_characters = 0
    for number, found in enumerate(re.finditer(r"%json\s*", spec.text)):
        try:
            schema, end = json.JSONDecoder().raw_decode(spec.text, found.end())
        except RecursionError:
            _refuse(f"a document nested deeper than {MAX_DEPTH}", spec.param)
        except ValueError:  # for the backends to refuse
            continue
        num_characters += end - found.end()
        if number >= MAX_SCHEMAS_IN_GRAMMAR or num_characters > MAX_GRAMMAR:
            _refuse(f"a grammar with more than {MAX_SCHEMAS_IN_GRAMMAR} schemas", spec.param)
        yield schema


def check_references(root: Any, param: str) -> None:
    """Follows the schema's references, each once and in the order in which an engine comes to them. Raises `UnsupportedGrammar`."""
    seen: set[str] = set()
    pending: list[tuple[Any, int]] = [(root, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > MAX_DEPTH_BEHIND_REFERENCES:
            _refuse(f"a schema nested deeper than {MAX_DEPTH_BEHIND_REFERENCES} objects, references included,", param)
        if isinstance(value, list):
            pending += [(child, depth) for child in reversed(value)]
            continue
        if not isinstance(value, dict):
            continue
        pending += [(child, depth + 1) for key, child in reversed(value.items()) if key not in ("$defs", "definitions", "enum", "const")]
        reference = value.get("$ref")
        if isinstance(reference, str) and reference.startswith("#") and reference not in seen:
            seen.add(reference)
            pending.append((referred(root, reference), depth + 1))


def _num_rules(grammar: str) -> int:
    """Of lines that look like the beginning of a rule."""
    return sum(":" in line and line.lstrip()[:1] not in ("|", "/", "#", "%", '"') for line in grammar.splitlines())


def specs_of(spec: GrammarSpec) -> Iterator[GrammarSpec]:
    """The constraint and those within it. Raises `UnsupportedGrammar` where there are too many parts or constraints."""
    pending = [spec]
    num_specs = 0
    while pending:
        own = pending.pop()
        if own is not spec and own.structure is not None:
            _refuse("a structure within a constrained part of another", own.param)
        yield own
        num_specs += 1
        if num_specs > MAX_CONSTRAINED_PARTS:
            _refuse(f"more than {MAX_CONSTRAINED_PARTS} constrained parts", spec.param)
        if own.structure is not None:
            pending += [part.spec for part in parts_of(own.structure, own.param) if isinstance(part, Value)]


def parts_of(structure: Structure, param: str) -> Iterator[Structure]:
    """Every part of a structure, outer ones first. Raises `UnsupportedGrammar` where they are too many or nest too deeply."""
    pending = [(structure, 1)]
    num_parts = 0
    while pending:
        part, depth = pending.pop()
        num_parts += 1
        if num_parts > MAX_PARTS:
            _refuse(f"a structure of more than {MAX_PARTS} parts", param)
        if depth > MAX_DEPTH:
            _refuse(f"a structure nested deeper than {MAX_DEPTH}", param)
        yield part
        match part:
            case Sequence(parts) | Either(parts):
                pending += [(inner, depth + 1) for inner in reversed(parts)]
            case Repeat(inner):
                pending.append((inner, depth + 1))


def _num_literal(part: Structure) -> int:
    match part:
        case Literal(text) | Marker(text) | TextUntil(text):
            return len(text)
    return 0


def _decoded(spec: GrammarSpec) -> Any:
    try:
        return json.loads(spec.text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, RecursionError):
            _refuse(f"a document nested deeper than {MAX_DEPTH}", spec.param)
        raise UnsupportedGrammar(f"not valid JSON: {error}", spec.param) from None


def _refuse(what: str, path: _Path | str) -> NoReturn:
    raise UnsupportedGrammar(f"{what} is refused", str(path))


class _Budget:
    """What of each limit the texts looked at so far have used up."""

    def __init__(self) -> None:
        self._used: dict[str, int] = {}

    def _spend(self, noun: str, amount: int, limit: int, path: _Path | str) -> None:
        used = self._used[noun] = self._used.get(noun, 0) + amount
        if used > limit:
            _refuse(f"a constraint with more than {limit} {noun}", path)

    def add_regex(self, pattern: str, path: _Path | str) -> None:
        if len(pattern) > MAX_REGEX:
            _refuse(f"a regex of more than {MAX_REGEX} characters", path)
        self._spend("characters of regexes", len(pattern), MAX_REGEXES, path)

    def add_choices(self, choices: Any, path: _Path | str) -> None:
        """The values of an `enum` or a choice; what is not a list of them is left to the backends to refuse."""
        if not isinstance(choices, list):
            return
        self._spend("values to choose from", len(choices), MAX_CHOICES, path)
        self._spend(
            "arrays and objects to choose from", sum(isinstance(value, dict | list) for value in choices), MAX_COMPOSITE_CHOICES, path
        )
        self._spend(
            "characters in values to choose from", sum(len(value) for value in choices if isinstance(value, str)), MAX_CHOICE_TEXT, path
        )
        for index, value in enumerate(choices):
            self.add_given(value, _Path(path, index))

    def add_given(self, value: Any, path: _Path | str) -> None:
        """A value that is to be generated as it is."""
        num_values = self.add_data(value, path)
        if isinstance(value, dict | list):
            self._spend("values in given arrays and objects", num_values, MAX_COMPOSITE_VALUES, path)

    def add_data(self, data: Any, path: _Path | str) -> int:
        """A value within a schema that is no schema itself. Returns of how many it is made."""
        pending = [(data, path, 0)]
        num_values = 0
        while pending:
            value, at, depth = pending.pop()
            num_values += 1
            self._spend("values", 1, MAX_VALUES, path)
            if depth > MAX_DEPTH:
                _refuse(f"a value nested deeper than {MAX_DEPTH}", path)
            if isinstance(value, dict):
                pending += [(child, _Path(at, name), depth + 1) for name, child in value.items()]
            elif isinstance(value, list):
                pending += [(child, _Path(at, index), depth + 1) for index, child in enumerate(value)]
        return num_values

    def add_schema(self, schema: Any, param: str) -> None:
        pending: list[tuple[Any, _Path | str, int]] = [(schema, param, 0)]
        while pending:
            value, path, depth = pending.pop()
            if depth > MAX_DEPTH:
                _refuse(f"a schema nested deeper than {MAX_DEPTH}", path)
            if not isinstance(value, dict):
                self.add_data(value, path)
                continue
            self._spend("subschemas", 1, MAX_SCHEMAS, path)
            for keyword, child in value.items():
                inside = self.add_keyword(keyword, child, _Path(path, keyword))
                pending += [(inner, at, depth + 1) for inner, at in inside]

    def add_keyword(self, keyword: str, value: Any, path: _Path) -> list[tuple[Any, _Path]]:
        """Counts what a keyword holds; returns the schemas in it, still to be looked at."""
        if keyword in ("properties", "patternProperties") and isinstance(value, dict):
            self._spend("properties", len(value), MAX_PROPERTIES, path)
        if keyword == "multipleOf":
            self._spend("remainders of `multipleOf`", divisor(value), MAX_DIVISORS, path)
        if keyword == "required" and isinstance(value, list):
            self._spend("required properties", len(value), MAX_PROPERTIES, path)
        if keyword == "patternProperties" and isinstance(value, dict):
            for pattern in value:
                self.add_regex(pattern, path)
        if keyword in _NAMED_SCHEMAS and isinstance(value, dict):
            return [(child, _Path(path, name)) for name, child in value.items()]
        if keyword in _SCHEMAS and isinstance(value, list):
            return [(child, _Path(path, index)) for index, child in enumerate(value)]
        if keyword in _SCHEMA and isinstance(value, dict):
            return [(value, path)]
        if keyword == "pattern" and isinstance(value, str):
            self.add_regex(value, path)
        elif keyword == "enum":
            self.add_choices(value, path)
        elif keyword == "const":
            self.add_given(value, path)
        else:
            self.add_data(value, path)
        return []


def num_patterns(schema: dict[str, Any]) -> float:
    """Patterns and formats of the schema itself."""
    return sum(isinstance(schema.get(keyword), str) for keyword in ("pattern", "format"))


def divisor_bits(schema: dict[str, Any]) -> float:
    """How many bits the remainder of a division by `multipleOf` takes."""
    return math.log2(divisor(schema.get("multipleOf")))


def divisor(value: Any) -> int:
    """A number's digits without its decimal point and trailing zeros. 1 for anything else."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not is_number and not (isinstance(value, float) and math.isfinite(value)):
        return 1
    return int("".join(map(str, Decimal(str(value)).as_tuple().digits)).rstrip("0") or "1")


class JoinedKeywords:
    """The most that `weight`, of single schemas, comes to in those that a value has to match together. May raise `RecursionError`."""

    def __init__(self, root: Any, weight: Callable[[dict[str, Any]], float]) -> None:
        self._root = root
        self._weight = weight
        self._known: dict[int, float] = {}

    def most(self) -> float:
        return self._most(self._root)

    def _most(self, schema: Any) -> float:
        if not isinstance(schema, dict | list):
            return 0
        if id(schema) in self._known:
            return self._known[id(schema)]
        self._known[id(schema)] = 0  # what it is while one looks at it from within
        if isinstance(schema, list):
            most = max(map(self._most, schema), default=0)
        else:
            joined = schema.get("allOf")
            reference = schema.get("$ref")
            most = self._weight(schema)
            most += sum(map(self._most, joined)) if isinstance(joined, list) else 0
            most += self._most(referred(self._root, reference)) if isinstance(reference, str) else 0
            others = (child for keyword, child in schema.items() if keyword not in ("allOf", "$defs", "definitions", "enum", "const"))
            most += max(map(self._most, others), default=0)
        self._known[id(schema)] = most
        return most


def referred(root: Any, reference: str) -> Any:
    """What a reference within the document leads to; None where it leads nowhere, which is for the backends to refuse."""
    target = root
    for step in reference.split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(target, dict):
            target = target.get(step)
        elif isinstance(target, list) and (place := position(step, len(target))) is not None:
            target = target[place]
        else:
            return None
    return target


def position(step: str, length: int) -> int | None:
    """Where in an array of that length a step of a JSON Pointer leads; None where nowhere. It may be as long as its author likes."""
    is_number = step.isascii() and step.isdigit() and len(step) <= len(str(length))
    return int(step) if is_number and int(step) < length else None
