import math

import pytest

from penstock.engine.grammars.joined_keywords import JoinedKeywords, divisor, divisor_bits, num_patterns, referred


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
