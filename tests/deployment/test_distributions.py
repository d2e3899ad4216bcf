"""Wheels and source distributions are the same to the byte, wherever and whenever they are built."""

import os
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.deployment.distributions import build, sources

pytestmark = pytest.mark.deployment


def test_archives_depend_on_nothing_but_the_sources(tmp_path: Path) -> None:
    first, second = sources(tmp_path / "first"), sources(tmp_path / "elsewhere" / "second")
    for path in second.rglob("*"):
        path.chmod(path.stat().st_mode & 0o700)
        os.utime(path, (10**9, 10**9))
    left_over = second / "build" / "lib" / "penstock" / "renamed.py"
    left_over.parent.mkdir(parents=True)
    left_over.touch()
    environment = {"PATH": os.environ["PATH"], "SOURCE_DATE_EPOCH": "1700000000", "TZ": "Asia/Kathmandu"}
    archives = {}
    for kind in ("wheel", "sdist"):
        one = build(kind, first, tmp_path / f"{kind}-1", environment=environment)
        other = build(kind, second, tmp_path / f"{kind}-2", environment={**environment, "TZ": "UTC", "HOME": "/"}, umask=0o077)
        assert (one.name, one.read_bytes()) == (other.name, other.read_bytes())
        archives[kind] = one
    with tarfile.open(archives["sdist"]) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
        assert {member.mtime for member in archive} == {1700000000}
        assert not [name for name in archive.getnames() if "/tests/" in name]
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    rebuilt = build("wheel", unpacked, tmp_path / "wheel-3", environment=environment)
    assert rebuilt.read_bytes() == archives["wheel"].read_bytes()


def test_without_an_epoch_archives_are_the_same_too(tmp_path: Path) -> None:
    folder, environment = sources(tmp_path / "sources"), {"PATH": os.environ["PATH"]}
    for kind in ("wheel", "sdist"):
        one, other = (build(kind, folder, tmp_path / f"{kind}-{number}", environment=environment) for number in range(2))
        assert one.read_bytes() == other.read_bytes()


def test_the_wheel_holds_what_the_server_reads(tmp_path: Path) -> None:
    wheel = build("wheel", sources(tmp_path / "sources"), tmp_path / "dist")
    names = zipfile.ZipFile(wheel).namelist()
    for example in (
        "penstock/engine/native/kernels.cpp",
        "penstock/engine/native/decoder.h",
        "penstock/api/pages/page/index.html",
        "penstock/serving/templates/chatml.jinja",
        "penstock/cli/templates/reasoning.py.txt",
        "penstock/plugins/tools/json_formats.py",
    ):
        assert example in names
    assert [name for name in names if not name.startswith(("penstock/", "penstock-"))] == []
