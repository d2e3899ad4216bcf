"""`penstock new-plugin`: what it writes can be installed, is found, and passes its own tests."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.commands.new_plugin_arguments import KINDS, parse_new_plugin_arguments
from penstock.commands.new_plugin_command import package_files
from penstock.plugins.manager import Plugins
from penstock.server import main
from tests.helpers.example_plugin import pip_install

REGISTRIES = {"reasoning": "reasoning parser", "tool": "tool parser", "logits": "logits processor", "grammar": "grammar backend"}


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of each kind."""
    folder = tmp_path_factory.mktemp("packages")
    for kind in KINDS:
        assert main(["new-plugin", f"my-{kind}", "--kind", kind, "--directory", str(folder / kind)]) == 0
    return folder


@pytest.fixture(scope="module")
def site(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them are installed."""
    target = tmp_path_factory.mktemp("site")
    pip_install(target, *(packages / kind for kind in KINDS))
    return target


def test_what_is_installed_is_found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    rows = {row.name: (row.kind, row.distribution) for row in Plugins.start().listing()}
    assert {kind: rows[f"my_{kind}"] for kind in KINDS} == {kind: (REGISTRIES[kind], f"penstock-plugin-my-{kind}") for kind in KINDS}


def test_their_own_tests_pass(packages: Path, site: Path, tmp_path: Path) -> None:
    tests = [str(packages / kind / "tests") for kind in KINDS]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--rootdir",
        str(tmp_path),
        *tests,
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(site), "PYTHONDONTWRITEBYTECODE": "1"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_formatted_as_our_own_code(packages: Path, kind: str) -> None:
    subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--line-length", "140", packages / kind], check=True)
    subprocess.run([sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--line-length", "140", packages / kind], check=True)


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-plugin", "mine", "--kind", "tool"]) == 0
    written = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert main(["new-plugin", "mine", "--kind", "reasoning"]) == 2
    assert "is there already" in capsys.readouterr().err
    assert {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == written
    assert (tmp_path / "penstock-plugin-mine" / "tests" / "test_mine.py").is_file()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(["new-plugin", "mine", "--kind", "tool", "--directory", str(tmp_path / "file" / "below")]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", "1st", "a b", "../x", "class", "auto", "none", "Ünï", "a.b"])
def test_what_is_no_name_is_refused(capsys: pytest.CaptureFixture[str], name: str) -> None:
    with pytest.raises(SystemExit):
        parse_new_plugin_arguments([name, "--kind", "tool"])
    assert "is not a name such as" in capsys.readouterr().err


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["x", "turn", "a_very_long_name_for_a_plugin_1"])
def test_any_name_gives_python(kind: str, name: str) -> None:
    for path, text in package_files(name, kind).items():
        if path.endswith(".py"):
            ast.parse(text)
