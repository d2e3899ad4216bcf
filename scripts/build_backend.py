"""The build backend: setuptools', with wheels and source distributions that depend on nothing but the sources, to the byte."""

import gzip
import os
import stat
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools import build_meta  # type: ignore[import-untyped]
from setuptools.build_meta import (  # type: ignore[import-untyped]
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = (
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
)
EPOCH = "315532800"  # 1980-01-01, where $SOURCE_DATE_EPOCH does not say; a wheel can hold no earlier time


def build_wheel(directory: str, settings: Any = None, metadata_directory: str | None = None) -> str:
    with _isolated():
        name: str = build_meta.build_wheel(directory, settings, metadata_directory)
        _rewrite_wheel(Path(directory, name))
        return name


def build_sdist(directory: str, settings: Any = None) -> str:
    with _isolated():
        name: str = build_meta.build_sdist(directory, settings)
        _rewrite_sdist(Path(directory, name), int(os.environ["SOURCE_DATE_EPOCH"]))
        return name


@contextmanager
def _isolated() -> Iterator[None]:
    """Without what earlier builds left in `build/`, which would become part of the wheel, nor the user's umask."""
    os.environ.setdefault("SOURCE_DATE_EPOCH", EPOCH)
    umask = os.umask(0o022)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            config = Path(scratch, "setup.cfg")
            config.write_text(f"[build]\nbuild_base = {scratch}/build\n", encoding="utf-8")
            os.environ["DIST_EXTRA_CONFIG"] = str(config)
            yield
    finally:
        del os.environ["DIST_EXTRA_CONFIG"]
        os.umask(umask)


def _rewrite_wheel(archive: Path) -> None:
    """The modes of a wheel's members, for which setuptools takes those of the checkout."""
    scratch = archive.with_suffix(".new")
    with zipfile.ZipFile(archive) as old, zipfile.ZipFile(scratch, "w", zipfile.ZIP_DEFLATED) as new:
        for member in old.infolist():
            content = old.read(member)
            member.external_attr = (stat.S_IFREG | 0o644) << 16
            new.writestr(member, content)
    scratch.replace(archive)


def _rewrite_sdist(archive: Path, epoch: int) -> None:
    """Times, owners, modes and the order of a source distribution's members, for which setuptools takes those of the file system."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        member.mtime = epoch
        member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
        member.pax_headers = {}
        return member

    with tarfile.open(archive) as old:
        members = [(plain(member), old.extractfile(member) if member.isfile() else None) for member in old.getmembers()]
        members.sort(key=lambda pair: pair[0].name)
        scratch = archive.with_suffix(".new")
        with (
            scratch.open("wb") as raw,
            gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=epoch) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as new,
        ):
            for member, content in members:
                new.addfile(member, content)
    scratch.replace(archive)
