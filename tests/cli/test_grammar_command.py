"""`penstock grammar`: what it reports of backends that are right, lenient, mistaken or broken, and what of the real ones."""

import asyncio
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.cli.grammar.command import Check, check, check_as_json, check_as_text, percentile, trial_as_json, trial_as_text
from penstock.cli.grammar.trial import (
    NUM_COMPILATIONS,
    Case,
    GrammarBench,
    Malformed,
    Outcome,
    Trial,
    Walker,
    read_cases,
    run_trial,
    schema_spec,
)
from penstock.engine.constraints import limits
from penstock.engine.constraints.compiler import TIME_LIMIT
from penstock.engine.contracts.grammar import CompiledGrammar, GrammarBackend, GrammarKind, GrammarMatcher, GrammarSpec, Vocabulary
from penstock.engine.errors import ConfigurationError, EngineUnavailable, UnsupportedGrammar
from penstock.engine.text.tokenizer import Tokenizer
from penstock.server import main
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE
from tests.llm.model_directory import write_model

ABOUT = {"file": "f", "model": "m", "backend": "auto", "is_strict": False, "kind": "json_schema", "additional_properties": "closed"}
VOCABULARY = TOKENIZER.vocabulary(VOCAB_SIZE, {EOS})


@dataclass
class ListMatcher(GrammarMatcher):
    """Allows what some of the texts begin with. `is_deaf` allows tokens that it then does not take."""

    texts: Sequence[bytes]
    is_deaf: bool
    said: bytes = b""

    def fill_bitmask(self, row: Tensor) -> None:
        row.zero_()
        for token_id in range(VOCAB_SIZE):
            data = VOCABULARY.token_bytes[token_id]
            is_allowed = self.said in self.texts if token_id == EOS else data and any(t.startswith(self.said + data) for t in self.texts)
            if is_allowed:
                row[token_id // 32] |= (1 << token_id % 32) if token_id % 32 < 31 else -(1 << 31)

    def advance(self, token_id: int) -> bool:
        self.said += VOCABULARY.token_bytes[token_id] or b""
        return not self.is_deaf

    def rollback(self, num_tokens: int) -> None:
        raise AssertionError("nothing here goes back")

    def forced_tokens(self) -> list[int]:
        return []

    @property
    def finished(self) -> bool:
        return False


@dataclass
class ListGrammar(CompiledGrammar):
    texts: Sequence[bytes]
    is_deaf: bool = False
    warnings: tuple[str, ...] = ()
    num_bytes: int = 2048

    def matcher(self) -> ListMatcher:
        return ListMatcher(self.texts, self.is_deaf)


class ListBackend(GrammarBackend):
    """Takes schemas such as {"accepts": [texts]}, with {"soft": ...} leniently only, with {"hard": ...} not at all."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        assert vocabulary.stop_token_ids == {EOS}

    def compile(self, spec: GrammarSpec) -> ListGrammar:
        if spec.kind is not GrammarKind.JSON_SCHEMA:
            raise UnsupportedGrammar("only JSON schemas are supported", spec.param)
        schema = json.loads(spec.text)
        if "hard" in schema:
            raise UnsupportedGrammar("`hard` is not supported", f"{spec.param}.hard")
        if "soft" in schema and not spec.is_lenient:
            raise UnsupportedGrammar("`soft` is not supported", f"{spec.param}.soft")
        texts = [text.encode() for text in schema.get("accepts", [])]
        return ListGrammar(texts, "deaf" in schema, ("soft at $.soft",) if "soft" in schema else ())


class HardBackend(ListBackend):
    """Is asked first for JSON schemas, and takes none but what is hard."""

    preferred_kinds = frozenset({GrammarKind.JSON_SCHEMA})

    def compile(self, spec: GrammarSpec) -> ListGrammar:
        if "hard" not in json.loads(spec.text):
            raise UnsupportedGrammar("too easy", spec.param)
        return ListGrammar([b"1"])


def bench(**factories: Any) -> GrammarBench:
    return GrammarBench(factories or {"lists": ListBackend}, TOKENIZER, VOCAB_SIZE, frozenset({EOS}))


def line(schema: Any, **tests: Sequence[Any]) -> bytes:
    instances = [{"valid": is_valid == "valid", "data": data} for is_valid, values in tests.items() for data in values]
    return json.dumps({"schema": schema, "tests": instances, "comment": "passed over"}).encode()


def tried(*lines: bytes, backend: str | None = None, is_strict: bool = False, limit: int | None = None, **factories: Any) -> Trial:
    trial = Trial()
    asyncio.run(run_trial(trial, bench(**factories), lines, backend, "open", is_strict=is_strict, limit=limit))
    return trial


def checked(schema: Any, backend: str | None = None, is_strict: bool = False, **factories: Any) -> Check:
    spec = GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema), "$")
    return asyncio.run(check(bench(**factories), spec, backend, is_strict=is_strict))


RIGHT = line({"accepts": ['{"a": [1, "字"]}', "2"]}, valid=[{"a": [1, "字"]}, 2], invalid=[3, {}])


def test_a_schema_that_accepts_and_refuses_as_it_should_is_right() -> None:
    trial = tried(RIGHT)
    (result,) = trial.results
    assert (result.verdict, result.is_right, result.outcome.backend) == ("exact", True, "lists")
    assert result.outcome.seconds == result.outcome.waited
    assert len(trial.mask_seconds) > 4
    assert trial.is_passed


@pytest.mark.parametrize(
    ("schema", "tests", "why"),
    [
        ({"accepts": ["1"]}, {"valid": [12]}, "valid, but '2' is refused after '1', at token 1 of 2"),
        ({"accepts": ["12"]}, {"valid": [1]}, "valid, but may not end after '1'"),
        ({"accepts": ["1"]}, {"invalid": [1]}, "invalid, but accepted"),
        ({"accepts": ["1"], "deaf": 0}, {"valid": [1]}, "the mask allows token 0, but the matcher does not take it"),
        ({"accepts": ["1"], "deaf": 0}, {"invalid": [1]}, "the mask allows token 0, but the matcher does not take it"),
    ],
)
def test_what_an_exact_grammar_gets_wrong_is_listed_and_fails_the_trial(schema: Any, tests: Any, why: str) -> None:
    trial = tried(RIGHT, line(schema, **tests))
    assert [failure.why for failure in trial.results[1].failures] == [why]
    assert not trial.is_passed
    report = trial_as_json(trial, ABOUT)
    assert report["right"]["strictly"] == {"schemas": 1, "share": 0.5}
    assert [(entry["line"], entry["failures"][0]["why"]) for entry in report["not_right"]] == [(2, why)]
    assert f"test 1: {why}" in "\n".join(trial_as_text(trial, ABOUT))


def test_members_may_come_in_the_files_order_or_in_the_schemas() -> None:
    """And what is invalid has to be refused in both."""
    schema = {"accepts": ['{"a": 1, "b": 2}'], "properties": {"a": 0, "b": 0}}
    assert tried(line(schema, valid=[{"b": 2, "a": 1}, {"a": 1, "b": 2}])).is_passed
    (result,) = tried(line(schema, invalid=[{"b": 2, "a": 1}], valid=[{"b": 3, "a": 1}])).results
    first = """valid, but '3' is refused after '{"a": 1, "b": ', at token 14 of 16"""
    assert sorted(failure.why for failure in result.failures) == ["invalid, but accepted", first]


def test_leniently_compiled_schemas_are_counted_apart_and_may_accept_what_is_invalid() -> None:
    soft = {"accepts": ["1", "2"], "soft": 0}
    trial = tried(RIGHT, line(soft, valid=[1], invalid=[2]), line(soft, valid=[1]), line({"hard": 0}, valid=[1]))
    report = trial_as_json(trial, ABOUT)
    assert report["compiled"] == {"exact": 1, "lenient": 2, "refused": 1, "failed": 0}
    assert report["right"]["strictly"]["schemas"] == 1
    assert report["right"]["with_lenient_fallback"] == {"schemas": 2, "share": 0.5}
    assert report["instances"]["lenient"] == {"valid": 2, "valid_accepted": 2, "invalid": 1, "invalid_refused": 0}
    assert {entry["reason"]: entry["schemas"] for entry in report["refused_exactly"]} == {
        "`soft` is not supported": 2,
        "`hard` is not supported": 1,
    }
    assert report["not_right"][0]["not_enforced"] == ["soft at $.soft"]
    assert report["not_right"][1]["refusal"] == {"message": "`hard` is not supported", "path": "$.hard"}
    assert trial.is_passed
    assert json.loads(json.dumps(report)) == report


def test_a_lenient_grammar_that_refuses_what_is_valid_fails_the_trial() -> None:
    assert not tried(line({"accepts": [], "soft": 0}, valid=[1])).is_passed


def test_strictly_nothing_is_compiled_leniently() -> None:
    trial = tried(line({"accepts": ["1"], "soft": 0}, valid=[1]), is_strict=True)
    assert [result.verdict for result in trial.results] == ["refused"]


def test_malformed_lines_are_named_and_the_rest_goes_on() -> None:
    nested = b'{"schema": {}, "tests": ' + b"[" * 100_000
    lines = [
        b"\n",
        b"{",
        b"[]",
        b'{"tests": []}',
        b'{"schema": {}}',
        b'{"schema": {}, "tests": [{"data": 1}]}',
        b'{"schema": {}, "tests": [{"valid": true, "data": "\\ud800"}]}',
        b'{"schema": {}, "tests": [{"valid": true, "data": NaN}]}',
        b'{"schema": {}, "tests": [{"valid": true, "data": 1e999}]}',
        b"\xff",
        nested,
        RIGHT,
    ]
    trial = tried(*lines)
    assert [result.case.line for result in trial.results] == [12]
    assert [malformed.line for malformed in trial.malformed] == list(range(2, 12))
    said = {malformed.line: malformed.message for malformed in trial.malformed}
    assert [
        word in said[number] for number, word in ((4, "`schema`"), (5, "`tests`"), (6, "`tests[0]`"), (7, "surrogate"), (8, "NaN"))
    ] == [True] * 5
    assert not trial.is_passed
    assert "line 5: `tests` must be an array" in "\n".join(trial_as_text(trial, ABOUT))


def test_the_limit_counts_schemas() -> None:
    assert len(tried(RIGHT, b"\n", RIGHT, RIGHT, limit=2).results) == 2


def test_the_same_schema_again_is_answered_from_the_cache() -> None:
    trial = tried(RIGHT, RIGHT)
    assert [result.outcome.backend for result in trial.results] == ["lists", "lists"]
    assert trial_as_json(trial, ABOUT)["compile_ms"]["count"] == 1


def test_compile_times_are_medians_of_compilations_that_no_cache_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    original = ListBackend.compile

    def noted(self: ListBackend, spec: GrammarSpec) -> Any:
        compiled.append(spec.text)
        return original(self, spec)

    monkeypatch.setattr(ListBackend, "compile", noted)
    (result,) = tried(RIGHT).results
    texts = [text for text in compiled if text.strip() == result.case.schema]
    assert len(texts) == len(set(texts)) == NUM_COMPILATIONS
    assert result.outcome.waited is not None
    assert 0 < (result.outcome.seconds or 0) <= result.outcome.waited


def test_what_the_cache_knows_under_another_name_has_a_backend() -> None:
    async def backends(bench: GrammarBench) -> list[str | None]:
        specs = [GrammarSpec(GrammarKind.JSON_SCHEMA, "{}", param) for param in ("a", "b")]
        return [(await bench.compile(spec)).backend for spec in specs]

    assert asyncio.run(backends(bench())) == ["lists", "lists"]


def test_a_schema_keeps_the_order_of_its_members() -> None:
    malformed: list[Malformed] = []
    (case,) = read_cases([b'{"schema": {"b": 1, "a": 2}, "tests": [], "id": 7}'], malformed)
    assert case == Case(1, "7", '{"b": 1, "a": 2}', ())


def test_a_trial_without_any_schema_has_a_report() -> None:
    report = trial_as_json(tried(), ABOUT)
    assert (report["right"]["strictly"]["share"], report["compile_ms"], report["is_passed"]) == (None, None, True)
    assert list(trial_as_text(tried(), ABOUT))


def test_auto_asks_in_the_order_of_a_server() -> None:
    factories: Any = {"lists": ListBackend, "hard": HardBackend}
    assert checked({"accepts": []}, **factories).chosen.backend == "lists"
    assert checked({"hard": 0}, **factories).chosen.backend == "hard"


def test_waiting_includes_what_another_backend_refused_first() -> None:
    outcome = checked({"accepts": []}, hard=HardBackend, lists=ListBackend).chosen
    assert outcome.backend == "lists"
    assert outcome.seconds is not None
    assert outcome.waited is not None
    assert outcome.waited > outcome.seconds


def test_a_check_says_of_every_backend_why_and_what() -> None:
    found = checked({"accepts": ["1"], "soft": 0}, lists=ListBackend, hard=HardBackend)
    report = check_as_json(found, ABOUT)
    assert (report["is_taken"], report["is_exact"], report["backend"]) == (True, False, "lists")
    assert [(entry["name"], entry["verdict"]) for entry in report["backends"]] == [("lists", "lenient"), ("hard", "refused")]
    lists, hard = report["backends"]
    assert (lists["not_enforced"], lists["num_bytes"]) == (["soft at $.soft"], 2048)
    assert lists["refusal"] == {"message": "`soft` is not supported", "path": "$.soft"}
    assert hard["refusal"] == {"message": "too easy", "path": "$"}
    text = "\n".join(check_as_text(found, ABOUT))
    assert "taken by lists, leniently" in text
    assert "not enforced: soft at $.soft" in text
    assert "refused: too easy, at $" in text


class OpenBackend(ListBackend):
    """Takes no schema with `additionalProperties`."""

    def compile(self, spec: GrammarSpec) -> ListGrammar:
        if "additionalProperties" in spec.text:
            raise UnsupportedGrammar("closed", spec.param)
        return ListGrammar([b"1"])


def test_a_check_says_how_additional_properties_are_read() -> None:
    spec = schema_spec({"properties": {"a": {}}}, "$", "closed")
    assert json.loads(spec.text) == {"properties": {"a": {}}, "additionalProperties": False}
    found = asyncio.run(check(bench(open=OpenBackend, lists=ListBackend), spec, None, is_strict=True))
    assert [(answer.backend, answer.outcome.is_as_written) for answer in found.answers] == [("open", True), ("lists", False)]
    assert (found.chosen.backend, found.chosen.is_as_written) == ("lists", False)
    text = "\n".join(check_as_text(found, ABOUT))
    assert "f (json_schema, closed): taken by lists, as a whole" in text
    assert text.count("open: refused as closed") == 1
    named = asyncio.run(check(bench(open=OpenBackend), spec, None, is_strict=True))
    assert named.chosen.is_as_written


def test_a_strict_check_takes_nothing_leniently() -> None:
    assert checked({"soft": 0}, is_strict=True).chosen.grammar is None
    assert "no backend takes it" in next(iter(check_as_text(checked({"hard": 0}), ABOUT)))


def test_a_named_backend_is_the_only_one_asked() -> None:
    found = checked({"accepts": []}, "hard", lists=ListBackend, hard=HardBackend)
    assert [answer.backend for answer in found.answers] == ["hard"]
    assert found.chosen.grammar is None


def test_an_unknown_backend_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match="did you mean lists"):
        bench().backend_named("list")
    assert bench().backend_named(None) is None


def test_a_backend_that_is_not_installed_is_refused_with_how_to_install_it() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install \./examples/penstock-plugin-xgrammar"):
        bench().backend_named("xgrammar")
    assert bench(xgrammar=ListBackend).backend_named("xgrammar") == "xgrammar"


def test_a_backend_may_have_the_name_that_it_has_in_requests_to_vllm() -> None:
    backends = bench(outlines_core=ListBackend)
    assert [backends.backend_named(name) for name in ("outlines", "outlines_core")] == ["outlines_core"] * 2
    with pytest.raises(ConfigurationError, match="--backend guidance"):
        backends.backend_named("guidance")


def test_a_backend_that_breaks_down_is_a_refusal() -> None:
    class Broken(ListBackend):
        def compile(self, spec: GrammarSpec) -> ListGrammar:
            raise RecursionError

    assert checked({}, broken=Broken).answers[0].verdict == "refused"


class FailingBackend(ListBackend):
    """Fails at schemas such as {"fails": 0}, as one whose process does not start or that has a defect."""

    def compile(self, spec: GrammarSpec) -> ListGrammar:
        match json.loads(spec.text):
            case {"fails": "process"}:
                raise EngineUnavailable("the compiler does not start")
            case {"fails": "defect"}:
                raise ZeroDivisionError("division by zero")
        return super().compile(spec)


@pytest.mark.parametrize(
    ("how", "message"), [("process", "the compiler does not start"), ("defect", "ZeroDivisionError: division by zero")]
)
def test_a_backend_that_fails_is_reported_and_the_next_schema_is_tried(how: str, message: str) -> None:
    trial = tried(line({"fails": how}, valid=[1]), RIGHT, lists=FailingBackend)
    assert [result.verdict for result in trial.results] == ["failed", "exact"]
    report = trial_as_json(trial, ABOUT)
    assert report["compiled"] == {"exact": 1, "lenient": 0, "refused": 0, "failed": 1}
    assert [(entry["refusal"], entry["failure"]) for entry in report["not_right"]] == [(None, message)]
    assert (report["is_complete"], report["is_passed"]) == (True, False)
    assert f"the backend failed: {message}" in "\n".join(trial_as_text(trial, ABOUT))
    found = checked({"fails": how}, lists=FailingBackend)
    assert [entry["verdict"] for entry in check_as_json(found, ABOUT)["backends"]] == ["failed"]
    assert f"  failed: {message}" in list(check_as_text(found, ABOUT))


def test_an_interrupted_test_prints_what_was_tried(
    default_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cases.jsonl"
    file.write_bytes(line({"type": "integer"}, valid=[1]) + b"\n" + line({"type": "string"}, valid=["a"]) + b"\n")
    original = GrammarBench.compile

    async def interrupted(self: GrammarBench, spec: GrammarSpec, backend: str | None = None) -> Outcome:
        if '"string"' in spec.text:
            raise KeyboardInterrupt
        return await original(self, spec, backend)

    monkeypatch.setattr(GrammarBench, "compile", interrupted)
    monkeypatch.setattr(GrammarBench, "warm_up", lambda self, backend: asyncio.sleep(0))
    assert main(["grammar", "test", str(file), "--backend", "llguidance", "--json"]) == 130
    report = json.loads(capsys.readouterr().out)
    assert (report["schemas"], report["is_complete"], report["is_passed"]) == (1, False, False)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_text_is_spelled_in_tokens_that_are_no_markers(text: str) -> None:
    for spelled in (text, f"{text}<think>{text}<|end|>"):
        token_ids = Walker(VOCABULARY).spell(spelled)
        assert b"".join(VOCABULARY.token_bytes[token_id] or b"" for token_id in token_ids) == spelled.encode()


def test_the_tokenizers_own_tokens_are_taken_where_they_spell_the_text(default_model_dir: Path) -> None:
    tokenizer = Tokenizer.load(default_model_dir)
    vocabulary = tokenizer.vocabulary(tokenizer.vocab_size, tokenizer.eos_token_ids)
    text = '{"city": "Paris", "note": "字 é"}'
    assert Walker(vocabulary).spell(text) == tokenizer.encode(text, add_special_tokens=False)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.integers(1, 100))
def test_a_percentile_is_not_exceeded_by_so_many(values: list[float], percent: int) -> None:
    limit = percentile(values, percent)
    assert limit in values
    assert sum(value <= limit for value in values) * 100 >= percent * len(values)
    assert sum(value < limit for value in values) * 100 < percent * len(values)


def test_check_runs_over_the_default_models_tokenizer(
    default_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["ü", 2]}}, "required": ["a"], "additionalProperties": False}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    assert main(["grammar", "check", str(file), "--backend", "outlines_core"]) == 0
    assert "taken by outlines_core, as a whole" in capsys.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a(?=b)\n")))
    assert main(["grammar", "check", "-", "--kind", "regex", "--json", "--backend", "outlines_core"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["kind"], report["is_taken"]) == ("regex", False)
    assert ["position 1" in entry["refusal"]["message"] for entry in report["backends"]] == [True]


def test_test_runs_over_a_models_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cases.jsonl"
    command = ["grammar", "test", str(file), "--model", str(write_model(tmp_path / "model"))]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
    file.write_bytes(line(schema, valid=[{"a": -12}], invalid=[{"a": "1"}, {}, {"a": 1.5}, {"a": 1, "b": 2}]) + b"\n")
    assert main([*command, "--backend", "outlines_core", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["right"]["strictly"] == {"schemas": 1, "share": 1.0}
    assert report["mask_us"]["max"] >= report["mask_us"]["p99"] >= report["mask_us"]["p50"] > 0
    file.write_bytes(line(schema, invalid=[{"a": 1}]) + b"\n")
    assert main([*command, "--backend", "outlines_core"]) == 1
    assert capsys.readouterr().out.endswith("NOT passed\n")
    del schema["additionalProperties"]
    file.write_bytes(line(schema, valid=[{"a": 1, "b": 2}]) + b"\n")
    assert main([*command, "--backend", "llguidance"]) == 0
    assert "read as open" in capsys.readouterr().out
    assert main([*command, "--backend", "llguidance", "--additional-properties", "closed"]) == 1
    assert "read as closed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", "{", "cannot be read as json"),
        ("a.json", '"x"', "no JSON Schema"),
        ("a.json", "\x00", "cannot be read as json"),
        ("b.choice", "[1]", "no choices"),
    ],
)
def test_a_file_that_holds_something_else_is_one_line_and_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str, words: str
) -> None:
    (tmp_path / name).write_text(content)
    assert main(["grammar", "check", str(tmp_path / name), *(["--kind", "choice"] if name == "b.choice" else [])]) == 2
    assert words in capsys.readouterr().err


def test_the_limits_in_the_docs_are_those_of_the_code() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "grammars.md").read_text(encoding="utf-8")
    names = (
        *("MAX_TEXT", "MAX_GRAMMAR", "MAX_RULES", "MAX_REPEATS", "MAX_INTERSECTIONS", "MAX_SET", "MAX_REGEX", "MAX_REGEXES", "MAX_DEPTH"),
        *("MAX_DEPTH_BEHIND_REFERENCES", "MAX_PROPERTIES", "MAX_SCHEMAS", "MAX_JOINED_PATTERNS", "MAX_CHOICES", "MAX_COMPOSITE_CHOICES"),
        "MAX_COMPOSITE_VALUES",
    )
    divisors = [2**limits.MAX_DIVISOR_BITS, limits.MAX_DIVISORS]
    known = [getattr(limits, name) for name in names] + divisors + [limits.MAX_CONSTRAINED_PARTS, int(TIME_LIMIT)]
    assert re.findall(r"^\| [^|]+ \| ([\d,]+) \|$", page, re.MULTILINE) == [f"{limit:,}" for limit in known]


def test_a_file_that_is_not_there_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["grammar", "test", "absent.jsonl"]) == 2
    assert "absent.jsonl cannot be read: No such file" in capsys.readouterr().err
