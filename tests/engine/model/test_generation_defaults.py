import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import sampling_defaults


def config_of(**values: Any) -> GenerationConfig:
    return GenerationConfig(**values)  # type: ignore[no-untyped-call]


def test_a_models_recommended_sampling_becomes_the_default() -> None:
    config = config_of(temperature=0.6, top_p=0.95, max_new_tokens=50, do_sample=True)
    assert sampling_defaults(config) == {"temperature": 0.6, "top_p": 0.95, "max_tokens": 50}
    assert sampling_defaults(config_of()) == {}


def test_the_models_defaults_can_be_left_out_or_overridden() -> None:
    config = config_of(temperature=0.6, max_new_tokens=50)
    assert sampling_defaults(config, "vllm") == {}
    assert sampling_defaults(config, override={"temperature": 0.1}) == {"temperature": 0.1, "max_tokens": 50}
    assert sampling_defaults(config, override={"max_new_tokens": None}) == {"temperature": 0.6}
    assert sampling_defaults(config, "vllm", {"top_k": 5}) == {"top_k": 5}


def test_another_file_is_read_by_its_path_or_its_directory(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.3}))
    (tmp_path / "mine.json").write_text(json.dumps({"temperature": 0.4}))
    assert sampling_defaults(config_of(top_k=3), str(tmp_path)) == {"temperature": 0.3}
    assert sampling_defaults(config_of(), str(tmp_path / "mine.json")) == {"temperature": 0.4}


@pytest.mark.parametrize(
    ("source", "override", "message"),
    [
        ("nowhere", {}, "--generation-config nowhere: neither auto, nor vllm, nor a directory"),
        ("auto", {"temprature": 1, "stop": "x"}, "--override-generation-config: stop, temprature: the names are temperature, "),
        ("auto", {"temperature": 3}, "`temperature` must be a number from 0 to 2, got 3.*--override-generation-config"),
        ("auto", {"top_k": "many"}, "the defaults for sampling"),
    ],
)
def test_what_cannot_be_used_is_said(source: str, override: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        sampling_defaults(config_of(), source, override)


def test_a_file_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigurationError, match="--generation-config"):
        sampling_defaults(config_of(), str(tmp_path))


def test_a_model_that_recommends_what_is_out_of_range_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigurationError, match="--generation-config vllm"):
        sampling_defaults(config_of(repetition_penalty=1000.0))
