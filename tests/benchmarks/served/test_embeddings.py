from pathlib import Path
from typing import Any

import pytest

from benchmarks.embeddings import NAMES, QUICK, WORKLOADS, Workload, embedding_with_penstock, measure
from penstock.engine.config import EngineConfig
from penstock.engine.pooling.encoder import EncoderInput
from penstock.engine.pooling.loader import load_pooling_model
from penstock.engine.pooling.model import PoolingParams
from penstock.engine.text.tokenizer import Tokenizer


class FakeWorker:
    """Takes its seconds, and gives embeddings that are off by a number."""

    def __init__(self, seconds: float, error: float) -> None:
        self.seconds, self.error = seconds, error

    def embed(self, texts: list[str]) -> tuple[float, list[list[float]]]:
        return self.seconds, [[len(text) + self.error, 1.0] for text in texts]


@pytest.mark.parametrize("workload", [*WORKLOADS.values(), *QUICK.values()])
def test_texts_are_new_in_every_round_and_the_same_in_every_run(workload: Workload) -> None:
    texts = workload.texts(1)
    assert len(texts) == workload.num_texts
    assert texts == workload.texts(1)
    assert texts != workload.texts(2)
    assert all(workload.fewest_words <= len(text.split()) <= workload.most_words for text in texts)


def test_a_ratio_is_above_1_where_the_first_is_faster_and_differences_are_found() -> None:
    workers: dict[str, Any] = {NAMES[0]: FakeWorker(0.5, 0.0), NAMES[1]: FakeWorker(2.0, 0.25)}
    result = measure(workers, Workload(8, 1, 3), rounds=2)
    assert result["ratio"] == 4.0
    assert result["largest_difference"] == 0.25
    assert result["texts_per_s"] == {NAMES[0]: 16.0, NAMES[1]: 4.0}
    assert result["seconds"] == {NAMES[0]: [0.5, 0.5], NAMES[1]: [2.0, 2.0]}


def test_what_is_timed_are_the_models_embeddings(minilm_dir: Path) -> None:
    texts = ["Paris", "The cat sat on the mat."]
    with embedding_with_penstock("minilm", threads=1) as embed:
        found = embed(texts)
    model, tokenizer = load_pooling_model(minilm_dir, EngineConfig(device="cpu")), Tokenizer.load(minilm_dir)
    inputs = [EncoderInput(tokenizer.encode(text, add_special_tokens=True)) for text in texts]
    expected = model.compute([model.check(each, PoolingParams()) for each in inputs])
    for ours, own in zip(found, expected, strict=True):
        assert ours == pytest.approx(own.tolist(), abs=1e-5)
