"""peft's adapters of small models, with random weights, and what peft's own model says with them."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from transformers import PreTrainedModel

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@contextmanager
def quiet() -> Iterator[None]:
    """peft asks transformers for what that has renamed, and for positions that a tuned prompt makes it ignore."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", "Position ids are not supported")
        yield


def write_adapter(model: PreTrainedModel, directory: Path, *, seed: int = 1, **config: Any) -> Path:
    """Writes an adapter of the model, which stays as it was, that changes most of what the model says."""
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": LINEARS, "task_type": "CAUSAL_LM"} | config
    with quiet(), torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        adapted = get_peft_model(model, LoraConfig(**settings))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.normal_(0.0, 0.15)
        adapted.save_pretrained(str(directory))
        adapted.unload()
    return directory


def write_tuned_prompt(model: PreTrainedModel, directory: Path, *, num_virtual_tokens: int = 9, seed: int = 1) -> Path:
    """Writes virtual tokens for the model, which stays as it was."""
    with quiet(), torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        tuned: Any = get_peft_model(model, PromptTuningConfig(num_virtual_tokens=num_virtual_tokens, task_type="CAUSAL_LM"))
        with torch.no_grad():
            tuned.prompt_encoder["default"].embedding.weight.normal_(0.0, 0.15)
        tuned.save_pretrained(str(directory))
    return directory


def write_encoded_prompt(model: PreTrainedModel, directory: Path, *, num_virtual_tokens: int = 6, seed: int = 1, **config: Any) -> Path:
    """Writes the virtual tokens that p-tuning's encoder gives for the model, which stays as it was."""
    settings: dict[str, Any] = {"encoder_hidden_size": 48, "encoder_dropout": 0.1, "task_type": "CAUSAL_LM"} | config
    with quiet(), torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        tuned: Any = get_peft_model(model, PromptEncoderConfig(num_virtual_tokens=num_virtual_tokens, **settings)).eval()
        tuned.save_pretrained(str(directory))
    return directory


def adapted_model(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    """peft's own, of which `model` becomes a part."""
    with quiet():
        adapted: Any = PeftModel.from_pretrained(model, str(directory)).eval()
    return adapted  # type: ignore[no-any-return]
