"""A model directory without its weights: its config, the tokens that end answers, and its vocabulary size."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.engine.errors import ConfigurationError
from penstock.engine.text.tokenizer import Tokenizer

# By the names of most architectures and by those of GPT-2 and its relatives. Each is 1 or more where a config gives it.
NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
SIZES = (
    *NUM_LAYERS,
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "n_embd", "n_head", "n_positions"),
)


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Token ids below `vocab_size` may be sampled; each of `stop_token_ids` ends an answer."""

    vocab_size: int
    stop_token_ids: frozenset[int]


def answer_tokens(logits_width: int, eos_token_ids: frozenset[int], tokenizer: Tokenizer) -> AnswerTokens:
    """Logits may be wider than what the tokenizer knows, and each of the two may know ends that the other does not."""
    return AnswerTokens(min(logits_width, tokenizer.vocab_size), eos_token_ids | tokenizer.eos_token_ids)


def read_answer_tokens(directory: Path, tokenizer: Tokenizer, trust_remote_code: bool = False) -> AnswerTokens:
    """Those of the model that would be loaded from there. Raises `ConfigurationError` as `read_config` does."""
    config = read_config(directory, trust_remote_code)
    return answer_tokens(int(config.vocab_size), eos_token_ids(config, read_generation_config(directory, config)), tokenizer)


def read_generation_config(directory: Path, config: PretrainedConfig) -> GenerationConfig:
    """That of the model that would be loaded from there."""
    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:  # there is no such file; a model then makes one of its config
        return GenerationConfig.from_model_config(config)


def eos_token_ids(config: PretrainedConfig, generation_config: GenerationConfig) -> frozenset[int]:
    """The stop tokens in the model's configs; the tokenizer may add more."""
    return frozenset(_token_ids(generation_config.eos_token_id)) | frozenset(_token_ids(config.eos_token_id))


def read_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model directory.

    Raises `ConfigurationError` where config.json is missing or broken, gives a size that cannot be, names an architecture that transformers
    does not know, or needs the model's own Python code without `trust_remote_code`.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type, auto_map = content.get("model_type"), content.get("auto_map")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a model's config: {error}") from error
    for part in (content, content.get("text_config")):
        if isinstance(part, dict):
            _check_sizes(part, path)
    if model_type not in CONFIG_MAPPING:
        if not auto_map:
            raise ConfigurationError(
                f"{directory} is a {model_type!r} model ({listed_architectures(content.get('architectures'))}), an architecture that "
                f"transformers {transformers.__version__} does not know"
            )
        if not trust_remote_code:
            raise ConfigurationError(
                f"{directory} is a {model_type!r} model that runs Python code of its own: read that code, then pass --trust-remote-code"
            )
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError, StrictDataclassError) as error:
        raise ConfigurationError(f"{path} cannot be read as a {model_type!r} config: {error}") from error
    return config


def _check_sizes(content: dict[str, Any], path: Path) -> None:
    """Raises `ConfigurationError` for sizes that no model has. transformers makes lists of a config's layers before it sees a weight."""
    architectures = content.get("architectures")
    if not (architectures is None or isinstance(architectures, list)):
        raise ConfigurationError(f"{path}: `architectures` is {architectures!r:.100}, not a list of names")
    sizes = {name: value for name in SIZES if isinstance(value := content.get(name), int)}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{path}: `{name}` is {value}, and must be 1 or more")
    num_tensors = _num_tensors(path.parent)
    for name in sizes.keys() & NUM_LAYERS:
        if num_tensors is not None and sizes[name] > num_tensors:
            raise ConfigurationError(f"{path}: `{name}` is {sizes[name]}, and the weight files hold {num_tensors} tensors")


def _num_tensors(directory: Path) -> int | None:
    """How many tensors the weight files hold; None without any, or if one cannot be read, which loading them reports."""
    paths = list(directory.glob("*.safetensors"))
    try:
        with ExitStack() as files:
            return sum(len(files.enter_context(safe_open(path, "pt")).keys()) for path in paths) if paths else None
    except (OSError, SafetensorError):
        return None


def listed_architectures(architectures: object) -> str:
    return ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else "no architecture named"


def _token_ids(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value
