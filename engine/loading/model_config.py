"""What the files of a model directory say without its weights: its config, how its answers end, which tokens they are made of."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.engine.errors import ConfigurationError
from penstock.engine.text.tokenizer import Tokenizer


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
    """What ends an answer by the model's configs; the tokenizer may know more."""
    return frozenset(_token_ids(generation_config.eos_token_id)) | frozenset(_token_ids(config.eos_token_id))


def read_config(directory: Path, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a model directory.

    Raises `ConfigurationError` where config.json is missing or broken, names an architecture that transformers does not know, or needs
    the model's own Python code without `trust_remote_code`.
    """
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type, auto_map = content.get("model_type"), content.get("auto_map")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a model's config: {error}") from error
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
    except (OSError, ValueError, TypeError, KeyError, ImportError, StrictDataclassError) as error:
        raise ConfigurationError(f"{path} cannot be read as a {model_type!r} config: {error}") from error
    return config


def listed_architectures(architectures: object) -> str:
    return ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else "no architecture named"


def _token_ids(value: int | Iterable[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else value
