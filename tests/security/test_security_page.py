"""docs/security.md: the tests that it names exist, and its words on permissions are those of the errors."""

import re
from pathlib import Path

import pytest

from penstock.engine.system.cache import TRUST
from tests.helpers.named_tests import check_named, rows_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
ROWS = rows_of(PAGE, "## Attacks")


def test_every_attack_has_an_outcome_and_tests_of_its_own() -> None:
    assert len(ROWS) >= 35
    assert len({attack for attack, *_ in ROWS}) == len(ROWS)
    for row in ROWS:
        assert len(row) == 4, row
        assert all(cell.strip() for cell in row[:3]), row


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_the_tests_of_an_attack_exist(row: list[str]) -> None:
    check_named(row[3])


def test_the_checks_of_every_change_run_these_tests_without_asserts() -> None:
    """A check by `assert` would be missing there. The tests' own asserts are rewritten by pytest, and hold nevertheless."""
    assert re.search(r"^PYTHONOPTIMIZE=1 tests .*tests/security", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)


def test_the_variable_that_skips_the_checks_is_on_the_page() -> None:
    assert f"`{TRUST}=1`" in PAGE
