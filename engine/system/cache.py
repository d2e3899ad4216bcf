"""The cache directory: private to its user, with entries built once by one process and verified when they are read."""

import contextlib
import glob
import hashlib
import json
import logging
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from penstock.engine.errors import DISK_FULL, ConfigurationError, StartFailed

# Where torch and triton keep what they compile, as the environment names it. By default torch loads code from a directory in /tmp whose
# name any user of the machine can predict, and make first.
COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
ROOT_USER = 0
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# For containers, in whose volumes an orchestrator lets a whole group write: the operator answers for its members.
TRUST = "PENSTOCK_TRUST_DIRECTORIES"


@dataclass(frozen=True, slots=True)
class Exposure:
    """Why something can be another user's work, and what to do about it."""

    reason: str
    remedy: str


def cache_directory() -> Path:
    """`$PENSTOCK_CACHE`, else `$XDG_CACHE_HOME/penstock`, else `~/.cache/penstock`. It may not exist yet.

    Raises `ConfigurationError` where a home directory is needed and missing, as for a user unknown to the system.
    """
    try:
        if override := os.environ.get("PENSTOCK_CACHE"):
            return Path(override).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base).expanduser() if base else Path.home() / ".cache") / "penstock"
    except RuntimeError as error:
        raise ConfigurationError(f"there is no home directory to keep models in ({error}): set PENSTOCK_CACHE to a directory") from error


def make_private(directory: Path) -> None:
    """Makes a directory of the cache, and what is missing above it, for this user alone. One that is there is checked.

    Raises `OSError` where it cannot be made, and as `check_private`.
    """
    check_private(directory)
    _make_missing(directory)


def _make_missing(directory: Path) -> None:
    for missing in [path for path in reversed((directory, *directory.parents)) if not path.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)


def check_private(path: Path) -> None:
    """Raises `ConfigurationError` where `path`, or a directory that it lies in, can be another user's work.

    From the cache directory down nothing may be writable by others. In the directories above, others may write where they can replace
    nothing of this user's, as in /tmp. What the system's administrator owns may be used. What does not exist is accepted.
    """
    root = cache_directory()
    places = [place for place in (path, *path.parents) if place == root or root in place.parents]
    for place in places:
        if (fault := _exposure_of(place)) is not None:
            raise _exposed_cache(place, fault)
    if places and (fault := _exposure_above(root)) is not None:
        raise _exposed_cache(root, fault)


def _exposed_cache(place: Path, fault: Exposure) -> ConfigurationError:
    return ConfigurationError(
        f"{place} {fault.reason}, and code is loaded from this cache: {fault.remedy}, or set PENSTOCK_CACHE to another directory; "
        f"{TRUST}=1 skips this check"
    )


def _exposure_of(place: Path) -> Exposure | None:
    try:
        return exposure(place.stat(), f"{place}")
    except (FileNotFoundError, NotADirectoryError):
        return None


def exposure(status: os.stat_result, name: str) -> Exposure | None:
    """Why what has this status can be another user's work; None where it cannot."""
    if is_trusted():
        return None
    if status.st_uid not in (ROOT_USER, os.geteuid()):
        return Exposure("belongs to another user", "remove it")
    if status.st_mode & WRITABLE_BY_OTHERS:
        return Exposure("can be written by other users", f"run `chmod -R go-w {name}`")
    return None


def _exposure_above(directory: Path) -> Exposure | None:
    """Why another user could put a directory of their own in the place of this one, as OpenSSH checks it for files of keys."""
    if is_trusted():
        return None
    for parent in dict.fromkeys((*Path(os.path.abspath(directory)).parents, *directory.resolve().parents)):
        try:
            status = parent.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if status.st_uid not in (ROOT_USER, os.geteuid()):
            return Exposure(f"lies in {parent}, which belongs to another user", "move it")
        if status.st_mode & stat.S_ISVTX:  # entries of such a directory are replaced by their owners only
            continue
        if status.st_mode & stat.S_IWOTH or (status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)):
            return Exposure(f"lies in {parent}, which can be written by other users", f"run `chmod go-w {parent}`")
    return None


def _is_own_group(group_id: int) -> bool:
    """Whether the group has no members but this user, as many systems make one for each user, with an umask that lets it write."""
    import grp  # which Windows lacks, as the next
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(group_id)
    except KeyError:
        return False
    return (group.gr_gid, group.gr_name) == (user.pw_gid, user.pw_name) and set(group.gr_mem) <= {user.pw_name}


def is_trusted() -> bool:
    """Whether no directory is checked: the operator says so, or the system has neither owners' numbers nor modes."""
    return sys.platform == "win32" or os.environ.get(TRUST) == "1"


def make_data_directory(directory: Path, flag: str) -> None:
    """Makes the directory that `flag` names, for this user alone, or checks it. Raises `ConfigurationError` where others can write it."""
    try:
        _make_missing(directory)
    except OSError as error:
        raise ConfigurationError(f"{flag} {directory}: it cannot be made: {error.strerror or error}") from error
    if not directory.is_dir():
        raise ConfigurationError(f"{flag} {directory} is not a directory")
    check_data(directory, flag)


def check_data(path: Path, flag: str) -> None:
    """Raises `ConfigurationError` where the file or directory that `flag` names can be another user's work. It may be missing."""
    if (fault := _exposure_of(path) or _exposure_above(path)) is not None:
        raise ConfigurationError(f"{flag} {path} {fault.reason}: {fault.remedy}, or use another; {TRUST}=1 skips this check")


def redirect_compiler_caches() -> None:
    """Has torch and triton, in this process and its children, keep their compiled code in the cache directory; what the user set stays.

    Raises `ConfigurationError` as `check_private`.
    """
    for variable, name in COMPILER_CACHES.items():
        if variable not in os.environ:
            directory = cache_directory() / name
            os.environ[variable] = str(directory)
            with contextlib.suppress(OSError):  # nothing is compiled then, or the compiler says why not
                make_private(directory)


MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)


class _Damaged(Exception):
    """A model directory does not hold what was written into it, as the message says."""


def build_once(directory: Path, build: Callable[[Path], None], *, verify: bool = False) -> Path:
    """Makes `directory` by `build(empty directory)` unless it is there and whole, and returns it.

    The work is done in a temporary directory beside it that is renamed at the end. Of several processes one builds and the others wait for
    it. With `verify` the checksum of every file is compared, otherwise of those whose size or time of modification has changed.
    Raises `ConfigurationError` where the cache cannot be written, or other users could have written it.
    """
    try:
        if fault_of(directory, verify) is None:
            return directory
        make_private(directory.parent)
        with _held(FileLock(directory.parent / f".{directory.name}.lock")):
            if (reason := fault_of(directory, verify)) is not None:
                if directory.exists():
                    logger.warning("The model in %s is damaged and made again: %s", directory, reason)
                with _scratch(directory) as scratch:
                    build(scratch)
                    _write_manifest(scratch, _manifest(scratch))
                    _write_through(scratch)
                    if directory.exists():
                        directory.rename(f"{scratch}.damaged")
                    scratch.rename(directory)
                    _sync(directory.parent)
    except ConfigurationError:
        raise
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):  # as libraries in Rust say it, each with its own exception
            raise
        is_full = getattr(error, "errno", None) in DISK_FULL or any(f"(os error {number})" in str(error) for number in DISK_FULL)
        kind = StartFailed if is_full else ConfigurationError
        raise kind(f"cannot write the model cache {directory}: {error}; set PENSTOCK_CACHE to another directory") from None
    return directory


def fault_of(directory: Path, verify: bool) -> str | None:
    """What keeps the directory from being used; None where it is whole."""
    if not directory.exists():
        return "it is missing"
    check_private(directory)
    try:
        _check_files(directory, verify)
    except _Damaged as damage:
        return str(damage)
    return None


def _check_files(directory: Path, verify: bool) -> None:
    """Raises `_Damaged`, and `ConfigurationError` as `check_private`."""
    manifest = _read_manifest(directory)
    touched = {}
    for name, written in manifest.items():
        path = directory / name
        if not path.is_file():
            raise _Damaged(f"{name} is missing")
        check_private(path)
        status = path.stat()
        if status.st_size != written["size"]:
            raise _Damaged(f"{name} has {status.st_size} bytes instead of {written['size']}")
        is_touched = status.st_mtime_ns != written["mtime_ns"]
        if (verify or is_touched) and _digest(path) != written["sha256"]:
            raise _Damaged(f"{name} has another checksum than when it was written")
        if is_touched:
            touched[name] = written | {"mtime_ns": status.st_mtime_ns}
    if touched:  # as in a copy of the cache, which need not be hashed at each start
        with contextlib.suppress(OSError):
            _write_manifest(directory, manifest | touched)


def _read_manifest(directory: Path) -> dict[str, dict[str, Any]]:
    try:
        files = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {str(name): {key: entry[key] for key in ("size", "mtime_ns", "sha256")} for name, entry in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Damaged(f"its {MANIFEST} cannot be read: {error}") from error


def _manifest(directory: Path) -> dict[str, dict[str, Any]]:
    """Size, time of modification and checksum of each file, by its path."""
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): {"size": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": _digest(path)}
        for path in paths
    }


def _write_manifest(directory: Path, manifest: dict[str, dict[str, Any]]) -> None:
    # Replaced atomically: another process may be reading it.
    with tempfile.NamedTemporaryFile("w", dir=directory, prefix=f".{MANIFEST}.", encoding="utf-8", delete=False) as file:
        json.dump({"files": manifest}, file, indent=2)
    Path(file.name).replace(directory / MANIFEST)


def _digest(path: Path) -> str:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _write_through(directory: Path) -> None:
    # Synced to disk: a power failure after the rename must not leave empty files under the final name.
    for path in sorted(directory.rglob("*"), reverse=True):
        path.chmod(path.stat().st_mode & ~WRITABLE_BY_OTHERS)
        _sync(path)
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _held(lock: FileLock) -> Iterator[None]:
    try:
        lock.acquire(blocking=False)
    except Timeout:
        logger.info("Waiting for another process that is making the same model's files (%s)", lock.lock_file)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """An empty directory beside it. The caller holds the lock, so any that is found there is of a process that was killed."""
    _remove_scratch(directory)
    try:
        yield Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    finally:
        _remove_scratch(directory)


def _remove_scratch(directory: Path) -> None:
    for path in directory.parent.glob(f".{glob.escape(directory.name)}.*/"):
        shutil.rmtree(path, ignore_errors=True)
