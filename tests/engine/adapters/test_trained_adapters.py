"""Adapters that are trained to answer otherwise: each request gets the text of its own adapter, whatever runs beside it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel

from penstock.engine.adapters.registry import Adapter
from tests.engines import core_over, loaded_model
from tests.fakes import EOS, byte_tokenizer, content, drive, ids, make_request
from tests.tiny_adapters import LINEARS, quiet
from tests.trained_models import Task, held_out, in_cases, text_batch, train, trained_model

pytestmark = pytest.mark.thorough  # both are trained, and the model before them
LONGEST = 24
TASKS = {"capitals": in_cases(str.upper), "other case": in_cases(str.swapcase)}
NEARLY_GREEDY: dict[str, Any] = {"n": 2, "temperature": 0.3, "seed": 0}
GREEDY: dict[str, Any] = {}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 7},
    "preemption": {"num_blocks": 16, "max_num_batched_tokens": 30},
    "one slot": {"max_loras": 1},
}


def train_adapter(model: PreTrainedModel, task: Task, directory: Path) -> None:
    with quiet(), torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        adapted: Any = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=LINEARS, task_type="CAUSAL_LM"))
        train(adapted.parameters(), text_batch(adapted, task), 5e-3)
        adapted.save_pretrained(str(directory))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("adapters")
    for name, task in TASKS.items():
        train_adapter(trained_model("both cases"), task, base / name)
    return {name: base / name for name in TASKS}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return [prompt for prompt, _ in held_out(in_cases(), 6)]


def right_answer(task: Task, prompt: str) -> str:
    return task.answer(prompt.removesuffix("="))


@pytest.mark.parametrize("name", TASKS)
def test_peft_gives_the_right_answers(name: str, directories: dict[str, Path], prompts: list[str]) -> None:
    with quiet():
        adapted: Any = PeftModel.from_pretrained(trained_model("both cases"), str(directories[name])).eval()
        for prompt in prompts:
            input_ids = torch.tensor([ids(prompt)])
            mask = torch.ones_like(input_ids)
            output = adapted.generate(input_ids=input_ids, attention_mask=mask, do_sample=False, max_new_tokens=LONGEST, eos_token_id=EOS)
            said = byte_tokenizer().decode(output[0, input_ids.shape[1] :].tolist(), skip_special_tokens=True)
            assert said == right_answer(TASKS[name], prompt)


@pytest.mark.parametrize("settings", [pytest.param(settings, id=name) for name, settings in SETTINGS.items()])
def test_every_request_is_answered_by_its_own_adapter(settings: dict[str, Any], directories: dict[str, Path], prompts: list[str]) -> None:
    core = core_over(loaded_model(trained_model("both cases"), 64), **{"num_blocks": 200, "block_size": 8, "enable_lora": True} | settings)
    assert core.runner.adapted is not None
    adapters: dict[str, Adapter | None] = {"none": None}
    for name, directory in directories.items():
        adapters[name] = core.runner.adapted.reader.read(name, directory)
    right = {name: [right_answer((TASKS | {"none": in_cases()})[name], prompt) for prompt in prompts] for name in adapters}
    try:
        for params in (GREEDY, NEARLY_GREEDY):  # the second time from the prefix cache
            for number, prompt in enumerate(prompts):
                for name, adapter in adapters.items():
                    core.add(make_request(f"{name} {number}", prompt, adapter=adapter, max_tokens=LONGEST, **params))
            said = drive(core)
            for index in range(params.get("n", 1)):
                got = {name: [content(said[f"{name} {number}"], index) for number in range(len(prompts))] for name in adapters}
                assert got == right
        stats = core.stats()
        core.check_integrity()
    finally:
        core.runner.shutdown()
    assert stats.num_prefix_cache_hits > 0
    assert (stats.num_preemptions > 0) == ("num_blocks" in settings)
