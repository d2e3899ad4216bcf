"""What proposers cost, counted on a small model, and the loops that they are measured with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.draft_costs import Turn, measure, summary
from benchmarks.speculation import natural_scenarios
from benchmarks.tool_tasks import tool_tasks
from penstock import LLM
from penstock.engine.scheduling.step import DraftCounts
from tests.llm.model_directory import SETTINGS, write_model


def turn(seconds: float, lengths: dict[int, int], num_drafted: int) -> Turn:
    counts = DraftCounts(num_drafted)
    for length, number in lengths.items():
        counts.lengths[length] = number
    return Turn([[1] * 10, [2] * 10], ["one", "two"], seconds, 20 - counts.num_accepted, counts)


def test_rounds_are_compared_one_by_one_and_drafts_counted_by_position() -> None:
    rounds = [{"none": turn(4.0, {}, 0), "suffix": turn(2.0, {0: 1, 3: 2}, 12)}, {"none": turn(9.0, {}, 0), "suffix": turn(3.0, {1: 1}, 4)}]
    found = summary(["none", "suffix"], rounds)["suffix"]
    assert found["gains"] == [2.0, 3.0]
    assert found["gain"] == 2.5
    assert found["processor_s_per_1000_tokens"] == 125.0
    assert (found["drafts"], found["drafted"], found["accepted"], found["steps"]) == (4, 16, 7, 33)
    assert found["accepted_by_position"][:4] == [3, 2, 2, 0]
    assert found["equal_rounds"] == found["rounds"] == 2


def test_all_proposers_answer_alike(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "llama")
    (scenario,) = natural_scenarios(["prose-1"])
    scenario = replace(scenario, output_tokens=24, num_conversations=2, temperature=0.0)

    def load(name: str) -> LLM:
        return LLM(directory, speculation="ngram" if name == "known" else name, **SETTINGS)

    ((_, found),) = measure(["none", "suffix", "known"], load, [scenario], 1, 0)
    assert found["suffix"]["equal_rounds"] == found["known"]["equal_rounds"] == 1
    assert found["known"]["accepted"] > found["suffix"]["accepted"]
    assert found["none"]["drafted"] == 0
    assert found["suffix"]["output_tokens"] == found["none"]["output_tokens"] > 2
    assert found["suffix"]["steps"] + found["suffix"]["accepted"] >= found["none"]["steps"]


def test_loops_are_of_three_kinds_and_their_results_are_json() -> None:
    loops = tool_tasks("seed", 6)
    assert len({loop.system for loop in loops}) == 3
    assert len({loop.turns for loop in loops}) == 6
    assert loops == tool_tasks("seed", 6)
    for loop in loops:
        assert len(loop.turns) >= 6
        for result in loop.turns[1:]:
            json.loads(result.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>"))


def test_scenarios_that_there_are_not_are_named() -> None:
    with pytest.raises(SystemExit, match="no such scenarios: nothing"):
        natural_scenarios(["nothing"])
