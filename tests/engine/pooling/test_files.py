import json
from pathlib import Path

import pytest

from penstock.engine.errors import ConfigurationError
from penstock.engine.pooling.files import model_kind

CLASSIFIERS = ["DistilBertForSequenceClassification", "Qwen3ForSequenceClassification", "BertForTokenClassification"]
POOLING = ["BertModel", "XLMRobertaForMaskedLM", *CLASSIFIERS]
GENERATING = ["LlamaForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"]


def directory_of(directory: Path, *architectures: str) -> Path:
    (directory / "config.json").write_text(json.dumps({"architectures": list(architectures)}))
    return directory


@pytest.mark.parametrize("architecture", POOLING)
def test_encoders_and_classifiers_turn_text_into_numbers(architecture: str, tmp_path: Path) -> None:
    assert model_kind(directory_of(tmp_path, architecture)) == "pooling"


@pytest.mark.parametrize("architecture", GENERATING)
def test_models_with_a_language_head_write_text(architecture: str, tmp_path: Path) -> None:
    assert model_kind(directory_of(tmp_path, architecture)) == "generate"


def test_a_language_model_with_sentence_transformers_files_makes_embeddings(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[]")
    assert model_kind(directory_of(tmp_path, "Qwen3ForCausalLM")) == "pooling"


def test_a_config_that_names_nothing_is_one_of_a_model_that_writes(tmp_path: Path) -> None:
    assert model_kind(directory_of(tmp_path)) == "generate"


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_config_is_the_operators_to_mend(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigurationError, match=r"config\.json"):
        model_kind(tmp_path)


def test_the_packaged_models_are_one_of_each(default_model_dir: Path, minilm_dir: Path) -> None:
    assert model_kind(default_model_dir) == "generate"
    assert model_kind(minilm_dir) == "pooling"
