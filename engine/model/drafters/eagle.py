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
from penstock.engine.kv_cache.tensors import LayerKV
from penstock.engine.model.config import make_config, read_config
from penstock.engine.model.drafters.heads import IMPLEMENTATION, DraftHead, register
from penstock.engine.model.loader import LoadedModel
from penstock.engine.weights.checkpoints import weight_files
from penstock.engine.weights.linear import pack_linears

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SPECULATORS = "speculators' eagle3"
SUPPORTED = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", SPECULATORS)
LAYER_TYPES = ("llama", "qwen3")
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # settings of heads; see `EagleModel`
# What else a config of the library speculators has; `norm_before_residual` and its like are read.
OF_TRAINING = ("speculators_config", "speculators_version", "embed_requires_grad", "has_no_defaults_at_init", "auto_map", "torch_dtype")
OF_SPECULATORS = ("speculators_model_type", "transformer_layer_config", "draft_vocab_size", "target_hidden_size", *NORMS, *OF_TRAINING)
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
UNUSED = ("t2d", "rotary_emb.inv_freq", "midlayer.self_attn.rotary_emb.inv_freq", "verifier_norm.weight", "verifier_lm_head.weight")


def architecture_of_head(directory: Path) -> str | None:
    """The architecture in the directory's config where that is of an EAGLE head, of whatever version; else None."""
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    if kind := config.get("speculators_model_type"):
        return f"speculators' {kind}"
    names = [name for name in config.get("architectures") or [] if isinstance(name, str)]
    return next((name for name in names if "eagle" in name.lower()), None)


def read_head_config(directory: Path, architecture: str, model_config: "PretrainedConfig") -> "PretrainedConfig":
    """Raises `ConfigurationError` for a head of another kind, or one that is not for this model."""
    if architecture not in SUPPORTED:
        raise ConfigurationError(f"--draft-model: {architecture} heads are not supported: use one of {', '.join(SUPPORTED)}")
    config = _read_speculators_config(directory) if architecture == SPECULATORS else read_config(directory)
    own = model_config.get_text_config(decoder=True)
    if config.model_type not in LAYER_TYPES or config.num_hidden_layers != 1:
        raise ConfigurationError(
            f"--draft-model: the head has {config.num_hidden_layers} layers of {config.model_type!r}: "
            f"it takes one of {' or '.join(map(repr, LAYER_TYPES))}"
        )
    if others := set(getattr(config, "layer_types", None) or ()) - {"full_attention"}:
        raise ConfigurationError(f"--draft-model: heads with {', '.join(sorted(others))} are not supported")
    if getattr(config, "norm_before_fc", False) and getattr(config, "fc_norm", False):
        raise ConfigurationError("--draft-model: the head has both norm_before_fc and fc_norm, which exclude each other")
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


def _read_speculators_config(directory: Path) -> "PretrainedConfig":
    """The config of the head's layer, with the head's own settings. Their format: github.com/vllm-project/speculators."""
    from transformers import PretrainedConfig

    path = directory / "config.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if stray := sorted(name for name in content.keys() - {*OF_SPECULATORS, LAYER_IDS, *PretrainedConfig().to_dict()} if content[name]):
        raise ConfigurationError(f"--draft-model: settings of the head that are not supported: {', '.join(stray[:3])}")
    settings = content.get("transformer_layer_config")
    if not isinstance(settings, dict):
        raise ConfigurationError(f"--draft-model: {path} has no transformer_layer_config")
    config = make_config(settings, path)
    for name in (*NORMS, "draft_vocab_size", "target_hidden_size", LAYER_IDS, "speculators_model_type"):
        if content.get(name) is not None:
            setattr(config, name, content[name])
    return config


def layers_read(config: "PretrainedConfig", num_layers: int) -> tuple[int, ...]:
    """The layers of the model whose inputs the head reads: low, middle and high where its config names none.

    Configs count either the layers whose inputs are read, from 2 on, or those whose outputs are, from 1 on. Those of the library
    speculators count the former.
    """
    settings = getattr(config, "eagle_config", None) or {}
    layers = settings.get(LAYER_IDS) or getattr(config, LAYER_IDS, None)
    if layers is None:
        return 2, num_layers // 2, num_layers - 3
    if not isinstance(layers, list) or not layers or not all(isinstance(layer, int) for layer in layers):
        raise ConfigurationError(f"--draft-model: {LAYER_IDS} is {layers!r:.100}")
    are_outputs = layers[0] == 1 and not hasattr(config, "speculators_model_type")
    return tuple(layer + are_outputs for layer in layers)


class EagleLayer(nn.Module):
    """A decoder layer whose attention reads a token's embedding beside the feature of the token before.

    The residual is the feature, with `norm_before_residual` the normalized one.
    """

    def __init__(self, config: Any) -> None:
        from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm
        from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3MLP

        super().__init__()
        size, epsilon = config.hidden_size, config.rms_norm_eps
        is_qwen3 = config.model_type == "qwen3"
        self.norm_before_residual = bool(getattr(config, "norm_before_residual", False))
        self.hidden_norm = LlamaRMSNorm(size, epsilon)
        self.input_layernorm = LlamaRMSNorm(size, epsilon)
        self.self_attn = Qwen3Attention(config, 0) if is_qwen3 else LlamaAttention(config, 0)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(self.self_attn, name)
            setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=narrow.bias is not None))
        self.post_attention_layernorm = LlamaRMSNorm(size, epsilon)
        self.mlp = Qwen3MLP(config) if is_qwen3 else LlamaMLP(config)  # type: ignore[no-untyped-call]

    def forward(
        self, embeds_1TH: Tensor, features_1TH: Tensor, rotary: tuple[Tensor, Tensor], attention: AttentionMetadata | list[LayerKV]
    ) -> Tensor:
        normed_1TH = self.hidden_norm(features_1TH)
        inputs = torch.cat([self.input_layernorm(embeds_1TH), normed_1TH], dim=-1)
        attended_1TH, _ = self.self_attn(inputs, position_embeddings=rotary, attention_mask=None, attention_metadata=attention)
        hidden_1TH = (normed_1TH if self.norm_before_residual else features_1TH) + attended_1TH
        result: Tensor = hidden_1TH + self.mlp(self.post_attention_layernorm(hidden_1TH))
        return result


class EagleModel(nn.Module):
    """The modules of a head, by the names that checkpoints have for them; without `embed_tokens` or `lm_head` the model's are used.

    With `norm_before_fc` the hidden states that `fc` reads are normalized together, with `fc_norm` one by one, and with `norm_output` a
    feature that the head gives is normalized before it takes the place of one of the model's.
    """

    def __init__(self, config: Any, num_layers_read: int, names: set[str]) -> None:
        from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

        super().__init__()
        size, draft_size = config.hidden_size, getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.input_norm: nn.Module | None = None
        self.fc_norm: nn.ModuleList | None = None
        if getattr(config, "norm_before_fc", False):
            self.input_norm = LlamaRMSNorm(num_layers_read * size, config.rms_norm_eps)
        if getattr(config, "fc_norm", False):
            self.fc_norm = nn.ModuleList(LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(num_layers_read))
        self.norm_output = bool(getattr(config, "norm_output", False))
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
        states = [states_TH.to(self._dtype) for states_TH in states]
        if self.module.fc_norm is not None:
            states = [norm(states_TH) for norm, states_TH in zip(self.module.fc_norm, states, strict=True)]
        joined = torch.cat(states, dim=-1)
        features_TH: Tensor = self.module.fc(joined if self.module.input_norm is None else self.module.input_norm(joined))
        return features_TH

    def run(self, features_TH: Tensor, input_ids_1T: Tensor, positions_1T: Tensor, attention: AttentionMetadata | list[LayerKV]) -> Tensor:
        embeds_1TH = self._embedding(input_ids_1T).to(self._dtype)
        rotary = self.module.rotary_emb(embeds_1TH, positions_1T)
        features_1TH: Tensor = self.module.midlayer(embeds_1TH, features_TH[None], rotary, attention)
        return self.module.norm(features_1TH[0]) if self.module.norm_output else features_1TH[0]

    def next_ids(self, features_KH: Tensor, vocab_size: int) -> list[int]:
        logits_KV = self._head(features_KH if self.module.norm_output else self.module.norm(features_KH))
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
