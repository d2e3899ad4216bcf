import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.contracts.grammar import GrammarKind, GrammarSpec
from penstock.engine.errors import UnsupportedGrammar
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.gbnf import to_lark
from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar
from penstock.plugins.grammars.regex.syntax import parse, python_dialect
from penstock.plugins.grammars.regex.tree import continuation
from tests.plugins.grammars.grammar_walks import SPECIAL, STOPS, VOCABULARY, allowed, patterns
from tests.plugins.grammars.llguidance.test_backend import accepts, compiled, refusal

MARKED = replace(VOCABULARY, added_token_ids={"<call>": SPECIAL[0], "<stop>": SPECIAL[1]})
JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws  # a comment
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
ARITHMETIC = r"""
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
CHESS = r"""
root    ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
move    ::= (pawn | nonpawn | castle) [+#]?
nonpawn ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn    ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
castle  ::= "O-O" "-O"?
"""


def lark_grammar(text: str) -> LlguidanceGrammar:
    return LlguidanceBackend(MARKED).compile(GrammarSpec(GrammarKind.LARK, text))


def gbnf(text: str) -> LlguidanceGrammar:
    return compiled(GrammarKind.GBNF, text)


@pytest.mark.parametrize("value", [{}, {"a": [1, -2.5e3, 'b\n"字', None, {"c": True}]}, {"": {}}])
def test_a_json_grammar_accepts_json(value: Any) -> None:
    grammar = gbnf(JSON_GRAMMAR)
    assert accepts(grammar, json.dumps(value, ensure_ascii=False))
    assert not accepts(grammar, json.dumps(value) + "}")
    assert not accepts(grammar, json.dumps([value]))


def test_an_ambiguous_grammar_is_read_in_every_way() -> None:
    grammar = gbnf(ARITHMETIC)  # white space after a term may hold the line break that ends it
    assert accepts(grammar, "ab=12\n")
    assert accepts(grammar, "(a +b1)*2 = c \n \n12=1\n")
    assert not accepts(grammar, "ab=12")
    chess = gbnf(CHESS)
    assert accepts(chess, "1. e4 e5\n2. Nf3 exd4+\n")
    assert not accepts(chess, "1. e4 e9\n2. Nf3 exd4+\n")


@pytest.mark.parametrize(
    ("grammar", "inside", "outside"),
    [
        ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx"], ["x", "ab"]),
        ('root ::= "ab" "cd" | "abce"', ["abcd", "abce"], ["ab", "abc"]),
        ('root ::= a "b"\na ::= a "a" | "a"', ["ab", "aaab"], ["b", "aa"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(", "())"]),
        ('root ::= [^a]{2} | . "\\u5b57" [\\x41-C\\]^-]', ["bc", "a字B", "a字]", "a字-", "\n字^"], ["ab", "a字D"]),
        ('root ::= "a"{2,3} b # end\nb ::=\n  "1"\n  | "2"', ["aa1", "aaa2"], ["a1", "aaaa1", "aa"]),
        ('start ::= "a"\nroot ::= start Start-2 start_2\nStart-2 ::= "b"\nstart_2 ::= "c"', ["abc"], ["a"]),
        ('root ::= "/" "//" "\\"" "\\\\" "#"', ['///"\\#'], ["/"]),
    ],
)
def test_a_grammar_means_characters(grammar: str, inside: list[str], outside: list[str]) -> None:
    compiled_grammar = gbnf(grammar)
    assert all(accepts(compiled_grammar, text) for text in inside)
    assert not any(accepts(compiled_grammar, text) for text in outside)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("root ::= x", "no rule is named 'x', at line 1, column 10"),
        ('root := "a"', "expected a rule, `name ::= ...`, at line 1, column 6"),
        ('a ::= "a"', "no rule `root`"),
        ('root ::= "a"\nb ::= "x', "a literal without its end, at line 2, column 7"),
        ("root ::= [a", "a character class without its end, at line 1, column 10"),
        ('root ::= ("a"', "expected `)`, at line 1, column 14"),
        ('root ::= "\\q"', "an unknown escape \\q, at line 1, column 11"),
        ('root ::= "a"\nroot ::= "b"', "a second rule 'root', at line 2, column 1"),
        ('root ::= "a"{3,1}', "bounds out of order"),
        ("root ::= " + "(" * 100, "nested deeper"),
        ("root ::= root", "no text satisfies it"),
        ("root ::= [^\\x01-\\U0010ffff]", "none that can be generated"),
        ("", "no rule `root`"),
    ],
)
def test_gbnf_is_refused_with_line_and_column(text: str, message: str) -> None:
    error = refusal(GrammarKind.GBNF, text)
    assert message in error.message
    assert error.param == "guided_json"


@settings(max_examples=60)
@given(patterns, st.text(st.sampled_from('ab1é".'), max_size=4), st.sampled_from('ab1é".'))
def test_what_may_go_on_is_in_the_continuation(pattern: str, text: str, character: str) -> None:
    may_go_on = any(re.fullmatch(pattern, text + character + rest) for rest in ("", "a", "b", "1", "ab", '"', "bc"))
    if re.fullmatch(pattern, text) and may_go_on:
        more = continuation(parse(pattern, python_dialect()))
        assert any(low <= ord(character) <= high for low, high in more)


def test_lark_is_taken_as_it_is_written() -> None:
    grammar = lark_grammar('start: greeting "!"?  // a comment with } and stop=\ngreeting: "hello" | /[a-c]+/\n')
    for text in ("hello", "abc!"):
        assert accepts(grammar, text)
    assert not accepts(grammar, "hell")


def test_added_tokens_can_be_named_and_stop_tokens_cannot() -> None:
    for symbol in ("<call>", f"<[{SPECIAL[0]}]>"):
        matcher = lark_grammar(f'start: {symbol} "a"').matcher()
        assert allowed(matcher) == {SPECIAL[0]}
        assert matcher.advance(SPECIAL[0])
        assert matcher.advance(ord("a"))
        assert allowed(matcher) == STOPS
    for symbol in ("<stop>", f"<[{SPECIAL[1]}]>", "<[0-400]>", "<[*]>", "<[^1]>", "<[97]>", "<unknown>"):
        with pytest.raises(UnsupportedGrammar, match="at line 1, column 8"):
            lark_grammar(f"start: {symbol}")
    assert accepts(lark_grammar('start: "<stop>"'), "<stop>")  # a quotation


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start: a\na: "x" b', 'unknown name: "b", at line 2, column 4'),
        ('start "a"', "Expected token ':'"),
        ("start: /a(?=b)/", "look-around, including look-ahead and look-behind, is not supported, at line 1, column 8"),
        ('%llguidance {"no_forcing": true}\nstart: "a"', "`%llguidance` is refused, at line 1, column 1"),
        ('start: a\na[stop=""]: /.*/', "`stop` is refused, at line 2, column 3"),
        ("start: a\na[max_tokens=3]: /.*/", "`max_tokens` is refused"),
        ("start: @other", "`@other` is refused"),
        ('start: "a" }\nstart: "b"', "an unbalanced `}`, at line 1, column 12"),
        ('{"grammars": [{"lark_grammar": "start: <[0]>"}]}', "expecting rule"),
        ('start: %json {"not": {"format": "date"}}', "`not` is not supported"),
        ('start: %json {"x-guidance": {"lenient": true}}', "`x-guidance` is refused"),
        ("start: %json {", "without a JSON value"),
        ("start: start", "no text satisfies it"),
        ("", "no start rule found"),
    ],
)
def test_lark_is_refused_with_its_place(text: str, message: str) -> None:
    assert message in refusal(GrammarKind.LARK, text).message


def test_a_schema_in_lark_is_compiled_as_others_are() -> None:
    grammar = lark_grammar('start: "x" %json {\n"type": "array", "items":\n {"type": "integer"}} "y"')
    assert accepts(grammar, "x[1, 2]y")
    assert accepts(grammar, "x[1,2]y")
    assert not accepts(grammar, "x[1,  2]y")
    message = refusal(GrammarKind.LARK, 'start: a b\na: %json {\n"type": "null"\n}\nb: c').message
    assert 'unknown name: "c", at line 5, column 4' in message


@pytest.mark.parametrize("num_rules", [4, 40, 200])
def test_rules_that_double_each_other_do_not_take_a_time_that_doubles(num_rules: int) -> None:
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(num_rules))
    assert len(to_lark(f'root ::= r0\n{rules}r{num_rules} ::= "x"')) < 200_000


def test_terminals_that_double_are_refused_where_they_grow_too_large() -> None:
    doubling = "\n".join(f"R{place}: R{place + 1} R{place + 1}" for place in range(900))
    message = refusal(GrammarKind.LARK, f'start: R0\n{doubling}\nR900: "x"').message
    assert "written out" in message
    assert re.search(r"at line \d+, column \d+", message)
    chain = "\n".join(f'R{place}: R{place + 1} "{place}"' for place in range(200))
    assert compiled(GrammarKind.LARK, f'start: R0\n{chain}\nR200: "x"')
    assert "written out" not in refusal(GrammarKind.LARK, 'start: A\nA: B\nB: A "x"').message


def test_a_rule_in_which_too_much_may_begin_at_once_is_refused() -> None:
    assert "row" in refusal(GrammarKind.LARK, f'start: {"a? " * 1000}\na: "x"').message
    assert accepts(compiled(GrammarKind.LARK, f'start: {"a? " * 200}\na: "x"'), "xxx")


def test_overlapping_sets_are_told_apart_for_so_long_only() -> None:
    sets = " | ".join(f"[a-{chr(0x4E00 + place)}]" for place in range(200))
    assert "[" in to_lark(f"root ::= ({sets})*")


def test_the_same_set_many_times_is_written_once() -> None:
    grammar = compiled(GrammarKind.REGEX, r"\w" * 1500)
    assert grammar.num_bytes < 2**21
    assert not accepts(grammar, "a" * 20)
    assert accepts(compiled(GrammarKind.REGEX, r"\w\w\w(?:a|b)(?:a|b)"), "xyzab")
