"""Small, randomly initialised encoders, classifiers and decoders for embeddings, saved as `from_pretrained` reads them.

Windows are shorter than the longest texts of the tests, and weights are drawn wider than transformers does, so that every output depends
on the whole text.
"""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)

from tests.tiny_models import tiny_config

VOCAB_SIZE = 320
MAX_LEN = 96
WINDOW = 8

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
}
_ROBERTA = {"pad_token_id": 1, "max_position_embeddings": MAX_LEN + 2, "type_vocab_size": 1}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "roberta": _COMMON | _ROBERTA,
    "xlm-roberta": _COMMON | _ROBERTA,
    "distilbert": {
        "vocab_size": VOCAB_SIZE,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": MAX_LEN,
        "pad_token_id": 0,
    },
    "modernbert": _COMMON | {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 3, "cls_token_id": 1, "sep_token_id": 2},
    "electra": _COMMON | {"embedding_size": 32},
    "albert": _COMMON | {"embedding_size": 16},
    "mpnet": _COMMON | {"pad_token_id": 1, "max_position_embeddings": MAX_LEN + 2},
    "deberta-v2": _COMMON | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0},
    "nomic_bert": _COMMON,
    "eurobert": _COMMON | {"num_key_value_heads": 2, "head_dim": 8},
}
HEADS: dict[str | None, Any] = {
    None: AutoModel,
    "masked": AutoModelForMaskedLM,
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
}
DECODERS = ("qwen3", "llama", "gemma3_text")


def tiny_encoder(name: str, *, head: str | None = None, seed: int = 0, **settings: Any) -> PreTrainedModel:
    """A float32 model of one of `ENCODERS` or `DECODERS` in eval mode. `head` is one of `HEADS`."""
    config = tiny_config(name) if name in DECODERS else AutoConfig.for_model(name, **ENCODERS[name])
    for key, value in settings.items():
        setattr(config, key, value)
    factory: Any = HEADS[head]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = factory.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.2)
    model.train(False)
    return model


def save_encoder(model: PreTrainedModel, directory: Path, **files: Any) -> Path:
    """Saves it; `files` are JSON by name: modules, and the config of a stage by the stage's directory."""
    model.save_pretrained(directory)
    for name, content in files.items():
        path = directory / (f"{name}/config.json" if name.startswith("_") else f"{name}.json")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    return directory


def modules(*kinds: str) -> list[dict[str, Any]]:
    """What modules.json holds, the transformer first; a stage's directory is called after its place and kind, as `_1_Pooling`."""
    return [
        {"idx": place, "name": str(place), "path": f"_{place}_{kind}" if place else "", "type": f"sentence_transformers.models.{kind}"}
        for place, kind in enumerate(("Transformer", *kinds))
    ]
