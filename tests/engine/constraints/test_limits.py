import json
import math
from dataclasses import replace
from typing import Any

import pytest

from penstock.engine.constraints import limits
from penstock.engine.constraints.limits import (
    JoinedKeywords,
    check_limits,
    check_size,
    divisor,
    divisor_bits,
    is_small,
    num_patterns,
    referred,
)
from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.contracts.structure import Either, Literal, Repeat, Sequence, Structure, Value
from penstock.engine.errors import UnsupportedGrammar


def schema(document: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(document), "guided_json")


def nested(depth: int, keyword: str = "items") -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, f'{{"{keyword}":' * depth + "{}" + "}" * depth, "guided_json")


def structure(part: Structure) -> GrammarSpec:
    return GrammarSpec(GrammarKind.STRUCTURE, "", "tools", structure=part)


def repeated(depth: int) -> Structure:
    part: Structure = Literal("a")
    for _ in range(depth):
        part = Repeat(part)
    return part


def properties(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {} for i in range(num)}}


def chain(num_references: int) -> dict[str, Any]:
    definitions = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(num_references)}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def rules(num: int) -> str:
    return "".join(f"r{i}: r{i + 1} // : no: rule\n" for i in range(num))


def joined(num_patterns: int) -> dict[str, Any]:
    """Patterns for one and the same value, behind references and properties."""
    branches = [{"properties": {"a": {"$ref": f"#/$defs/{i}"}}} for i in range(num_patterns)]
    return {"$defs": {str(i): {"pattern": f"{i}$"} for i in range(num_patterns)}, "allOf": [{"allOf": branches[:3]}, *branches[3:]]}


def lark(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.LARK, text, "guided_grammar")


AT_THE_LIMIT = [
    schema({"const": [0] * (limits.MAX_COMPOSITE_VALUES - 1)}),
    schema({"items": [{"multipleOf": number} for number in (0.01, 1000, 10**300, 65_536, 1e-300, 99_991, True, "7", 1e400)]}),
    schema({"allOf": [{"multipleOf": 317}, {"multipleOf": 319}]}),
    schema(joined(limits.MAX_JOINED_PATTERNS)),
    schema({"anyOf": [{"pattern": "a"}, {"format": "date"}] * 20}),
    schema({"required": [str(i) for i in range(limits.MAX_PROPERTIES)]}),
    schema({"enum": [[i] for i in range(limits.MAX_COMPOSITE_CHOICES)]}),
    lark("start: " + '"a"? ' * limits.MAX_REPEATS),
    lark('start: "' + "?&" * limits.MAX_REPEATS + '" // ' + "*~" * limits.MAX_REPEATS),
    lark("start: T\nT: /a/" + " & /b/" * limits.MAX_INTERSECTIONS),
    lark("start: /" + "a" * limits.MAX_REGEX + "/"),
    lark('start: %json {"items": {}}'),
    schema(chain(80)),
    schema({"$defs": {"a": {"properties": {"b": {"$ref": "#/$defs/a"}, "c": {"$ref": "#"}}}}, "$ref": "#/$defs/a"}),
    GrammarSpec(GrammarKind.LARK, rules(limits.MAX_RULES)),
    schema(properties(limits.MAX_PROPERTIES)),
    nested(limits.MAX_DEPTH),
    schema({"const": json.loads("[" * limits.MAX_DEPTH + "]" * limits.MAX_DEPTH)}),
    schema({"pattern": "a" * limits.MAX_REGEX}),
    schema({"enum": list(range(limits.MAX_CHOICES))}),
    schema({"properties": {"properties": {"type": "string"}, "pattern": {"type": "string"}, "enum": {"type": "string"}}}),
    schema({"default": "a" * limits.MAX_REGEX * 2}),
    schema(True),
    GrammarSpec(GrammarKind.REGEX, "a" * limits.MAX_REGEX),
    GrammarSpec(GrammarKind.CHOICE, json.dumps(["a"] * limits.MAX_CHOICES)),
    GrammarSpec(GrammarKind.LARK, "a" * limits.MAX_GRAMMAR),
    GrammarSpec(GrammarKind.JSON_OBJECT, ""),
    structure(repeated(limits.MAX_DEPTH - 1)),
    structure(Sequence((Literal("a"),) * (limits.MAX_PARTS - 1))),
]

BEYOND = [
    (schema({"const": [0] * limits.MAX_COMPOSITE_VALUES}), "20000 values in given arrays", "guided_json.const"),
    (schema({"enum": [[0] * 9_000] * 3}), "20000 values in given arrays", "guided_json.enum[2]"),
    (schema({"multipleOf": 150_001}), "17 bits", "guided_json"),
    (schema({"multipleOf": 10**400 + 1}), "remainders", "guided_json.multipleOf"),
    (schema({"allOf": [{"multipleOf": 317}, {"multipleOf": 319}, {"multipleOf": 321}]}), "17 bits", "guided_json"),
    (schema({"items": [{"multipleOf": 99_991}] * 3}), "200000 remainders of `multipleOf`", "guided_json.items[0].multipleOf"),
    (schema(joined(limits.MAX_JOINED_PATTERNS + 1)), "more than 8 patterns", "guided_json"),
    (schema({"required": [str(i) for i in range(limits.MAX_PROPERTIES + 1)]}), "5000 required properties", "guided_json.required"),
    (schema({"enum": [[i] for i in range(limits.MAX_COMPOSITE_CHOICES + 1)]}), "5000 arrays and objects", "guided_json.enum"),
    (lark("start: " + '"a"? ' * (limits.MAX_REPEATS + 1)), "2000 repeats", "guided_grammar"),
    (lark("start: /" + "a{3}" * 500 + "/ /" + "b{3}" * 501 + "/" + "x*" * 1000), "2000 repeats", "guided_grammar"),
    (lark("start: T\nT: /a/" + " & /b/" * (limits.MAX_INTERSECTIONS + 1)), "64 times", "guided_grammar"),
    (lark("start: /" + "a" * (limits.MAX_REGEX + 1) + "/"), "4096 characters", "guided_grammar"),
    (lark("start: %json " + json.dumps(chain(1000))), "deeper than 256", "guided_grammar"),
    (lark("start: %json " + '{"items":' * 70 + "{}" + "}" * 70), "deeper than 64", "guided_grammar"),
    (lark('start: a\na: %json {"a": 1}' * 600), "512 schemas", "guided_grammar"),
    (GrammarSpec(GrammarKind.GBNF, "root ::= [" + "a" * 2048 + "]", "guided_grammar"), "set of more than 2048", "guided_grammar"),
    (GrammarSpec(GrammarKind.GBNF, "root ::= " + "r ::= r " * 1001, "guided_grammar"), "1000 rules", "guided_grammar"),
    (schema(properties(limits.MAX_PROPERTIES + 1)), "5000 properties", "guided_json.properties"),
    (
        schema({"$defs": {"a": properties(3000)}, "allOf": [{}, properties(3000)]}),
        "5000 properties",
        "guided_json.",
    ),
    (nested(limits.MAX_DEPTH + 1), "deeper than 64", "guided_json" + ".items" * 65),
    (nested(10_000), "deeper than 64", "guided_json"),
    (schema({"const": json.loads("[" * 65 + "0" + "]" * 65)}), "deeper than 64", "guided_json.const"),
    (schema({"properties": {"a": {"pattern": "a" * 4097}}}), "4096 characters", "guided_json.properties.a.pattern"),
    (schema({"patternProperties": {"a" * 4097: {}}}), "4096 characters", "guided_json.patternProperties"),
    (schema({"anyOf": [{"pattern": "a" * 4000}] * 20}), "65536 characters of regexes", "guided_json.anyOf["),
    (schema({"anyOf": [{}, {"enum": list(range(10_001))}]}), "10000 values", "guided_json.anyOf[1].enum"),
    (schema({"enum": ["a" * 300_000]}), "262144 characters", "guided_json.enum"),
    (schema({"anyOf": [{}] * 20_001}), "20000 subschemas", "guided_json.anyOf["),
    (schema(chain(1000)), "deeper than 256", "guided_json"),
    (GrammarSpec(GrammarKind.LARK, rules(limits.MAX_RULES + 1), "guided_grammar"), "1000 rules", "guided_grammar"),
    (GrammarSpec(GrammarKind.GBNF, rules(limits.MAX_RULES + 1).replace(": ", " ::= "), "guided_grammar"), "1000 rules", "guided_grammar"),
    (schema({"x-data": [0] * 200_001}), "200000 values", "guided_json.x-data"),
    (schema({"description": "a" * 2**20}), "1048576 characters", "guided_json"),
    (GrammarSpec(GrammarKind.JSON_SCHEMA, "{", "guided_json"), "not valid JSON", "guided_json"),
    (GrammarSpec(GrammarKind.REGEX, "a" * 4097, "guided_regex"), "4096 characters", "guided_regex"),
    (GrammarSpec(GrammarKind.CHOICE, json.dumps(["a"] * 10_001), "guided_choice"), "10000 values", "guided_choice"),
    (GrammarSpec(GrammarKind.LARK, "a" * (2**16 + 1), "guided_grammar"), "65536 characters", "guided_grammar"),
    (GrammarSpec(GrammarKind.GBNF, "a" * (2**16 + 1), "guided_grammar"), "65536 characters", "guided_grammar"),
    (replace(schema({}), whitespace_pattern=" " * 4097), "4096 characters", "guided_json"),
    (structure(repeated(100_000)), "deeper than 64", "tools"),
    (structure(Either((Literal("a"),) * 10_001)), "10000 parts", "tools"),
    (structure(Sequence((Value(schema({})),) * 513)), "512 constrained parts", "tools"),
    (structure(Sequence((Value(schema(properties(3000))),) * 2)), "5000 properties", "guided_json.properties"),
    (structure(Sequence((Literal("a" * 2**19),) * 3)), "1048576 characters", "tools"),
    (structure(Value(structure(Literal("a")))), "structure within", "tools"),
]


@pytest.mark.parametrize("spec", AT_THE_LIMIT, ids=lambda spec: f"{spec.kind} of {len(spec.text)}")
def test_what_is_within_every_limit_is_let_in(spec: GrammarSpec) -> None:
    check_size(spec)
    check_limits(spec)


@pytest.mark.parametrize(("spec", "limit", "path"), BEYOND, ids=[f"{limit} at {path}"[:60] for _, limit, path in BEYOND])
def test_what_is_beyond_a_limit_is_refused_with_the_limit_and_its_place(spec: GrammarSpec, limit: str, path: str) -> None:
    with pytest.raises(UnsupportedGrammar) as caught:
        check_limits(spec)
    assert limit in caught.value.message
    assert (caught.value.param or "").startswith(path)
    assert len(caught.value.message) < 200


def test_small_constraints_are_told_without_looking_at_all_of_large_ones() -> None:
    assert is_small(schema({"a": "b"}))
    assert not is_small(schema({"a": "b" * limits.SMALL_TEXT}))
    assert is_small(structure(Sequence((Literal("a"),) * (limits.SMALL_PARTS - 2))))
    assert not is_small(structure(Sequence((Literal("a"),) * limits.SMALL_PARTS)))
    assert not is_small(structure(Value(schema({"a": "b" * limits.SMALL_TEXT}))))
    assert not is_small(structure(Literal("a" * limits.SMALL_TEXT)))


@pytest.mark.parametrize(
    ("value", "digits"),
    [(7, 7), (1000, 1), (0.01, 1), (0.25, 25), (1e-300, 1), (12_500, 125), (-3, 3), (0, 1), (True, 1), ("7", 1), (None, 1), (math.inf, 1)],
)
def test_a_divisor_is_a_numbers_digits(value: object, digits: int) -> None:
    assert divisor(value) == digits


def test_what_all_of_joins_is_added_up_and_of_alternatives_the_most_counts() -> None:
    patterns = {"pattern": "a", "format": "date"}
    joined = {"allOf": [patterns, {"anyOf": [{"pattern": "b"}, patterns]}], "pattern": "c"}
    assert JoinedKeywords(joined, num_patterns).most() == 5
    assert JoinedKeywords({"properties": {"a": patterns, "b": {"pattern": "d"}}}, num_patterns).most() == 2
    assert JoinedKeywords({"allOf": [{"multipleOf": 8}, {"multipleOf": 0.4}]}, divisor_bits).most() == 5


def test_references_are_followed_once_and_need_not_lead_anywhere() -> None:
    root = {"$defs": {"a/b": {"pattern": "a", "items": {"$ref": "#"}}}, "allOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/none"}]}
    assert JoinedKeywords(root, num_patterns).most() == 1
    assert referred({"a": [{}, {"b": 1}]}, "#/a/1/b") == 1
    assert referred({"a": [{}]}, "#/a/7") is None
    assert referred({"a": [{}]}, "#/a/" + "9" * 5000) is None
