from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from penstock.engine.errors import ConfigurationError
from penstock.engine.model.config import max_model_len
from tests.tiny_models import ARCHITECTURES, tiny_config


def llama(positions: int, **rope: Any) -> PretrainedConfig:
    return AutoConfig.for_model("llama", max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **rope})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_tells_its_context_length(name: str) -> None:
    assert max_model_len(tiny_config(name)) == 512


def test_less_than_the_limit_is_honoured_and_more_is_refused() -> None:
    config = llama(1000, rope_type="default")
    assert max_model_len(config, 10) == 10
    assert max_model_len(config, 1000) == 1000
    with pytest.raises(ConfigurationError, match=r"1001 is more than this model's 1000"):
        max_model_len(config, 1001)


@pytest.mark.parametrize("asked", [0, -1])
def test_less_than_one_token_is_refused(asked: int) -> None:
    with pytest.raises(ConfigurationError, match="at least 1"):
        max_model_len(llama(1000, rope_type="default"), asked)


def test_yarn_is_counted_once_whichever_length_the_config_holds() -> None:
    before = llama(1000, rope_type="yarn", factor=4.0, original_max_position_embeddings=1000)
    after = llama(4000, rope_type="yarn", factor=4.0, original_max_position_embeddings=1000)
    assert max_model_len(before) == max_model_len(after) == 4000


def test_linear_scaling_stretches_the_context() -> None:
    assert max_model_len(llama(1000, rope_type="linear", factor=2.0)) == 2000


def test_llama3_scaling_is_already_in_the_config() -> None:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 500}
    assert max_model_len(llama(4000, rope_type="llama3", **rope)) == 4000


def test_scaling_that_depends_on_the_batch_stops_where_it_would_begin() -> None:
    assert max_model_len(llama(1000, rope_type="dynamic", factor=4.0)) == 1000
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 400}
    assert max_model_len(llama(1600, rope_type="longrope", factor=4.0, **factors)) == 400


def test_a_model_without_a_limit_takes_what_the_operator_gives() -> None:
    config = PretrainedConfig()
    assert max_model_len(config, 77) == 77
    with pytest.raises(ConfigurationError, match="pass --max-model-len"):
        max_model_len(config)
