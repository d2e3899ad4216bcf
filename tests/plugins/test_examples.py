import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.engine.contracts.parsing import Text, ToolCallArguments, ToolCallStart, Turn
from penstock.plugins.manager import Plugins
from penstock.testing import check_parser, read
from tests.helpers.example_plugin import EXAMPLE_PLUGINS, EXAMPLES, run_own_tests


@pytest.fixture
def environment(example_plugins: Path) -> dict[str, str]:
    """Variables for a process in which the examples are installed."""
    return {**os.environ, "PYTHONPATH": str(example_plugins / "site")}


def test_installed_distributions_are_found_and_selected(environment: dict[str, str], tmp_path: Path) -> None:
    code = """if True:
        from penstock.plugins.manager import Plugins
        plugins = Plugins.start(["thought_tags", "xgrammar"])
        for row in plugins.listing():
            if row.name in ("thought_tags", "xgrammar"):
                print(row.kind, row.plugin, row.distribution, row.version, row.is_active, sep="|")
        print(*plugins.grammar_backends, sep="|")
    """
    result = subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    *rows, backends = result.stdout.splitlines()
    assert "reasoning parser|thought_tags|penstock-plugin-thought-tags|0.1.0|True" in rows
    assert any(row.startswith("grammar backend|xgrammar|penstock-plugin-xgrammar|") for row in rows)
    assert backends == "llguidance|outlines_core|xgrammar", "it comes after the built-in ones"


@pytest.mark.thorough
def test_the_distributions_own_tests_pass(example_plugins: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tests = [example_plugins / source.name / "tests" for source in EXAMPLE_PLUGINS]
    assert run_own_tests(example_plugins / "site", tests, tmp_path, monkeypatch) == 0


@pytest.fixture
def fenced_calls() -> Plugins:
    return Plugins.start([str(EXAMPLES / "fenced_calls.py")])


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
