"""What the offline benchmark asks and counts; the engines themselves are in a process each."""

from typing import Any

import pytest

from benchmarks import offline
from benchmarks.offline import Prose, Workload, summary, table


def test_prompts_are_of_mixed_length_and_new_in_every_round() -> None:
    workload, prose = Workload(50, 4, 20, 8), Prose(lambda text: list(text.encode()), ["One thing. Another thing.", "More."])
    first, second = workload.prompts(1, prose), workload.prompts(2, prose)
    assert first == workload.prompts(1, prose)
    assert len({tuple(prompt[:4]) for prompt in first}) > 45
    assert first != second
    assert {4 <= len(prompt) <= 20 for prompt in first} == {True}
    assert len({len(prompt) for prompt in first}) > 5


def test_the_ratio_is_to_the_better_of_the_others_round_by_round() -> None:
    seconds = {"penstock": [1.0, 2.0, 1.0], "generate": [4.0, 4.0, 9.0], "generate_batch": [5.0, 3.0, 2.0]}
    result = summary(Workload(10, 1, 1, 6), seconds, [100, 100, 100])
    assert result["ratio"] == 2.0
    assert result["ratios"] == {"generate": 4.0, "generate_batch": 2.0}
    assert result["output_tokens_per_s"] == {"penstock": 60.0, "generate": 15.0, "generate_batch": 20.0}
    lines = table(result | {"sizes": {"generate": 16, "generate_batch": 32}})
    assert "penstock is 4.00 times as fast (size 16)" in lines[2]
    assert lines[-1] == "to the better of the other two: 2.00"


def test_a_worker_keeps_the_best_size(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = offline.Worker.__new__(offline.Worker)
    worker.name, worker.size = "generate", 64
    seconds = {8: 3.0, 16: 1.0, 32: 2.0, 64: 4.0}
    answers: list[Any] = []

    def generate_s(prompts: Any, num_tokens: int, size: int | None = None) -> float:
        answers.append(size)
        return seconds[size or 0]

    monkeypatch.setattr(worker, "generate_s", generate_s)
    assert worker.try_sizes([[1]], 2) == seconds
    assert worker.size == 16
    assert tuple(answers) == offline.SIZES
