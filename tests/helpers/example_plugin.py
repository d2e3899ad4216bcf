"""Installs the third-party plug-ins of `examples/` into a folder, as pip would for a user."""

import shutil
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
THOUGHT_TAGS = EXAMPLES / "penstock-plugin-thought-tags"
XGRAMMAR = EXAMPLES / "penstock-plugin-xgrammar"


def install_example_plugin(source: Path, target: Path, workspace: Path) -> None:
    """Puts the distribution into `target`, for `PYTHONPATH`, and builds it in `workspace`, which does not exist yet. Needs no network."""
    shutil.copytree(source, workspace)  # a build leaves files beside its source
    pip_install(target, workspace)


def pip_install(target: Path, *sources: Path) -> None:
    """Into a folder for `PYTHONPATH`, without network."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, *sources], check=True)
