"""The audit of masks: it finds tokens that are wrongly masked and wrongly allowed, and nothing in a right grammar."""

import asyncio
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.cli.grammar.arguments import AuditEffort, parse_grammar_arguments
from penstock.cli.grammar.audit import Audit
from penstock.cli.grammar.campaign import Campaign
from penstock.cli.grammar.command import audit_as_json, audit_as_text, compared
from penstock.cli.grammar.context_free import Grammar, samples_of
from penstock.cli.grammar.languages import DecidedTokens, RegexLanguage, Syntax, TextState
from penstock.cli.grammar.raw import RawBench, raw_backends
from penstock.cli.grammar.trial import GrammarBench
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.contracts.hooks import ToolParserFactory
from penstock.engine.contracts.parsing import CallableTool, Turn
from penstock.engine.contracts.structure import Marker, Sequence
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar
from penstock.plugins.grammars.outlines_core.backend import OutlinesCoreBackend
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE
from tests.helpers.tool_parsers import tool_parser

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 2}, "size": {"enum": ["small", "large"]}, "count": {"type": "number"}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
LINE = json.dumps({"schema": SCHEMA, "tests": [{"valid": True, "data": {"city": "Osló", "size": "large", "count": 2.5}}]}).encode()


class Altered(GrammarBackend):
    """llguidance with masks that are changed afterwards."""

    def __init__(self, change: Callable[[Tensor, bytes], None], vocabulary: Vocabulary) -> None:
        self._backend, self._change, self._vocabulary = LlguidanceBackend(vocabulary), change, vocabulary

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        grammar = self._backend.compile(spec)
        return AlteredGrammar(grammar, self._change, self._vocabulary)


class AlteredGrammar(CompiledGrammar):
    num_bytes = 0

    def __init__(self, grammar: CompiledGrammar, change: Callable[[Tensor, bytes], None], vocabulary: Vocabulary) -> None:
        self._grammar, self._change, self._vocabulary = grammar, change, vocabulary

    def matcher(self) -> GrammarMatcher:
        return AlteredMatcher(self._grammar.matcher(), self._change, self._vocabulary)


class AlteredMatcher(GrammarMatcher):
    def __init__(self, matcher: GrammarMatcher, change: Callable[[Tensor, bytes], None], vocabulary: Vocabulary) -> None:
        self._matcher, self._change, self._vocabulary = matcher, change, vocabulary
        self._taken: list[int] = []

    def fill_bitmask(self, row: Tensor) -> None:
        self._matcher.fill_bitmask(row)
        self._change(row, b"".join(self._vocabulary.token_bytes[token_id] or b"" for token_id in self._taken))

    def advance(self, token_id: int) -> bool:
        is_taken = self._matcher.advance(token_id)
        self._taken += [token_id] * is_taken
        return is_taken

    def rollback(self, num_tokens: int) -> None:
        self._matcher.rollback(num_tokens)
        del self._taken[len(self._taken) - num_tokens :]

    @property
    def finished(self) -> bool:
        return self._matcher.finished


def audited(
    lines: list[bytes],
    factory: Callable[[Vocabulary], GrammarBackend] = LlguidanceBackend,
    *,
    completions: int = 2,
    tool_parsers: Mapping[str, ToolParserFactory] | None = None,
) -> Audit:
    bench, audit = GrammarBench({"llguidance": factory}, TOKENIZER, VOCAB_SIZE, frozenset({EOS})), Audit()
    try:
        effort = AuditEffort(spellings=2, tokenizations=3, completions=completions)
        asyncio.run(Campaign(audit, bench, None, "open", effort, tool_parsers or {}).run(lines))
    finally:
        bench.close()
    return audit


def with_bit(token_id: int, *, is_set: bool, where: Callable[[bytes], bool]) -> Callable[[Vocabulary], GrammarBackend]:
    def change(row: Tensor, before: bytes) -> None:
        if where(before):
            word, bit = divmod(token_id, 32)
            number = int(row[word]) & 0xFFFFFFFF
            number = number | 1 << bit if is_set else number & ~(1 << bit)
            row[word] = number - (1 << 32) * (number >> 31)

    return lambda vocabulary: Altered(change, vocabulary)


def token(text: str) -> int:
    (token_id,) = TOKENIZER.encode(text)
    return token_id


def test_right_masks_pass_and_every_kind_of_decision_is_counted() -> None:
    audit = audited([LINE])
    assert audit.is_passed, audit.findings
    assert audit.constraints == {"schema": {"exact": 1}}
    assert all(audit.decisions[kind] > 0 for kind in ("impossible", "spelled", "completed"))
    assert audit.spelled["exponent"] == 1


@pytest.mark.parametrize(
    ("text", "is_set", "after", "fault"),
    [
        ("]", True, b'{"city":', "allowed"),
        ("O", False, b'"', "masked"),
        pytest.param("x", True, b'{"city', "error", marks=pytest.mark.thorough),
    ],
)
def test_one_wrong_bit_is_found(text: str, is_set: bool, after: bytes, fault: str) -> None:
    audit = audited([LINE], with_bit(token(text), is_set=is_set, where=lambda before: before.endswith(after)), completions=40)
    assert fault in {finding.fault for finding in audit.findings}
    assert not audit.is_passed


def test_a_grammar_that_takes_more_than_the_schema_is_found() -> None:
    class Looser(LlguidanceBackend):
        def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
            return super().compile(replace(spec, text=spec.text.replace('"large"', '"large", "huge"')))

    audit = audited([LINE], Looser, completions=40)
    assert {finding.fault for finding in audit.findings} == {"invalid"}
    assert "'huge' is not one of ['small', 'large']" in audit.findings[0].detail


def test_an_end_that_comes_too_soon_is_found() -> None:
    audit = audited([LINE], with_bit(EOS, is_set=True, where=lambda before: before.endswith(b",")))
    assert {finding.fault for finding in audit.findings} >= {"allowed"}


@pytest.mark.parametrize("text", ['{"a": [1, -2.5e-3, true, null, "x\\u00e9\\n é"], "b": {}}', "[ ]", "0", '"😀"', " [[], {}]\n"])
def test_syntax_takes_json(text: str) -> None:
    state: Any = Syntax()
    for byte in text.encode():
        state = state.step(byte)
        assert state is not None
    assert state.is_complete
    assert json.loads(text) is not None or text == "null"


NO_JSON = ["{,", "[1,]", "01", '{"a" 1', '"\n', "tru}", "[1 2", '{"a":1,}', "-a", "1.e", "}", "[}", '"\\x', '"\\u00g']


@pytest.mark.parametrize("text", NO_JSON)
def test_syntax_refuses_what_is_no_json(text: str) -> None:
    assert Syntax().after(text.encode()) is None


@pytest.mark.parametrize("data", [b'"\xc0', b'"\xe0\x80', b'"\xed\xa0', b'"\xf4\x90', b'"\x80', b'"\xe2\x82"'])
def test_syntax_refuses_what_is_no_utf8(data: bytes) -> None:
    assert Syntax().after(data) is None


def test_a_token_may_close_more_containers_than_a_state_remembers() -> None:
    tokens = DecidedTokens([b"]" * 12, b"]}", b"a", b"1,", None], 6)
    state = Syntax().after(b"[" * 20 + b"1")
    assert state is not None
    impossible, needed = tokens.at(state)
    assert impossible.tolist() == [False, True, True, False, True, True]
    assert not needed.any()


def test_flags_set_the_effort() -> None:
    given = parse_grammar_arguments(["audit", "f", "--spellings", "3", "--tokenizations", "4", "--completions", "0", "--seed", "9"])
    assert given.effort == AuditEffort(spellings=3, tokenizations=4, completions=0, seed=9)
    assert parse_grammar_arguments(["audit", "f"]).effort == AuditEffort()


REFUSED = b'{"schema": {"type": "array", "uniqueItems": true, "items": {"type": "object"}}, "tests": [{"valid": true, "data": []}]}'


def test_what_was_audited_is_told_in_words() -> None:
    audit = audited([LINE, b"{"])
    said = "\n".join(audit_as_text(audit, {"file": "f", "model": "m", "backend": "auto", "additional_properties": "open"}))
    assert said.endswith("NOT passed")
    assert "line 2: malformed" in said


@pytest.mark.parametrize(("lines", "why"), [([], "the file has no constraint"), ([REFUSED], "no constraint was compiled")])
def test_an_audit_of_nothing_is_not_passed(lines: list[bytes], why: str) -> None:
    audit = audited(lines)
    said = list(audit_as_text(audit, {"file": "f", "model": "m", "backend": "auto", "additional_properties": "open"}))
    assert said[-2].startswith(f"nothing was audited: {why}")
    assert said[-1] == "NOT passed"
    assert not audit_as_json(audit, {})["is_passed"]


EXPRESSIONS = 'root ::= term | root ("+" | "-") term\nterm ::= [0-9]{1,2} | "(" root ")"\n'
REASONS = 'start: "yes" | "no, because " REASON\nREASON: /[a-z ]{3,9}/\n'
TOOL = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def line(**content: Any) -> bytes:
    return json.dumps(content).encode()


LANGUAGES = [
    (line(regex="[0-9]{2}(-[a-c]+|é)?"), LlguidanceBackend),
    (line(regex="(?!ab)[a-c]{2,3}", tests=[{"data": "acb"}]), LlguidanceBackend),
    (line(regex="[0-9]+(\\.[0-9]{1,2})?"), OutlinesCoreBackend),
    (line(choice=["yes", "no", "not now", "né"]), LlguidanceBackend),
    (line(choice=["yes", "no", "not now", "né"]), OutlinesCoreBackend),
    (line(gbnf=EXPRESSIONS, tests=[{"data": "1+(20-3)"}]), LlguidanceBackend),
    (line(lark=REASONS), LlguidanceBackend),
]


@pytest.mark.parametrize(("constraint", "backend"), LANGUAGES)
def test_right_masks_of_other_languages_pass_and_every_token_is_decided(
    constraint: bytes, backend: Callable[[Vocabulary], GrammarBackend]
) -> None:
    audit = audited([constraint], backend)
    assert audit.is_passed, (audit.findings, audit.malformed)
    assert [counts["exact"] for counts in audit.constraints.values()] == [1]
    assert audit.decisions["impossible"] > 0
    assert audit.decisions["spelled"] > 0


@pytest.mark.parametrize(
    ("constraint", "text", "is_set", "after", "fault"),
    [
        (line(regex="[0-9]{2}(-[a-c]+)?"), "-", False, b"12", "masked"),
        (line(regex="[0-9]{2}(-[a-c]+)?", tests=[{"data": "12-a"}]), "d", True, b"-", "allowed"),
        (line(choice=["yes", "no"]), "y", False, b"", "masked"),
        (line(gbnf=EXPRESSIONS, tests=[{"data": "(1)"}]), "+", True, b"(", "allowed"),
        (line(lark=REASONS), "n", False, b"", "masked"),
    ],
)
def test_one_wrong_bit_in_another_language_is_found(constraint: bytes, text: str, is_set: bool, after: bytes, fault: str) -> None:
    def where(before: bytes) -> bool:
        return before[-len(after) :] == after if after == b"-" or after == b"(" else len(before) == len(after)

    audit = audited([constraint], with_bit(token(text), is_set=is_set, where=where))
    assert fault in {finding.fault for finding in audit.findings}


def test_calls_are_audited_in_every_wire_format_that_has_a_grammar() -> None:
    formats = {name: tool_parser(name) for name in ("hermes", "qwen3_coder", "openai", "pythonic")}
    tests = [{"data": {"city": "Oslo", "days": 3}}, {"data": {"city": "a"}}]
    audit = audited([line(tool=TOOL, tests=tests)], tool_parsers=formats)
    assert audit.is_passed, audit.findings[:3]
    assert {kind for kind, counts in audit.constraints.items() if counts["exact"]} >= {
        "tool (hermes)",
        "tool (qwen3_coder)",
        "tool (openai)",
    }
    assert audit.decisions["spelled"] > 0
    assert audit.decisions["completed"] > 0


def test_a_grammar_of_calls_that_is_another_tools_is_found() -> None:
    hermes = tool_parser("hermes")(Turn()).tool_format
    assert hermes is not None
    other = CallableTool("weather", GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"town": {}}}'))
    structure = Sequence((Marker(hermes.opening), hermes.calls([other], is_single=True)))

    class Other(LlguidanceBackend):
        def compile(self, spec: GrammarSpec) -> LlguidanceGrammar:
            return super().compile(spec if spec.structure is None else replace(spec, structure=structure))

    tool = line(tool=TOOL, tests=[{"data": {"city": "Oslo"}}])
    audit = audited([tool], Other, completions=20, tool_parsers={"hermes": tool_parser("hermes")})
    assert "invalid" in {finding.fault for finding in audit.findings}


@pytest.mark.parametrize("pattern", [r"\s", r"[^\d\s]", r"\w", r"[\W]", r"[]\s]\D", r"\[\S\]"])
def test_shorthands_match_what_they_match_in_re(pattern: str) -> None:
    language = RegexLanguage(pattern)
    for character in "\x1c\xa0 \n_aé²٣\u0301[]1\u200b":
        for text in (character, f"]{character}", f"[{character}]"):
            assert language.holds(text) <= language.begins(text)
            assert (re.fullmatch(pattern, text) is not None) == (language.begins(text) and language.holds(text))
    assert RegexLanguage(r"\s").begins("\x1c")
    assert not RegexLanguage(r"[^\d\s]").begins("\x1c")


def test_texts_that_are_made_up_match_and_begin_like_what_matches() -> None:
    numbers = random.Random(0)
    for pattern in ("[0-9]{4}-[0-9]{2}", r"(?!ab)\w{2,4}\s?[^x]", "(a|b(c|d)*)+e?"):
        language, texts = RegexLanguage(pattern), samples_of(pattern, 5, numbers)
        assert texts
        assert all(re.fullmatch(pattern, text) and language.begins(text[:-1]) for text in texts)
    grammar = Grammar(EXPRESSIONS, "gbnf")
    for _ in range(20):
        text = grammar.sample(numbers)
        assert grammar.holds(text)
        assert all(grammar.begins(text[:end]) for end in range(len(text)))
        assert not grammar.begins(text + "(")
    assert not grammar.holds("1+")
    assert grammar.begins("1+")


@pytest.mark.parametrize("text", ["root ::= missing", "root ::= root", 'start: "a"', 'root ::= "a" (', "root ::= [a"])
def test_grammars_that_cannot_be_judged_are_malformed(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        Grammar(text, "gbnf")


def test_a_character_that_is_not_complete_is_not_decided() -> None:
    state = TextState(RegexLanguage("é+")).after("é".encode()[:1])
    assert state is not None
    assert not state.is_settled
    assert TextState(RegexLanguage("é+")).after(b"\xff") is None


def test_u007f_is_refused_as_documented_where_it_is_not_escaped() -> None:
    schema = {"type": "string"}
    audit = audited([json.dumps({"schema": schema, "tests": [{"valid": True, "data": "a\x7fb"}]}).encode()])
    assert audit.is_passed, audit.findings
    assert audit.spelled["delete_character"] == audit.restricted["delete_character"] == 1


def test_an_instance_that_no_tokens_spell_is_counted() -> None:
    bench, audit = GrammarBench({"llguidance": LlguidanceBackend}, TOKENIZER, VOCAB_SIZE, frozenset({EOS})), Audit()
    known = bench.vocabulary.token_bytes
    bench.vocabulary = replace(bench.vocabulary, token_bytes=tuple(None if text == b"x" else text for text in known), encode=None)
    campaign = Campaign(audit, bench, None, "open", AuditEffort(spellings=1, tokenizations=1), {})
    try:
        asyncio.run(campaign.run([line(schema={"type": "string"}, tests=[{"valid": True, "data": "axe"}])]))
    finally:
        bench.close()
    assert (audit.unspelled, audit.findings) == (1, [])


@pytest.mark.parametrize("engine", ["llguidance", "outlines_core"])
def test_an_engine_as_it_comes_is_audited_beside(engine: str) -> None:
    make = raw_backends()[f"{engine} as it comes"]
    audit = Audit()
    bench = RawBench(engine, make, TOKENIZER.vocabulary(VOCAB_SIZE, frozenset({EOS})))
    campaign = Campaign(audit, bench, None, "open", AuditEffort(spellings=1, tokenizations=1), {})
    asyncio.run(campaign.run([LINE, line(regex="a+"), line(choice=["a", "b"])]))
    assert sum(counts["exact"] for counts in audit.constraints.values()) == 3
    assert "raw" in "\n".join(compared({"raw": audit}))


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["benchmarks/masks.jsonl", "tests/cli/real_schemas.jsonl"])
def test_masks_of_all_kinds_and_wire_formats_are_right(path: str) -> None:
    """The same files as with a real vocabulary, byte by byte."""
    formats = {name: tool_parser(name) for name in ("hermes", "mistral", "qwen3_coder", "openai", "pythonic", "gemma4", "kimi_k2")}
    bench, audit = (
        GrammarBench({"outlines_core": OutlinesCoreBackend, "llguidance": LlguidanceBackend}, TOKENIZER, VOCAB_SIZE, frozenset({EOS})),
        Audit(),
    )
    lines = Path(__file__).parents[2].joinpath(path).read_bytes().splitlines()
    try:
        effort = AuditEffort(spellings=1, tokenizations=1, completions=1)
        asyncio.run(Campaign(audit, bench, None, "open", effort, formats).run(lines))
    finally:
        bench.close()
    assert audit.is_complete
    assert (audit.findings[:5], audit.malformed) == ([], [])
    assert sum(counts["exact"] for counts in audit.constraints.values()) > 40  # a busy machine exceeds the time to compile now and then


@pytest.mark.thorough
def test_masks_of_the_backend_that_others_are_tried_before_are_right() -> None:
    backends = {"llguidance": LlguidanceBackend, "outlines_core": OutlinesCoreBackend}
    bench, audit = GrammarBench(backends, TOKENIZER, VOCAB_SIZE, frozenset({EOS})), Audit()
    lines = Path(__file__).with_name("real_schemas.jsonl").read_bytes().splitlines()
    try:
        effort = AuditEffort(spellings=3, tokenizations=1, completions=1)
        asyncio.run(Campaign(audit, bench, "outlines_core", "open", effort, {}).run(lines))
    finally:
        bench.close()
    assert audit.constraints["schema"]["exact"] > 5
    assert (audit.is_complete, audit.findings[:5]) == (True, [])
