import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.events import Text, ToolCallArguments, ToolCallStart
from penstock.engine.turn import Turn
from penstock.plugins.manager import Plugins
from penstock.testing import check_parser, read
from tests.helpers.example_plugin import EXAMPLE, install_example_plugin

ROOT = EXAMPLE.parents[1]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables for a process in which the example is installed."""
    target = tmp_path_factory.mktemp("site")
    install_example_plugin(target, tmp_path_factory.mktemp("build") / "source")
    return {**os.environ, "PYTHONPATH": str(target)}


def test_an_installed_distribution_is_found_and_selected(environment: dict[str, str], tmp_path: Path) -> None:
    code = """if True:
        from penstock.plugins.manager import Plugins
        row, = [row for row in Plugins.start(["thought_tags"]).listing() if row.name == "thought_tags"]
        print(row.kind, row.plugin, row.distribution, row.version, row.is_active, sep="|")
    """
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "reasoning parser|thought_tags|penstock-plugin-thought-tags|0.1.0|True"


def test_the_distributions_own_tests_pass(environment: dict[str, str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(EXAMPLE / "tests")]
    result = subprocess.run(command, env={**environment, "PYTHONDONTWRITEBYTECODE": "1"}, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.fixture
def fenced_calls() -> Plugins:
    return Plugins.start([str(ROOT / "examples" / "fenced_calls.py")])


def test_the_file_is_loaded_and_selected(fenced_calls: Plugins) -> None:
    assert fenced_calls.tool_parsers.active == "fenced_calls"


def test_the_files_parser_keeps_its_promises(fenced_calls: Plugins) -> None:
    factory = fenced_calls.tool_parser
    assert factory is not None
    samples = ['a\n```call\nweather {"city": "Oslo"}\n```\nb', "```call\nno json\n```", "```call\nf {}", "```python\n1\n```"]
    check_parser(factory, samples, markers=["```call\n", "\n```"])
    assert read(factory(Turn(tool_choice="auto")), samples[:1]) == [
        Text("a\n"),
        ToolCallStart(0, "weather", ""),
        ToolCallArguments(0, '{"city": "Oslo"}'),
        Text("\nb"),
    ]
    assert read(factory(Turn(tool_choice="auto")), samples[1:2]) == [Text(samples[1])]
