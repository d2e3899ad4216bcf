"""`penstock keys`: keys and their hashes, on standard output and in a file."""

import io
import re
from pathlib import Path

import pytest

from penstock.server import main
from penstock.serving.limits import KeyRing
from penstock.serving.options import ServerOptions


def said(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    assert main(["keys", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def ring_of(path: Path) -> KeyRing:
    return KeyRing.of(ServerOptions(keys_file=str(path)))


def test_a_key_is_printed_with_the_table_that_makes_a_server_accept_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    secret, _, table = said(capsys, "team.a").partition("\n\n")
    (tmp_path / "keys.toml").write_text(table, encoding="utf-8")
    found = ring_of(tmp_path / "keys.toml").find(secret)
    assert found is not None
    assert found.name == "team.a"
    assert secret not in table


def test_keys_are_added_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    secrets = {name: said(capsys, name, "--append", str(path)).strip() for name in ("a", "b")}
    assert {name: key.name for name, secret in secrets.items() if (key := ring_of(path).find(secret))} == {"a": "a", "b": "b"}
    assert "has a key with the name a already" in said(capsys, "a", "--append", str(path), code=2)


def test_a_key_is_added_to_an_empty_file_and_not_printed_where_it_cannot_be_added(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "keys.toml"
    path.touch()
    secret = said(capsys, "a", "--append", str(path)).strip()
    assert ring_of(path).find(secret) is not None
    assert main(["keys", "b", "--append", str(tmp_path / "missing" / "keys.toml")]) == 2
    assert capsys.readouterr().out == ""


def test_a_key_that_was_made_elsewhere_is_hashed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("0123456789abcdef01234567\n"))
    path = tmp_path / "keys.toml"
    assert said(capsys, "mine", "--stdin", "--append", str(path)) == ""
    assert ring_of(path).find("0123456789abcdef01234567") is not None
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))
    assert "24 characters" in said(capsys, "mine", "--stdin", code=2)


def test_a_file_is_checked(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    said(capsys, "a", "--append", str(path))
    with path.open("a") as file:
        file.write("requests_per_minute = 5\nmodels = ['x', 'y']\n")
    assert said(capsys, "--check", str(path)) == "a requests_per_minute=5 models=x,y\n"
    path.write_text("[keys.a]\nhash = 5\n")
    assert re.search(r"line 2: \[keys.a\]", said(capsys, "--check", str(path), code=2))


@pytest.mark.parametrize("words", [[], ["a", "--check", "f"], ["--check", "f", "--stdin"]])
def test_wrong_usage_is_explained(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["keys", *words])
    assert stopped.value.code == 2
    assert "NAME" in capsys.readouterr().err


def test_a_name_that_no_key_may_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a name" in said(capsys, "a b", code=2)
