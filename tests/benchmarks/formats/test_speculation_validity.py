# mypy: disable-error-code="import-untyped"
"""The experiment on strict schemas under speculation: what it asks for, and how it counts."""

import json
import random
import shlex
import sys
from pathlib import Path

import jsonschema
import pytest

from benchmarks.speculation_validity import Counts, main, make_request

FAKE = f"{shlex.quote(sys.executable)} -m tests.benchmarks.served.fake_server --port {{port}}"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def test_requests_have_schemas_of_their_own_and_are_drawn_by_the_seed() -> None:
    requests = [make_request(random.Random(seed)) for seed in range(50)]
    assert requests == [make_request(random.Random(seed)) for seed in range(50)]
    assert len({json.dumps(schema) for _, schema in requests}) == 50
    for prompt, schema in requests:
        jsonschema.Draft202012Validator.check_schema(schema)
        shown = json.loads(prompt.partition("\n")[2])
        assert not jsonschema.Draft202012Validator(schema).is_valid(shown) or len(shown["records"][0]) == 5


def test_answers_are_valid_or_not_or_cut_off() -> None:
    counts = Counts()
    for text, reason in (('{"a": 1}', "stop"), ('{"a": "1"}', "stop"), ('{"a": 1', "stop"), ('{"a":   ', "length")):
        counts.add(text, reason, SCHEMA)
    assert (counts.valid, counts.invalid, counts.cut_off, counts.total) == (1, 2, 1, 4)
    assert counts.examples[0] == "'1' is not of type 'integer': {\"a\": \"1\"}"


def test_a_server_that_ignores_the_schema_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "made" / "results.json"
    assert main(["--launch", f"fake={FAKE}", "--concurrency", "2", "--rounds", "1", "--json", str(written)]) == 0
    counts = json.loads(written.read_text())["servers"]["fake"]["at"]["2"]
    assert counts["valid"] == 0
    assert counts["invalid"] + counts["cut_off"] == 24
    assert "0 of 24" in capsys.readouterr().out


def test_a_server_that_does_not_start_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such model')", "--port", "1"])
    assert main(["--launch", f"none={command}"]) == 1
    assert "no such model" in capsys.readouterr().err
