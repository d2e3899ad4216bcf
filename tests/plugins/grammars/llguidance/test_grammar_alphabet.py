import pytest

from penstock.plugins.grammars.llguidance.structure import gbnf_alphabet, lark_alphabet
from penstock.plugins.grammars.regex.tree import ANY, complement, of


@pytest.mark.parametrize(
    ("source", "characters"),
    [
        ('start: "a" ("b" | start)* # "c"\n', "ab"),
        (r'start: "\n\"#" /[0-9]+,?/ x' + "\nx: <tool>", '\n"#0123456789,'),
        ('start: "aB"i', "abAB"),
        ("start: /a|(bc)*/", "abc"),
    ],
)
def test_the_characters_of_a_lark_grammar(source: str, characters: str) -> None:
    assert lark_alphabet(source) == of(characters)


def test_the_characters_of_a_gbnf_grammar() -> None:
    assert gbnf_alphabet('root ::= "x" [a-c\\n]{2,3} | "(" root ")" # [z]') == of("xabc\n()")
    assert gbnf_alphabet("root ::= [^<]+") == complement(of("<"))


@pytest.mark.parametrize(
    "source",
    ['start: "a".."z"', "start: A\n%import common.A", "A: ~/a/", 'start: ["a"]', "start: /(?=a)/", "start: /a/i", "start: /a/ // x"],
)
def test_all_of_them_where_it_is_not_plain_to_see(source: str) -> None:
    assert lark_alphabet(source) == ANY
