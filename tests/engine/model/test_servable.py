import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import check_servable, read_config
from tests.tiny_models import ARCHITECTURES, tiny_config


def config_of(model_type: str, architecture: str, **settings: Any) -> PretrainedConfig:
    return AutoConfig.for_model(model_type, architectures=[architecture], **settings)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_that_is_tried_is_servable(name: str) -> None:
    config = tiny_config(name)
    assert len(check_servable(config)) == config.num_hidden_layers


REFUSED = [
    ("bert", "BertModel", "encoder"),
    ("bert", "BertForMaskedLM", "encoder"),
    ("roberta", "RobertaForSequenceClassification", "classifier"),
    ("llama", "LlamaForSequenceClassification", "classifier"),
    ("t5", "T5ForConditionalGeneration", "encoder-decoder"),
    ("whisper", "WhisperForConditionalGeneration", "encoder-decoder"),
    ("mamba2", "Mamba2ForCausalLM", "recurrent state"),
    ("qwen3_next", "Qwen3NextForCausalLM", "recurrent state"),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", "recurrent state"),
    ("jamba", "JambaForCausalLM", "recurrent state"),
    ("minimax", "MiniMaxForCausalLM", "linear_attention"),
    ("lfm2", "Lfm2ForCausalLM", "conv"),
    ("bloom", "BloomForCausalLM", "_supports_attention_backend"),
    ("gptj", "GPTJForCausalLM", "_supports_attention_backend"),
    ("gemma3", "Gemma3ForConditionalGeneration", "multimodal"),
    ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", "multimodal"),
    ("llama4_text", "Llama4ForCausalLM", "chunked_attention"),
]


@pytest.mark.parametrize(("model_type", "architecture", "reason"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(model_type: str, architecture: str, reason: str) -> None:
    settings = {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2} if model_type == "lfm2" else {}
    with pytest.raises(ConfigurationError, match=f"{architecture} cannot be served: .*{reason}"):
        check_servable(config_of(model_type, architecture, **settings))


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "quux", "architectures": ["QuuxForCausalLM"]}))
    with pytest.raises(ConfigurationError, match=r"'quux' model \(QuuxForCausalLM\)"):
        read_config(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_a_broken_config_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        read_config(tmp_path)


def test_a_config_with_a_value_of_the_wrong_type_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": "wide"}))
    with pytest.raises(ConfigurationError, match="hidden_size"):
        read_config(tmp_path)


def write_model_with_its_own_code(directory: Path) -> None:
    """A model that is Llama under another name, as code beside its config."""
    content = tiny_config("llama").to_dict() | {
        "model_type": "own_llama",
        "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (directory / "config.json").write_text(json.dumps(content))
    (directory / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "class OwnConfig(LlamaConfig):\n    model_type = 'own_llama'\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )


def test_code_beside_a_model_runs_only_when_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = tmp_path / "model"
    model.mkdir()
    write_model_with_its_own_code(model)
    with pytest.raises(ConfigurationError, match=r"'own_llama'.*--trust-remote-code"):
        read_config(model)
    config = read_config(model, trust_remote_code=True)
    assert type(config).__name__ == "OwnConfig"
    assert len(check_servable(config, trust_remote_code=True)) == 3
