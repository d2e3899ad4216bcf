"""Three processes with a stage each. Of a process, one model at a time may have ranks, so that these tests have a file of their own."""

from pathlib import Path

import pytest

from penstock import LLM, SamplingParams
from tests.engine.running import InFlight
from tests.llm.model_directory import SETTINGS, write_model
from tests.llm.parallel.both import GREEDY, OPTIONS, PROMPTS, admitting, said
from tests.llm.parallel.test_pipeline_parallel import BLOCK_BYTES

pytestmark = pytest.mark.thorough


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "mixtral", "deepseek_v3"])
def test_three_stages_say_what_one_says(tmp_path: Path, name: str) -> None:
    directory = str(write_model(tmp_path, name))
    settings = {**SETTINGS, **OPTIONS, "kv_cache_memory": BLOCK_BYTES * 200}
    with LLM(directory, **settings) as one:
        expected = said(one, PROMPTS, SamplingParams(**GREEDY))
    with LLM(directory, pipeline_parallel_size=3, **settings) as three:
        core = admitting(three)._model.rest.awake()
        core.observer = in_flight = InFlight()
        assert said(three, PROMPTS, SamplingParams(**GREEDY)) == expected
        assert in_flight.most == 3
        core.check_integrity()
