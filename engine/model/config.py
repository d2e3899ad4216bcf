"""A model's config files: which models are refused, the context length, the tokens that end an answer, and sampling defaults."""

import copy
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.kv_cache.tensors import LayerKV, kv_layout
from penstock.engine.multimodal.vision import FAMILIES, is_multimodal, takes_images
from penstock.engine.recurrent import layout as recurrent
from penstock.engine.sampling.params import SAMPLING_DEFAULTS, SamplingParams, check_sampling_defaults
from penstock.engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

# By the names of most architectures and by those of GPT-2 and its relatives. Each is 1 or more where a config gives it.
NUM_LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers")
SIZES = (
    *NUM_LAYERS,
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "n_embd", "n_head", "n_positions"),
)


LANGUAGE_MODELS = ("forcausallm", "lmheadmodel")  # what the names of their classes end in, in lower case


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """Token ids below `vocab_size` may be sampled; each of `stop_token_ids` ends an answer."""

    vocab_size: int
    stop_token_ids: frozenset[int]


def answer_tokens(logits_width: int, eos_token_ids: frozenset[int], tokenizer: Tokenizer) -> AnswerTokens:
    """Logits may be wider than what the tokenizer knows, and each of the two may know ends that the other does not."""
    return AnswerTokens(min(logits_width, tokenizer.vocab_size), eos_token_ids | tokenizer.eos_token_ids)


def read_answer_tokens(directory: Path, tokenizer: Tokenizer, trust_remote_code: bool = False) -> AnswerTokens:
    """Those of the model that would be loaded from there. Raises `ConfigurationError` as `read_config` does."""
    config = read_config(directory, trust_remote_code)
    return answer_tokens(
        int(config.get_text_config().vocab_size), eos_token_ids(config, read_generation_config(directory, config)), tokenizer
    )


def read_generation_config(directory: Path, config: "PretrainedConfig") -> "GenerationConfig":
    """That of the model that would be loaded from there."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(directory, local_files_only=True)
    except OSError:  # there is no such file; a model then makes one of its config
        return GenerationConfig.from_model_config(config)


def eos_token_ids(config: "PretrainedConfig", generation_config: "GenerationConfig") -> frozenset[int]:
    """The stop tokens in the model's configs; the tokenizer may add more."""
    return frozenset(_token_ids(generation_config.eos_token_id)) | frozenset(_token_ids(config.get_text_config().eos_token_id))


def read_config(directory: Path, trust_remote_code: bool = False) -> "PretrainedConfig":
    """The config of a model directory.

    Raises `ConfigurationError` where config.json is missing or broken, gives a size that cannot be, names an architecture that transformers
    does not know, or needs the model's own Python code without `trust_remote_code`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    from penstock.engine.scripted.model import register

    register()
    path = directory / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        model_type, auto_map = content.get("model_type"), content.get("auto_map")
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigurationError(f"{path} cannot be read as a model's config: {error}") from error
    for part in (content, content.get("text_config")):
        if isinstance(part, dict):
            _check_sizes(part, path)
    if model_type not in CONFIG_MAPPING:
        if not auto_map:
            raise ConfigurationError(
                f"{directory} is a {model_type!r} model ({listed_architectures(content.get('architectures'))}), an architecture that "
                f"transformers {version('transformers')} does not know"
            )
        if not trust_remote_code:
            raise ConfigurationError(
                f"{directory} is a {model_type!r} model that runs Python code of its own: read that code, then pass --trust-remote-code"
            )
    with _reading(path, model_type):
        config: PretrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=trust_remote_code)
    return config


def make_config(content: dict[str, Any], path: Path) -> "PretrainedConfig":
    """The config with these settings, which are a part of the file `path`. Raises `ConfigurationError` as `read_config`."""
    from transformers import AutoConfig

    _check_sizes(content, path)
    model_type = str(content.get("model_type"))
    with _reading(path, model_type):
        config: PretrainedConfig = AutoConfig.for_model(
            model_type, **{name: value for name, value in content.items() if name != "model_type"}
        )
    return config


@contextmanager
def _reading(path: Path, model_type: object) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, ImportError, StrictDataclassError) as error:
        raise ConfigurationError(f"{path} cannot be read as a {model_type!r} config: {error}") from error


def _check_sizes(content: dict[str, Any], path: Path) -> None:
    """Raises `ConfigurationError` for sizes that no model has. transformers makes lists of a config's layers before it sees a weight."""
    architectures = content.get("architectures")
    if not (architectures is None or isinstance(architectures, list)):
        raise ConfigurationError(f"{path}: `architectures` is {architectures!r:.100}, not a list of names")
    sizes = {name: value for name in SIZES if isinstance(value := content.get(name), int)}
    for name, value in sizes.items():
        if value < 1:
            raise ConfigurationError(f"{path}: `{name}` is {value}, and must be 1 or more")
    num_tensors = _num_tensors(path.parent)
    for name in sizes.keys() & NUM_LAYERS:
        if num_tensors is not None and sizes[name] > num_tensors:
            raise ConfigurationError(f"{path}: `{name}` is {sizes[name]}, and the weight files hold {num_tensors} tensors")


def _num_tensors(directory: Path) -> int | None:
    """How many tensors the weight files hold; None without any, or if one cannot be read, which loading them reports."""
    paths = list(directory.glob("*.safetensors"))
    try:
        with ExitStack() as files:
            return sum(len(files.enter_context(safe_open(path, "pt")).keys()) for path in paths) if paths else None
    except (OSError, SafetensorError):
        return None


def listed_architectures(architectures: object) -> str:
    return ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else "no architecture named"


def _token_ids(value: int | Iterable[int] | None) -> Iterable[int]:
    """Those that are tokens: some configs write -1 for none."""
    if value is None:
        return ()
    return [token_id for token_id in ((value,) if isinstance(value, int) else value) if token_id >= 0]


# These change their frequencies with the longest sequence in the batch, which would let one request change another's answer.
# Up to the length that the model was first trained for they do not.
BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})


def max_model_len(config: "PretrainedConfig", asked: int | None = None) -> int:
    """The context length in tokens, prompt and answer together: the model's own limit, or `asked` where that is less.

    Raises `ConfigurationError` where `asked` is beyond what the model can do, or where nothing says what that is.
    """
    if asked is not None and asked < 1:
        raise ConfigurationError(f"--max-model-len must be at least 1, got {asked}")
    limit = _limit(config.get_text_config())
    if limit is None and asked is None:
        raise ConfigurationError(f"the config of this {config.model_type} model gives no context length: pass --max-model-len")
    if limit is None or asked is None:
        return limit or asked or 0
    if asked > limit:
        raise ConfigurationError(f"--max-model-len {asked} is more than this model's {limit} tokens")
    return asked


def _limit(config: "PretrainedConfig") -> int | None:
    positions = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    match rope.get("rope_type"):  # absent where each type of layer has parameters of its own
        case kind if kind in BATCH_DEPENDENT_ROPE:
            return int(original or positions)
        case "yarn":
            # Some configs write the length before scaling into max_position_embeddings, some the length after.
            return max(int(positions), int((original or positions) * rope.get("factor", 1.0)))
        case "linear":
            return int(positions * rope.get("factor", 1.0))
        case _:
            return int(positions)


def refusal(config: "PretrainedConfig", reason: str) -> ConfigurationError:
    name = listed_architectures(config.architectures) if config.architectures else f"a {config.model_type} model"
    return ConfigurationError(f"{name} cannot be served: {reason}")


def check_kind(config: "PretrainedConfig") -> None:
    """Raises `ConfigurationError` for models with audio and for encoder-decoders."""
    from transformers.models.auto import modeling_auto as auto

    if config.model_type in (*auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES):
        raise refusal(config, "it generates audio, and only text is generated here")
    if config.model_type == "whisper":
        raise refusal(config, "it turns speech into text, which a server of this model alone does, at /v1/audio/transcriptions")
    if config.model_type in (*auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES, *auto.MODEL_FOR_CTC_MAPPING_NAMES):
        raise refusal(config, "it turns speech into text, and of such models only Whisper is served")
    if "audio_config" in config.sub_configs:
        raise refusal(config, "it takes audio, and only text and images are read here")
    if config.is_encoder_decoder:
        raise refusal(config, "it is an encoder-decoder, and only decoders generate text here, and only they and encoders make embeddings")


def check_servable(
    config: "PretrainedConfig", trust_remote_code: bool = False, *, has_latents: bool = True, language_model_only: bool = False
) -> list[LayerKV]:
    """What `kv_layout` gives for a model that can be served. Raises `ConfigurationError` naming what is in the way of one that cannot."""

    def refuse(reason: str) -> ConfigurationError:
        return refusal(config, reason)

    check_kind(config)
    if is_multimodal(config):
        if not (language_model_only or takes_images(config)):
            parts, families = ", ".join(sorted(config.sub_configs)), ", ".join(FAMILIES)
            raise refuse(
                f"it is a multimodal model (its config holds {parts}), of which the served kinds are {families}; "
                "--language-model-only asks for its language model alone"
            )
        if "qformer_config" in config.sub_configs:
            raise refuse("it has a Q-Former before a language model with a head of its own, which is not served alone")
        from penstock.engine.multimodal import mrope

        mrope.register(config)
        language_model = copy.copy(config.get_text_config())
        language_model.architectures = None  # those of the whole model, where the file has one config for all
        try:
            return check_servable(language_model, has_latents=has_latents)
        except ConfigurationError as error:
            raise refuse(f"its language model: {error}") from error
    has_own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if not has_own_code:
        _check_class(config, refuse)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()) - recurrent.ATTENTION)
    if kinds and not recurrent.is_recurrent(config):
        served = ", ".join(recurrent.FAMILIES)
        raise refuse(f"it has layers of type {', '.join(kinds)}; beside attention, only the recurrent layers of {served} are served")
    return kv_layout(config, trust_remote_code, has_latents=has_latents)


def _check_class(config: "PretrainedConfig", refuse: Callable[[str], ConfigurationError]) -> None:
    model_class = _causal_lm_class(config)
    if model_class is None or not _islisted_architectures(model_class, config.architectures):
        raise refuse(_reason_without_class(config, model_class))
    if config.model_type in recurrent.FAMILIES:
        return  # whose attention, if they have any, is like that of others, whatever the class says of it
    if model_class._is_stateful:
        raise refuse(f"it keeps a recurrent state, of which the served kinds are {', '.join(recurrent.FAMILIES)}")
    if not model_class._supports_attention_backend:
        raise refuse("transformers does not let its attention be replaced (_supports_attention_backend)")
    if "position_ids" not in inspect.signature(model_class.forward).parameters:
        raise refuse("it takes no position ids, so sequences cannot share a batch")


def _reason_without_class(config: "PretrainedConfig", model_class: "type[PreTrainedModel] | None") -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    # Where transformers lists a language model as one that takes images, it does not load it as any other.
    named = config.architectures or [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(config.model_type, "")]
    if not any(str(name).lower().endswith(LANGUAGE_MODELS) for name in named):
        return "it is an encoder, a classifier or another kind of model that generates no text"
    if model_class is None:
        return f"AutoModelForCausalLM of transformers {version('transformers')} has no class for it"
    return f"{config.model_type} models are of the class {model_class.__name__}"


def _causal_lm_class(config: "PretrainedConfig") -> "type[PreTrainedModel] | None":
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model_class: type[PreTrainedModel] = found[0] if isinstance(found, tuple) else found
    return model_class


def _islisted_architectures(model_class: "type[PreTrainedModel]", architectures: list[str] | None) -> bool:
    """Whether config.json says that its weights are of this class; old files differ in case, and some say nothing."""
    return not architectures or model_class.__name__.lower() in {architecture.lower() for architecture in architectures}


def recommended_sampling(config: "GenerationConfig") -> dict[str, Any]:
    """What a generation_config says of sampling, by its names."""
    return {name: value for name, value in config.to_diff_dict().items() if name in SAMPLING_DEFAULTS}


def sampling_defaults(own: Mapping[str, Any], source: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults by our field names. `source` is `auto` (the model's own), `vllm` (none) or a path, as vLLM's `--generation-config`.

    `own` is what `recommended_sampling` makes of the model's config.

    `override` has precedence over either, by generation_config's names. Raises `ConfigurationError` for unreadable or invalid values.
    """
    given = dict(override or {})
    try:
        check_sampling_defaults(given)
    except ValueError as error:
        raise ConfigurationError(f"--override-generation-config: {error}") from error
    recommended = {} if source == "vllm" else own if source == "auto" else recommended_sampling(_read(source))
    chosen = {theirs: given.get(theirs, recommended.get(theirs)) for theirs in SAMPLING_DEFAULTS}
    defaults = {SAMPLING_DEFAULTS[theirs]: value for theirs, value in chosen.items() if value is not None}
    try:
        SamplingParams(**defaults)
    except (InvalidRequest, TypeError) as error:
        raise ConfigurationError(
            f"the defaults for sampling, {defaults}: {error}: change them with --override-generation-config, or leave the model's out with "
            "--generation-config vllm"
        ) from error
    return defaults


def _read(source: str) -> "GenerationConfig":
    """Reads a generation_config.json, given as a file or its directory."""
    from transformers import GenerationConfig

    path = Path(source).expanduser()
    directory, name = (path.parent, path.name) if path.is_file() else (path, "generation_config.json")
    if not (directory / name).is_file():
        raise ConfigurationError(f"--generation-config {source}: neither auto, nor vllm, nor a directory with a generation_config.json")
    try:
        return GenerationConfig.from_pretrained(directory, name, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--generation-config {source}: {error}") from error
