"""The comparison of models with recurrent layers, on a small one."""

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import recurrent
from benchmarks.recurrent import FAMILIES, compare, converse
from penstock.engine.recurrent.layout import FAMILIES as SERVED
from tests.llm.model_directory import write_model


def test_both_say_the_same_and_snapshots_spare_what_was_computed_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"VOCAB_SIZE": 250, "MAX_MODEL_LEN": 400, "FIRST_TURN": 100, "NEXT_TURN": 10, "TURN_ANSWER": 4}.items():
        monkeypatch.setattr(recurrent, name, value)
    directory = write_model(tmp_path, "lfm2")
    found = compare(directory, Namespace(threads=1, streams=[2], rounds=1, prompt=20, answer=5))
    (load,) = found["loads"]
    assert load["answers"] == load["equal_answers"] == 2
    assert min(load[name]["output_tokens_per_s"] for name in ("penstock", "transformers")) > 0
    assert found["bytes"]["states"] == 2 * 3 * 64 * 4  # two convolutions over three tokens
    assert found["bytes"]["token"] == 2 * 2 * 16 * 4
    with_snapshots, without = (converse(directory, 1, is_cached=is_cached) for is_cached in (True, False))
    assert with_snapshots["prompt_tokens"] == without["prompt_tokens"] == without["computed_tokens"]
    assert with_snapshots["computed_tokens"] < without["computed_tokens"] / 2


def test_families_are_served_ones() -> None:
    assert FAMILIES.keys() <= set(SERVED)
