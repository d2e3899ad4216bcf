"""Where converted models and compiled code are kept between runs, and the check that no other user can have written them."""

import contextlib
import os
import stat
import sys
from pathlib import Path

from penstock.engine.errors import ConfigurationError

# Where torch and triton keep what they compile, as the environment names it. By default torch loads code from a directory in /tmp whose
# name any user of the machine can predict, and make first.
COMPILER_CACHES = {"TORCHINDUCTOR_CACHE_DIR": "torchinductor", "TRITON_CACHE_DIR": "triton"}
ROOT_USER = 0
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
    for missing in [path for path in reversed((directory, *directory.parents)) if not path.exists()]:
        missing.mkdir(mode=0o700, exist_ok=True)


def check_private(path: Path) -> None:
    """Raises `ConfigurationError` where `path`, or a directory that it lies in from the cache directory down, can be another user's work.

    What the system's administrator owns may be used. What does not exist is accepted.
    """
    root = cache_directory()
    for place in (path, *path.parents):
        if place == root or root in place.parents:
            _check_place(place)


def _check_place(place: Path) -> None:
    if sys.platform == "win32":  # which has neither owners' numbers nor these bits
        return
    try:
        status = place.stat()
    except (FileNotFoundError, NotADirectoryError):
        return
    if status.st_uid not in (ROOT_USER, os.geteuid()):
        reason, remedy = "belongs to another user", "remove it"
    elif status.st_mode & WRITABLE_BY_OTHERS:
        reason, remedy = "can be written by other users", f"run `chmod -R go-w {place}`"
    else:
        return
    raise ConfigurationError(f"{place} {reason}, and code is loaded from this cache: {remedy}, or set PENSTOCK_CACHE to another directory")


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
