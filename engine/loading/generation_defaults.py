"""The defaults for sampling: a model's own generation_config.json, another one, and the operator's values."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import GenerationConfig

from penstock.engine.errors import ConfigurationError, InvalidRequest
from penstock.engine.sampling.params import SamplingParams, parameters_of

# Ours by generation_config's names. `do_sample` is left out, as in vLLM: a client that wants greedy says temperature 0.
SAMPLING_DEFAULTS = {each.generation_config: name for name, each in parameters_of(SamplingParams).items() if each.generation_config}


def sampling_defaults(own: GenerationConfig, source: str = "auto", override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The defaults by our field names. `source` is `auto` (the model's own), `vllm` (none) or a path, as vLLM's `--generation-config`.

    `override` has precedence over either, by generation_config's names. Raises `ConfigurationError` for unreadable or invalid values.
    """
    given = dict(override or {})
    if unknown := given.keys() - SAMPLING_DEFAULTS.keys():
        names = ", ".join(sorted(unknown))
        raise ConfigurationError(f"--override-generation-config: {names}: the names are {', '.join(SAMPLING_DEFAULTS)}")
    recommended = {} if source == "vllm" else (own if source == "auto" else _read(source)).to_diff_dict()
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


def _read(source: str) -> GenerationConfig:
    """Reads a generation_config.json, given as a file or its directory."""
    path = Path(source).expanduser()
    directory, name = (path.parent, path.name) if path.is_file() else (path, "generation_config.json")
    if not (directory / name).is_file():
        raise ConfigurationError(f"--generation-config {source}: neither auto, nor vllm, nor a directory with a generation_config.json")
    try:
        return GenerationConfig.from_pretrained(directory, name, local_files_only=True)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigurationError(f"--generation-config {source}: {error}") from error
