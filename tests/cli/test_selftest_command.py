"""`penstock selftest`: greedy answers are compared with those of a plain engine, and an engine that errs is found."""

import itertools
import json
import random
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from penstock.cli.selftest.arguments import ROUNDING, parse_selftest_arguments
from penstock.cli.selftest.cases import Case, Feature, draw_cases, script_of
from penstock.cli.selftest.matrix import Round
from penstock.cli.selftest.results import Answer, Situation
from penstock.engine.errors import ConfigurationError
from penstock.engine.scripted import model
from penstock.engine.scripted.file import read_script
from penstock.plugins.grammars.llguidance.matcher import LlguidanceMatcher, MatcherFailed
from penstock.server import main


def run_test(path: Path, *words: str, code: int = 0) -> dict[str, Any]:
    """The results that the command has written."""
    found = main(["selftest", *words, "--json", str(path / "results.json")])
    results: dict[str, Any] = json.loads((path / "results.json").read_text(encoding="utf-8"))
    assert found == code, {name: results[name] for name in ("failed", "differences")}
    return results


def counted(results: dict[str, Any], situation: Situation) -> dict[str, int]:
    counts: dict[str, int]
    (counts,) = (counts for counts in results["counted"] if counts["situation"] == situation)
    return counts


def test_answers_are_the_same_in_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = run_test(tmp_path, "--runs", "50", "--speculation", "suffix")
    assert (results["runs"], results["different"], results["differences"]) == (55, 0, [])
    cells = {(cell["situation"], cell["feature"]): cell["runs"] for cell in results["cells"]}
    assert cells == {(situation, feature): 1 if situation == Situation.ALONE else 2 for situation in Situation for feature in Feature}
    assert counted(results, Situation.BATCH)["aborted"] > 0
    assert counted(results, Situation.PREFIX)["cached tokens"] > 0
    assert counted(results, Situation.DISK)["blocks from disk"] > 0
    assert all(counts["draft tokens"] > counts["accepted"] > 0 for counts in results["counted"])
    assert capsys.readouterr().out.endswith("0 differ\npassed\n")


@pytest.mark.thorough
def test_every_proposer_is_tested_in_every_situation(tmp_path: Path) -> None:
    results = run_test(tmp_path, "--runs", "800", "--jobs", "2")
    assert results["runs"] >= 750
    assert results["not_tested"] == []
    assert all(counted["preemptions"] for counted in results["counted"] if counted["situation"] == Situation.PREEMPTION)


def err_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row of a step of several takes the second token of its script."""
    exact = model.CompiledScript.logits

    def erring(self: model.CompiledScript, answers: list[model.Answer]) -> Tensor:
        logits_KV = exact(self, answers)
        if len(answers) > 3:
            best, second = logits_KV[0].topk(2).indices.tolist()
            logits_KV[0, [best, second]] = logits_KV[0, [second, best]]
        return logits_KV

    monkeypatch.setattr(model.CompiledScript, "logits", erring)


def test_an_engine_that_errs_in_batches_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    err_in_batches(monkeypatch)
    results = run_test(tmp_path, "--runs", "30", "--speculation", "none", code=1)
    wrong = {cell["situation"] for cell in results["cells"] if cell["different"]}
    assert Situation.BATCH in wrong
    assert Situation.ALONE not in wrong
    difference = results["differences"][0]
    place = difference["token"]
    expected, got = (difference[name]["token_ids"] for name in ("expected", "got"))
    assert expected[:place] == got[:place]
    assert difference["margin_nats"] is None or difference["margin_nats"] >= model.GAP
    assert "DIFFER" in (printed := capsys.readouterr().out)
    assert printed.endswith("NOT passed\n")


@pytest.mark.thorough
def test_differences_within_the_margin_are_counted_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    err_in_batches(monkeypatch)
    results = run_test(tmp_path, "--runs", "30", "--speculation", "none", "--max-margin", "1e9", "--seed", "1", code=0)
    assert results["within_margin"] == results["different"] > 0
    assert results["is_passed"]


def test_a_request_that_fails_is_no_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    advance, numbers = LlguidanceMatcher.advance, itertools.count()

    def failing(self: LlguidanceMatcher, token_id: int) -> bool:
        if next(numbers) % 40 == 39:
            raise MatcherFailed("it is the fortieth token")
        return advance(self, token_id)

    references = Round._refer

    async def then_failing(self: Round) -> None:
        await references(self)
        monkeypatch.setattr(LlguidanceMatcher, "advance", failing)

    monkeypatch.setattr(Round, "_refer", then_failing)
    results = run_test(tmp_path, "--runs", "25", "--speculation", "none", code=1)
    assert results["different"] == 0
    assert sum(results["failed"].values()) > 0
    assert "fortieth" in (printed := capsys.readouterr().out)
    assert printed.endswith("NOT passed\n")


def test_an_aborted_answer_is_a_beginning() -> None:
    reference = Answer((1, 2, 3), "abc", finish_reason="stop")
    assert not Answer((1, 2)).differs_from(reference, is_aborted=True)
    assert Answer((1, 2)).differs_from(reference, is_aborted=False)
    assert Answer((1, 4)).differs_from(reference, is_aborted=True)
    assert Answer((1, 4)).position(reference) == 1
    assert Answer((1, 2, 3), "abd", finish_reason="stop").differs_from(reference, is_aborted=False)


def test_a_seed_draws_the_same_cases_and_a_script_that_answers_them(tmp_path: Path) -> None:
    cases, again = (draw_cases(random.Random("0"), tuple(Feature), 4) for _ in range(2))
    assert cases == again
    (tmp_path / "s.jsonl").write_text(script_of(cases), encoding="utf-8")
    assert len(read_script(tmp_path / "s.jsonl").lines) == len({case.messages[-1]["content"] for case in cases}) == 20
    assert script_of(cases, draft=random.Random(0)) != script_of(cases)


def test_penalties_count_in_margins() -> None:
    case = Case(feature=Feature.STOP, name="s", messages=[], params={"frequency_penalty": 0.5, "presence_penalty": -0.25})
    assert [case.penalty(token_id, (1, 2, 2)) for token_id in (0, 1, 2)] == [0, 0.25, 0.75]
    assert not case.is_free


def test_flags_are_the_servers_and_its_own() -> None:
    words = shlex.split("--runs 5 --jobs 2 --json f.json --model m --seed 3 --dtype float32 --speculation mtp")
    arguments = parse_selftest_arguments(words)
    assert (arguments.num_runs, arguments.num_jobs, arguments.json_path, arguments.seed) == (5, 2, Path("f.json"), 3)
    assert (arguments.model, arguments.proposers, arguments.max_margin) == ("m", ("mtp",), ROUNDING)
    assert arguments.options == {"dtype": "float32", "seed": 3}
    assert parse_selftest_arguments([]).max_margin == 0
    assert parse_selftest_arguments(["--max-margin", "0.25"]).max_margin == 0.25


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--kv-cache-dir d", "--kv-cache-dir: the test has one of its own"),
        ("--no-prefix-caching", "--prefix-caching: the test switches it itself"),
        ("--port 80", "--port is an option of the server"),
    ],
)
def test_flags_that_the_test_cannot_take_are_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_selftest_arguments(words.split())


def test_a_proposer_that_is_not_registered_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["selftest", "--speculation", "suffix,ngram", "--json", str(tmp_path / "results.json")]) == 2
    assert "`--speculation suffix,ngram`: there is no proposer of that name; did you mean 'suffix' or 'ngram'?" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
