# mypy: disable-error-code="import-untyped"
"""The benchmark of parsers: what it has them read, and what it prints."""

import json
from pathlib import Path

import pytest

from benchmarks import parsers
from benchmarks.parsers import workloads
from penstock.engine.contracts.parsing import Reasoning, Text, ToolCallArguments
from penstock.plugins.manager import Plugins
from penstock.testing import read

LOADS = {(load.kind, load.name): load for load in workloads(Plugins.start(["none"]))}


def test_reasoning_and_content_grow_with_the_answer() -> None:
    load = LOADS["reasoning", "qwen3"]
    events = read(load.make(), [load.answer(1000)])
    lengths = {type(event): len(event.text) for event in events if isinstance(event, Text | Reasoning)}
    assert all(abs(length - 2000) < 50 for length in lengths.values())
    assert set(lengths) == {Text, Reasoning}


@pytest.mark.parametrize("name", [name for kind, name in LOADS if kind == "tool"])
def test_the_argument_grows_with_the_answer(name: str) -> None:
    load = LOADS["tool", name]
    fragments = [event.fragment for event in read(load.make(), [load.answer(1000)]) if isinstance(event, ToolCallArguments)]
    assert len(json.loads("".join(fragments))["city"]) == 4000


@pytest.mark.parametrize("name", [name for kind, name in LOADS if kind == "reasoning"])
def test_answers_with_reasoning_are_about_as_long_as_they_should_be(name: str) -> None:
    assert 3900 < len(LOADS["reasoning", name].answer(1000)) < 4300


def test_costs_are_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "made" / "costs.json"
    flags = ["--parser", "hermes", "--parser", "qwen3", "--lengths", "100", "20", "--repeats", "1", "--json", str(written)]
    assert parsers.main(flags) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["kind", "parser", "20", "100", "growth"]
    assert [line[:2] for line in lines[1:]] == [["reasoning", "qwen3"], ["tool", "hermes"]]
    assert [cost["name"] for cost in json.loads(written.read_text())["costs"]] == ["qwen3", "hermes"]


def test_an_unknown_parser_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsers.main(["--parser", "absent"]) == 2
    assert "absent" in capsys.readouterr().err
