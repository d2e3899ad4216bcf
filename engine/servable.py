"""What can be served, decided from the config alone, before any weights are read."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_layout import LayerKV, kv_layout

SERVABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


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
                f"{directory} is a {model_type!r} model ({_listed(content.get('architectures'))}), an architecture that "
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


def check_servable(config: PretrainedConfig, trust_remote_code: bool = False) -> list[LayerKV]:
    """The KV layout of a model that can be served. Raises `ConfigurationError` naming what is in the way of one that cannot."""
    name = _listed(config.architectures) if config.architectures else f"a {config.model_type} model"

    def refuse(reason: str) -> ConfigurationError:
        return ConfigurationError(f"{name} cannot be served: {reason}")

    if config.is_encoder_decoder:
        raise refuse("it is an encoder-decoder, and only decoder-only models generate here")
    if config.sub_configs:
        raise refuse(f"it is a multimodal model (its config holds {', '.join(sorted(config.sub_configs))}), and only text is served")
    has_own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not has_own_code:
        _check_class(config, refuse)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - SERVABLE_LAYER_TYPES)
    if kinds:
        raise refuse(f"it has layers of type {', '.join(kinds)}, and only full and sliding-window attention have a cache here")
    return kv_layout(config, trust_remote_code)


def _check_class(config: PretrainedConfig, refuse: Callable[[str], ConfigurationError]) -> None:
    model_class = _causal_lm_class(config)
    if model_class is None or not _is_listed(model_class, config.architectures):
        raise refuse("it is an encoder, a classifier or another kind of model that generates no text")
    if model_class._is_stateful:
        raise refuse("it keeps a recurrent state, and only attention has a cache here")
    if not model_class._supports_attention_backend:
        raise refuse("transformers does not let its attention be replaced (_supports_attention_backend)")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise refuse("it takes no position ids, so sequences cannot share a batch")


def _causal_lm_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return model_class


def _is_listed(model_class: type[PreTrainedModel], architectures: list[str] | None) -> bool:
    """Whether config.json says that its weights are of this class; old files differ in case, and some say nothing."""
    return not architectures or model_class.__name__.lower() in {architecture.lower() for architecture in architectures}


def _listed(architectures: object) -> str:
    return ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else "no architecture named"
