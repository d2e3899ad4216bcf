"""The comparison of compiled decoder layers, on a small model that is compiled in neither way: compiling takes a minute."""

import json
from pathlib import Path

import pytest

from benchmarks import compiled_layers
from benchmarks.compiled_layers import main


def test_both_ways_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    monkeypatch.setitem(compiled_layers.FAMILIES, "cohere2", compiled_layers.FAMILIES["cohere2"] | small)
    monkeypatch.setattr(compiled_layers, "WAYS", {"compiled": "off", "uncompiled": "off"})
    file = tmp_path / "result.json"
    sizes = ["--layers", "1", "--prompt", "4", "--answer", "3", "--rounds", "1", "--streams", "2"]
    assert main(["--families", "cohere2", *sizes, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    found = result["families"]["cohere2"]["2"]
    assert found["ratio"] == found["compiled"]["output_tokens_per_s"] / found["uncompiled"]["output_tokens_per_s"]
    assert "cohere2, 2 streams" in capsys.readouterr().out
