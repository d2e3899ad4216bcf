"""Compares the versions that constraints.txt pins with those that the package index has yanked (PEP 592), or no longer has.

    .venv/bin/python scripts/pins.py

The index is pip's: `$PIP_INDEX_URL`, else what `pip config` says, else PyPI. The exit status is 1 where a version is yanked or missing, and
2 where the index does not answer, so that nothing was checked.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import Version

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"
PYPI = "https://pypi.org/simple"
ACCEPTED = "application/vnd.pypi.simple.v1+json, text/html;q=0.1"  # the simple API in JSON (PEP 691), or what older indices have
SECONDS = 30.0  # for one answer


def read_pins(text: str) -> dict[str, Version]:
    """The versions by the names of their packages."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): Version(version) for name, version in found}


def index_url() -> str:
    if configured := os.environ.get("PIP_INDEX_URL"):
        return configured.rstrip("/")
    command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return (asked.stdout.strip() or PYPI).rstrip("/")


class Links(HTMLParser):
    """The files of a package in a page of the simple API, each with the reason for which it is yanked, or None."""

    def __init__(self) -> None:
        super().__init__()
        self.files: list[tuple[str, str | None]] = []
        self._yanked: str | None = None
        self._is_link = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            given = dict(attrs)
            self._is_link, self._yanked = True, (given["data-yanked"] or "") if "data-yanked" in given else None

    def handle_data(self, data: str) -> None:
        if self._is_link:
            self.files.append((data.strip(), self._yanked))
            self._is_link = False


def files_of(name: str, index: str) -> list[tuple[str, str | None]]:
    """As `Links` has them; none where the index does not know the package. Raises `OSError`."""
    request = urllib.request.Request(f"{index}/{name}/", headers={"Accept": ACCEPTED})
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            content, kind = response.read(), response.headers.get_content_type()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return []
        raise
    if kind.endswith("+json"):
        files = json.loads(content)["files"]
        return [(file["filename"], _reason(file.get("yanked", False))) for file in files]
    links = Links()
    links.feed(content.decode())
    return links.files


def _reason(yanked: bool | str) -> str | None:
    """In JSON the reason may be missing."""
    return None if yanked is False else "" if yanked is True else yanked


def version_of(filename: str) -> Version | None:
    """None of a file of another kind, or of a name that is no longer valid."""
    try:
        return parse_wheel_filename(filename)[1] if filename.endswith(".whl") else parse_sdist_filename(filename)[1]
    except (InvalidWheelFilename, InvalidSdistFilename):
        return None


def faults(pins: dict[str, Version], index: str) -> Iterator[str]:
    """What is wrong with the pinned versions, a line for each. Raises `OSError`."""
    with ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda name: files_of(name, index), pins)
        for (name, version), files in zip(pins.items(), answers, strict=True):
            own = [reason for filename, reason in files if version_of(filename) == version]
            if not own:
                yield f"{name}=={version} is not on the index"
            elif reasons := {reason for reason in own if reason is not None}:
                yield f"{name}=={version} is yanked: {', '.join(sorted(reasons)) or 'without a reason'}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=PINS, help="pins, one a line (default: %(default)s)")
    pins, index = read_pins(parser.parse_args(argv).file.read_text(encoding="utf-8")), index_url()
    try:
        found = list(faults(pins, index))
    except (OSError, ValueError) as error:
        print(f"NOT CHECKED: the pinned versions were not compared with the index, which does not answer: {error}", file=sys.stderr)
        return 2
    for fault in found:
        print(fault, file=sys.stderr)
    print(f"{len(pins)} pinned versions, {len(found)} yanked or missing")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
