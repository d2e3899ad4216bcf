"""`penstock new-plugin`: what it writes can be installed, is found, and passes its own tests."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.flags import PLUGIN_KINDS, parse_new_plugin_arguments
from penstock.cli.plugins import package_files
from penstock.plugins.manager import Plugins
from penstock.server import main
from tests.helpers.example_plugin import pip_install, run_own_tests

REGISTRIES = {
    "reasoning": "reasoning parser",
    "tool": "tool parser",
    "logits": "logits processor",
    "grammar": "grammar backend",
    "proposer": "proposer",
}
PACKAGES = {"grammar": ("grammar",), "format": ("tool", "reasoning", "logits", "proposer")}  # each kind, in both forms of a package


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a package of one module, and one of several."""
    folder = tmp_path_factory.mktemp("packages")
    for package in PACKAGES:
        kinds = [word for kind in PACKAGES[package] for word in ("--kind", kind)]
        assert main(["new-plugin", f"my-{package}", *kinds, "--directory", str(folder / package)]) == 0
    return folder


@pytest.fixture(scope="module")
def site(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all of them are installed."""
    target = tmp_path_factory.mktemp("site")
    pip_install(target, *(packages / package for package in PACKAGES))
    return target


@pytest.mark.thorough
def test_what_is_installed_is_found(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    rows = {(row.kind, row.name, row.distribution) for row in Plugins.start().listing()}
    assert rows >= {
        (REGISTRIES[kind], f"my_{package}", f"penstock-plugin-my-{package}") for package in PACKAGES for kind in PACKAGES[package]
    }


@pytest.mark.thorough
def test_one_name_selects_both_parsers_of_a_format(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    plugins = Plugins.start(["my_format"])
    assert (plugins.reasoning_parsers.active, plugins.tool_parsers.active) == ("my_format", "my_format")
    assert "my_format" in plugins.logits_processors


@pytest.mark.thorough
def test_their_own_tests_pass(packages: Path, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_own_tests(site, [packages / package / "tests" for package in PACKAGES], tmp_path, monkeypatch) == 0


@pytest.mark.parametrize("package", PACKAGES)
def test_what_is_written_is_formatted_as_our_own_code(packages: Path, package: str) -> None:
    subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "--line-length", "140", packages / package], check=True)
    subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--no-cache", "--check", "--line-length", "140", packages / package], check=True
    )


@pytest.mark.parametrize(
    ("name", "kinds", "reason"),
    [
        ("hermes", ["tool"], "there is a tool parser of that name, of plug-in 'penstock.plugins.tools.json_formats'"),
        ("deepseek-r1", ["tool", "reasoning"], "there is a reasoning parser of that name"),
        ("qwen", ["tool"], "there is a tool parser of that name, which is 'hermes'"),
        ("llguidance", ["grammar"], "there is a grammar backend of that name"),
    ],
)
def test_a_name_that_is_taken_is_refused_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, kinds: list[str], reason: str
) -> None:
    words = [word for kind in kinds for word in ("--kind", kind)]
    assert main(["new-plugin", name, *words, "--directory", str(tmp_path / "new")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
    assert main(["new-plugin", name, "--kind", "logits", "--directory", str(tmp_path / "new")]) == 0


def test_it_says_that_penstock_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["new-plugin", "mine", "--kind", "tool", "--kind", "tool", "--directory", str(tmp_path / "new")]) == 0
    assert "In an environment where penstock is installed already" in capsys.readouterr().out
    assert (tmp_path / "new" / "penstock_plugin_mine.py").is_file()


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


@pytest.mark.parametrize("kind", PLUGIN_KINDS)
@pytest.mark.parametrize("name", ["x", "turn", "a_very_long_name_for_a_plugin_1"])
def test_any_name_gives_python(kind: str, name: str) -> None:
    for path, text in package_files(name, [kind, "tool"] if kind != "tool" else [kind]).items():
        if path.endswith(".py"):
            ast.parse(text)
