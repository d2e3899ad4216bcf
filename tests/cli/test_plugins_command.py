"""`penstock plugins`: the table for people, and the page for the documentation."""

import re
from pathlib import Path

import pytest

from penstock.cli.plugins import code, parser_page, plugin_table
from penstock.engine.contracts.parsing import FormatInfo
from penstock.plugins.manager import Plugins
from penstock.plugins.tools.json_formats import HERMES
from penstock.server import main

ROOT = Path(__file__).parents[2]


def test_plugins_are_listed_with_their_distribution_and_aliases(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--plugin", "deepseek_r1"]) == 0
    rows = [re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["KIND", "NAME", "FROM", "PLUG-IN", "ALIASES"]
    parser = next(row for row in rows if row[1].startswith("deepseek_r1"))
    assert parser[:2] == ["reasoning parser", "deepseek_r1 *"]
    assert re.fullmatch(r"penstock \d+\.\d+\.\d+", parser[2])


def test_a_plugin_from_nowhere_has_no_distribution() -> None:
    plugins = Plugins()
    plugins.load(str(ROOT / "examples" / "fenced_calls.py"))
    assert re.search(r"tool parser\s+fenced_calls \*\s+-\s+/", plugin_table(plugins))


def test_the_page_of_parsers_is_what_they_say_of_themselves() -> None:
    page = (ROOT / "docs" / "parsers.md").read_text(encoding="utf-8")
    assert page == parser_page(Plugins.start(["none"])), "run: penstock plugins --markdown > docs/parsers.md"


def test_the_page_has_what_a_format_is_known_by() -> None:
    plugins = Plugins()
    info = FormatInfo(models="Mine", markers=("<a|b>",), quirks="Odd.", aliases=("m2",), signs=("<a|",), counter_signs=("x",))
    plugins.tool_parsers.add("mine", "mine.py", HERMES, info)
    page = parser_page(plugins)
    assert r"| `mine` | Mine | `<a\|b>` | `m2` |  |" in page
    assert "- **`mine`**: Odd. Signs: `<a|`, and no `x`." in page


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<think>\n", r"`<think>\n`"),
        ("```json\n", r"```` ```json\n ````"),
        (" x", "` x`"),
        (" x ", "`  x  `"),
        ("a`", "`` a` ``"),
        ("", ""),
    ],
)
def test_texts_are_shown_as_code_that_can_be_copied(text: str, shown: str) -> None:
    assert code(text) == shown
