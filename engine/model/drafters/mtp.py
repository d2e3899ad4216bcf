"""MTP: heads for multi-token prediction that come with a model's own checkpoint (DeepSeek-V3, arXiv:2412.19437, section 2.2)."""

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from penstock.engine.attention.interface import AttentionMetadata
from penstock.engine.errors import ConfigurationError
from penstock.engine.kv_cache.tensors import LayerKV
from penstock.engine.model.drafters.heads import IMPLEMENTATION, DraftHead, register
from penstock.engine.model.loader import LoadedModel
from penstock.engine.system.process import making_model

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OPTION = "--speculation mtp"


class MtpHead(DraftHead):
    """The first of the model's MTP layers, one after another for each draft token.

    It reads what the model's head reads, and gives the same for the next token; embedding and head are the model's.
    """

    module: Any
    reads_last = True

    def __init__(self, loaded: LoadedModel, module: Any) -> None:
        self.module = module
        self.width = int(module.config.hidden_size)
        self.kv = self.kv_by_trial()
        self.num_weights = sum(weight.numel() for weight in module.layers[0].parameters()) + self.width * loaded.vocab_size

    def features(self, states: list[Tensor]) -> Tensor:
        (last_TH,) = states
        return last_TH

    def run(self, features_TH: Tensor, input_ids_1T: Tensor, positions_1T: Tensor, attention: AttentionMetadata | list[LayerKV]) -> Tensor:
        embeds_1TH = self.module.embed_tokens(input_ids_1T)
        features_1TH: Tensor = self.module.layers[0](
            embeds_1TH,
            features_TH[None].to(embeds_1TH.dtype),
            position_embeddings=self.module.rotary_emb(embeds_1TH, position_ids=positions_1T),
            attention_mask=None,
            position_ids=positions_1T,
            past_key_values=None,
            attention_metadata=attention,
        )
        return features_1TH[0]

    def next_ids(self, features_KH: Tensor, vocab_size: int) -> list[int]:
        token_ids: list[int] = self.module.shared_head(features_KH)[:, :vocab_size].argmax(-1).tolist()
        return token_ids


def check_mtp(config: "PretrainedConfig") -> None:
    """Raises `ConfigurationError` for a model that has no MTP head, or one of another kind."""
    own = config.get_text_config(decoder=True)
    if not getattr(own, "num_mtp_layers", None):
        raise ConfigurationError(f"{OPTION}: {own.model_type} models have no MTP layers that are read here")
    if getattr(own, "sliding_window", None) or getattr(own, "layer_types", None) or getattr(own, "mlp_layer_types", None):
        raise ConfigurationError(f"{OPTION}: the MTP layers of {own.model_type} models are not supported")


def load_mtp(loaded: LoadedModel) -> MtpHead:
    """The MTP head in the model's own directory. Raises `ConfigurationError` where it lacks weights, or has others."""
    from transformers.modeling_layers import MtpModel

    check_mtp(loaded.config)
    model = loaded.model
    try:
        with making_model:
            module = MtpModel.from_pretrained(model)
    except (RuntimeError, ValueError, OSError, LookupError, AttributeError, TypeError, SafetensorError) as error:
        raise ConfigurationError(f"{OPTION}: the model's MTP layer cannot be loaded: {error}") from error
    return mtp_head(loaded, module)


def mtp_head(loaded: LoadedModel, module: Any) -> MtpHead:
    """Of transformers' module, which is changed."""
    register()
    module.config._attn_implementation = IMPLEMENTATION
    torch.nn.Module.to(module, loaded.dtype)
    return MtpHead(loaded, module.train(False).requires_grad_(False))
