"""Small models that turn text into numbers, as whole directories: with a tokenizer, and what sentence-transformers adds."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.tiny_encoders import modules, save_encoder, tiny_encoder

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


def embedding_directory(directory: Path, files: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Mean pooling and normalisation, 32 dimensions. `files` are further JSON files by name, `family` is the model's."""
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    stages: dict[str, Any] = {"modules": modules("Pooling", "Normalize"), "_1_Pooling": pooling}
    return _write(directory, None, stages | (files or {}), **settings)


def cross_encoder_directory(directory: Path, **settings: Any) -> Path:
    """One label: it scores pairs."""
    return _write(directory, "sequence", num_labels=1, **settings)


def classifier_directory(directory: Path) -> Path:
    """With three labels, `LABELS`."""
    return _write(directory, "sequence", id2label=dict(enumerate(LABELS)))


def token_classifier_directory(directory: Path) -> Path:
    return _write(directory, "token", num_labels=3)


def _write(directory: Path, head: str | None, files: dict[str, Any] | None = None, family: str = "bert", **settings: Any) -> Path:
    backend = byte_backend()
    model = tiny_encoder(family, head=head, vocab_size=backend.get_vocab_size(), max_position_embeddings=MAX_LEN, **settings)
    save_encoder(model, directory, tokenizer_config={}, **(files or {}))
    backend.save(str(directory / "tokenizer.json"))
    return directory
