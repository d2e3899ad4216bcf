"""Small, randomly initialised models that turn text into numbers, as directories."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, BertForTokenClassification, BertModel, PreTrainedModel

MAX_LEN = 64
LABELS = ("calm", "glad", "sad")


def byte_backend() -> Backend:
    """One token per byte, and BERT's special tokens around a text or a pair of texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["[CLS]", "[SEP]"])
    special = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=special
    )
    return backend


def embedding_directory(directory: Path, **settings: Any) -> Path:
    """Mean pooling and normalisation, 32 dimensions."""
    _save(directory, BertModel(_config(**settings)))
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    listed = [{"idx": int(name), "name": name, "path": path, "type": f"models.{kind}"} for name, path, kind in modules]
    (directory / "modules.json").write_text(json.dumps(listed), encoding="utf-8")
    (directory / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling), encoding="utf-8")
    return directory


def cross_encoder_directory(directory: Path) -> Path:
    """One label: it scores pairs."""
    return _save(directory, BertForSequenceClassification(_config(num_labels=1)))


def classifier_directory(directory: Path) -> Path:
    """With three labels, `LABELS`."""
    return _save(directory, BertForSequenceClassification(_config(num_labels=3, id2label=dict(enumerate(LABELS)))))


def token_classifier_directory(directory: Path) -> Path:
    return _save(directory, BertForTokenClassification(_config(num_labels=3)))


def _config(**settings: Any) -> BertConfig:
    return BertConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LEN,
        initializer_range=0.3,
        **settings,
    )


def _save(directory: Path, model: PreTrainedModel) -> Path:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.init_weights()
    model.save_pretrained(directory)
    byte_backend().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    return directory
