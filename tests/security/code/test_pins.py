"""Pinned versions are compared with what a package index says of them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from packaging.version import Version

from scripts import pins


def page(*files: tuple[str, str | bool]) -> bytes:
    return json.dumps({"files": [{"filename": name, "yanked": yanked} for name, yanked in files]}).encode()


PAGES = {
    "/good/": ("json", page(("good-1.0-py3-none-any.whl", False), ("good-0.9-py3-none-any.whl", "broken"))),
    "/bad-one/": ("json", page(("bad_one-2.0-py3-none-any.whl", "a stolen token"), ("bad_one-2.0.tar.gz", "a stolen token"))),
    "/silent/": ("json", page(("silent-1.0.tar.gz", True))),
    "/old/": ("html", b'<a href="x" data-yanked="unsafe">old-1.0.tar.gz</a><a href="y">old-1.1.tar.gz</a><a href="z">old.egg</a>'),
}


class Index(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        kind, content = PAGES.get(self.path, ("html", b""))
        self.send_response(200 if content else 404)
        self.send_header("Content-Type", "text/html" if kind == "html" else "application/vnd.pypi.simple.v1+json")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextmanager
def index() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str, *lines: str) -> int:
    (tmp_path / "pins.txt").write_text("# a comment\n" + "".join(f"{line}\n" for line in lines))
    monkeypatch.setenv("PIP_INDEX_URL", url + "/")
    return pins.main([str(tmp_path / "pins.txt")])


def test_a_yanked_version_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with index() as url:
        assert check(tmp_path, monkeypatch, url, "good==7", "Bad_One==2.0", "silent==1.0", "old==1.0", "gone==1.0") == 1
    assert capsys.readouterr().err.splitlines() == [
        "good==7 is not on the index",
        "bad-one==2.0 is yanked: a stolen token",
        "silent==1.0 is yanked: without a reason",
        "old==1.0 is yanked: unsafe",
        "gone==1.0 is not on the index",
    ]


def test_versions_that_are_neither_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with index() as url:
        assert check(tmp_path, monkeypatch, url, "good==1.0", "old==1.1") == 0
    assert capsys.readouterr().out == "2 pinned versions, 0 yanked or missing\n"


def test_an_index_that_does_not_answer_is_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with index() as url:
        pass
    assert check(tmp_path, monkeypatch, url, "good==1.0") == 2
    assert capsys.readouterr().err.startswith("NOT CHECKED: ")


def test_every_line_of_constraints_is_a_pin() -> None:
    text = pins.PINS.read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = pins.read_pins(text)
    assert len(found) == len(lines) > 90
    assert found["torch"] >= Version("2.13")
