"""Constraints that were sent, or could be, to bring a server to its knees. Each is small enough to be let in and asks for much more."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class HostileInput:
    """`fields(salt)` are a request's fields; another salt makes another constraint, which no cache has seen. Sent `num_at_once` times."""

    name: str
    fields: Callable[[int], Fields]
    num_at_once: int = 1


def _schema(schema: Fields) -> Callable[[int], Fields]:
    return lambda salt: {"guided_json": {**schema, "description": f"salt {salt}"}}


def _regex(pattern: str, backend: str | None = None) -> Callable[[int], Fields]:
    named = {} if backend is None else {"guided_decoding_backend": backend}
    return lambda salt: {"guided_regex": f"{pattern}|salt {salt}", **named}


def _lark(grammar: str) -> Callable[[int], Fields]:
    return lambda salt: {"structured_outputs": {"grammar": {"syntax": "lark", "definition": f"// {salt}\n{grammar}"}}}


def _object(num_properties: int, **keywords: Any) -> Fields:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(num_properties)}, **keywords}


def _nested(depth: int) -> Fields:
    schema: Fields = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def _nested_one_of(depth: int) -> Fields:
    schema: Fields = {"type": "integer"}
    for level in range(depth):
        schema = {"oneOf": [schema, {"type": "string", "maxLength": level + 1}, {"type": "array", "items": schema}]}
    return schema


def _variants(num_variants: int) -> Fields:
    return {"oneOf": [{"type": "object", "properties": {"k": {"const": i}}, "required": ["k"]} for i in range(num_variants)]}


def _doubling(depth: int) -> Fields:
    definitions = {f"d{i}": {"type": "array", "prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2, "minItems": 2} for i in range(depth)}
    return {"$defs": {**definitions, f"d{depth}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _deep_document(depth: int) -> Callable[[int], Fields]:
    return lambda salt: {"guided_json": '{"items":' * depth + json.dumps(salt) + "}" * depth}


def _reference_chain(num_references: int) -> Fields:
    """As deep as it is long: what follows references recursively uses up its stack."""
    definitions = {f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(num_references)}
    return {"$defs": {**definitions, f"d{num_references}": {"type": "null"}}, "$ref": "#/$defs/d0"}


def _rules(num_rules: int) -> str:
    """Each may be followed by the next."""
    return f'start: r0\nr{num_rules}: "x"\n' + "\n".join(f'r{i}: "{i}" r{i + 1}?' for i in range(num_rules))


def _named_values(num_values: int) -> list[str]:
    return [f"{i:020}" for i in range(num_values)]


INPUTS = [
    HostileInput("maxLength 1,000,000", _schema({"type": "string", "maxLength": 10**6})),
    HostileInput("maxItems 100,000", _schema({"type": "array", "items": {"type": "integer"}, "maxItems": 10**5})),
    HostileInput("minItems 100,000", _schema({"type": "array", "items": {"type": "integer"}, "minItems": 10**5})),
    HostileInput("enum of 20,000", _schema({"enum": _named_values(20_000)})),
    HostileInput("enum of 9,000", _schema({"enum": _named_values(9_000)})),
    HostileInput("choice of 9,000", lambda salt: {"guided_choice": [str(salt), *_named_values(9_000)]}),
    HostileInput("300 optional properties", _schema(_object(300))),
    HostileInput("5,000 properties", _schema(_object(5_000))),
    HostileInput("5,000 required properties", _schema(_object(5_000, required=[f"p{i}" for i in range(5_000)]))),
    HostileInput("depth 60", _schema(_nested(60))),
    HostileInput("depth 10,000", _deep_document(10_000)),
    HostileInput("nested oneOf", _schema(_nested_one_of(12))),
    HostileInput("oneOf of 1,000", _schema(_variants(1_000))),
    HostileInput("chain of 100 references", _schema(_reference_chain(100))),
    HostileInput("chain of 5,000 references", _schema(_reference_chain(5_000))),
    HostileInput("references that double", _schema(_doubling(30))),
    HostileInput(
        "one enum, 4,000 references",
        _schema(
            {
                "$defs": {"e": {"enum": _named_values(5_000)}},
                "type": "object",
                "properties": {f"p{i}": {"$ref": "#/$defs/e"} for i in range(4_000)},
            }
        ),
    ),
    HostileInput("pattern .*a.{20}", _schema({"type": "string", "pattern": ".*a.{20}"})),
    HostileInput("pattern (x{1000}){1000}", _schema({"type": "string", "pattern": "^(x{1000}){1000}$"})),
    HostileInput(".*a.{20}", _regex(".*a.{20}")),
    HostileInput("(x{1000}){1000}", _regex("(x{1000}){1000}")),
    HostileInput(r"\w{1,400}", _regex(r"\w{1,400}")),
    HostileInput("(((a?){90}){90}){90}", _regex("(((a?){90}){90}){90}")),
    HostileInput("(a{1,50}){1,50}", _regex("(a{1,50}){1,50}")),
    HostileInput("[ab]*a[ab]{12}, outlines_core", _regex("[ab]*a[ab]{12}", "outlines_core")),
    HostileInput("(.*a){30}, outlines_core", _regex("(.*a){30}", "outlines_core")),
    HostileInput("500 words, outlines_core", _regex("|".join(rf"\w{chr(97 + i % 26)}{i}" for i in range(500)), "outlines_core")),
    HostileInput("800 overlapping sets", _regex("(" + "|".join(rf"[\w{chr(0x2000 + 2 * i)}]" for i in range(580)) + ")*x{9}")),
    HostileInput("set of 3,900", _regex("[" + "".join(chr(0x4E00 + 2 * i) for i in range(3_900)) + "]{3}")),
    HostileInput("Lark of 10,000 rules", _lark(_rules(10_000))),
    HostileInput("Lark of 900 rules", _lark(_rules(900))),
    HostileInput("Lark of 100,000 brackets", _lark("start: " + "(" * 50_000 + '"x"' + ")" * 50_000)),
    HostileInput("ambiguous Lark", _lark('start: a\na: a a | a a a | "x" | ""')),
    HostileInput("100 schemas at once", _schema({**_object(100), "required": [f"p{i}" for i in range(100)]}), num_at_once=100),
]
