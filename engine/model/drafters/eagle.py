"""EAGLE-3 heads (Li et al., arXiv:2503.01840): their configs and weights, checked against the model, and what they compute."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.cache import LayerKV
from penstock.engine.model.config import read_config
from penstock.engine.model.drafters.heads import IMPLEMENTATION, DraftHead, register
from penstock.engine.model.loader import LoadedModel
from penstock.engine.weights.checkpoints import weight_files
from penstock.engine.weights.linear import pack_linears

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SUPPORTED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
UNUSED = ("t2d", "rotary_emb.inv_freq", "midlayer.self_attn.rotary_emb.inv_freq")


def architecture_of_head(directory: Path) -> str | None:
    """The architecture in the directory's config where that is of an EAGLE head, of whatever version; else None."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    kind = config.get("speculators_model_type")
    return next((name for name in names if "eagle" in name.lower()), None) or (f"speculators' {kind}" if kind else None)


def read_head_config(directory: Path, architecture: str, model_config: "PretrainedConfig") -> "PretrainedConfig":
    """Raises `ConfigurationError` for a head of another kind, or one that is not for this model."""
    if architecture not in SUPPORTED:
        raise ConfigurationError(f"--draft-model: {architecture} heads are not supported: use one of {', '.join(SUPPORTED)}")
    config, own = read_config(directory), model_config.get_text_config(decoder=True)
    if config.model_type != "llama" or config.num_hidden_layers != 1:
        raise ConfigurationError(
            f"--draft-model: the head has {config.num_hidden_layers} layers of {config.model_type!r}: it takes one of 'llama'"
        )
    target_size = getattr(config, "target_hidden_size", None) or config.hidden_size
    for name, of_head, of_model in (
        ("hidden states", target_size, own.hidden_size),
        ("hidden states", config.hidden_size, own.hidden_size),
        ("a vocabulary", config.vocab_size, own.vocab_size),
    ):
        if of_head != of_model:
            raise ConfigurationError(f"--draft-model: the head is for {name} of {of_head}, and the model has {of_model}")
    layers = layers_read(config, own.num_hidden_layers)
    if not all(0 <= layer < own.num_hidden_layers for layer in layers):
        raise ConfigurationError(f"--draft-model: the head reads before layers {layers}, and the model has {own.num_hidden_layers}")
    return config


def layers_read(config: "PretrainedConfig", num_layers: int) -> tuple[int, ...]:
    """The layers of the model whose inputs the head reads: low, middle and high where its config names none.

    Configs count either the layers whose inputs are read, from 2 on, or those whose outputs are, from 1 on.
    """
    settings = getattr(config, "eagle_config", None) or {}
    layers = settings.get("eagle_aux_hidden_state_layer_ids") or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    if layers is None:
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise ConfigurationError(f"--draft-model: eagle_aux_hidden_state_layer_ids is {layers!r:.100}")
    return tuple(layer + (layers[0] == 1) for layer in layers)


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads a token's embedding beside the feature of the token before."""

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm

        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.input_layernorm = LlamaRMSNorm(size, epsilon)
        self.self_attn = LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, embeds_1TH: Tensor, features_1TH: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionMetadata | list[LayerKV]
    ) -> Tensor:
        inputs = torch.cat([self.input_layernorm(embeds_1TH), self.hidden_norm(features_1TH)], dim=-1)
        attended_1TH, _ = self.self_attn(inputs, position_embeddings=rotary, attention_mask=None, attention_metadata=attention)
        hidden_1TH = features_1TH + attended_1TH
        result: Tensor = hidden_1TH + self.mlp(self.post_attention_layernorm(hidden_1TH))
        return result


class EagleModel(nn.Module):
    """The modules of a head, by the names that checkpoints have for them; without `embed_tokens` or `lm_head` the model's are used."""

    def __init__(self, config: Any, num_layers_read: int, names: set[str]) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        size, draft_size = config.hidden_size, getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.fc = nn.Linear(num_layers_read * size, size, bias=False)
        self.midlayer = EagleLayer(config)
        self.norm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, size) if "embed_tokens.weight" in names else None
        self.lm_head = nn.Linear(size, draft_size, bias=False) if draft_size < config.vocab_size or "lm_head.weight" in names else None
        if draft_size < config.vocab_size or "d2t" in names:
            self.register_buffer("d2t", torch.zeros(draft_size, dtype=torch.int64))


class EagleHead(DraftHead):
    """An EAGLE-3 head beside its model."""

    module: EagleModel

    def __init__(self, loaded: LoadedModel, module: EagleModel, layers: tuple[int, ...]) -> None:
        attention: Any = module.midlayer.self_attn
        config = attention.config
        self.module = module
        self.layers = layers
        self.width = int(config.hidden_size)
        self.kv = LayerKV(int(config.num_key_value_heads), int(attention.head_dim), int(attention.head_dim))
        self.num_weights = sum(weight.numel() for weight in module.parameters())
        if module.lm_head is None:
            self.num_weights += self.width * loaded.vocab_size
        pack_linears(module)
        offsets = dict(module.named_buffers()).get("d2t")
        self._token_ids = None if offsets is None else torch.arange(len(offsets)) + offsets
        if self._token_ids is not None and not ((self._token_ids >= 0) & (self._token_ids < loaded.vocab_size)).all():
            raise ConfigurationError(f"--draft-model: the head's d2t names tokens that are not below {loaded.vocab_size}")
        self._embedding: Any = module.embed_tokens or loaded.model.get_input_embeddings()
        self._head: Any = module.lm_head or loaded.model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._dtype = loaded.dtype

    def features(self, states: list[Tensor]) -> Tensor:
        features_TH: Tensor = self.module.fc(torch.cat(states, dim=-1).to(self._dtype))
        return features_TH

    def run(self, features_TH: Tensor, input_ids_1T: Tensor, positions_1T: Tensor, attention: AttentionMetadata | list[LayerKV]) -> Tensor:
        embeds_1TH = self._embedding(input_ids_1T).to(self._dtype)
        rotary = self.module.rotary_emb(embeds_1TH, positions_1T)
        features_1TH: Tensor = self.module.midlayer(embeds_1TH, features_TH[None], rotary, attention)
        return features_1TH[0]

    def next_ids(self, features_KH: Tensor, vocab_size: int) -> list[int]:
        logits_KV = self._head(self.module.norm(features_KH))
        if self._token_ids is None:
            best_K = logits_KV[:, :vocab_size].argmax(-1)
        else:
            best_K = self._token_ids[logits_KV.masked_fill(self._token_ids >= vocab_size, -torch.inf).argmax(-1)]
        token_ids: list[int] = best_K.tolist()
        return token_ids


def load_eagle(directory: Path, architecture: str, loaded: LoadedModel) -> EagleHead:
    """Raises `ConfigurationError` for a head that does not fit the model; its shapes are checked before its weights are read."""
    config = read_head_config(directory, architecture, loaded.config)
    try:
        files = weight_files(directory)
    except ConfigurationError as error:
        raise ConfigurationError(f"--draft-model: {error}") from error
    try:
        names = {_name_in_module(name): (file, name) for file in files for name in _names(file)}
        module = _empty_head(config, loaded, set(names))
        expected = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
        _check_shapes(expected, {name: _shape(*place) for name, place in names.items() if name not in UNUSED})
        weights = {name: _tensor(*place) for name, place in names.items() if name in expected}
    except (OSError, SafetensorError) as error:
        raise ConfigurationError(f"--draft-model: the head's weights cannot be read: {error}") from error
    return eagle_head(config, loaded, weights)


def eagle_head(config: Any, loaded: LoadedModel, weights: Mapping[str, Tensor]) -> EagleHead:
    """Of weights by the names of `EagleModel`."""
    register()
    module = _empty_head(config, loaded, set(weights))
    module.to_empty(device=loaded.device)
    module.load_state_dict(weights)
    module.rotary_emb = type(module.rotary_emb)(config)  # its frequencies are in no checkpoint
    module.to(loaded.dtype)
    return EagleHead(loaded, module.train(False).requires_grad_(False), layers_read(config, loaded.config.num_hidden_layers))


def _empty_head(config: "PretrainedConfig", loaded: LoadedModel, names: set[str]) -> EagleModel:
    config._attn_implementation = IMPLEMENTATION
    with torch.device("meta"):
        return EagleModel(config, len(layers_read(config, loaded.config.num_hidden_layers)), names)


def _check_shapes(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    if stray := sorted(found.keys() - expected.keys()):
        raise ConfigurationError(f"--draft-model: the head has weights that are not those of EAGLE-3: {', '.join(stray[:3])}")
    if lacking := sorted(expected.keys() - found.keys()):
        raise ConfigurationError(f"--draft-model: the head lacks {', '.join(lacking[:3])}")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ConfigurationError(f"--draft-model: the head's {name} has the shape {found[name]}, and this model takes {shape}")


def _name_in_module(name: str) -> str:
    name = name.removeprefix("model.")
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def _names(file: Path) -> list[str]:
    with safe_open(file, "pt") as weights:
        return list(weights.keys())


def _shape(file: Path, name: str) -> tuple[int, ...]:
    with safe_open(file, "pt") as weights:
        return tuple(weights.get_slice(name).get_shape())


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as weights:
        tensor: Tensor = weights.get_tensor(name)
        return tensor.clone()
