"""`lora_config`: adapters in TensorRT-LLM's packed form, against peft."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from penstock.llm.executor import Executor, LoraConfig, OutputConfig, Request
from tests.llm.model_directory import SETTINGS
from tests.tiny_adapters import adapted_model, write_adapter

PROMPT = list(range(40, 60))
IDS = {"q_proj": 1, "k_proj": 2, "v_proj": 3, "o_proj": 4, "gate_proj": 5, "down_proj": 6, "up_proj": 7}
SCALE = 8 / 4  # of lora_alpha and the rank


@pytest.fixture(scope="module")
def directory(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(load(model_dir), tmp_path_factory.mktemp("adapter"))


@pytest.fixture(scope="module")
def executor(model_dir: Path) -> Iterator[Executor]:
    with Executor(model_dir, enable_lora=True, max_cpu_loras=1, **SETTINGS) as running:
        yield running


def load(directory: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def packed(directory: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """As the original's converter does it."""
    weights, rows, config = load_file(directory / "adapter_model.safetensors"), [], []
    for name in sorted(weights):
        if name.endswith("lora_A.weight"):
            parts = name.split(".")
            down, up = weights[name], weights[name.replace("lora_A", "lora_B")] * SCALE
            rows.append(torch.cat([down.flatten(), up.flatten()]))
            config.append([IDS[parts[-3]], int(parts[4]), len(down)])
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(config, dtype=torch.int32)


def answer(executor: Executor, config: LoraConfig | None) -> list[int] | str:
    request = Request(PROMPT, 8, end_id=-1, lora_config=config, output_config=OutputConfig(exclude_input_from_output=True))
    (response,) = executor.await_responses(executor.enqueue_request(request))
    return response.error_msg or response.result.output_token_ids[0]


def test_a_task_has_the_adapter_that_its_first_request_brings(executor: Executor, model_dir: Path, directory: Path) -> None:
    ids = torch.tensor([PROMPT])
    settings = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 8, "eos_token_id": None, "pad_token_id": 0}
    models: tuple[Any, ...] = (load(model_dir), adapted_model(load(model_dir), directory))
    plain, expected = (model.generate(input_ids=ids, **settings)[0, len(PROMPT) :].tolist() for model in models)
    weights, config = packed(directory)
    assert "task 7, which is not known" in answer(executor, LoraConfig(7))
    assert answer(executor, LoraConfig(7, weights, config)) == expected
    assert answer(executor, LoraConfig(7)) == expected != plain
    assert answer(executor, None) == plain
    assert answer(executor, LoraConfig(8, weights[None] * 0, config[None])) == plain
    assert "task 7, which is not known" in answer(executor, LoraConfig(7)), "only one is kept"


def test_what_does_not_fit_is_refused(executor: Executor, directory: Path) -> None:
    weights, config = packed(directory)
    cases = {
        "module 9 of layer 0 is not in this model": (weights[:1], torch.tensor([[9, 0, 4]])),
        "module 1 of layer 99 is not in this model": (weights[:1], torch.tensor([[1, 99, 4]])),
        "module 1 of layer 0 is there twice": (weights[:2], torch.tensor([[1, 0, 4], [1, 0, 4]])),
        "lacks weights of rank 16": (weights[:1], torch.tensor([[1, 0, 16]])),
        "DoRA": (weights[:1], torch.tensor([[1, 0, 4, 1]])),
        "`weights` are [modules, numbers]": (weights[0], config),
    }
    for reason, given in cases.items():
        assert reason in answer(executor, LoraConfig(9, *given))
    with pytest.raises(ValueError, match="go together"):
        LoraConfig(1, weights)
    with pytest.raises(TypeError):
        Request(PROMPT, 8, lora_config={"task_id": 1})  # type: ignore[arg-type]
