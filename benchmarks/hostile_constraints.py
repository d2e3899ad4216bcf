"""Constraints that were sent, or could be, to overload a server. Each is small enough to be accepted and costs far more than its size."""

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


def _gbnf(grammar: str) -> Callable[[int], Fields]:
    return lambda salt: {"structured_outputs": {"grammar": {"syntax": "gbnf", "definition": f"# {salt}\n{grammar}"}}}


def _tag(format: Callable[[int], Fields]) -> Callable[[int], Fields]:
    return lambda salt: {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": format(salt)}}}


def _tags(num_tags: int, schema: Fields) -> Callable[[int], Fields]:
    def triggered(salt: int) -> Fields:
        content = {"type": "json_schema", "json_schema": schema}
        tags = [{"begin": f"<f{i}-{salt}>", "content": content, "end": "</f>"} for i in range(num_tags)]
        return {"type": "triggered_tags", "triggers": ["<f"], "tags": tags}

    return _tag(triggered)


def _words(num_rows: int, num_words: int) -> Callable[[int], Fields]:
    """A choice among rows of words, all different."""

    def row(number: int, salt: int) -> Fields:
        return {"type": "sequence", "elements": [{"type": "const_string", "value": f"{number}-{i}-{salt} "} for i in range(num_words)]}

    return _tag(lambda salt: {"type": "or", "elements": [row(i, salt) for i in range(num_rows)]})


def _required(schemas: list[Fields]) -> Fields:
    names = [f"n{i}" for i in range(len(schemas))]
    return {"type": "object", "properties": dict(zip(names, schemas, strict=True)), "required": names}


def _nested_if(depth: int) -> Fields:
    schema: Fields = {"type": "object"}
    for level in range(depth):
        schema = {"if": {"properties": {f"a{level}": {"const": level}}}, "then": schema, "else": schema}
    return schema


def _grammar_part(number: int, salt: int) -> Fields:
    return {"type": "grammar", "grammar": f'root ::= "a{number}" x\nx ::= x x | [a-z] | "{salt}"'}


def _lark_schemas(num_schemas: int) -> str:
    rules = [f's{i}: %json {{"type": "object", "properties": {{"k{i}": {{"type": "string"}}}}}}' for i in range(num_schemas)]
    return "\n".join(["start: " + " | ".join(f"s{i}" for i in range(num_schemas)), *rules])


def _of_every_kind(salt: int) -> Fields:
    """Another one for each salt: what one client may send at the same time."""
    kinds = [hostile for hostile in INPUTS if hostile.num_at_once == 1]
    return kinds[salt % len(kinds)].fields(salt)


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
    HostileInput("anyOf of 2,000 objects", _schema({"anyOf": [_object(2, required=["p0"], title=str(i)) for i in range(2_000)]})),
    HostileInput("nested if", _schema(_nested_if(12))),
    HostileInput(
        "200 patternProperties", _schema({"type": "object", "patternProperties": {f"^k{i}_[a-z]{{1,20}}$": {} for i in range(200)}})
    ),
    HostileInput("multipleOf 999,983", _schema({"type": "integer", "multipleOf": 999_983})),
    HostileInput("joined multipleOf", _schema({"type": "integer", "allOf": [{"multipleOf": 317 + 2 * i} for i in range(3)]})),
    HostileInput("20 times multipleOf 10,007", _schema(_required([{"type": "integer", "multipleOf": 10_007 + 2 * i} for i in range(19)]))),
    HostileInput("const of 60,000 values", _schema({"const": [{"a": [i, str(i), {"b": None}]} for i in range(12_000)]})),
    HostileInput("const of 15,000 values", _schema({"const": [{"a": [i, str(i), {"b": None}]} for i in range(3_000)]})),
    HostileInput("const of 200,000 characters", _schema({"const": "lorem ipsum " * 16_000})),
    HostileInput("5,000 required, not described", _schema({"type": "object", "required": [f"r{i}" for i in range(5_000)]})),
    HostileInput("250 tags", _tags(250, _object(10, required=[f"p{i}" for i in range(10)]))),
    HostileInput("9,500 words", _words(250, 38)),
    HostileInput("250 grammars", _tag(lambda salt: {"type": "or", "elements": [_grammar_part(i, salt) for i in range(250)]})),
    HostileInput("whitespace {0,4000}", lambda salt: {**_schema(_object(100))(salt), "guided_whitespace_pattern": r"[ \t\n]{0,4000}"}),
    HostileInput("sets, many times", _regex(r"[\w\s]{500}[^a-z]{500}")),
    HostileInput(
        "300 ranges, outlines_core", _regex("[" + "".join(f"{chr(256 + 3 * i)}-{chr(257 + 3 * i)}" for i in range(300)) + "]{1,300}")
    ),
    HostileInput("3,600 characters in a row", _regex("lorem ipsum dolor " * 200)),
    HostileInput("lexer of many states", _lark("start: A\nA: /((.*a.{12}){2}|(.*b.{14}){2}|(.*c.{16}){3})/")),
    HostileInput("400 schemas in Lark", _lark(_lark_schemas(400))),
    HostileInput("GBNF repeats", _gbnf('root ::= (((("a"{1,90}){1,90}){1,90}){1,90})')),
    HostileInput("GBNF left recursion", _gbnf('root ::= root "a" | root root | "a" | ""')),
    HostileInput(
        "GBNF of 900 rules",
        _gbnf("root ::= r0\n" + "\n".join(f'r{i} ::= "{i}" r{i + 1}? | r{i + 1}' for i in range(900)) + '\nr900 ::= "x"'),
    ),
    HostileInput("8 MB of values", lambda salt: {"guided_json": {"enum": [f"{i:012}-{salt}" for i in range(400_000)]}}),
    HostileInput("4 MB of brackets", lambda salt: {"guided_json": {"const": [[]] * 1_000_000, "title": str(salt)}}),
    HostileInput("32 of every kind at once", _of_every_kind, num_at_once=32),
    HostileInput("100 schemas at once", _schema({**_object(100), "required": [f"p{i}" for i in range(100)]}), num_at_once=100),
]
