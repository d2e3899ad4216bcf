"""Whether a model directory holds a model that writes text or one that turns text into numbers, by its files alone."""

import json
from pathlib import Path
from typing import Any, Literal

from penstock.engine.errors import ConfigurationError
from penstock.engine.pooling.files import has_sentence_files

ModelKind = Literal["generate", "pooling"]

_SERVED = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForPreTraining", "Model")
_GENERATING = ("LMHeadModel", "DoubleHeadsModel")  # of GPT-2's time, when the names had no system yet


def model_kind(directory: Path) -> ModelKind:
    """`pooling` for embedding models, classifiers and cross-encoders; `generate` for all else.

    A model for which sentence-transformers' files are there is one of embeddings, whatever its class: Qwen3-Embedding, for one, is a
    causal language model by its config. Raises `ConfigurationError` where config.json cannot be read.
    """
    if has_sentence_files(directory):
        return "pooling"
    architectures = [str(name) for name in read_json_config(directory).get("architectures") or ()]
    return "pooling" if any(name.endswith(_SERVED) and not name.endswith(_GENERATING) for name in architectures) else "generate"


def is_sequence_classifier(architectures: list[str] | None) -> bool:
    return any(name.endswith("ForSequenceClassification") for name in architectures or ())


def is_token_classifier(architectures: list[str] | None) -> bool:
    return any(name.endswith("ForTokenClassification") for name in architectures or ())


def read_json_config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read as a model's config: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return content
