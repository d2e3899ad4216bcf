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
COLLECTOR = "rotel==0.0.1a15"
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
    """The packages of package.json, with their programs in `.bin`."""
    # npm may leave out what packages run after their installation.
    return npm_packages(HERE / "package.json", "node_modules/@anthropic-ai/claude-code/install.cjs")


def npm_packages(manifest: Path, *scripts: str) -> Path:
    """`node_modules` with what a package.json lists. Scripts run once, after it. Skips the test where node or npm is missing."""
    needs("node", "npm")

    def install(directory: Path) -> None:
        shutil.copy(manifest, directory / "package.json")
        run(["npm", "install", "--no-audit", "--no-fund"], cwd=directory, seconds=INSTALL_SECONDS)
        for script in scripts:
            run(["node", script], cwd=directory)

    identity = hashlib.sha256(manifest.read_bytes()).hexdigest()[:16]
    return _installed(f"npm-{identity}", install) / "node_modules"


def needs(*programs: str) -> None:
    """Skips the test where one is missing."""
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")


def llm_comply() -> Path:
    """A directory of Python packages with the compliance tester."""
    return python_packages(LLM_COMPLY)


def collector() -> Path:
    """An OpenTelemetry collector, which its package has as a program."""
    return python_packages(COLLECTOR) / "rotel" / "rotel-agent"


def python_packages(*requirements: str) -> Path:
    """A directory for `PYTHONPATH` of this version of Python, with their programs in `bin`."""

    def install(directory: Path) -> None:
        options = ["--quiet", "--disable-pip-version-check", "--target", str(directory)]
        run([sys.executable, "-m", "pip", "install", *options, *requirements], seconds=INSTALL_SECONDS)

    identity = hashlib.sha256(" ".join(requirements).encode()).hexdigest()[:16]
    name = requirements[0] if len(requirements) == 1 else f"pypi-{identity}"
    return _installed(f"{name}-{sys.implementation.cache_tag}", install)


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
