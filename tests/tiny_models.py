"""Small, randomly initialised configs of every architecture that the engine is tried with.

Sliding windows are shorter than any interesting test's prompt, and soft caps, sinks and multipliers are active.
"""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 320
WINDOW = 12

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "truncate": False}
_ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}

_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": WINDOW},
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {**_ALTERNATING, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0, "query_pre_attn_scalar": 24},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 24},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0},
    "phi3": {},
    "olmo2": {},
    "olmo3": {**_ALTERNATING},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "glm4": {"partial_rotary_factor": 0.5},
    "cohere2": {**_ALTERNATING, "logit_scale": 0.5},
    "gpt_oss": {**_ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24, "n_group": 2, "topk_group": 1},
}

_HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16, "mamba_n_groups": 2, "mamba_chunk_size": 8}
_DELTA_NET = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 32}
_CONVOLUTIONS = {"layer_types": ["conv", "full_attention", "conv"], "conv_L_cache": 3}
_RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {**_COMMON, **_CONVOLUTIONS},
    "mamba2": {
        **{name: _COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", *_TOKENS)},
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "granitemoehybrid": {
        **_COMMON,
        **_HYBRID,
        **_MAMBA,
        **_OWN["granite"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
    },
    "qwen3_next": {**_COMMON, **_HYBRID, **_DELTA_NET, **_SHARED_EXPERT},
    "qwen3_5_text": {**_COMMON, **_HYBRID, **_DELTA_NET},
    "qwen3_5_moe_text": {**_COMMON, **_HYBRID, **_DELTA_NET, **_SHARED_EXPERT},
    "olmo_hybrid": {**_COMMON, **_HYBRID, **_DELTA_NET},
    "lfm2_moe": {**_COMMON, **_CONVOLUTIONS, **_EXPERTS, "num_dense_layers": 1},
    "bamba": {**_COMMON, **_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_COMMON, **_MAMBA, "mamba_d_ssm": 128, "mamba_d_head": 16},
    "nemotron_h": {
        **_COMMON,
        "layers_block_type": ["mamba", "attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
}

ARCHITECTURES: list[str] = list(_OWN)
RECURRENT_ARCHITECTURES: list[str] = list(_RECURRENT)

# More that keep latents, or have experts: relatives of one of those above.
RELATIVES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "glm4_moe_lite": {**_LATENT, "q_lora_rank": 24, "n_group": 1, "topk_group": 1, "rope_parameters": _PLAIN_ROPE},
    "youtu": {**_LATENT, "q_lora_rank": 24},
    "minicpm3": {**_LATENT, "q_lora_rank": 24, "rope_parameters": _PLAIN_ROPE, "scale_emb": 2, "dim_model_base": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_multiplier": 0.2, "residual_multiplier": 0.5},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
}


def tiny_config(name: str) -> PretrainedConfig:
    """The config of one of the architectures or `RELATIVES`: 3 layers, 64 wide, 320 tokens, context of 512."""
    if name in _RECURRENT:
        return AutoConfig.for_model(name, **_RECURRENT[name])
    own = (_OWN | RELATIVES)[name]
    settings = own if name == "gpt2" else _COMMON | own
    if name == "gpt2":
        settings = settings | {"vocab_size": VOCAB_SIZE, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(name, **settings)


def tiny_model(name: str, attn_implementation: str = "eager", seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A float32 model of one of the architectures on the CPU, in eval mode; the same weights for the same seed.

    Weights are drawn wider than transformers does, sinks and biases included, so that the next token depends on the whole context.
    """
    config = tiny_config(name)
    for key, value in settings.items():
        setattr(config, key, value)
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation, dtype=torch.float32)  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.5 if "conv" in parameter_name and parameter.dim() == 3 else 0.15)
                elif parameter_name.endswith(("bias", "sinks")):
                    parameter.normal_(0.0, 0.5)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    result: PreTrainedModel = model.eval()
    return result


# Layers of these differ from those of the other architectures in numbers, not in form.
ALIKE = ("qwen2", "qwen3", "mistral", "gemma3_text", "granite", "olmo2", "olmo3", "smollm3")
FORMS: list[Any] = [pytest.param(name, marks=[pytest.mark.thorough] * (name in ALIKE)) for name in ARCHITECTURES]
"""All of `ARCHITECTURES`, for tests of which it is enough by default to run them with one of each form."""
