"""A model for pooling of two processes gives the numbers of one process, and ends with either of them."""

from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from penstock import LLM, ConfigurationError
from penstock.engine.errors import EngineUnavailable
from tests.encoders import cross_encoder_directory, embedding_directory

TEXTS = ["a short one", "a text of some more words than that", "x", "the last of them, the longest"]
OPTIONS: dict[str, Any] = {"dtype": "float32", "threads": 1, "device": "cpu"}
TOLERANCE = 1e-5


def embeddings(llm: LLM) -> list[list[float]]:
    return [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3", "eurobert"])
def test_embeddings_are_those_of_one_process(tmp_path: Path, family: str) -> None:
    directory = str(embedding_directory(tmp_path, family=family))
    with LLM(directory, **OPTIONS) as llm:
        expected = embeddings(llm)
    with LLM(directory, tensor_parallel_size=2, **OPTIONS) as llm:
        assert llm._model.pooling.engine.model.group.size == 2
        found = [embeddings(llm), embeddings(llm)]
    assert found[0] == found[1]
    for ours, own in zip(found[0], expected, strict=True):
        assert ours == pytest.approx(own, abs=TOLERANCE)
    assert expected[0] != pytest.approx(expected[1], abs=100 * TOLERANCE)


@pytest.mark.thorough
def test_scores_are_those_of_one_process(tmp_path: Path) -> None:
    directory = str(cross_encoder_directory(tmp_path, family="qwen3"))
    scores = []
    for size in (1, 2):
        with LLM(directory, tensor_parallel_size=size, **OPTIONS) as llm:
            scores.append([output.outputs.score for output in llm.score(TEXTS[0], TEXTS[1:], use_tqdm=False)])
    assert scores[1] == pytest.approx(scores[0], abs=TOLERANCE)
    assert len(set(scores[0])) == len(TEXTS) - 1


@pytest.mark.thorough
def test_the_end_of_a_rank_is_the_end_of_the_engine(tmp_path: Path) -> None:
    with LLM(str(embedding_directory(tmp_path, family="qwen3")), tensor_parallel_size=2, **OPTIONS) as llm:
        assert len(embeddings(llm)) == len(TEXTS)
        (rank,) = (child for child in psutil.Process().children(recursive=True) if "--join" in child.cmdline())
        rank.kill()
        rank.wait(10)
        for _ in range(2):  # the first may be what finds it
            with pytest.raises(EngineUnavailable):
                embeddings(llm)


@pytest.mark.thorough
def test_models_without_a_plan_and_stages_are_refused_by_name(tmp_path: Path) -> None:
    directory = str(embedding_directory(tmp_path))
    with pytest.raises(ConfigurationError, match="--tensor-parallel-size 2: BertModel cannot be shared by ranks: transformers has no plan"):
        LLM(directory, tensor_parallel_size=2, **OPTIONS)
    with pytest.raises(ConfigurationError, match="--pipeline-parallel-size: for models that generate text"):
        LLM(directory, pipeline_parallel_size=2, **OPTIONS)
