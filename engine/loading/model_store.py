"""Where a model's files are: what `--model` names, as a local directory that `from_pretrained` reads."""

import difflib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from penstock.engine.errors import ConfigurationError
from penstock.engine.gguf.conversion import converted_gguf
from penstock.engine.gguf.header import gguf_name
from penstock.engine.loading.packaged_model import DEFAULT_MODEL, PACKAGED_MODELS, PackagedModel, packaged_model_directory

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What serving takes from a repository: not its other weight formats, which can be many times as large.
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_CODE = ["*.py"]

logger = logging.getLogger(__name__)


def resolve_model(model: str | None, trust_remote_code: bool = False, *, verify: bool = False) -> Path:
    """The local directory of a model: None for the default one, the name of a packaged one, a directory, a `.gguf` file or a
    Hugging Face id. A directory that has the short name of a packaged model is given as `./minilm`.

    Fetches and converts where needed, with progress on standard error. `trust_remote_code` also fetches a repository's Python files.
    With `verify`, all of what was converted before is compared with its checksums.
    Raises `ConfigurationError` with what to change.
    """
    packaged = _packaged(model)
    if packaged is not None:
        return packaged_model_directory(packaged, verify=verify)
    assert model is not None
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigurationError(f"--model {model}: the directory holds no config.json, so it is not a transformers model")
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationError(f"--model {model}: a file must be a .gguf; of other formats name the directory")
        return converted_gguf(path, verify=verify)
    if path.suffix == ".gguf" or model.startswith((".", "~", os.sep)) or model.count("/") > 1:
        raise ConfigurationError(f"--model {model}: there is no such file or directory")
    return _from_hub(model, trust_remote_code)


def model_name(model: str | None) -> str:
    """The model's name for clients, by default: the id itself, the name of its directory, or the name in its GGUF file, else that
    file's name.
    """
    packaged = _packaged(model)
    if packaged is not None:
        return packaged.name
    assert model is not None
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return gguf_name(path) or path.stem if path.suffix == ".gguf" else model


def _packaged(model: str | None) -> PackagedModel | None:
    """By its short name, or by its full one where nothing here is called so, in capitals or not."""
    if model is None:
        return DEFAULT_MODEL
    if model in PACKAGED_MODELS or Path(model).expanduser().exists():
        return PACKAGED_MODELS.get(model)
    return {spelling.casefold(): packaged for spelling, packaged in _spellings()}.get(model.casefold())


def _spellings() -> Iterator[tuple[str, PackagedModel]]:
    for short, packaged in PACKAGED_MODELS.items():
        yield from ((short, packaged), (packaged.name, packaged))


def _hint(model: str) -> str:
    """The packaged model that may be meant by a name that leads nowhere."""
    short_names = {packaged: short for short, packaged in PACKAGED_MODELS.items()}
    by_spelling = {spelling.casefold(): short_names[packaged] for spelling, packaged in _spellings()}
    near = difflib.get_close_matches(model.rpartition("/")[2].casefold(), by_spelling, n=1)
    return f" (did you mean --model {by_spelling[near[0]]}?)" if near else ""


def _from_hub(model_id: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    otherwise = f"a local directory or a .gguf file also works{_hint(model_id)}"
    try:
        if try_to_load_from_cache(model_id, "config.json") is None:
            logger.info("Downloading %s from Hugging Face; this happens once", model_id)
        return Path(snapshot_download(model_id, allow_patterns=_FILES + _CODE * trust_remote_code, etag_timeout=5))
    except HFValidationError:
        raise ConfigurationError(f"--model {model_id} is neither a path that exists nor a Hugging Face id; {otherwise}") from None
    except GatedRepoError:
        raise ConfigurationError(f"--model {model_id} is gated: accept its terms there and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConfigurationError(f"--model {model_id}: Hugging Face has no such model, or it is private; {otherwise}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise ConfigurationError(
                f"--model {model_id} cannot be downloaded: {error.strerror}; HF_HOME names another directory"
            ) from None
        raise ConfigurationError(
            f"--model {model_id}: Hugging Face cannot be reached and the model is not in its local cache; {otherwise}"
        ) from None
