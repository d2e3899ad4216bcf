"""Installs the third-party plug-ins of `examples/` into a folder, as pip would for a user."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_PLUGINS = (EXAMPLES / "penstock-plugin-thought-tags", EXAMPLES / "penstock-plugin-xgrammar")


def install_example_plugins(target: Path, workspace: Path) -> None:
    """Puts the distributions into `target`, for `PYTHONPATH`, and builds them in folders of `workspace`. Needs no network."""
    for source in EXAMPLE_PLUGINS:
        shutil.copytree(source, workspace / source.name)  # a build leaves files beside its source
    pip_install(target, *(workspace / source.name for source in EXAMPLE_PLUGINS))


def pip_install(target: Path, *sources: Path) -> None:
    """Into a folder for `PYTHONPATH`, without network."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, *sources], check=True)


def run_own_tests(site: Path, folders: Sequence[Path], rootdir: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of pytest over the tests of packages that are installed in `site`. In this process, which has imported all else."""
    monkeypatch.syspath_prepend(site)
    monkeypatch.setenv("PYTHONPATH", str(site))  # of the processes that they start
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:faulthandler", "--import-mode=importlib", "--rootdir", str(rootdir)]
    return int(pytest.main([*options, *map(str, folders)]))
