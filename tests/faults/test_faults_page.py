"""docs/faults.md: the tests that it names exist."""

from pathlib import Path

import pytest

from tests.helpers.named_tests import check_named, rows_of

PAGE = (Path(__file__).parents[2] / "docs" / "faults.md").read_text(encoding="utf-8")
ROWS = rows_of(PAGE, "# Faults")


def test_every_fault_has_an_outcome_of_its_own() -> None:
    assert len(ROWS) >= 24
    assert len({fault for fault, *_ in ROWS}) == len(ROWS)
    assert all(len(row) == 3 and all(cell.strip() for cell in row) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0].strip()[:40])
def test_the_tests_of_a_fault_exist(row: list[str]) -> None:
    check_named(row[2])
