"""Schemas as people write them: manifests, Kubernetes, Snowplow, GeoJSON, FHIR, OpenAPI, tools, and each keyword by itself."""

import asyncio
import json
from pathlib import Path

import pytest

import penstock.cli.grammar.trial as grammar_trial
from penstock.cli.grammar.trial import GrammarBench, Trial, run_trial
from penstock.engine.contracts.grammar import AdditionalProperties
from penstock.plugins.grammars.llguidance.backend import LlguidanceBackend
from tests.fakes import EOS, TOKENIZER, VOCAB_SIZE

CASES = Path(__file__).with_name("real_schemas.jsonl").read_bytes().splitlines()


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of several times, for medians of times that do not matter here."""
    monkeypatch.setattr(grammar_trial, "NUM_COMPILATIONS", 1)


def tried(additional_properties: AdditionalProperties, cases: list[bytes]) -> Trial:
    bench = GrammarBench({"llguidance": LlguidanceBackend}, TOKENIZER, VOCAB_SIZE, frozenset({EOS}))
    trial = Trial()
    try:
        asyncio.run(run_trial(trial, bench, cases, None, additional_properties, is_strict=False))
    finally:
        bench.close()
    return trial


def test_instances_are_told_apart() -> None:
    """None wrongly where a schema is enforced exactly, which most are; the keywords that are not are told in docs/grammars.md."""
    trial = tried("open", CASES)
    assert not trial.malformed
    assert {json.loads(line)["name"] for line in CASES} == {result.case.name for result in trial.results}
    assert [(result.case.name, failure) for result in trial.of("exact") for failure in result.failures] == []
    assert [result.case.name for result in trial.of("refused")] == []
    assert [result.case.name for result in trial.of("lenient") for failure in result.failures if failure.is_valid] == []
    assert len(trial.of("exact")) > 0.86 * len(CASES)
    assert sum(result.is_right for result in trial.results) > 0.91 * len(CASES)


@pytest.mark.parametrize("cases", [CASES[::4], pytest.param(CASES, marks=pytest.mark.thorough)], ids=["some", "all"])
def test_in_the_closed_reading_they_all_compile_and_nothing_invalid_is_accepted(cases: list[bytes]) -> None:
    trial = tried("closed", cases)
    assert [(result.case.name, failure) for result in trial.of("exact") for failure in result.failures if not failure.is_valid] == []
    assert [result.case.name for result in trial.of("refused")] == []
    assert [result.case.name for result in trial.results if result.outcome.is_as_written] == []
    assert len(trial.of("exact")) > 0.8 * len(cases)
