# mypy: disable-error-code="import-untyped"
"""The benchmark of constraints against a server that answers at once, and its schemas."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from benchmarks import structured
from benchmarks.structured import VARIANTS, Load, schema

FAKE = f"{shlex.quote(sys.executable)} -m tests.benchmarks.served.fake_server --port {{port}}"


def test_variants_take_turns_in_another_order_each_round(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "made" / "results.json"
    assert structured.main(["serve", "--launch", FAKE, "--quick", "--rounds", "2", "--json", str(written)]) == 0
    out, err = capsys.readouterr()
    assert re.findall(r"^round \d +(\w+)", err, re.MULTILINE) == ["free", "schema", "distinct", "schema", "distinct", "free"]
    assert re.search(r"^distinct: [\d.]+ of the throughput", out, re.MULTILINE)
    whole = json.loads(written.read_text())
    assert {"date", "command_line", "hardware", "versions", "seed"} <= whole.keys()
    assert whole["is_complete"]
    assert all(len(ratios["rounds"]) == 2 for ratios in whole["ratios_to_free"].values())


def test_a_server_that_does_not_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such model')", "--port", "1"])
    assert structured.main(["serve", "--launch", command]) == 1
    assert "no such model" in capsys.readouterr().err


def fields_of(variant: str, num_requests: int) -> list[dict[str, Any]]:
    load = Load(argparse.Namespace(quick=False, requests=16, tokens=32, schema="records"))
    make_fields = load.fields_of(variant)
    return [make_fields() for _ in range(num_requests)]


def test_requests_have_no_schema_or_one_or_each_its_own() -> None:
    texts = {variant: {json.dumps(fields) for fields in fields_of(variant, 5)} for variant in VARIANTS}
    assert texts["free"] == {"{}"}
    assert len(texts["schema"]) == 1
    assert len(texts["distinct"]) == 5
    assert not texts["distinct"] & texts["schema"]


@pytest.mark.parametrize("items", ["strings", "records"])
def test_no_answer_of_fewer_tokens_than_asked_fulfils_the_schema(items: str) -> None:
    content = schema(items, 32, 7)
    jsonschema.Draft202012Validator.check_schema(content)
    validator = jsonschema.Draft202012Validator(content)
    item: Any = "a" if items == "strings" else {"name": "a", "count_7": 1, "kind": "thing"}
    assert validator.is_valid({"words_7": [item] * 32})
    assert not validator.is_valid({"words_7": [item] * 31})


@pytest.mark.thorough
def test_a_file_is_tried_with_each_backend(default_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, written = tmp_path / "cases.jsonl", tmp_path / "results.json"
    file.write_text('{"schema": {"type": "integer"}, "tests": [{"valid": true, "data": 1}, {"valid": false, "data": "1"}]}\n')
    backends = ["--backend", "llguidance", "--backend", "outlines_core"]
    assert structured.main(["grammars", str(file), *backends, "--json", str(written)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["backend", "llguidance", "outlines_core"]
    reports = json.loads(written.read_text())["grammars"]
    assert [report["right"]["strictly"]["share"] for report in reports] == [1.0, 1.0]


def test_an_unknown_backend_is_an_error(default_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.jsonl").touch()
    assert structured.main(["grammars", str(tmp_path / "none.jsonl"), "--backend", "outline"]) == 2
    assert "did you mean outlines_core?" in capsys.readouterr().err
