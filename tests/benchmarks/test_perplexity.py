"""A GGUF file's perplexity as served, beside its dequantized weights' and another program's."""

from pathlib import Path

import gguf
import pytest
import torch

from benchmarks.perplexity import chunks, main, perplexity
from benchmarks.quality import Subject
from penstock.engine.weights.gguf import convert_gguf
from tests.engine.weights.test_gguf import write_gguf


def test_only_whole_chunks_are_read() -> None:
    assert chunks(range(10), 4, 8) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert chunks(range(10), 4, 1) == [[0, 1, 2, 3]]
    assert chunks(range(3), 4, 8) == []


def test_the_second_half_of_each_chunk_counts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    subject, token_ids = Subject(tmp_path, "float32", "none"), list(range(10, 26))
    with torch.inference_mode():
        logprobs_TV = subject.model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    expected = -torch.stack([logprobs_TV[t - 1, token_ids[t]] for t in range(9, 16)]).mean()
    assert perplexity(subject, [token_ids]) == pytest.approx(float(expected.exp()), rel=1e-5)


def test_all_read_the_same_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    write_gguf(tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q5_0)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path)
    monkeypatch.setattr("benchmarks.perplexity.resolve_model", lambda name: tmp_path)
    text, program = tmp_path / "text.txt", tmp_path / "llama-perplexity"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/given\ncp "$4" {tmp_path}/read\necho "Final estimate: PPL = 200.5 +/- 1.0"\n')
    program.chmod(0o700)
    given = [str(tmp_path / "tiny.gguf"), "--text", str(text), "--context", "32", "--chunks", "3", "--llama-perplexity", str(program)]
    assert main(given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny.gguf: 3 chunks of 32 tokens"
    assert "Q5_0" in lines[2]
    assert "200.5000" in lines[3]
    assert (tmp_path / "read").read_text() == text.read_text()
    assert "-c 32 -b 32 --chunks 3" in (tmp_path / "given").read_text()
