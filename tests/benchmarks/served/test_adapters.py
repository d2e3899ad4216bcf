"""benchmarks/adapters.py: what it writes is served, and the scenario asks for it."""

from pathlib import Path

from benchmarks.adapters import write_adapters
from benchmarks.scenarios import SCENARIOS
from tests.engine.adapters.test_engine import read
from tests.engines import core_over, loaded_model
from tests.tiny_models import tiny_model


def test_written_adapters_fit_their_model_and_have_the_names_that_the_scenario_asks_for(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    written = write_adapters(str(tmp_path / "model"), tmp_path, number=2, rank=4)
    core = core_over(loaded_model(tiny_model("llama")), enable_lora=True)
    adapters = [read(core, path) for path in written]
    core.runner.shutdown()
    assert len({adapter.digest for adapter in adapters}) == 2
    assert {len(adapter.updates) for adapter in adapters} == {3 * 7}
    (scenario,) = (scenario for scenario in SCENARIOS if scenario.num_adapters)
    assert [scenario.model_of(number)["model"] for number in (0, 1, 9)] == [written[0].name, written[1].name, written[1].name]
    assert (tmp_path / "flags").read_text(encoding="utf-8").startswith(f"--adapter adapter-0={tmp_path}")
