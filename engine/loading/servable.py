"""Which models can be served, decided from the config alone, before any weights are read."""

import inspect
from collections.abc import Callable
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache import LayerKV, kv_layout
from penstock.engine.loading.model_config import listed_architectures

SERVABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def check_servable(config: PretrainedConfig, trust_remote_code: bool = False) -> list[LayerKV]:
    """The KV layout of a model that can be served. Raises `ConfigurationError` naming what is in the way of one that cannot."""
    name = listed_architectures(config.architectures) if config.architectures else f"a {config.model_type} model"

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
    if model_class is None or not _islisted_architectures(model_class, config.architectures):
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


def _islisted_architectures(model_class: type[PreTrainedModel], architectures: list[str] | None) -> bool:
    """Whether config.json says that its weights are of this class; old files differ in case, and some say nothing."""
    return not architectures or model_class.__name__.lower() in {architecture.lower() for architecture in architectures}
