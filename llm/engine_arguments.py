"""Keyword arguments of the library as what the command line would have said: the names are its flags', in snake case."""

import argparse
import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from penstock.arguments import Arguments, CommandParser, build_parser, parse_arguments
from penstock.engine.errors import ConfigurationError

UNBOUNDED = 2**31  # who hands over a whole batch wants all of it to wait for its turn
# Of the command line, and without meaning where there is no server.
OF_THE_SERVER = frozenset(
    {
        "access_log",
        "allow_unknown_fields",
        "allowed_origins",
        "api_key",
        "drain_timeout",
        "host",
        "keep_alive_interval",
        "log_level",
        "max_body_size",
        "port",
        "trust_request_chat_template",
    }
)
# Other names for the same, vLLM's among them.
ALIASES = {
    "enable_prefix_caching": "prefix_caching",
    "kv_cache_memory_bytes": "kv_cache_memory",
    "num_threads": "threads",
    "plugins": "plugin",
    "tool_call_parser": "tool_parser",
}
# vLLM's arguments that have another answer here: what to do instead, and the values that ask for nothing. None never asks for anything.
REFUSED: dict[str, tuple[str, tuple[Any, ...]]] = {
    "allowed_local_media_path": ("only text can be read", ("",)),
    "attention_backend": ("the device decides", ("auto",)),
    "block_size": ("blocks of the KV cache hold 16 tokens", (16,)),
    "compilation_config": ("use `compile`", ({},)),
    "convert": ("the model's own files say what it is for", ("auto", "none")),
    "cpu_offload_gb": ("weights stay where the model runs", (0,)),
    "data_parallel_size": ("a model runs on one device", (1,)),
    "disable_custom_all_reduce": ("a model runs on one device", (True, False)),
    "disable_log_stats": ("metrics are always counted", (False,)),
    "distributed_executor_backend": ("a model runs on one device, in this process", ("uni",)),
    "download_dir": ("models are kept where huggingface_hub keeps them: set HF_HOME", ()),
    "enable_chunked_prefill": ("long prompts are always computed in chunks", (True,)),
    "enable_expert_parallel": ("a model runs on one device", (False,)),
    "enable_lora": ("adapters are not supported", (False,)),
    "enable_prompt_embeds": ("prompts are texts or token ids", (False,)),
    "enable_sleep_mode": ("`sleep` is always there", (True, False)),
    "enforce_eager": ("use `compile='off'`", (False,)),
    "gpu_memory_utilization": ("use `kv_cache_memory`, in bytes or such as '8GiB'", ()),
    "guided_decoding_backend": ("say `StructuredOutputsParams(backend=...)` in the sampling parameters", ("auto",)),
    "hf_overrides": ("change the model's config.json", ({},)),
    "hf_token": ("set HF_TOKEN in the environment", ()),
    "kv_transfer_config": ("the KV cache stays in this process", ()),
    "limit_mm_per_prompt": ("only text can be read", ({},)),
    "load_format": ("models are read from safetensors or GGUF files", ("auto", "safetensors")),
    "logprobs_mode": ("log probabilities are those of the raw logits", ("raw_logprobs",)),
    "max_logprobs": ("there are at most 20", (20,)),
    "max_lora_rank": ("adapters are not supported", ()),
    "max_loras": ("adapters are not supported", ()),
    "mm_processor_kwargs": ("only text can be read", ({},)),
    "model_impl": ("models are those of transformers", ("auto", "transformers")),
    "num_gpu_blocks_override": ("use `kv_cache_memory`", ()),
    "pipeline_parallel_size": ("a model runs on one device", (1,)),
    "pooler_config": ("the model's own files say how it pools", ({},)),
    "revision": ("name a local directory that holds it", ("main",)),
    "scheduling_policy": ("requests of equal priority are served in turn", ("fcfs", "priority")),
    "skip_tokenizer_init": ("a model is always loaded with its tokenizer", (False,)),
    "spec_method": ("use `speculation`, 'ngram' or 'none'", ()),
    "spec_model": ("use `speculation`, 'ngram' or 'none'", ()),
    "spec_tokens": ("use `speculation`, 'ngram' or 'none'", ()),
    "speculative_config": ("use `speculation`, 'ngram' or 'none'", ()),
    "stream_interval": ("each step's tokens are given at once", (1,)),
    "structured_outputs_config": ("say `StructuredOutputsParams(backend=...)` in the sampling parameters", ({},)),
    "swap_space": ("what does not fit the KV cache is computed again", (0,)),
    "task": ("use `runner`, 'generate' or 'pooling'", ("auto",)),
    "tensor_parallel_size": ("a model runs on one device", (1,)),
    "tokenizer": ("the tokenizer in the model's directory is used", ()),
    "tokenizer_mode": ("the tokenizer in the model's directory is used", ("auto",)),
    "tokenizer_revision": ("the tokenizer in the model's directory is used", ()),
}


class _Reader(CommandParser):
    """Says what is wrong to whoever calls from Python: no usage, no exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(re.sub(r"^argument --([\w-]+)(?:/--[\w-]+)*:", lambda found: f"`{found[1].replace('-', '_')}`:", message))


def engine_arguments(model: str | os.PathLike[str] | None, given: Mapping[str, Any]) -> Arguments:
    """What the command line would have made of them. None is the default of every one of them.

    Sizes may be given in bytes or as the command line takes them, lists where a flag is repeatable, and torch's own types for `dtype`.
    Raises `TypeError` for an argument that there is not, with the nearest one, and `ConfigurationError` for one that is refused or for a
    value that cannot be.
    """
    parser = build_parser(_Reader)
    flags = {action.dest: action for action in parser._actions if action.option_strings and action.dest not in ("help", "version")}
    if not isinstance(model, str | os.PathLike | None):
        raise TypeError(f"`model` must be a path or a name, got {model!r:.100}")
    words = [] if model is None else [f"--model={os.fspath(model)}"]
    for name, value in ({"max_waiting_requests": UNBOUNDED} | dict(given)).items():
        dest = ALIASES.get(name, name)
        if name in REFUSED:
            check_refused(name, value)
        elif dest in OF_THE_SERVER:
            raise ConfigurationError(f"`{name}` is the server's, and there is none here")
        elif dest not in flags:
            nearest = difflib.get_close_matches(name, known_arguments(), n=1)
            raise TypeError(f"there is no argument `{name}`" + (f": did you mean `{nearest[0]}`?" if nearest else ""))
        elif value is not None:
            words += spelled(flags[dest], name, value)
    return parse_arguments([*words, "--trust-request-chat-template"], parser)


def known_arguments() -> list[str]:
    """Every name that may be given, without those that are always refused."""
    flags = [action.dest for action in build_parser()._actions if action.option_strings and action.dest not in ("help", "version")]
    return sorted({"model", *flags, *ALIASES} - OF_THE_SERVER)


def check_refused(name: str, value: Any) -> None:
    hint, neutral = REFUSED[name]
    if value is not None and value not in neutral:
        raise ConfigurationError(f"`{name}` is not supported: {hint}")


def spelled(flag: argparse.Action, name: str, value: Any) -> Iterator[str]:
    """A value as the words of the command line."""
    long = flag.option_strings[0]
    if flag.nargs == 0:  # a switch
        if not isinstance(value, bool):
            raise ConfigurationError(f"`{name}`: expected True or False, got {value!r}")
        if value:
            yield long
        elif isinstance(flag, argparse.BooleanOptionalAction):
            yield next(spelling for spelling in flag.option_strings if spelling.startswith("--no-"))
        return
    is_list = isinstance(value, list | tuple)
    if is_list and flag.default != []:
        raise ConfigurationError(f"`{name}`: expected one value, got {value!r}")
    if isinstance(value, dict):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(f"`{name}`: {error}") from error
    for item in value if is_list else [value]:
        yield f"{long}={str(item).removeprefix('torch.') if isinstance(item, torch.dtype) else item}"
