"""Tables in the documentation whose last column names the tests of each row."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def rows_of(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a heading, without the table's own."""
    lines = page.split(f"{heading}\n")[1].split("\n## ")[0].splitlines()
    return [line.strip("|").split(" | ") for line in lines if line.startswith("| ")][1:]


def check_named(cell: str) -> None:
    """Asserts that it names tests, nothing else, and that these exist."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", cell)
    assert named, cell
    assert re.sub(r"`[\w/.]+::\w+`", "", cell).replace("<br>", "").strip() == ""
    for path, name in named:
        assert re.search(rf"^def {name}\(", (TESTS / path).read_text(encoding="utf-8"), re.MULTILINE), f"{path}::{name}"
