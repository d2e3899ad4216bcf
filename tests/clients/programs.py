"""The clients from npm and PyPI, installed once into the cache and not into the checkout."""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from penstock.engine.system.cache import cache_directory

HERE = Path(__file__).parent
LLM_COMPLY = "llm-comply==0.5.0"
INSTALL_SECONDS = 300


def run(
    command: Sequence[str | Path], *, environment: Mapping[str, str] | None = None, cwd: Path | None = None, seconds: float = 60
) -> str:
    """What a command without input wrote to standard output. `environment` replaces all but the search path. Asserts that it succeeds."""
    settings = None if environment is None else {"PATH": os.environ["PATH"], **environment}
    done = subprocess.run(command, cwd=cwd, env=settings, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, f"{command[0]} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def node_modules() -> Path:
    """The packages of package.json, with their programs in `.bin`. Skips the test where node or npm is missing."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    manifest = HERE / "package.json"

    def install(directory: Path) -> None:
        shutil.copy(manifest, directory)
        run(["npm", "install", "--no-audit", "--no-fund"], cwd=directory, seconds=INSTALL_SECONDS)
        # npm may leave out what packages run after their installation.
        run(["node", "node_modules/@anthropic-ai/claude-code/install.cjs"], cwd=directory)

    identity = hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    return _installed(f"npm-{identity}", install) / "node_modules"


def llm_comply() -> Path:
    """A directory of Python packages with the compliance tester."""

    def install(directory: Path) -> None:
        options = ["--quiet", "--disable-pip-version-check", "--target", str(directory)]
        run([sys.executable, "-m", "pip", "install", *options, LLM_COMPLY], seconds=INSTALL_SECONDS)

    return _installed(LLM_COMPLY, install)


def _installed(name: str, install: Callable[[Path], None]) -> Path:
    directory = cache_directory() / "clients" / name
    if not directory.is_dir():
        scratch = directory.with_name(f"{name}.{os.getpid()}")
        scratch.mkdir(parents=True)
        try:
            install(scratch)
            scratch.rename(directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return directory
