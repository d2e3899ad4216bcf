"""What the distribution says of itself holds: packages, pins and scripts."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("engine", "plugins", "serving", "api", "llm", "cli", "integrations", "testing")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def name_of(requirement: str) -> str:
    found = re.match(r"[\w.-]+", requirement)
    assert found is not None
    return found[0].lower().replace("_", "-")


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = {name_of(requirement) for requirement in [*PROJECT["project"]["dependencies"], *(item for extra in extras for item in extra)]}
    assert wanted - set(pins()) == set()


def test_pins_are_plain_versions_that_any_index_can_have() -> None:
    assert all(re.fullmatch(r"[0-9][0-9a-z.]*", version) for version in pins().values())


def test_every_package_is_in_the_distribution() -> None:
    on_disk = {
        ".".join(["penstock", *path.parent.relative_to(ROOT).parts]) for layer in LAYERS for path in (ROOT / layer).rglob("__init__.py")
    }
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == on_disk | {"penstock"}


def test_every_file_that_the_code_reads_is_in_the_distribution() -> None:
    packaged = {
        file
        for package, patterns in PROJECT["tool"]["setuptools"]["package-data"].items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    on_disk = {path for layer in LAYERS for path in (ROOT / layer).rglob("*.*") if "__pycache__" not in path.parts}
    assert {path for path in on_disk if path.suffix != ".py"} == packaged


@pytest.mark.parametrize("script", ["scripts/serve", "scripts/test", ".ci/run"])
def test_scripts_are_executable_and_posix(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)
    subprocess.run(["sh", "-n", ROOT / script], check=True)


def test_an_environment_that_is_up_to_date_is_not_installed_again(tmp_path: Path) -> None:
    for name in ("constraints.txt", "pyproject.toml", "scripts/environment.sh"):
        copy = tmp_path / name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes((ROOT / name).read_bytes())
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/calls"\n', encoding="utf-8")
    python.chmod(0o755)
    script = tmp_path / "scripts" / "run"

    def calls(extras: str) -> str:
        script.write_text(f'. "$(dirname -- "$0")/environment.sh"\ninstall "{extras}"\n', encoding="utf-8")
        log = python.parent / "calls"
        log.unlink(missing_ok=True)
        subprocess.run(["sh", script], check=True, capture_output=True)
        return log.read_text(encoding="utf-8") if log.exists() else ""

    assert f"-e {tmp_path}[dev]" in calls("[dev]")
    assert calls("[dev]") == ""
    assert calls("") == ""
    with (tmp_path / "constraints.txt").open("a", encoding="utf-8") as constraints:
        constraints.write("more==1\n")
    assert f"-e {tmp_path}\n" in calls("")
    assert f"-e {tmp_path}[dev]" in calls("[dev]")
