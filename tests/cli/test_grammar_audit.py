"""The audit of masks: it finds tokens that are wrongly masked and wrongly allowed, and nothing in a right grammar."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from penstock.cli.grammar.arguments import AuditEffort, parse_grammar_arguments
from penstock.cli.grammar.audit import Audit, audit_as_text, run_audit
from penstock.cli.grammar.json_syntax import ImpossibleTokens, Syntax
from penstock.cli.grammar.trial import GrammarBench
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from penstock.plugins.grammars.llguidance.matcher import LlguidanceGrammar
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE

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


def audited(lines: list[bytes], factory: Callable[[Vocabulary], GrammarBackend] = LlguidanceBackend, *, completions: int = 2) -> Audit:
    bench, audit = GrammarBench({"llguidance": factory}, TOKENIZER, VOCAB_SIZE, frozenset({EOS})), Audit()
    try:
        asyncio.run(run_audit(audit, bench, lines, None, "open", AuditEffort(spellings=2, tokenizations=3, completions=completions)))
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
    assert audit.schemas == {"exact": 1}
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
    tokens = ImpossibleTokens([b"]" * 12, b"]}", b"a", b"1,", None], 6)
    state = Syntax().after(b"[" * 20 + b"1")
    assert state is not None
    assert tokens.at(state).tolist() == [False, True, True, False, True, True]


def test_flags_set_the_effort() -> None:
    given = parse_grammar_arguments(["audit", "f", "--spellings", "3", "--tokenizations", "4", "--completions", "0", "--seed", "9"])
    assert given.effort == AuditEffort(spellings=3, tokenizations=4, completions=0, seed=9)
    assert parse_grammar_arguments(["audit", "f"]).effort == AuditEffort()


def test_what_was_audited_is_told_in_words() -> None:
    audit = audited([LINE, b"{"])
    said = "\n".join(audit_as_text(audit, {"file": "f", "model": "m", "backend": "auto", "additional_properties": "open"}))
    assert said.endswith("NOT passed")
    assert "line 2: malformed" in said
