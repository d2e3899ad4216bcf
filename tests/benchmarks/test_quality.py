"""What rounding costs, measured on a model that costs nothing itself."""

import json
from pathlib import Path

import gguf
import pytest
import torch

from benchmarks.passages import PASSAGES, QUESTIONS
from benchmarks.quality import Predictions, main
from penstock.engine.weights.gguf import convert_gguf
from tests.engine.weights.test_gguf import write_gguf


def test_perplexity_is_that_of_the_tokens_that_came() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.25, 0.25, 0.5]])
    predictions = Predictions(probabilities.log(), torch.tensor([0, 1]))
    assert predictions.perplexity == pytest.approx((0.5 * 0.25) ** -0.5)
    assert predictions.choices_T.tolist() == [0, 2]
    assert predictions.is_clear_T.tolist() == [False, False]
    assert Predictions(torch.tensor([[0.7, 0.2, 0.1]]).log(), torch.tensor([0])).is_clear_T.tolist() == [True]


@pytest.mark.thorough
def test_variants_are_compared_with_the_model_in_float32(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.quality.PASSAGES", [passage[:200] for passage in PASSAGES])
    monkeypatch.setattr("benchmarks.quality.QUESTIONS", QUESTIONS[:2])
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    (tmp_path / "tiny").mkdir()
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny")
    target = tmp_path / "results" / "quality.json"
    arguments = ["--model", str(tmp_path / "tiny"), "--dtype", "float32", "--variants", "none", "auto", "int4", "--json", str(target)]
    assert main(arguments) == 0
    results = json.loads(target.read_text())
    reference, none, auto, int4 = results["qualities"]
    for quality in (reference, none):
        assert quality["divergence"] == pytest.approx(0, abs=1e-6)
        assert (quality["same"], quality["greedy"], quality["greedy_clear"]) == (1, 1, 1)
    assert none["perplexity"] == reference["perplexity"]
    assert (none["layers"], auto["layers"], int4["layers"]) == ({}, {"Q8_0": 9}, {"Q4_1": 8, "Q8_0": 1})
    assert 0 < auto["divergence"] < int4["divergence"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith(f"tiny: {results['passage_tokens']} tokens of {len(PASSAGES)} passages")
    assert printed[0].endswith("of 2 answers")
    assert [line.split()[0] for line in printed[1:]] == ["variant", "reference", "none", "auto", "int4"]


def test_attention_over_a_paged_cache_is_compared_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.quality.PASSAGES", [passage[:200] for passage in PASSAGES])
    monkeypatch.setattr("benchmarks.quality.QUESTIONS", QUESTIONS[:1])
    model, target = tmp_path / "tiny", tmp_path / "quality.json"
    model.mkdir()
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q8_0)
    convert_gguf(tmp_path / "tiny.gguf", model)
    assert main(["--model", str(model), "--dtype", "float32", "--variants", "none", "--kv-cache-dtype", "auto", "--json", str(target)]) == 0
    reference, none = json.loads(target.read_text())["qualities"]
    assert none["perplexity"] == pytest.approx(reference["perplexity"], rel=1e-5)
