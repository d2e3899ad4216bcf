"""The files that sentence-transformers adds to a model directory: a model's kind, and how token vectors become the vector of a text.

Formats as that library writes them: modules.json lists the stages, each with a directory and a config.json of its own.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from penstock.engine.errors import ConfigurationError

PoolingMode = Literal["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"]

# The keys that files had before `pooling_mode`, in the order in which several are joined.
_OLD_KEYS: dict[str, PoolingMode] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_STAGES = ("Dense", "Normalize", "LayerNorm")
_IDLE = ("Dropout",)  # acts in training only
_SERVED = ("ForSequenceClassification", "ForTokenClassification", "ForMaskedLM", "ForPreTraining", "Model")
_GENERATING = ("LMHeadModel", "DoubleHeadsModel")  # of GPT-2's time, when the names had no system yet


@dataclass(frozen=True, slots=True)
class StageFiles:
    """A stage after the pooling: `Dense`, `Normalize` or `LayerNorm`, the directory of its weights and its config."""

    kind: str
    directory: Path
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SentenceFiles:
    """The stages of a sentence-transformers directory in their order, and what its other files say. Defaults are that library's.

    Several `pooling_modes` are joined end to end. `max_seq_length` counts tokens, special ones included. `truncate_dim` cuts embeddings
    unless the request says to what. `prompts` are texts to put before the input, by name.
    """

    pooling_modes: tuple[PoolingMode, ...] = ("mean",)
    include_prompt: bool = True
    stages: tuple[StageFiles, ...] = ()
    max_seq_length: int | None = None
    do_lower_case: bool = False
    truncate_dim: int | None = None
    prompts: Mapping[str, str] | None = None
    default_prompt_name: str | None = None
    is_cross_encoder: bool = False
    activation: str | None = None


def has_sentence_files(directory: Path) -> bool:
    return (directory / "modules.json").is_file()


def read_sentence_files(directory: Path) -> SentenceFiles:
    """Of a directory without such files, the defaults. Raises `ConfigurationError` naming a stage that is not supported."""
    settings = _read_object(directory / "config_sentence_transformers.json")
    found: dict[str, Any] = {
        "truncate_dim": settings.get("truncate_dim"),
        "prompts": settings.get("prompts") or {},
        "default_prompt_name": settings.get("default_prompt_name"),
        "is_cross_encoder": settings.get("model_type") == "CrossEncoder",
        "activation": settings.get("activation_fn"),
    }
    transformer_directory = directory
    stages: list[StageFiles] = []
    for module in _read_modules(directory):
        kind = str(module.get("type")).rpartition(".")[2]
        place = directory / str(module.get("path", ""))
        match kind:
            case "Transformer":
                transformer_directory = place
            case "Pooling":
                config = _read_object(place / "config.json")
                found["pooling_modes"] = _pooling_modes(config, place)
                found["include_prompt"] = bool(config.get("include_prompt", True))
            case _ if kind in _STAGES:
                stages.append(StageFiles(kind, place, _read_object(place / "config.json")))
            case _ if kind not in _IDLE:
                raise ConfigurationError(f"{directory} cannot be served: its modules.json has a {kind} stage, which is not supported")
    if transformer_directory != directory:
        raise ConfigurationError(
            f"{directory} cannot be served: its weights lie in {transformer_directory.name}/ rather than beside modules.json"
        )
    transformer = _read_transformer_settings(directory)
    task = transformer.get("transformer_task", "feature-extraction")
    if task not in ("feature-extraction", "fill-mask", "sequence-classification"):
        raise ConfigurationError(f"{directory} cannot be served: its transformer_task {task!r} is not supported")
    return SentenceFiles(
        stages=tuple(stages),
        max_seq_length=transformer.get("max_seq_length"),
        do_lower_case=bool(transformer.get("do_lower_case", False)),
        **found,
    )


def _pooling_modes(config: Mapping[str, Any], directory: Path) -> tuple[PoolingMode, ...]:
    given = config.get("pooling_mode")
    if given is None:
        return tuple(mode for key, mode in _OLD_KEYS.items() if config.get(key)) or ("mean",)
    modes = (given,) if isinstance(given, str) else tuple(given)
    unknown = [mode for mode in modes if mode not in get_args(PoolingMode)]
    if unknown:
        raise ConfigurationError(f"{directory / 'config.json'}: pooling_mode {unknown[0]!r} is not supported")
    return modes


def _read_transformer_settings(directory: Path) -> dict[str, Any]:
    # sentence-transformers named the file after the kind of model.
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"):
        content = _read_object(directory / f"sentence_{kind}_config.json")
        if content:
            return content
    return {}


def _read_modules(directory: Path) -> list[dict[str, Any]]:
    content = _read(directory / "modules.json", [])
    if not isinstance(content, list) or not all(isinstance(module, dict) for module in content):
        raise ConfigurationError(f"{directory / 'modules.json'} does not hold a list of modules")
    return content


def _read_object(path: Path) -> dict[str, Any]:
    content = _read(path, {})
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} does not hold a JSON object")
    return content


def _read(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error


ModelKind = Literal["generate", "pooling", "transcription"]


def model_kind(directory: Path) -> ModelKind:
    """`pooling` for embedding models, classifiers and cross-encoders, `transcription` for Whisper; `generate` for all else.

    A model for which sentence-transformers' files are there is one of embeddings, whatever its class: Qwen3-Embedding, for one, is a
    causal language model by its config. Raises `ConfigurationError` where config.json cannot be read.
    """
    if has_sentence_files(directory):
        return "pooling"
    architectures = [str(name) for name in read_json_config(directory).get("architectures") or ()]
    if "WhisperForConditionalGeneration" in architectures:
        return "transcription"
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
