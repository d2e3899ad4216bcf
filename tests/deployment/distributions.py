"""Wheels and source distributions of the checkout, built as any front end builds them, but without an environment of their own."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from tests.deployment.files import ROOT

IGNORED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", ".*_cache", "benchmarks", "tests")


def sources(folder: Path) -> Path:
    """A copy of the checkout, without its tests."""
    shutil.copytree(ROOT, folder, ignore=IGNORED)
    return folder


def build(
    kind: Literal["wheel", "sdist"], directory: Path, target: Path, *, environment: Mapping[str, str] | None = None, umask: int = -1
) -> Path:
    """Calls the backend's hook in a directory of sources, as PEP 517 says. Returns the archive."""
    target.mkdir(parents=True, exist_ok=True)
    code = f"import sys; sys.path.insert(0, 'scripts'); import build_backend; build_backend.build_{kind}({str(target)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=directory, env=environment, umask=umask, capture_output=True, check=True)
    (archive,) = target.iterdir()
    return archive
