"""Keyword arguments as the command line's flags."""

from typing import Any

import pytest
import torch

from penstock.cli.flags import parse_arguments
from penstock.engine.errors import ConfigurationError
from penstock.llm.model import DEFAULTS, LocalModel, engine_arguments, known_arguments
from penstock.serving.options import OPTIONS_BY_ANY_NAME
from penstock.serving.vllm_arguments import ENGINE, SERVER


def test_every_option_is_taken_or_is_the_servers() -> None:
    for name, option in OPTIONS_BY_ANY_NAME.items():
        assert (name in known_arguments()) != option.is_server_only
        if option.is_server_only:
            with pytest.raises(ConfigurationError, match=f"`{name}` is an option of the server"):
                engine_arguments(None, {name: option.default})
    assert set(known_arguments()) >= {"plugins", "num_threads", "enable_prefix_caching", "kv_cache_memory_bytes", "tool_call_parser"}


def test_arguments_mean_what_the_flags_mean() -> None:
    ours = engine_arguments(
        "some/model",
        {
            "dtype": torch.bfloat16,
            "max_num_seqs": 7,
            "kv_cache_memory": "2GiB",
            "enable_prefix_caching": False,
            "plugins": ["hermes", "deepseek_r1"],
            "trust_remote_code": True,
            "chat_template": None,
            "seed": 0,
        },
    )
    words = ["--model", "some/model", "--dtype", "bfloat16", "--max-num-seqs", "7", "--kv-cache-memory", "2GiB", "--no-prefix-caching"]
    words += ["--plugin", "hermes", "--plugin", "deepseek_r1", "--trust-remote-code", "--seed", "0"]
    words += ["--trust-request-chat-template"]
    words += [word for name, value in DEFAULTS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    assert ours == parse_arguments(words)
    assert engine_arguments(None, {"kv_cache_memory_bytes": 1024, "prefix_caching": True}).engine.kv_cache_memory == 1024
    assert engine_arguments(None, {"plugins": "hermes", "max_waiting_requests": 3}).engine.max_waiting_requests == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_num_seqs": 0}, "`max_num_seqs`: '0' is not an integer of 1 or more"),
        ({"dtype": "float8"}, "`dtype`: invalid choice: 'float8'"),
        ({"trust_remote_code": "yes"}, "`trust_remote_code`: expected True or False"),
        ({"threads": [1, 2]}, "`threads`: expected one value"),
        ({"kv_cache_memory": "much"}, "`kv_cache_memory`: 'much' is not a size"),
        ({"port": 8000}, "`port` is an option of the server"),
        ({"shutdown_timeout": 3}, "`shutdown_timeout` is an option of the server"),
        ({"uvicorn_log_level": "info"}, "`uvicorn_log_level` is an option of the server"),
        ({"gpu_memory_utilization": 0.9}, "`gpu_memory_utilization` is not supported: use `kv_cache_memory="),
        ({"tokenizer": "other"}, "`tokenizer` is not supported"),
        ({"pooler_config": {"pooling_type": "CLS"}}, "`pooler_config` is not supported: the model's own files"),
        ({"spec_tokens": 3}, "`spec_tokens` is not supported: use `speculation`"),
        ({"enable_chunked_prefill": False}, "`enable_chunked_prefill` is not supported: long prompts"),
        ({"disable_async_output_proc": True}, "not supported: use `async_scheduling=False`"),
        ({"num_gpu_blocks_override": 7}, "not supported: use `kv_cache_memory='8GiB'`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        engine_arguments(None, given)


def test_vllms_arguments_that_ask_for_nothing_are_taken() -> None:
    plain = engine_arguments(None, {})
    for name, argument in ENGINE.items():
        for value in (None, *argument.neutral):
            assert engine_arguments(None, {name.replace("*", "x"): value}) == plain
    with pytest.raises(ConfigurationError):
        engine_arguments(None, {next(iter(SERVER)): None})


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"task": "embed"}, {"runner": "pooling"}),
        ({"task": "score"}, {"runner": "pooling"}),
        ({"task": "classify"}, {"runner": "pooling"}),
        ({"task": "generate"}, {"runner": "generate"}),
        ({"enforce_eager": True}, {"compile": "off"}),
        ({"enable_prefix_caching": False}, {"prefix_caching": False}),
        ({"dtype": "half", "kv_cache_dtype": "fp8_e4m3"}, {"dtype": "float16", "kv_cache_dtype": "fp8"}),
        ({"max_model_len": "auto", "max_num_batched_tokens": "8K"}, {"max_num_batched_tokens": 8192}),
        ({"max_model_len": -1}, {}),
    ],
)
def test_vllms_arguments_and_values_that_are_ours_by_another_name(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert engine_arguments(None, given) == engine_arguments(None, ours)


def test_an_unknown_argument_names_the_nearest() -> None:
    with pytest.raises(TypeError, match="did you mean `max_num_seqs`"):
        engine_arguments(None, {"max_num_seq": 3})
    with pytest.raises(TypeError, match="did you mean `tensor_parallel_size`"):
        engine_arguments(None, {"tensor_paralel_size": 3})
    with pytest.raises(TypeError, match=r"no argument `zzz`$"):
        engine_arguments(None, {"zzz": 3})


def test_a_model_that_is_no_name_and_processors_without_names_are_refused_by_name() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="`model` must be a path or a name, got 5"):
        engine_arguments(wrong, {})
    wrong = [len]
    with pytest.raises(ConfigurationError, match="`logits_processors` must be a dict of processors by the names"):
        LocalModel(None, {}, wrong)
